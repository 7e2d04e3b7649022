"""FedAvg: one classifier over all classes, averaged over clients.

Source: McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized
Data, algorithm 1: w_k <- w_k - eta grad F_k(w_k) for the local epochs, w <- sum_k n_k w_k / n.
Symbols: w encoder and classifier; n_k the examples of client k.
Departures from the paper: by default a local epoch is one step on all examples of the client, since
there are few; clients upload w_k - w, which averages to the same. At test an answer is one of the
question's classes: a client knows which classes it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.classification import Batches, check_batches, draw_passes
from fedshot.learners.learner import EvalEpisode
from fedshot.methods.personal.base_class_method import AmongBaseClasses
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.averaging import average, local_reply
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Prediction, predict_at_server


class FedAvgState(NamedTuple):
    """What the server remembers."""

    theta: Tree  # {"body", "classifier"}
    stats: Tree  # running statistics of batch norm


@dataclass(frozen=True)
class FedAvg(AmongBaseClasses[FedAvgState]):
    """A classifier over all classes, averaged over clients.

    Args:
        model: backbone; a head plays no part.
        episode: only its `augment` plays a part: a client trains on all its samples.
        classes: the dataset's numbers of the base classes.
        local_steps: passes over the samples; each is one step.
        batch: with a number, a pass is a step for every so many samples.
        optimizer: of the clients.
    """

    name: ClassVar[str] = "fedavg"

    model: Model
    episode: EpisodeSpec
    classes: tuple[int, ...]
    local_steps: int = 5
    batch: int | None = None
    optimizer: Optimizer = Optimizer("sgd", 0.01)

    def __post_init__(self) -> None:
        check_batches(self.local_steps, 1 if self.batch is None else self.batch)
        _ = self.learner  # which checks the rest

    def init(self, key: Key) -> FedAvgState:
        """Return a fresh encoder and classifier."""
        return FedAvgState(*self.learner.init(key))

    def draw(self, data: ClientData, key: Key) -> Batches:
        """Draw the passes over the client's samples."""
        augment = self.episode.augment
        return draw_passes(data, self.classes, self.local_steps, self.batch, augment, key)

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: Batches) -> Reply:
        """Minimise F_k from w; send the change."""
        return local_reply(self.learner.episode_loss, self.optimizer, down, private, drawn)

    def round(
        self, server: FedAvgState, clients: Clients, key: Key
    ) -> tuple[FedAvgState, Mapping[str, float]]:
        """w <- w + sum_k n_k (w_k - w) / n."""
        new, got = average(clients, self.train, server._asdict(), key, max_weight=None)
        return FedAvgState(**new), got.metrics

    def evaluate(
        self, server: FedAvgState, clients: Clients, eval_episodes: Sequence[EvalEpisode], key: Key
    ) -> list[Prediction]:
        """Answer with the server's classifier, among the classes of the question."""
        del key
        answer = partial(self.learner.logits_among, *server, classes=self.classes)
        return predict_at_server(answer, eval_episodes, clients)
