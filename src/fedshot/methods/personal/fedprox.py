"""FedProx: FedAvg whose clients are held near the server's weights.

Source: Li et al. 2020, Federated Optimization in Heterogeneous Networks, algorithm 2: client k
minimises h_k(w; w^t) = F_k(w) + (mu/2) ||w - w^t||^2 inexactly; the server averages.
Symbols: w encoder and classifier; w^t those of the server at the start of round t.
Departures from the paper: a fixed number of local steps for every client, so no partial work; the
average is weighted by examples, as in FedAvg, where the paper samples clients by their examples and
averages plainly. The distance is over the weights, not the running statistics. mu = 0 is `fedavg`.
At test an answer is one of the question's classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

from torch import Tensor

from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.classification import Batch, Batches, check_batches, draw_passes
from fedshot.learners.learner import EpisodeLoss, EvalEpisode
from fedshot.learners.local_training import check_not_negative
from fedshot.methods.personal.base_class_method import AmongBaseClasses
from fedshot.nn.losses import proximal
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.averaging import average, local_reply
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Prediction, predict_at_server


class FedProxState(NamedTuple):
    """What the server remembers."""

    theta: Tree  # {"body", "classifier"}
    stats: Tree  # running statistics of batch norm


@dataclass(frozen=True)
class FedProx(AmongBaseClasses[FedProxState]):
    """FedAvg with a proximal term.

    Args:
        model: backbone; a head plays no part.
        episode: only its `augment` plays a part: a client trains on all its samples.
        classes: the dataset's numbers of the base classes.
        mu: weight of the proximal term; 0 is FedAvg.
        local_steps: passes over the samples; each is one step.
        batch: with a number, a pass is a step for every so many samples.
        optimizer: of the clients.
    """

    name: ClassVar[str] = "fedprox"

    model: Model
    episode: EpisodeSpec
    classes: tuple[int, ...]
    mu: float = 0.01
    local_steps: int = 5
    batch: int | None = None
    optimizer: Optimizer = Optimizer("sgd", 0.01)

    def __post_init__(self) -> None:
        check_batches(self.local_steps, 1 if self.batch is None else self.batch)
        check_not_negative(mu=self.mu)
        _ = self.learner  # which checks the rest

    def init(self, key: Key) -> FedProxState:
        """Return a fresh encoder and classifier."""
        return FedProxState(*self.learner.init(key))

    def draw(self, data: ClientData, key: Key) -> Batches:
        """Draw the passes over the client's samples."""
        augment = self.episode.augment
        return draw_passes(data, self.classes, self.local_steps, self.batch, augment, key)

    def objective(
        self, anchor: Tree, theta: Tree, stats: Tree, batch: Batch, seed: Tensor
    ) -> EpisodeLoss:
        """Return h_k(theta; anchor)."""
        gradients = self.learner.episode_loss(theta, stats, batch, seed)
        distance = proximal(theta, anchor)
        loss = gradients.loss + self.mu * distance
        return gradients._replace(loss=loss, extra={"proximal": distance})

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: Batches) -> Reply:
        """Minimise h_k from w^t; send the change."""
        episode_loss = (
            partial(self.objective, down["theta"]) if self.mu else self.learner.episode_loss
        )
        return local_reply(episode_loss, self.optimizer, down, private, drawn)

    def round(
        self, server: FedProxState, clients: Clients, key: Key
    ) -> tuple[FedProxState, Mapping[str, float]]:
        """w <- w + sum_k n_k (w_k - w) / n."""
        new, got = average(clients, self.train, server._asdict(), key, max_weight=None)
        return FedProxState(**new), got.metrics

    def evaluate(
        self, server: FedProxState, clients: Clients, eval_episodes: Sequence[EvalEpisode], key: Key
    ) -> list[Prediction]:
        """Answer with the server's classifier, among the classes of the question."""
        del key
        answer = partial(self.learner.logits_among, *server, classes=self.classes)
        return predict_at_server(answer, eval_episodes, clients)
