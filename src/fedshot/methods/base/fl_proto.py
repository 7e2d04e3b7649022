"""FL-Proto: prototypical networks trained by federated averaging.

Each client minimises the ProtoNet loss of episodes of its own; the server averages the encoders.
At test a query gets the class of the nearest prototype.

Source: Wang et al., Federated Few-shot Learning, KDD 2023, section 4 (baseline FL-Proto); the loss
is Snell et al. 2017, eqs. (1)-(2); the averaging is McMahan et al. 2017, algorithm 1.
Symbols: theta the encoder; theta_k client k's after its local steps; |B_k| its episodes.
Departures from the paper: clients upload theta_k - theta, which averages to the same; the Adam
state starts afresh at every visit, because the weights it belongs to are overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.learner import Proto
from fedshot.learners.local_training import LocalEpisodes, local_sgd
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.averaging import average, changes
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import (
    EpisodicMethod,
    ServerModel,
    Traits,
)


class FLProtoState(NamedTuple):
    """What the server remembers."""

    theta: Tree  # {"body": ...}
    stats: Tree  # running statistics of batch norm


@dataclass(frozen=True)
class FLProto(EpisodicMethod[FLProtoState]):
    """Prototypical networks, averaged over clients.

    Args:
        model: backbone; a head plays no part.
        episode: shape of the training episodes.
        local_steps: optimiser steps per visit.
        episodes_per_step: episodes whose gradients are averaged in a step.
        optimizer: of the clients.
    """

    name: ClassVar[str] = "fl_proto"

    model: Model
    episode: EpisodeSpec
    local_steps: int = 10
    episodes_per_step: int = 1
    optimizer: Optimizer = Optimizer()

    @property
    def learner(self) -> Proto:
        """What the clients train."""
        return Proto(self.model)

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs."""
        return replace(super().traits, adds_examples=True)

    def init(self, key: Key) -> FLProtoState:
        """Return a fresh encoder."""
        return FLProtoState(*self.learner.init(key))

    def server_model(self, server: FLProtoState) -> ServerModel:
        """Return the learner with the server's weights."""
        return ServerModel(self.learner, server.theta, server.stats)

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: LocalEpisodes) -> Reply:
        """Take the local steps from theta; send the change."""
        theta, stats = down["theta"], down["stats"]
        new = local_sgd(self.learner.episode_loss, self.optimizer, theta, stats, drawn)
        up = changes({"theta": new.params, "stats": new.stats}, down)
        return Reply(up, private, drawn.n_episodes, new.metrics)

    def round(
        self, server: FLProtoState, clients: Clients, key: Key
    ) -> tuple[FLProtoState, Mapping[str, float]]:
        """theta <- theta + sum_k |B_k| (theta_k - theta) / sum_k |B_k|."""
        parts = server._asdict()
        new, got = average(clients, self.train, parts, key, max_weight=self.n_episodes)
        return FLProtoState(**new), got.metrics
