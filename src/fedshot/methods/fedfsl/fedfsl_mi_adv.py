"""FedFSL-MI-Adv: FedFSL-MI whose features are trained against two heads that disagree.

Each client adds a private second head. In turns, the two heads learn the task while disagreeing
as much as possible (stage 1, features fixed), and the features learn to make the heads agree
(stage 2, heads fixed). The server averages features and first heads; the second head stays local.

Source: Fan & Huang, Federated Few-Shot Learning with Adversarial Learning, eqs. (14) to (16) of
both versions, algorithm 1 of the revised one, 2 of the first. With w = [Theta, theta]:
L_adv = 1/|B_k| sum_T KL(p(Theta, theta) || p(Theta, theta'));
stage 1: min over theta, theta'  L_k(theta; Theta) + L_k(theta'; Theta) - eta L_adv;
stage 2: min over Theta  L_k(Theta; theta) + L_k(Theta; theta') + lambda L_adv.
L_k is the objective of FedFSL-MI, eq. (12), in the revised version, and the plain eq. (7) in the
first. Symbols: Theta backbone; theta first head, theta' second, drawn anew in each round; eta,
lambda = lambda_adv; the rest as in `fedshot.methods.fedfsl.fedfsl_mi`.

Choices where the papers leave a point open: [Theta, theta] and [Theta, theta'] each adapt to the
support as a whole, so the inner steps change Theta in stage 1, too; these changes are discarded.
The heads are compared on the queries. A local step is one step of the heads and one of the backbone
on the same episodes (the revised algorithm's "alternatively"), or all steps of the heads come first
(mode="v1", the first version). KL has no upper bound, so maximising it needs limits: its
probabilities are at least `min_prob`, and the gradient norm of stage 1 is at most `max_grad_norm`.
The papers' text speaks of a difference from the central model, but their equations have the
difference between theta and theta'. The code follows the equations.
Departures: those of FedFSL-MI; and the heads are compared after adapting, where both papers define
p(Theta, theta) as the softmax of f_theta(f_Theta(x)) before adapting
(adv_predictions="unadapted_query").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from fedshot.core.ranges import NotNegative, OpenShare
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData, Episode
from fedshot.learners.learner import EpisodeLoss
from fedshot.learners.local_training import (
    LocalEpisodes,
    local_sgd,
    mean_metrics,
)
from fedshot.methods.fedfsl.prediction_regularizer import ReferenceLogits, RegularizedMaml
from fedshot.methods.fedfsl.predictions import Predictions, paired_predictions
from fedshot.nn.losses import accuracy, cross_entropy, floored_kl, kl
from fedshot.nn.models.mode import Mode
from fedshot.protocol.exchange import Reply, client_work


class MIAdvData(NamedTuple):
    """The random inputs of a local update: the episodes and the second head."""

    local_episodes: LocalEpisodes  # B_k
    second: Tree  # theta'


@dataclass(frozen=True)
class FedFSLMIAdv(RegularizedMaml):
    """MAML with features trained against two heads, averaged over clients.

    The other options are those of `FederatedMaml` and `RegularizedMaml`.

    Args:
        eta: weight of the heads' disagreement in stage 1.
        lambda_adv: weight of the heads' disagreement in stage 2, lambda.
        adv_predictions: the predictions in the heads' disagreement, "adapted_query" or
            "unadapted_query", as for `predictions`.
        mode: how the papers are read. "strict": the divergence from the reference is part of both
            stages, and its ratio is clipped in the gradient; heads and backbone take turns step by
            step. "paper", the revised version: the same, but the ratio is clipped inside the
            logarithm. "v1", the first version: no divergence and no clip; all steps of the heads
            precede those of the backbone. No mode changes `min_prob`, `max_grad_norm`,
            `adv_predictions` or the inner steps.
        mi_in_stages: whether the objective L_k of both stages includes the divergence from the
            reference, as in FedFSL-MI. If not, gamma is unused. null: as `mode` says.
        min_prob: smallest probability in the logarithms of the disagreement.
        max_grad_norm: largest gradient norm in stage 1; 0 for no limit.
        local_steps: optimiser steps per local update: this number for the heads, and as many for
            the backbone.
        optimizer_state: "reset" the backbone's optimiser in every round, or "keep" its state; the
            optimiser of the heads is always reset, as the second head is.
    """

    name: ClassVar[str] = "fedfsl_mi_adv"

    eta: NotNegative = 0.1
    lambda_adv: NotNegative = 0.1
    adv_predictions: Predictions = "adapted_query"
    mi_in_stages: bool | None = None
    min_prob: OpenShare = 1e-4
    max_grad_norm: NotNegative = 10.0

    @property
    def has_mi(self) -> bool:
        """Whether L_k in both stages is the objective of FedFSL-MI."""
        wanted = self.mode != "v1" if self.mi_in_stages is None else self.mi_in_stages
        return wanted and self.gamma > 0

    def init_client(self, client: int, key: Key) -> Tree:
        """Return the private state of `FederatedMaml`, with an optimiser state for the backbone."""
        kept = super().init_client(client, key)
        if kept.pop("optimizer", None) is not None:
            body = self.learner.init(key)[0]["body"]
            kept["features"] = {"optimizer": self.optimizer.init(body)}
        return kept

    def draw(self, data: ClientData, key: Key) -> MIAdvData:
        """Sample the local episodes, B_k, and the second head."""
        assert self.model.head is not None
        head_key, d = key.at("second head"), self.model.out_features
        return MIAdvData(
            super().draw(data, key), self.model.head.init(head_key, d, self.model.torch_dtype)
        )

    def objective(
        self,
        stage: Literal[1, 2],
        reference: ReferenceLogits,
        fixed: Tree,
        moving: Tree,
        stats: Tree,
        episode: Episode,
        seed: Tensor,
    ) -> EpisodeLoss:
        """Return the loss of a stage, eq. (15) or (16).

        In stage 1 `fixed` is the backbone, and `moving` are the heads, {"first", "second"}, which
        are trained; in stage 2 the reverse. Only stage 2 updates the running statistics.
        """
        body, heads = (fixed, moving) if stage == 1 else (moving, fixed)
        both = paired_predictions(
            self.learner,
            body,
            (heads["first"], heads["second"]),
            stats,
            episode,
            seed,
            {self.adv_predictions, *([self.predictions] if self.has_mi else [])},
            reference.features if self.has_mi else None,  # without MI no other pass uses them
        )
        first, second = both
        loss, mi = first.query.new_zeros(()), {}
        for one in both:
            loss = loss + cross_entropy(one.query, episode.query_y)
        if self.has_mi:
            p_reference = reference(stats, episode, seed)
            for one in both:
                loss = loss + self.term(p_reference, one.p[self.predictions])
            mi["mi"] = kl(p_reference, first.p[self.predictions].detach())
        p, q = first.p[self.adv_predictions], second.p[self.adv_predictions]
        discrepancy = floored_kl(p, q, self.min_prob)
        found = accuracy(first.query.detach(), episode.query_y)
        if stage == 1:
            return EpisodeLoss(loss - self.eta * discrepancy, stats, found)
        loss = loss + self.lambda_adv * discrepancy
        return EpisodeLoss(loss, first.stats, found, {"discrepancy": discrepancy, **mi})

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: MIAdvData) -> Reply:
        """Alternate the two stages, starting from [Theta^t, theta^t]; upload the change of w.

        The second head, theta', is not uploaded.
        """
        w, stats = down["w"], down["stats"]
        reference = ReferenceLogits(self, self.reference_model(down, private))
        body, heads = w["body"], {"first": w["head"], "second": drawn.second}
        head_state, body_state = None, private.get("features", {}).get("optimizer")
        reported: list[dict[str, Tensor]] = []
        for turn in self._turns(drawn.local_episodes):
            stage_1 = partial(self.objective, 1, reference, body)
            heads, _, head_state, _ = local_sgd(
                stage_1,
                self.optimizer,
                heads,
                stats,
                turn,
                head_state,
                max_grad_norm=self.max_grad_norm,
            )
            stage_2 = partial(self.objective, 2, reference, heads)
            body, stats, body_state, metrics = local_sgd(
                stage_2, self.optimizer, body, stats, turn, body_state
            )
            reported.append(dict(metrics))
        if "features" in private:
            private = {**private, "features": {"optimizer": body_state}}
        new = {"body": body, "head": heads["first"]}
        return self.reply(down, private, drawn.local_episodes, new, stats, mean_metrics(reported))

    def _turns(self, local_episodes: LocalEpisodes) -> list[LocalEpisodes]:
        """Split the local steps into turns. A turn runs stage 1, then stage 2 on the same episodes.

        A turn has one local step, or in mode "v1" all of them. Both of its stages use the same
        dropout seed.
        """
        if self.mode == "v1":
            return [local_episodes]
        noise = Mode(seed=local_episodes.seed)
        seeds = (noise.layer(s).seed for s in range(len(local_episodes.steps)))
        return [
            local_episodes._replace(steps=(step,), seed=seed)
            for step, seed in zip(local_episodes.steps, seeds, strict=True)
            if seed is not None
        ]
