"""FedMeta: clients send the gradient of their query loss after adapting; the server takes a step.

The server averages the gradients, which are all taken with respect to its initialisation. A round
is therefore one MAML step whose tasks are the clients. With `learned_steps` the inner step sizes
are learned as well (Meta-SGD). At test the server's initialisation adapts to the support set.

Source: Chen et al. 2018, Federated Meta-Learning with Fast Convergence and Efficient Communication,
algorithm 1: theta_u = theta - alpha grad l_S(theta) (ModelTraining: adapt), g_u = grad_theta
l_Q(theta_u) (upload), theta <- theta - beta/m sum_u g_u (server); its Meta-SGD is Li et al. 2017.
Symbols: theta the initialisation; alpha inner.lr or a tree of step sizes; g_u client u's gradient.
Departures from the paper: a client draws several episodes from its data and averages their
gradients, where the paper splits the data once; several inner steps by default (the paper writes
one: inner.steps=1); the server's optimiser is Adam, where algorithm 1 has plain SGD; alpha starts
at inner.lr everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from fedshot.core.ranges import AtLeast1, check_options
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.learners.local_training import (
    LocalEpisodes,
    mean_gradient,
    mean_metrics,
    sample_episodes,
)
from fedshot.learners.maml import InnerLoop, Maml
from fedshot.learners.meta_sgd import MetaSgd
from fedshot.nn.models.mode import Mode
from fedshot.nn.optim import Optimizer, OptState
from fedshot.protocol.averaging import average, changes
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Method, ServerModel, Traits
from fedshot.protocol.reducers import Mean


class FedMetaState(NamedTuple):
    """The server's state."""

    theta: Tree  # {"body", "head"}; with learned steps {"start": {"body", "head"}, "alpha": ...}
    outer: OptState
    stats: Tree  # running statistics of batch norm


@dataclass(frozen=True)
class FedMeta(Method[FedMetaState]):
    """MAML with gradients averaged over clients, one outer step per round.

    Args:
        model: backbone and head; the head needs an output for each class of an episode.
        episode: shape of the training episodes.
        inner: how a model adapts to a support set.
        learned_steps: whether to learn the inner step sizes, one for each adapted weight
            (Meta-SGD); they start at inner.lr.
        episodes: episodes of a local update, whose gradients are averaged.
        optimizer: the server's optimiser.
    """

    name: ClassVar[str] = "fedmeta"
    test_norm: ClassVar[str] = "support"

    inner: InnerLoop = InnerLoop()
    learned_steps: bool = False
    episodes: AtLeast1 = 10
    optimizer: Optimizer = Optimizer()

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def learner(self) -> Maml | MetaSgd:
        """The learner whose loss the clients differentiate."""
        kind = MetaSgd if self.learned_steps else Maml
        return kind(self.model, self.inner, self.episode.labels)

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs."""
        return replace(
            super().traits,
            max_way=self.learner.max_way,
            adapts=True,
            base_classes_only=self.episode.labels == "global",
        )

    def init(self, key: Key) -> FedMetaState:
        """Return a random initialisation, with the initial state of the server's optimiser."""
        theta, stats = self.learner.init(key)
        return FedMetaState(theta, self.optimizer.init(theta), stats)

    def server_model(self, server: FedMetaState) -> ServerModel:
        """Return the initialisation, which adapts to each support set."""
        return ServerModel(self.learner, server.theta, server.stats)

    def draw(self, data: ClientData, key: Key) -> LocalEpisodes:
        """Draw the episodes of a local update; all of them belong to one local step."""
        return sample_episodes(data, self.episode, 1, self.episodes, key)

    @client_work(draw="draw")
    def meta_gradient(self, down: Tree, private: Tree, drawn: LocalEpisodes) -> Reply:
        """Send g_u, the gradient of the query loss after adapting, averaged over the episodes."""
        theta, stats = down["theta"], down["stats"]
        (step,) = drawn.steps
        g = mean_gradient(self.learner.episode_loss, theta, stats, step, Mode(seed=drawn.seed))
        up = {"gradient": g.grads, **changes({"stats": g.stats}, down)}
        return Reply(up, private, drawn.n_episodes, mean_metrics(g.metrics))

    def round(
        self, server: FedMetaState, clients: Clients, key: Key
    ) -> tuple[FedMetaState, Mapping[str, float]]:
        """Run one round: the server takes an optimiser step on the mean gradient, sum_u g_u / m."""
        new, got = average(
            clients,
            self.meta_gradient,
            {"stats": server.stats},
            key,
            max_weight=self.episodes,
            down={"theta": server.theta},
            reduce={"gradient": Mean(server.theta, max_weight=self.episodes)},
        )
        theta, outer = self.optimizer.update(got["gradient"], server.outer, server.theta)
        return FedMetaState(theta, outer, **new), got.metrics
