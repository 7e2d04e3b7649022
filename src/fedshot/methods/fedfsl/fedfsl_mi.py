"""FedFSL-MI: MAML under federated averaging, with predictions held near the server's.

Each client minimises the loss of its queries after adapting to its supports, plus the divergence of
its predictions from those of the model that it was sent; the server averages the weights.

Source: Fan & Huang, Federated Few-Shot Learning with Adversarial Learning. Local objective
L_k(w_k) + gamma L_MI, L_MI = 1/|B_k| sum_T KL(p(w^t) || p(w_k)): eqs. (11) and (12) of the revised
version, (12) and (13) of the first, which defines the reference as the average w_-k of the other
clients, eq. (11), and uses w^t. Inner step, task loss, server: eqs. (4), (5), (10) of both.
Symbols: w^t backbone and head of the server at the start of round t; w_k client k's; p(w) softmax
over the episode's classes; |B_k| the episodes that client k used; epsilon half the band of p/p.

What the papers leave open: p(.) is taken on the queries, after both models have adapted to the same
support with the same dropout masks (a head that has not adapted does not know labels that are
shuffled anew for each episode), and averaged over the queries; the reference is a constant, its
adapting included, while gradients run through the client's inner steps. The revised version clips
p(w^t)/p(w_k) "in (11)" to [1 - epsilon, 1 + epsilon]: see `fedshot.nn.losses.clipped_kl`.
Departures: the default clip is not in (11) but in its gradient. With reference="exclusive" the
client takes its own share out of the mean that it is sent, where the paper's server computes and
sends K models: see `fedshot.methods.fedfsl.leave_one_out`. What is left out is the client's part
in the last mean, so where only a cohort takes part each round, a client that made no part of w^t
has w^t for a reference. It keeps |B_k| w_k in float64, the memory of two models, at the client. As
in FedFSL-naive: fresh episodes in every local step, clients upload
w_k - w^t, and the Adam state starts afresh at every visit unless optimizer_state="keep".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

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
from fedshot.methods.fedfsl.prediction_regularizer import PredictionRegularizer, Reading
from fedshot.methods.fedfsl.predictions import Predictions, episode_predictions
from fedshot.nn.losses import Clip, accuracy, cross_entropy, kl
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.averaging import average, changes
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Prediction, diagnostic, predict_at_server


class FedFSLMIState(NamedTuple):
    """What the server remembers."""

    w: Tree  # {"body": ..., "head": ...}
    stats: Tree  # running statistics of batch norm
    pool: Tree  # what w is the mean of, for reference "exclusive"; else {}


@dataclass(frozen=True)
class FedFSLMI:
    """MAML whose predictions stay near the server's, averaged over clients.

    Args:
        model: backbone and head; the head is as wide as the widest episode.
        episode: shape of the training episodes.
        gamma: weight of the divergence; 0 is FedFSL-naive.
        reference: the model that predictions stay near: "global", or "exclusive", the average of
            the others.
        predictions: p(.) on the queries after adapting, on the queries without, or after adapting
            on queries and support: "adapted_query", "unadapted_query", "adapted_both".
        mode: which clip where none is said: "strict" has "coef"; "paper" has "log", as the revised
            version writes it; "v1" has "none".
        clip: how the ratio of probabilities is bounded: "none", "log", "coef".
        epsilon: the ratio stays within 1 - epsilon and 1 + epsilon.
        inner: how a model adapts to a support set.
        local_steps: optimiser steps per visit.
        episodes_per_step: episodes whose gradients are averaged in a step.
        optimizer: of the clients, for the outer steps.
        common_questions: made-up questions to which each client uploads its answers in each round,
            to report the `divergence` of their predictions; 0 for none. Nothing else depends on it.
        weigh_by: what a client counts for in the mean: its "episodes", |B_k|, or "examples", n_k.
        optimizer_state: what a local update does with the state of the client's optimiser: "reset"
            it, or "keep" it from the last one.
    """

    name: ClassVar[str] = "fedfsl_mi"

    model: Model
    episode: EpisodeSpec
    gamma: float = 0.2
    reference: Reference = "global"
    predictions: Predictions = "adapted_query"
    mode: Reading = "strict"
    clip: Clip | None = None
    epsilon: float = 0.2
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
        check_not_negative(common_questions=self.common_questions)
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
    def warnings(self) -> tuple[str, ...]:
        """What a person should know of these options before a run."""
        return self.regularizer.warnings

    @property
    def stays_near(self) -> Reference:
        """The reference, and the global one where MI has no part and none is looked at."""
        return self.reference if self.gamma else "global"

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

    def init(self, key: Key) -> FedFSLMIState:
        """Return a fresh model."""
        return FedFSLMIState(*self.learner.init(key), first_pool(self.stays_near))

    def init_client(self, client: int, key: Key) -> Tree:
        """Return what a client remembers of its part in the mean, nothing yet, and its moments."""
        del client
        share = init_share(self.stays_near, self.learner, key)
        return share | first_moments(
            self.optimizer_state, self.optimizer, self.learner.init(key)[0]
        )

    def draw(self, data: ClientData, key: Key) -> LocalEpisodes:
        """Draw the local episodes, B_k."""
        return sample_episodes(data, self.episode, self.local_steps, self.episodes_per_step, key)

    def objective(
        self, reference: Tree, w: Tree, stats: Tree, episode: Episode, seed: Tensor
    ) -> EpisodeLoss:
        """Return l_T(w) + gamma KL(p(reference) || p(w)), eqs. (5), (11) and (12)."""
        told = self.regularizer.told(self.learner, reference, stats, episode, seed)
        mine = episode_predictions(self.learner, w, stats, episode, seed, (self.predictions,))
        p = mine.p[self.predictions]
        loss = cross_entropy(mine.query, episode.query_y) + self.regularizer.term(told, p)
        hits = accuracy(mine.query.detach(), episode.query_y)
        return EpisodeLoss(loss, mine.stats, hits, {"mi": kl(told, p.detach())})

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: LocalEpisodes) -> Reply:
        """Minimise the objective from w^t for the round; send the change."""
        w, stats = down["w"], down["stats"]
        near = partial(self.objective, reference_model(down, private))
        episode_loss = near if self.gamma else self.learner.episode_loss
        new = local_sgd(episode_loss, self.optimizer, w, stats, drawn, moments_of(private))
        up = changes({"w": new.params, "stats": new.stats}, down)
        up |= answer_common(self.learner, new.params, new.stats, self.common_questions)
        weight = weight_of(drawn, self.weigh_by)
        kept = keep_share(down, private, new.params, weight)
        return Reply(up, keep_moments(kept, new.state), weight, new.metrics)

    def round(
        self, server: FedFSLMIState, clients: Clients, key: Key
    ) -> tuple[FedFSLMIState, Mapping[str, float]]:
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
        return FedFSLMIState(**new, pool=next_pool(server.pool, got.weight)), got.metrics

    def evaluate(
        self,
        server: FedFSLMIState,
        clients: Clients,
        eval_episodes: Sequence[EvalEpisode],
        key: Key,
    ) -> list[Prediction]:
        """Adapt the server's model to each support, and answer the queries."""
        del key
        answer = partial(self.learner.answer, server.w, server.stats)
        return predict_at_server(answer, eval_episodes, clients)
