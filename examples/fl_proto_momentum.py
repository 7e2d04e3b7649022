"""A user's method: FL-Proto with momentum at the server, and a command line that knows it.

    python examples/fl_proto_momentum.py run --name mine --data digits --split.base 0-4 \
        --split.novel 5-9 --model.backbone mlp --method fl_proto_momentum --method.momentum 0.5

Clients minimise the ProtoNet loss on episodes of their own data, as in FL-Proto. The server adds a
decaying sum of the mean changes of all rounds, not the last mean change alone.

Source: Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification, 2019 (FedAvgM); the loss is Snell et al. 2017, eqs. (1)-(2).
Symbols: theta the encoder, v its velocity, beta the momentum, theta_k client k's after its steps.
Departures: batch norm's running statistics are averaged without momentum.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from fedshot.cli.main import main
from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.learners.local_training import LocalEpisodes, local_sgd, sample_episodes
from fedshot.learners.proto import Proto
from fedshot.methods.registry import register
from fedshot.nn.optim import Optimizer
from fedshot.protocol.averaging import average, changes
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Method, ServerModel


class Server(NamedTuple):
    """The server's state."""

    theta: Tree  # the encoder
    stats: Tree  # running statistics of batch norm
    velocity: Tree  # of theta


@register
@dataclass(frozen=True)
class FLProtoMomentum(Method[Server]):
    """Prototypical networks, averaged over clients, with momentum at the server.

    Args:
        model: the encoder; its head, if it has one, is not used.
        episode: shape of the training episodes.
        momentum: beta, the share of the last step that the next one repeats; 0 is FL-Proto.
        local_steps: optimiser steps of a local update, one episode each.
        optimizer: of the clients.
    """

    name: ClassVar[str] = "fl_proto_momentum"

    momentum: float = 0.9
    local_steps: int = 10
    optimizer: Optimizer = Optimizer()

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ConfigError(
                f"method.momentum is {self.momentum}; expected 0 <= momentum < 1, such as 0.9."
            )

    @property
    def learner(self) -> Proto:
        """What the clients train."""
        return Proto(self.model)

    def init(self, key: Key) -> Server:
        """Return a fresh encoder at rest."""
        theta, stats = self.learner.init(key)
        return Server(theta, stats, tree.zeros_like(theta))

    def draw(self, data: ClientData, key: Key) -> LocalEpisodes:
        """Draw the episodes of a local update."""
        return sample_episodes(data, self.episode, self.local_steps, 1, key)

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: LocalEpisodes) -> Reply:
        """Take the local steps from theta; send the changes, weighted by the episodes."""
        new = local_sgd(
            self.learner.episode_loss, self.optimizer, down["theta"], down["stats"], drawn
        )
        up = changes({"theta": new.params, "stats": new.stats}, down)
        return Reply(up, private, drawn.n_episodes, new.metrics)

    def round(
        self, server: Server, clients: Clients, key: Key
    ) -> tuple[Server, Mapping[str, float]]:
        """v <- beta v + sum_k n_k (theta_k - theta) / n, then theta <- theta + v."""
        parts = {"theta": server.theta, "stats": server.stats}
        new, got = average(clients, self.train, parts, key, max_weight=self.local_steps)
        change = tree.sub(new["theta"], server.theta)
        velocity = tree.map(lambda v, d: self.momentum * v + d, server.velocity, change)
        return Server(tree.add(server.theta, velocity), new["stats"], velocity), got.metrics

    def server_model(self, server: Server) -> ServerModel:
        """Return the model that the server predicts with: prototypes of its encoder."""
        return ServerModel(self.learner, server.theta, server.stats)


if __name__ == "__main__":
    sys.exit(main())
