"""FedFSL-prox: MAML under federated averaging, held near the server's weights.

Each client minimises the loss of its queries after adapting to its supports, plus the squared
distance to the weights that it was sent; the server averages the weights.

Source: Fan & Huang, Federated Few-Shot Learning with Adversarial Learning, section 5.4 of the first
version (baseline FedFSL-prox), which adds the term of Li et al. 2020, FedProx, algorithm 2, to
eq. (7): L_k(w) + (mu/2) ||w - w^t||^2. Inner step, task loss and server: eqs. (4), (5) and (10).
Symbols: w backbone and head; w^t those of the server at the start of round t; mu the pull.
Departures from the paper: it gives no mu, and none is left out of the distance here (backbone and
head, not the running statistics). The inner steps know nothing of the term. As in FedFSL-naive:
fresh episodes in every local step, clients upload w_k - w^t, and
the Adam state starts afresh at every visit unless optimizer_state="keep".
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
from fedshot.nn.losses import proximal
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.averaging import average, changes
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Prediction, diagnostic, predict_at_server


class FedFSLProxState(NamedTuple):
    """What the server remembers."""

    w: Tree  # {"body": ..., "head": ...}
    stats: Tree  # running statistics of batch norm


@dataclass(frozen=True)
class FedFSLProx:
    """MAML with a proximal term, averaged over clients.

    Args:
        model: backbone and head; the head is as wide as the widest episode.
        episode: shape of the training episodes.
        mu: weight of the proximal term; 0 is FedFSL-naive.
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

    name: ClassVar[str] = "fedfsl_prox"

    model: Model
    episode: EpisodeSpec
    mu: float = 0.01
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
        check_not_negative(mu=self.mu, common_questions=self.common_questions)

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

    def init(self, key: Key) -> FedFSLProxState:
        """Return a fresh model."""
        return FedFSLProxState(*self.learner.init(key))

    def init_client(self, client: int, key: Key) -> Tree:
        """Return what the optimiser remembers, or `{}`."""
        del client
        return first_moments(self.optimizer_state, self.optimizer, self.learner.init(key)[0])

    def draw(self, data: ClientData, key: Key) -> LocalEpisodes:
        """Draw the local episodes, B_k."""
        return sample_episodes(data, self.episode, self.local_steps, self.episodes_per_step, key)

    def objective(
        self, anchor: Tree, w: Tree, stats: Tree, episode: Episode, seed: Tensor
    ) -> EpisodeLoss:
        """Return l_T(w) + (mu/2) ||w - anchor||^2."""
        gradients = self.learner.episode_loss(w, stats, episode, seed)
        distance = proximal(w, anchor)
        loss = gradients.loss + self.mu * distance
        return gradients._replace(loss=loss, extra={"proximal": distance})

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: LocalEpisodes) -> Reply:
        """Minimise the objective from w^t for the round; send the change."""
        w, stats = down["w"], down["stats"]
        episode_loss = partial(self.objective, w) if self.mu else self.learner.episode_loss
        new = local_sgd(episode_loss, self.optimizer, w, stats, drawn, moments_of(private))
        up = changes({"w": new.params, "stats": new.stats}, down)
        up |= answer_common(self.learner, new.params, new.stats, self.common_questions)
        weight = weight_of(drawn, self.weigh_by)
        return Reply(up, keep_moments(private, new.state), weight, new.metrics)

    def round(
        self, server: FedFSLProxState, clients: Clients, key: Key
    ) -> tuple[FedFSLProxState, Mapping[str, float]]:
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
        return FedFSLProxState(**new), got.metrics

    def evaluate(
        self,
        server: FedFSLProxState,
        clients: Clients,
        eval_episodes: Sequence[EvalEpisode],
        key: Key,
    ) -> list[Prediction]:
        """Adapt the server's model to each support, and answer the queries."""
        del key
        answer = partial(self.learner.answer, server.w, server.stats)
        return predict_at_server(answer, eval_episodes, clients)
