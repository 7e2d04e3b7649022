"""FedMeta: clients send the gradient of their query loss after adapting; the server takes a step.

Nothing is averaged but gradients, all taken at the same initialisation: a round is one step of
MAML whose tasks are the clients'. With `learned_steps` the inner step sizes are learned, too
(Meta-SGD). At test the server's initialisation adapts to the support.

Source: Chen et al. 2018, Federated Meta-Learning with Fast Convergence and Efficient Communication,
algorithm 1: theta_u = theta - alpha grad l_S(theta) (ModelTraining: adapt), g_u = grad_theta
l_Q(theta_u) (upload), theta <- theta - beta/m sum_u g_u (server); its Meta-SGD is Li et al. 2017.
Symbols: theta the initialisation; alpha inner.lr or a tree of step sizes; g_u client u's gradient.
Departures from the paper: a client draws several episodes from its data and averages their
gradients, where the paper splits the data once; several inner steps by default (the paper writes
one: inner.steps=1); the server's optimiser is Adam, algorithm 1's plain SGD; alpha starts at
inner.lr everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.learner import EvalEpisode
from fedshot.learners.local_training import (
    LocalEpisodes,
    mean_gradient,
    mean_metrics,
    sample_episodes,
)
from fedshot.learners.maml import InnerLoop, Maml
from fedshot.learners.meta_sgd import MetaSgd
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer, OptState
from fedshot.protocol.averaging import average, changes
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Prediction, predict_at_server
from fedshot.protocol.reducers import Mean


class FedMetaState(NamedTuple):
    """What the server remembers."""

    theta: Tree  # {"body", "head"}; with learned steps {"start": {"body", "head"}, "alpha": ...}
    outer: OptState
    stats: Tree  # running statistics of batch norm


@dataclass(frozen=True)
class FedMeta:
    """MAML by averaged gradients, one outer step a round.

    Args:
        model: backbone and head; the head is as wide as the widest episode.
        episode: shape of the training episodes.
        inner: how a model adapts to a support set.
        learned_steps: learn the inner step sizes, one for each number that adapts (Meta-SGD); they
            start at inner.lr.
        episodes: of a visit; their gradients are averaged.
        optimizer: of the server.
    """

    name: ClassVar[str] = "fedmeta"

    model: Model
    episode: EpisodeSpec
    inner: InnerLoop = InnerLoop()
    learned_steps: bool = False
    episodes: int = 10
    optimizer: Optimizer = Optimizer()

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise ConfigError(f"episodes is {self.episodes}; expected a whole number from 1.")

    @staticmethod
    def norm_policy(options: Mapping[str, Any]) -> str:
        """Return the batch norm at test that suits MAML: the support's."""
        del options
        return "support"

    @property
    def learner(self) -> Maml | MetaSgd:
        """What the clients differentiate."""
        kind = MetaSgd if self.learned_steps else Maml
        return kind(self.model, self.inner, self.episode.labels)

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

    def init(self, key: Key) -> FedMetaState:
        """Return a fresh initialisation."""
        theta, stats = self.learner.init(key)
        return FedMetaState(theta, self.optimizer.init(theta), stats)

    def init_client(self, client: int, key: Key) -> Tree:
        """Return `{}`: nothing stays with a client."""
        del client, key
        return {}

    def draw(self, data: ClientData, key: Key) -> LocalEpisodes:
        """Draw the episodes of a visit, as one step."""
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
        """theta <- one outer step along sum_u g_u / m."""
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

    def evaluate(
        self, server: FedMetaState, clients: Clients, eval_episodes: Sequence[EvalEpisode], key: Key
    ) -> list[Prediction]:
        """Adapt the server's model to each support, and answer the queries."""
        del key
        answer = partial(self.learner.answer, server.theta, server.stats)
        return predict_at_server(answer, eval_episodes, clients)
