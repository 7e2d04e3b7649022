"""Supervised classification of all base classes: batches of examples, and a classifier.

Each episode numbers its classes anew. Here, by contrast, the label of a class is always its index
among the sorted base classes, at every client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedshot.core.errors import ConfigError, DataError
from fedshot.core.ranges import check_options
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.augment import Augment
from fedshot.data.episodes.episode import ClientData
from fedshot.learners.learner import EpisodeLoss, EvalEpisode, check_body, episode_features
from fedshot.learners.local_training import LocalSteps
from fedshot.nn.heads import CosineHead, Head, LinearHead, MLPClassifier
from fedshot.nn.losses import accuracy, cross_entropy
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model


class Batch(NamedTuple):
    """A batch of labelled examples."""

    x: Tensor  # uint8 [n, H, W, C], or int32 [n, L]
    y: Tensor  # int64 [n], 0..classes-1


Batches: TypeAlias = LocalSteps[Batch]


def draw_batches(
    data: ClientData, classes: Sequence[int], size: int, steps: int, augment: Augment, key: Key
) -> Batches:
    """Draw a batch of `size` examples for each local step.

    The examples of a batch are distinct if the client has enough. `classes` are the base classes,
    as class indices of the dataset.

    Raises DataError if the client has an example of any other class.
    """
    rng = key.at("batches").numpy()
    drawn: list[tuple[Batch, ...]] = []
    for step in range(steps):
        x, labels = data.batch(size, rng)
        x = _augmented(x, data, augment, key.at("augment", step))
        drawn.append((Batch(x, base_numbers(labels, classes)),))
    return Batches(tuple(drawn), key.at("noise").tensor(), torch.tensor(data.n))


def draw_passes(
    data: ClientData,
    classes: Sequence[int],
    passes: int,
    size: int | None,
    augment: Augment,
    key: Key,
) -> Batches:
    """Draw the batches of `passes` passes over all examples of a client; each is one local step.

    A pass is one batch if `size` is None. Otherwise it shuffles the examples and splits them evenly
    into batches of at most `size`. `classes` are the base classes, as class indices of the dataset.

    Raises DataError if the client has an example of any other class.
    """
    rng = key.at("passes").numpy()
    x, labels = data.all()
    y = base_numbers(labels, classes)
    cuts = 1 if size is None else math.ceil(data.n / size)
    drawn: list[tuple[Batch, ...]] = []
    for i in range(passes):
        seen = _augmented(x, data, augment, key.at("augment", i))
        if cuts == 1:
            drawn.append((Batch(seen, y),))
            continue
        order = torch.from_numpy(rng.permutation(data.n))
        drawn += [(Batch(seen[rows], y[rows]),) for rows in order.tensor_split(cuts)]
    return Batches(tuple(drawn), key.at("noise").tensor(), torch.tensor(data.n))


def base_numbers(labels: Tensor, classes: Sequence[int]) -> Tensor:
    """Convert labels, int64 [n], from class indices of the dataset to indices of base classes.

    The base classes are sorted first. Raises DataError for a label outside them.
    """
    known = torch.tensor(sorted(classes), dtype=torch.int64, device=labels.device)
    y = torch.searchsorted(known, labels).clamp(max=len(known) - 1)
    strange = labels[known[y] != labels]
    if len(strange):
        raise DataError(
            f"the client has an example of class {int(strange[0])}, which is not one of the "
            f"{len(known)} base classes, so the classifier has no output for it."
        )
    return y


def _augmented(x: Tensor, data: ClientData, augment: Augment, key: Key) -> Tensor:
    if not augment.active:
        return x
    augment.check(data.dataset)
    return augment.apply(x, key)


@dataclass(frozen=True)
class Classifier:
    """An encoder with a classifier, trained with the cross-entropy over all classes.

    Parameters are `{"body": ..., "classifier": ...}`; the model's own head is not used.

    Args:
        model: the encoder.
        classes: number of classes.
        kind: the classifier: "linear", "cosine" (one weight row per class, without a bias) or "mlp"
            (three layers).
        scale: factor that multiplies the cosines, for "cosine".
    """

    model: Model
    classes: int
    kind: Literal["linear", "cosine", "mlp"] = "linear"
    scale: float = 10.0

    def __post_init__(self) -> None:
        check_options(self)
        if self.classes < 2:
            raise ConfigError(
                f"the number of base classes is {self.classes}; a classifier needs at least 2. "
                "Name more in split.base."
            )
        check_body(self.model, "a classifier's encoder")

    @property
    def head(self) -> Head:
        """The classifier, as a head: a layer that computes logits from features."""
        if self.kind == "cosine":
            return CosineHead(self.classes, self.scale)
        if self.kind == "mlp":
            return MLPClassifier(self.classes)
        return LinearHead(self.classes)

    def init(self, key: Key) -> tuple[Tree, Tree]:
        """Return a random encoder and classifier, and the running statistics.

        `Proto` draws the same encoder from the same key.
        """
        params, stats = self.model.init(key)
        model = self.model
        row = self.head.init(key.at("classifier"), model.out_features, model.torch_dtype)
        return {"body": params["body"], "classifier": row}, stats

    def episode_loss(self, params: Tree, stats: Tree, batch: Batch, seed: Tensor) -> EpisodeLoss:
        """Return the cross-entropy of a batch over all classes."""
        h, stats = self.model.features(params, stats, batch.x, Mode(True, "batch", seed=seed))
        logits = self.head.logits(params["classifier"], h)
        found = accuracy(logits.detach(), batch.y)
        return EpisodeLoss(cross_entropy(logits, batch.y), stats, found)

    def logits_among(
        self, params: Tree, stats: Tree, eval_episode: EvalEpisode, classes: Sequence[int]
    ) -> Tensor:
        """Return the classifier's logits [queries, way] for the classes of an episode.

        `classes` are the base classes; a class of the episode outside them gets the logit -inf.
        The support set is used only for its batch-norm statistics, under policy "support".
        """
        _, query = self.encode(params, stats, eval_episode)
        with torch.no_grad():
            logits = self.head.logits(params["classifier"], query)
        known = torch.tensor(sorted(classes), device=logits.device)
        column = torch.searchsorted(known, eval_episode.classes).clamp(max=len(known) - 1)
        there = known[column] == eval_episode.classes
        return torch.where(there, logits[:, column], -torch.inf)

    def embed(self, params: Tree, stats: Tree, x: Tensor) -> Tensor:
        """Return the features [n, d] of x, with batch norm under running statistics.

        The features of an example therefore do not depend on the rest of its batch.
        """
        return self.model.features(params, stats, x, Mode(norm="given"))[0]

    def encode(self, params: Tree, stats: Tree, eval_episode: EvalEpisode) -> tuple[Tensor, Tensor]:
        """Return the features (support [n, d], queries [m, d]) of an episode, without gradients."""
        with torch.no_grad():
            return episode_features(self.model, params, stats, eval_episode)
