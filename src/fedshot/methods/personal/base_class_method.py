"""What personal methods share: training on all samples, and a classifier of all base classes."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from fedshot.core.ranges import AtLeast1, check_options
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.learners.classification import (
    Batch,
    Batches,
    Classifier,
    base_numbers,
    draw_passes,
)
from fedshot.learners.learner import EpisodeLoss, EvalEpisode
from fedshot.nn.losses import proximal
from fedshot.nn.optim import Optimizer
from fedshot.protocol.averaging import average
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply
from fedshot.protocol.method import Method, ModelState, Prediction, Traits, predict_at_server

S = TypeVar("S", bound=Tree)


@dataclass(frozen=True)
class OwnClassesMethod(Method[S]):
    """A method whose clients train on all their samples and are tested on their own classes.

    Args:
        model: the encoder; its head, if it has one, is not used.
        episode: only its `augment` is used, because a client trains on all its samples.
        classes: the base classes, as class indices of the dataset.
        local_steps: passes over a client's samples in a local update.
        batch: samples per step; null for all samples of a client, in one step per pass.
        optimizer: the optimiser of the clients.
    """

    test_norm: ClassVar[str] = "support"  # the statistics of a client's own samples

    classes: tuple[int, ...]
    local_steps: AtLeast1 = 5
    batch: AtLeast1 | None = None
    optimizer: Optimizer = Optimizer("sgd", 0.01)

    def __post_init__(self) -> None:
        check_options(self)

    def passes(self, data: ClientData, n: int, key: Key) -> Batches:
        """Draw the batches, of `batch` samples each, of n passes over a client's samples."""
        return draw_passes(data, self.classes, n, self.batch, self.episode.augment, key)

    def all_samples(self, data: ClientData) -> Batch:
        """Return all samples of a client as one batch, without augmentation."""
        x, labels = data.all()
        return Batch(x, base_numbers(labels, self.classes))

    def draw(self, data: ClientData, key: Key) -> Tree:
        """Draw the batches of a local update: `local_steps` passes over the client's samples."""
        return self.passes(data, self.local_steps, key)


class AmongBaseClasses(OwnClassesMethod[S]):
    """A method whose models have a classifier over all base classes.

    By default the server's state is a `ModelState`, and a round is one of federated averaging.
    """

    max_weight: ClassVar[int | None] = None  # as for `average`: None if examples are the weights

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.learner  # which checks the model

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs."""
        return replace(super().traits, base_classes_only=True, sends_changes=True)

    @property
    def learner(self) -> Classifier:
        """The learner that clients train."""
        return Classifier(self.model, len(self.classes))

    def init(self, key: Key) -> Any:
        """Return a random encoder and classifier."""
        return ModelState(*self.learner.init(key))

    @abstractmethod
    def train(self, down: Tree, private: Tree, drawn: Any) -> Reply:
        """Train the client's model; upload the changes of the server's trees."""

    def round(self, server: S, clients: Clients, key: Key) -> tuple[S, Mapping[str, float]]:
        """Run one round: each tree of the server moves by the cohort's mean change."""
        new, got = average(clients, self.train, server._asdict(), key, max_weight=self.max_weight)
        return type(server)(**new), got.metrics

    def proximal_loss(
        self, weight: float, anchor: Tree, theta: Tree, stats: Tree, batch: Batch, seed: Tensor
    ) -> EpisodeLoss:
        """Return F_k(theta) + (weight / 2) ||theta - anchor||^2, where F_k is the cross-entropy."""
        plain = self.learner.episode_loss(theta, stats, batch, seed)
        distance = proximal(theta, anchor)
        loss = plain.loss + weight * distance
        return plain._replace(loss=loss, extra={"proximal": distance})

    def logits(self, theta: Tree, stats: Tree, eval_episode: EvalEpisode) -> Tensor:
        """Return the classifier's logits [queries, way] for the classes of an episode."""
        return self.learner.logits_among(theta, stats, eval_episode, self.classes)

    def evaluate(
        self, server: S, clients: Clients, eval_episodes: Sequence[EvalEpisode], key: Key
    ) -> list[Prediction]:
        """Predict with the server's model."""
        del key
        return predict_at_server(partial(self.logits, *server), eval_episodes, clients)
