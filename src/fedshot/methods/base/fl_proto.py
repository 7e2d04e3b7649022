"""FL-Proto: prototypical networks trained by federated averaging.

Each client minimises the ProtoNet loss on episodes of its own data; the server averages the
encoders. At test a query gets the class of the nearest prototype.

Source: Wang et al., Federated Few-shot Learning, KDD 2023, section 4 (baseline FL-Proto); the loss
is Snell et al. 2017, eqs. (1)-(2); the averaging is McMahan et al. 2017, algorithm 1.
Symbols: theta the encoder; theta_k client k's after its local steps; |B_k| its episodes.
Departures from the paper: clients upload theta_k - theta, which averages to the same; the Adam
state starts fresh in every local update, because the weights it belongs to are overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from fedshot.core.ranges import AtLeast1
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.learners.local_training import LocalEpisodes
from fedshot.learners.proto import Proto
from fedshot.nn.optim import Optimizer
from fedshot.protocol.averaging import average, local_reply
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import EpisodicMethod, ModelState, ServerModel, Traits


@dataclass(frozen=True)
class FLProto(EpisodicMethod[ModelState]):
    """Prototypical networks, averaged over clients.

    Args:
        model: the encoder; its head, if it has one, is not used.
        episode: shape of the training episodes.
        local_steps: optimiser steps per local update.
        episodes_per_step: episodes whose gradients are averaged in a step.
        optimizer: the optimiser of the clients.
    """

    name: ClassVar[str] = "fl_proto"

    local_steps: AtLeast1 = 10
    episodes_per_step: AtLeast1 = 1
    optimizer: Optimizer = Optimizer()

    @property
    def learner(self) -> Proto:
        """The learner that clients train."""
        return Proto(self.model)

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs."""
        return replace(super().traits, adds_examples=True, sends_changes=True)

    def init(self, key: Key) -> ModelState:
        """Return a random encoder."""
        return ModelState(*self.learner.init(key))

    def server_model(self, server: ModelState) -> ServerModel:
        """Return a prototypical network with the server's encoder."""
        return ServerModel(self.learner, server.theta, server.stats)

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: LocalEpisodes) -> Reply:
        """Take the local steps from theta; upload the change theta_k - theta."""
        loss, weight = self.learner.episode_loss, drawn.n_episodes
        return local_reply(loss, self.optimizer, down, private, drawn, weight)

    def round(
        self, server: ModelState, clients: Clients, key: Key
    ) -> tuple[ModelState, Mapping[str, float]]:
        """Run one round; theta <- theta + sum_k |B_k| (theta_k - theta) / sum_k |B_k|."""
        parts = server._asdict()
        new, got = average(clients, self.train, parts, key, max_weight=self.n_episodes)
        return ModelState(**new), got.metrics
