"""Frozen encoder, federated prototypes: the control that few-round learning is to be held against.

Base clients train an encoder under a classifier over all base classes, by federated averaging. At
test nothing is trained: the clients of a question send sums of features, once, and queries get the
class of the nearest mean.

Source: Park et al., Few-Round Learning for Federated Learning, ICLR 2021 submission, whose
Table 1 hardly depends on the rounds of the test; the control itself is ours. Prototypes are those
of Snell et al. 2017; sums of features are exact whatever client holds what.
Symbols: theta encoder and classifier; n_k examples of client k.
Departures from the paper: it has no such row. The preparation is that of `frl_finetune`, to
the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from fedshot.data import ClientData, EpisodeSpec
from fedshot.keys import Key
from fedshot.nn import (
    Batches,
    Classifier,
    Local,
    Model,
    Optimizer,
    Question,
    Share,
    check_batches,
    draw_batches,
)
from fedshot.protocol import (
    Adapted,
    Answer,
    Clients,
    Group,
    Reply,
    answer_group,
    average,
    census_reply,
    client_work,
    few_rounds,
    local_reply,
)
from fedshot.tree import Tree


class Server(NamedTuple):
    """What the server remembers."""

    theta: Tree  # {"body", "classifier"}; the classifier is of the preparation alone
    stats: Tree  # running statistics of batch norm


@dataclass(frozen=True)
class FRLFrozen:
    """A frozen encoder and the class means of a group of clients, in one exchange.

    Args:
        model: backbone; a head plays no part.
        episode: its `augment` is for the batches of the preparation.
        classes: the dataset's numbers of the base classes.
        distance: from the means: squared and "plain", its "mean" over the features, or that of
            "unit" features.
        prepare_steps: optimiser steps per visit in the preparation.
        batch: examples of such a step.
        optimizer: of the clients in the preparation.
    """

    name: ClassVar[str] = "frl_frozen"

    model: Model
    episode: EpisodeSpec
    classes: tuple[int, ...]
    distance: Literal["plain", "mean", "unit"] = "plain"
    prepare_steps: int = 1
    batch: int = 60
    optimizer: Optimizer = Optimizer()

    def __post_init__(self) -> None:
        check_batches(self.prepare_steps, self.batch)
        _ = self.local, self.learner  # which check the rest

    @staticmethod
    def norm_policy(options: Mapping[str, Any]) -> str:
        """Return the batch norm at test that suits features of a classifier: running ones."""
        del options
        return "running"

    @property
    def learner(self) -> Classifier:
        """What the clients train in the preparation."""
        return Classifier(self.model, len(self.classes))

    @property
    def local(self) -> Local:
        """How a client of a question learns."""
        return Local(self.model, "proto", distance=self.distance)

    @property
    def transductive(self) -> bool:
        """Whether predictions for one query depend on the others."""
        return self.model.norm_policy == "transductive"

    @property
    def max_way(self) -> int | None:
        """None: an episode may have any number of classes."""
        return None

    def init(self, key: Key) -> Server:
        """Return a fresh encoder and classifier."""
        return Server(*self.learner.init(key))

    def init_client(self, client: int, key: Key) -> Tree:
        """Return `{}`: nothing stays with a client."""
        del client, key
        return {}

    def draw(self, data: ClientData, key: Key) -> Batches:
        """Draw the batches of a visit."""
        augment = self.episode.augment
        return draw_batches(data, self.classes, self.batch, self.prepare_steps, augment, key)

    @client_work(draw="draw")
    def prepare(self, down: Tree, private: Tree, drawn: Batches) -> Reply:
        """Take the local steps on the cross-entropy over all base classes; send the change."""
        return local_reply(self.learner.lesson, self.optimizer, down, private, drawn)

    def round(
        self, server: Server, clients: Clients, key: Key
    ) -> tuple[Server, Mapping[str, float]]:
        """theta <- theta + sum_k n_k (theta_k - theta) / sum_k n_k."""
        new, got = average(clients, self.prepare, server._asdict(), key, heaviest=None)
        return Server(**new), got.metrics

    @client_work()
    def census(self, down: Tree, private: Tree, drawn: Share) -> Reply:
        """Send the sums of features, at a test."""
        return census_reply(self.local, down, private, drawn)

    def evaluate(
        self, server: Server, clients: Clients, questions: Sequence[Question], key: Key
    ) -> list[Answer]:
        """Let the group of each question join its prototypes; the nearest one answers."""

        def learn(group: Group, question: Question, key: Key) -> Adapted:
            return few_rounds(
                group,
                group.ids,
                (self.census, self.census),
                self.local,
                {"body": server.theta["body"]},
                len(question.classes),
                0,
                key,
                refresh=True,
                stats=server.stats or None,
            )

        return answer_group(self.local, server.stats, learn, questions, clients, key)
