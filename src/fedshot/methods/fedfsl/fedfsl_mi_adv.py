"""FedFSL-MI-Adv: FedFSL-MI whose features are trained against two heads that disagree.

Each client adds a second head of its own. In turns, the two heads learn to answer while disagreeing
as much as they can (stage 1, features fixed), and the features learn to make them agree (stage 2,
heads fixed). The server averages features and first heads; the second head stays where it is.

Source: Fan & Huang, Federated Few-Shot Learning with Adversarial Learning, eqs. (14) to (16) of
both versions, algorithm 1 of the revised one, 2 of the first. With w = [Theta, theta]:
L_adv = 1/|B_k| sum_T KL(p(Theta, theta) || p(Theta, theta'));
stage 1: min over theta, theta'  L_k(theta; Theta) + L_k(theta'; Theta) - eta L_adv;
stage 2: min over Theta  L_k(Theta; theta) + L_k(Theta; theta') + lambda L_adv.
L_k is the objective of FedFSL-MI, eq. (12), in the revised version, and the plain eq. (7) in the
first. Inner step, task loss, server: eqs. (4), (5), (10).
Symbols: Theta backbone; theta first head, theta' second; eta, lambda = lambda_adv; the rest as in
FedFSL-MI: w^t, p(.), |B_k|, gamma, epsilon.

What the papers leave open: [Theta, theta] and [Theta, theta'] adapt to the support each by itself
and as wholes, so the inner steps move Theta in stage 1, too, and what they did is forgotten; both
are compared on the queries. A local step is one step of the heads and one of the backbone on the
same episodes (alternation="batch", the revised algorithm's "alternatively"), or all steps of the
heads come first ("round", the first version). A divergence can be maximised without end: in KL
probabilities are at least `min_prob`, and gradients of stage 1 at most `max_grad_norm`. Their prose
speaks of differing from the central model, the equations of theta and theta'; the equations are
followed.
Departures: the heads are compared after adapting, where both papers define p(Theta, theta) as the
softmax of f_theta(f_Theta(x)) without (adv_predictions="unadapted_query"); and those of FedFSL-MI,
reference="exclusive" included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import ConfigError, check_word
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData, Episode
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.learner import EpisodeLoss, EvalEpisode, InnerLoop, Maml
from fedshot.learners.local_training import (
    LocalEpisodes,
    check_budget,
    check_not_negative,
    local_sgd,
    mean_metrics,
    sample_episodes,
)
from fedshot.learners.local_update import (
    OptimizerState,
    Weighing,
    check_local_update,
    first_moments,
    keep_moments,
    max_weight_of,
    moments_of,
    weight_of,
)
from fedshot.learners.prediction_drift import answer_common, common_form
from fedshot.methods.fedfsl.leave_one_out import (
    Reference,
    first_pool,
    init_share,
    keep_share,
    next_pool,
    pool_message,
    reference_model,
)
from fedshot.methods.fedfsl.prediction_regularizer import (
    PredictionRegularizer,
    Reading,
    ReferenceLogits,
)
from fedshot.methods.fedfsl.predictions import (
    PREDICTIONS,
    EpisodePredictions,
    Predictions,
    paired_predictions,
)
from fedshot.nn.losses import (
    Clip,
    accuracy,
    cross_entropy,
    floored_kl,
    jensen_shannon,
    kl,
    mean_gap,
)
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.averaging import average, changes
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Prediction, diagnostic, predict_at_server


class FedFSLMIAdvState(NamedTuple):
    """What the server remembers."""

    w: Tree  # {"body": ..., "head": ...}
    stats: Tree  # running statistics of batch norm
    pool: Tree  # what w is the mean of, for reference "exclusive"; else {}


class MIAdvData(NamedTuple):
    """What is drawn for a visit."""

    local_episodes: LocalEpisodes  # B_k
    second: Tree  # theta', or the noise that makes it of theta; {} where the client keeps one


class Disagreement(NamedTuple):
    """What both heads make of an episode."""

    tasks: Tensor  # l_T of both, gamma KL to the reference included
    discrepancy: Tensor  # between the heads
    mi: Tensor  # KL of the first head's predictions from the reference's
    first: EpisodePredictions


@dataclass(frozen=True)
class FedFSLMIAdv:
    """MAML with features trained against two heads, averaged over clients.

    Args:
        model: backbone and head; the head is as wide as the widest episode.
        episode: shape of the training episodes.
        gamma: weight of the divergence from the reference.
        eta: weight of the heads' disagreement in stage 1.
        lambda_adv: weight of the heads' disagreement in stage 2, lambda.
        reference: the model that predictions stay near: "global", or "exclusive", the average of
            the others.
        predictions: p(.) on the queries after adapting, on the queries without, or after adapting
            on queries and support: "adapted_query", "unadapted_query", "adapted_both".
        adv_predictions: the same for the two heads.
        mode: what holds where an option is null. "strict": clip "coef", MI in the stages, in turns
            by "batch". "paper", as the revised version writes it: clip "log", else the same. "v1",
            the first version: clip "none", no MI in the stages, in turns by "round". In all three
            `min_prob`, `max_grad_norm`, `adv_predictions` and the inner steps stay as they are set.
        clip: how the ratio of probabilities is bounded in MI: "none", "log", "coef".
        epsilon: the ratio stays within 1 - epsilon and 1 + epsilon.
        mi_in_stages: whether L_k in the stages is that of FedFSL-MI; without it gamma has no part.
        alternation: a step of the heads and one of the backbone in turns, "batch", or all steps of
            the heads and then all of the backbone, "round".
        second_head: "fresh" at random in every round, "persistent" with the client, or "copy", the
            first head plus noise.
        noise: standard deviation of that noise.
        discrepancy: of the heads' predictions: "kl", "l1" (Saito et al. 2018), "js"
            (Jensen-Shannon).
        min_prob: the smallest probability that "kl" reckons with.
        max_grad_norm: a gradient of stage 1 is shortened to this norm; 0 takes any.
        inner: how a model adapts to a support set.
        local_steps: optimiser steps per visit, of the heads and of the backbone each.
        episodes_per_step: episodes whose gradients are averaged in a step.
        optimizer: of the clients, for the outer steps.
        common_questions: made-up questions to which each client uploads its answers in each round,
            to report the `divergence` of their predictions; 0 for none. Nothing else depends on it.
        weigh_by: what a client counts for in the mean: its "episodes", |B_k|, or "examples", n_k.
        optimizer_state: what a local update does with the states of the client's optimisers:
            "reset" them, or "keep" them from the last one, that of the heads only where the second
            head is persistent.
    """

    name: ClassVar[str] = "fedfsl_mi_adv"

    model: Model
    episode: EpisodeSpec
    gamma: float = 0.2
    eta: float = 0.1
    lambda_adv: float = 0.1
    reference: Reference = "global"
    predictions: Predictions = "adapted_query"
    adv_predictions: Predictions = "adapted_query"
    mode: Reading = "strict"
    clip: Clip | None = None
    epsilon: float = 0.2
    mi_in_stages: bool | None = None
    alternation: Literal["batch", "round"] | None = None
    second_head: Literal["fresh", "persistent", "copy"] = "fresh"
    noise: float = 0.01
    discrepancy: Literal["kl", "l1", "js"] = "kl"
    min_prob: float = 1e-4
    max_grad_norm: float = 10.0
    inner: InnerLoop = InnerLoop()
    local_steps: int = 10
    episodes_per_step: int = 1
    optimizer: Optimizer = Optimizer()
    common_questions: int = diagnostic(0)
    weigh_by: Weighing = "episodes"
    optimizer_state: OptimizerState = "reset"

    def __post_init__(self) -> None:
        check_budget(self.local_steps, self.episodes_per_step)
        check_local_update(self.weigh_by, self.optimizer_state)
        check_not_negative(eta=self.eta, lambda_adv=self.lambda_adv, noise=self.noise)
        check_not_negative(max_grad_norm=self.max_grad_norm, common_questions=self.common_questions)
        check_word("adv_predictions", self.adv_predictions, PREDICTIONS)
        check_word("alternation", self.turns, ("batch", "round"))
        check_word("second_head", self.second_head, ("fresh", "persistent", "copy"))
        check_word("discrepancy", self.discrepancy, ("kl", "l1", "js"))
        if not 0 < self.min_prob < 1:
            raise ConfigError(
                f"min_prob is {self.min_prob}; expected a probability between 0 and 1."
            )
        _ = self.regularizer  # which checks the rest

    @staticmethod
    def norm_policy(options: Mapping[str, Any]) -> str:
        """Return the batch norm at test that suits MAML: the support's."""
        del options
        return "support"

    @property
    def learner(self) -> Maml:
        """What the clients train."""
        return Maml(self.model, self.inner, self.episode.labels)

    @property
    def regularizer(self) -> PredictionRegularizer:
        """How predictions are held near the reference's."""
        return PredictionRegularizer(
            self.gamma, self.reference, self.predictions, self.mode, self.clip, self.epsilon
        )

    @property
    def mi_counts(self) -> bool:
        """Whether the stages hold predictions near the reference."""
        wanted = self.mode != "v1" if self.mi_in_stages is None else self.mi_in_stages
        return wanted and self.gamma > 0

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know of these options before a run."""
        return self.regularizer.warnings if self.mi_counts else ()

    @property
    def turns(self) -> str:
        """How the stages take turns."""
        return self.alternation or ("round" if self.mode == "v1" else "batch")

    @property
    def stays_near(self) -> Reference:
        """The reference, and the global one where MI has no part and none is looked at."""
        return self.reference if self.mi_counts else "global"

    @property
    def n_episodes(self) -> int:
        """Episodes of one visit, |B_k|."""
        return self.local_steps * self.episodes_per_step

    @property
    def transductive(self) -> bool:
        """Whether predictions for one query depend on the others."""
        return self.model.norm_policy == "transductive"

    @property
    def knows_base_alone(self) -> bool:
        """Whether its head has an output for each class of the dataset, and none for others."""
        return self.episode.labels == "global"

    @property
    def max_way(self) -> int | None:
        """The most classes an episode may have; None for any number."""
        return self.learner.max_way

    def init(self, key: Key) -> FedFSLMIAdvState:
        """Return a fresh model."""
        return FedFSLMIAdvState(*self.learner.init(key), first_pool(self.stays_near))

    def init_client(self, client: int, key: Key) -> Tree:
        """Return the second head, if it stays, and the part in the mean, if it matters."""
        del client
        kept = init_share(self.stays_near, self.learner, key)
        if self.second_head == "persistent":
            kept["second"] = self._new_head(key.at("second head"))
        if self.optimizer_state == "keep":
            w, _ = self.learner.init(key)
            kept["features"] = first_moments(self.optimizer_state, self.optimizer, w["body"])
            if self.second_head == "persistent":
                heads = {"first": w["head"], "second": w["head"]}
                kept["heads"] = first_moments(self.optimizer_state, self.optimizer, heads)
        return kept

    def draw(self, data: ClientData, key: Key) -> MIAdvData:
        """Draw the local episodes, B_k, and the second head or its noise."""
        local_episodes = sample_episodes(
            data, self.episode, self.local_steps, self.episodes_per_step, key
        )
        second: Tree = {}
        if self.second_head == "fresh":
            second = self._new_head(key.at("second head"))
        if self.second_head == "copy":
            rng = key.at("second head").torch()
            second = tree.map(
                lambda leaf: self.noise * torch.randn(leaf.shape, generator=rng).to(leaf.dtype),
                self._new_head(key),
            )
        return MIAdvData(local_episodes, second)

    def verdict(
        self,
        reference: ReferenceLogits,
        body: Tree,
        heads: Tree,
        stats: Tree,
        episode: Episode,
        seed: Tensor,
    ) -> Disagreement:
        """Let [Theta, theta] and [Theta, theta'] adapt and predict; compare them."""
        kinds = {self.adv_predictions, *([self.predictions] if self.mi_counts else [])}
        both = (heads["first"], heads["second"])
        looks = reference.looks if self.mi_counts else None  # else nobody looks with it
        first, second = paired_predictions(
            self.learner, body, both, stats, episode, seed, kinds, looks
        )
        y, tasks = episode.query_y, first.query.new_zeros(())
        for one in (first, second):
            tasks = tasks + cross_entropy(one.query, y)
        mi = torch.zeros_like(tasks)
        if self.mi_counts:
            told = reference(stats, episode, seed)
            for one in (first, second):
                tasks = tasks + self.regularizer.term(told, one.p[self.predictions])
            mi = kl(told, first.p[self.predictions].detach())
        gap = self._gap(first.p[self.adv_predictions], second.p[self.adv_predictions])
        return Disagreement(tasks, gap, mi, first)

    def stage_1(
        self,
        reference: ReferenceLogits,
        body: Tree,
        heads: Tree,
        stats: Tree,
        episode: Episode,
        seed: Tensor,
    ) -> EpisodeLoss:
        """Return L_k(theta) + L_k(theta') - eta L_adv, eq. (15)."""
        seen = self.verdict(reference, body, heads, stats, episode, seed)
        loss = seen.tasks - self.eta * seen.discrepancy
        return EpisodeLoss(loss, stats, accuracy(seen.first.query.detach(), episode.query_y))

    def stage_2(
        self,
        reference: ReferenceLogits,
        heads: Tree,
        body: Tree,
        stats: Tree,
        episode: Episode,
        seed: Tensor,
    ) -> EpisodeLoss:
        """Return L_k(Theta; theta) + L_k(Theta; theta') + lambda L_adv, eq. (16).

        This is the stage whose passes move the running statistics.
        """
        seen = self.verdict(reference, body, heads, stats, episode, seed)
        loss = seen.tasks + self.lambda_adv * seen.discrepancy
        extra = {"discrepancy": seen.discrepancy} | ({"mi": seen.mi} if self.mi_counts else {})
        hits = accuracy(seen.first.query.detach(), episode.query_y)
        return EpisodeLoss(loss, seen.first.stats, hits, extra)

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: MIAdvData) -> Reply:
        """Let the stages take turns from [Theta^t, theta^t]; send the change, without theta'."""
        w, stats = down["w"], down["stats"]
        reference = ReferenceLogits(self.regularizer, self.learner, reference_model(down, private))
        body, heads = w["body"], {"first": w["head"], "second": self._second(w, private, drawn)}
        of_heads, of_body = private.get("heads", {}), private.get("features", {})
        state_1, state_2 = moments_of(of_heads), moments_of(of_body)
        told: list[dict[str, Tensor]] = []
        for local_episodes in self._turns(drawn.local_episodes):
            heads, _, state_1, _ = local_sgd(
                partial(self.stage_1, reference, body),
                self.optimizer,
                heads,
                stats,
                local_episodes,
                state_1,
                max_grad_norm=self.max_grad_norm,
            )
            body, stats, state_2, metrics = local_sgd(
                partial(self.stage_2, reference, heads),
                self.optimizer,
                body,
                stats,
                local_episodes,
                state_2,
            )
            told.append(dict(metrics))
        new = {"body": body, "head": heads["first"]}
        up = changes({"w": new, "stats": stats}, down)
        up |= answer_common(self.learner, new, stats, self.common_questions)
        weight = weight_of(drawn.local_episodes, self.weigh_by)
        kept = keep_share(down, private, new, weight)
        if self.second_head == "persistent":
            kept = {**kept, "second": heads["second"]}
        for part, memory, state in (("heads", of_heads, state_1), ("features", of_body, state_2)):
            if part in kept and state is not None:
                kept = {**kept, part: keep_moments(memory, state)}
        return Reply(up, kept, weight, mean_metrics(told))

    def round(
        self, server: FedFSLMIAdvState, clients: Clients, key: Key
    ) -> tuple[FedFSLMIAdvState, Mapping[str, float]]:
        """w <- w + sum_k |B_k| (w_k - w) / |B|."""
        new, got = average(
            clients,
            self.train,
            {"w": server.w, "stats": server.stats},
            key,
            max_weight=max_weight_of(self.n_episodes, self.weigh_by),
            down=pool_message(server.pool, len(clients.ids)),
            common=common_form(self.model, self.common_questions),
        )
        return FedFSLMIAdvState(**new, pool=next_pool(server.pool, got.weight)), got.metrics

    def evaluate(
        self,
        server: FedFSLMIAdvState,
        clients: Clients,
        eval_episodes: Sequence[EvalEpisode],
        key: Key,
    ) -> list[Prediction]:
        """Adapt the server's model to each support, and answer the queries."""
        del key
        answer = partial(self.learner.answer, server.w, server.stats)
        return predict_at_server(answer, eval_episodes, clients)

    def _new_head(self, key: Key) -> Tree:
        assert self.model.head is not None
        return self.model.head.init(key, self.model.out_features, self.model.torch_dtype)

    def _second(self, w: Tree, private: Tree, drawn: MIAdvData) -> Tree:
        if self.second_head == "persistent":
            return private["second"]
        return tree.add(w["head"], drawn.second) if self.second_head == "copy" else drawn.second

    def _turns(self, local_episodes: LocalEpisodes) -> list[LocalEpisodes]:
        """Return the episodes of each turn; a seed of its own for each, the same in both stages."""
        if self.turns == "round":
            return [local_episodes]
        noise = Mode(seed=local_episodes.seed)
        seeds = (noise.layer(s).seed for s in range(len(local_episodes.steps)))
        return [
            local_episodes._replace(steps=(step,), seed=seed)
            for step, seed in zip(local_episodes.steps, seeds, strict=True)
            if seed is not None
        ]

    def _gap(self, p: Tensor, q: Tensor) -> Tensor:
        if self.discrepancy == "kl":
            return floored_kl(p, q, self.min_prob)
        return jensen_shannon(p, q) if self.discrepancy == "js" else mean_gap(p, q)
