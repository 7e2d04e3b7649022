"""The base class of the FedFSL methods: MAML trained by federated averaging.

Source: Fan & Huang, Federated Few-Shot Learning with Adversarial Learning, eqs. (4)-(7), (9) and
(10) of the first version. w' = w - a grad f_S(w) (inner step); l_T(w) = f_Q(w') (task loss);
L_k(w) = 1/|B_k| sum_T l_T(w) (local objective); w <- sum_k |B_k| w_k / |B| (server).
Symbols: w backbone and head; w^t the server's at the start of round t; w_k client k's; a inner.lr;
|B_k| the episodes that client k uses in a round; n_k the examples that it holds.
Departures from the paper, in all four methods: every local step samples fresh episodes and uses
them once, where eq. (9) has one fixed batch B_k; clients upload w_k - w^t, which averages to the
same; the optimiser's state is fresh in every round unless optimizer_state="keep".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from torch import Tensor

from fedshot.core.errors import ConfigError
from fedshot.core.ranges import AtLeast0, AtLeast1
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import Episode
from fedshot.learners.learner import EpisodeLoss
from fedshot.learners.local_training import LocalEpisodes, local_sgd
from fedshot.learners.maml import InnerLoop, Maml
from fedshot.learners.prediction_drift import PART, answer_common, common_form, divergence
from fedshot.methods.fedfsl.leave_one_out import (
    Reference,
    first_pool,
    first_share,
    leave_one_out,
    next_pool,
    next_share,
)
from fedshot.nn.optim import Optimizer
from fedshot.protocol.averaging import average, changes
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import EpisodicMethod, ServerModel, Traits, diagnostic
from fedshot.protocol.reducers import Gather

Weighing = Literal["episodes", "examples"]
OptimizerState = Literal["reset", "keep"]
LossOf: TypeAlias = Callable[[Tree, Tree, Episode, Tensor], EpisodeLoss]


class FedFSLState(NamedTuple):
    """The server's state."""

    w: Tree  # {"body": ..., "head": ...}
    stats: Tree  # running statistics of batch norm
    pool: Tree  # for reference "exclusive", see `leave_one_out`: describes the mean w; else {}


@dataclass(frozen=True)
class FederatedMaml(EpisodicMethod[FedFSLState]):
    """MAML, averaged over clients. A subclass defines the clients' objective.

    Args:
        model: backbone and head; the head needs an output for each class of an episode.
        episode: shape of the training episodes.
        inner: how a model adapts to a support set.
        local_steps: optimiser steps per local update.
        episodes_per_step: episodes whose gradients are averaged in a step.
        optimizer: the clients' optimiser for the outer steps.
        common_questions: synthetic episodes on which each client uploads its predictions in every
            round, to report their `divergence`; 0 for none. It does not affect training.
        weigh_by: weight of a client in the mean: its "episodes", |B_k|, or its "examples", n_k.
        optimizer_state: "reset" the client's optimiser in every round, or "keep" its state.
    """

    test_norm: ClassVar[str] = "support"

    inner: InnerLoop = InnerLoop()
    local_steps: AtLeast1 = 10
    episodes_per_step: AtLeast1 = 1
    optimizer: Optimizer = Optimizer()
    common_questions: AtLeast0 = diagnostic(0)
    weigh_by: Weighing = "episodes"
    optimizer_state: OptimizerState = "reset"

    @property
    def learner(self) -> Maml:
        """The learner that clients train."""
        return Maml(self.model, self.inner, self.episode.labels)

    @property
    def reference_kind(self) -> Reference:
        """The reference model of the objective: "global" or "exclusive".

        "global" is w^t, and "exclusive" the average of the other clients' models. If no reference
        model is used, as here, the value is "global".
        """
        return "global"

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs."""
        return replace(
            super().traits,
            max_way=self.learner.max_way,
            adapts=True,
            base_classes_only=self.episode.labels == "global",
            sends_changes=True,
            gathers=("train", PART) if self.common_questions else None,
            subtracts_own=self.reference_kind == "exclusive",
        )

    def init(self, key: Key) -> FedFSLState:
        """Return a random backbone and head."""
        return FedFSLState(*self.learner.init(key), first_pool(self.reference_kind))

    def init_client(self, client: int, key: Key) -> Tree:
        """Return the client's private state before its first local update.

        It has a placeholder for the client's weighted model if the reference is "exclusive", and
        the optimiser's state if `optimizer_state` is "keep".
        """
        del client
        if self.reference_kind == "global" and self.optimizer_state == "reset":
            return {}
        w, _ = self.learner.init(key)  # only its shapes matter
        share = {} if self.reference_kind == "global" else {"share": first_share(w)}
        return share | (
            {"optimizer": self.optimizer.init(w)} if self.optimizer_state == "keep" else {}
        )

    def local_objective(self, down: Tree, private: Tree) -> LossOf:
        """Return the function with which a client computes its loss on an episode."""
        del down, private
        return self.learner.episode_loss

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: Any) -> Reply:
        """Minimise the local objective, starting from w^t; upload the change."""
        episode_loss, state = self.local_objective(down, private), private.get("optimizer")
        new = local_sgd(episode_loss, self.optimizer, down["w"], down["stats"], drawn, state)
        kept = {**private, "optimizer": new.state} if "optimizer" in private else private
        return self.reply(down, kept, drawn, new.params, new.stats, new.metrics)

    def reply(
        self,
        down: Tree,
        private: Tree,
        episodes: LocalEpisodes,
        w: Tree,
        stats: Tree,
        metrics: Mapping[str, Tensor],
    ) -> Reply:
        """Return the reply of a client whose local update ended with weights `w` and `stats`."""
        up = changes({"w": w, "stats": stats}, down)
        up |= answer_common(self.learner, w, stats, self.common_questions)
        weight = episodes.n_episodes if self.weigh_by == "episodes" else episodes.n
        if "pool" in down:
            share = next_share(private["share"], w, weight, down["pool"])
            private = {**private, "share": share}
        return Reply(up, private, weight, metrics)

    def reference_model(self, down: Tree, private: Tree) -> Tree:
        """Return the reference for the client's predictions: w^t, or the other clients' average."""
        if "pool" not in down:
            return down["w"]
        return leave_one_out(down["w"], down["pool"], private["share"])

    def round(
        self, server: FedFSLState, clients: Clients, key: Key
    ) -> tuple[FedFSLState, Mapping[str, float]]:
        """Run one round; w <- w + sum_k |B_k| (w_k - w) / |B|.

        Raises ConfigError if the option `reference` is "exclusive" and there is only one client.
        """
        if server.pool and len(clients.ids) == 1:
            raise ConfigError(
                "method.reference is 'exclusive', the average of the other clients' models, but "
                "there is only one client. Set it to 'global', or use more clients."
            )
        common = common_form(self.model, self.common_questions)
        new, got = average(
            clients,
            self.train,
            {"w": server.w, "stats": server.stats},
            key,
            max_weight=self.n_episodes if self.weigh_by == "episodes" else None,
            down={"pool": server.pool} if server.pool else {},
            reduce={name: Gather(form) for name, form in common.items()},
        )
        state = FedFSLState(**new, pool=next_pool(server.pool, got.weight))
        return state, {**got.metrics, **divergence(got)}

    def server_model(self, server: FedFSLState) -> ServerModel:
        """Return the learner with the server's weights."""
        return ServerModel(self.learner, server.w, server.stats)
