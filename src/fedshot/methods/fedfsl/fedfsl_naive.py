"""FedFSL-naive: MAML trained by federated averaging.

Each client minimises the loss of its queries after adapting to its supports, from the server's
weights; the server averages the weights. At test the averaged model adapts to the support.

Source: Fan & Huang, Federated Few-Shot Learning with Adversarial Learning, eqs. (4)-(7), (9)
and (10) of the first version. w' = w - a grad f_S(w) (inner step); l_T(w) = f_Q(w') (task loss);
L_k(w) = 1/|B_k| sum_T l_T(w) (local objective); w <- sum_k |B_k| w_k / |B| (server).
Symbols: w backbone and head; a = inner.lr; |B_k| the episodes that client k used.
The paper allows one or several inner steps and writes one, inner.steps=1; the default is five.
Departures from the paper: every local step draws fresh episodes and uses them once, where eq. (9)
has one fixed batch B_k; clients upload w_k - w, which averages to the same; the Adam state starts
afresh at every visit unless optimizer_state="keep".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.learner import EvalEpisode, InnerLoop, Maml
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
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.averaging import average, changes
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Prediction, diagnostic, predict_at_server


class FedFSLNaiveState(NamedTuple):
    """What the server remembers."""

    w: Tree  # {"body": ..., "head": ...}
    stats: Tree  # running statistics of batch norm


@dataclass(frozen=True)
class FedFSLNaive:
    """MAML, averaged over clients.

    Args:
        model: backbone and head; the head is as wide as the widest episode.
        episode: shape of the training episodes.
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

    name: ClassVar[str] = "fedfsl_naive"

    model: Model
    episode: EpisodeSpec
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

    def init(self, key: Key) -> FedFSLNaiveState:
        """Return a fresh model."""
        return FedFSLNaiveState(*self.learner.init(key))

    def init_client(self, client: int, key: Key) -> Tree:
        """Return what the optimiser remembers, or `{}`."""
        del client
        return first_moments(self.optimizer_state, self.optimizer, self.learner.init(key)[0])

    def draw(self, data: ClientData, key: Key) -> LocalEpisodes:
        """Draw the local episodes, B_k."""
        return sample_episodes(data, self.episode, self.local_steps, self.episodes_per_step, key)

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: LocalEpisodes) -> Reply:
        """Minimise L_k from w for the round; send the change."""
        w, stats = down["w"], down["stats"]
        new = local_sgd(
            self.learner.episode_loss, self.optimizer, w, stats, drawn, moments_of(private)
        )
        up = changes({"w": new.params, "stats": new.stats}, down)
        up |= answer_common(self.learner, new.params, new.stats, self.common_questions)
        weight = weight_of(drawn, self.weigh_by)
        return Reply(up, keep_moments(private, new.state), weight, new.metrics)

    def round(
        self, server: FedFSLNaiveState, clients: Clients, key: Key
    ) -> tuple[FedFSLNaiveState, Mapping[str, float]]:
        """w <- w + sum_k |B_k| (w_k - w) / |B|."""
        common = common_form(self.model, self.common_questions)
        new, got = average(
            clients,
            self.train,
            server._asdict(),
            key,
            max_weight=max_weight_of(self.n_episodes, self.weigh_by),
            common=common,
        )
        return FedFSLNaiveState(**new), got.metrics

    def evaluate(
        self,
        server: FedFSLNaiveState,
        clients: Clients,
        eval_episodes: Sequence[EvalEpisode],
        key: Key,
    ) -> list[Prediction]:
        """Adapt the server's model to each support, and answer the queries."""
        del key
        answer = partial(self.learner.answer, server.w, server.stats)
        return predict_at_server(answer, eval_episodes, clients)
