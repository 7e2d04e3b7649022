"""Fine-tuning by FedAvg: a classifier of the base classes first, then a few federated rounds.

Base clients train an encoder under a classifier over all base classes, by federated averaging. At
test the classifier is replaced by a fresh head, and the clients of a question fine-tune everything
for R rounds.

Source: Park et al., Few-Round Learning for Federated Learning, ICLR 2021 submission, section 4
(baseline fine-tuning via FedAvg); McMahan et al. 2017, algorithm 1.
Symbols: theta encoder and classifier; theta_r the model of round r; n_k examples of client k.
Departures from the paper: the paper does not say how the classifier is trained. Here a visit
is one step of Adam on a batch, fresh at every visit. Where images are dealt anew for each episode
(partition "redealt"), batches are of the whole pool, so the preparation is IID.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

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
    fresh_head,
)
from fedshot.protocol import (
    Adapted,
    Answer,
    Clients,
    Group,
    Reply,
    answer_group,
    average,
    check_rounds,
    client_work,
    few_rounds,
    local_reply,
    update_reply,
)
from fedshot.tree import Tree


class Server(NamedTuple):
    """What the server remembers."""

    theta: Tree  # {"body", "classifier"}; the classifier is of the preparation alone
    stats: Tree  # running statistics of batch norm


@dataclass(frozen=True)
class FRLFinetune:
    """A classifier of the base classes, fine-tuned by a group of clients in a few rounds.

    Args:
        model: backbone, and a head as wide as the widest test episode.
        episode: its `augment` is for the batches of the preparation.
        classes: the dataset's numbers of the base classes.
        test_rounds: R at test.
        inner_lr: step size of a question's clients.
        local_steps: steps of a client in a round of a test.
        inner_batch: examples of such a step; null for all supports of the client.
        prepare_steps: optimiser steps per visit in the preparation.
        batch: examples of such a step.
        optimizer: of the clients in the preparation.
    """

    name: ClassVar[str] = "frl_finetune"

    model: Model
    episode: EpisodeSpec
    classes: tuple[int, ...]
    test_rounds: int = 3
    inner_lr: float = 0.1
    local_steps: int = 1
    inner_batch: int | None = None
    prepare_steps: int = 1
    batch: int = 60
    optimizer: Optimizer = Optimizer()

    def __post_init__(self) -> None:
        check_rounds(self.test_rounds)
        check_batches(self.prepare_steps, self.batch)
        _ = self.local, self.learner  # which check the rest

    @staticmethod
    def norm_policy(options: Mapping[str, Any]) -> str:
        """Return the batch norm at test that suits what adapts by gradient steps."""
        del options
        return "support"

    @property
    def learner(self) -> Classifier:
        """What the clients train in the preparation."""
        return Classifier(self.model, len(self.classes))

    @property
    def local(self) -> Local:
        """How a client of a question learns."""
        return Local(self.model, "linear", 0.0, self.inner_lr, self.local_steps, self.inner_batch)

    @property
    def transductive(self) -> bool:
        """Whether predictions for one query depend on the others."""
        return self.model.norm_policy == "transductive"

    @property
    def max_way(self) -> int | None:
        """The width of the head."""
        return self.local.slots(0)

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
    def update(self, down: Tree, private: Tree, drawn: Share) -> Reply:
        """Take the local steps of a round of a test."""
        return update_reply(self.local, down, private, drawn)

    def evaluate(
        self, server: Server, clients: Clients, questions: Sequence[Question], key: Key
    ) -> list[Answer]:
        """Let the group of each question fine-tune for R rounds, and its model answer."""

        def learn(group: Group, question: Question, key: Key) -> Adapted:
            del question
            head = fresh_head(self.model, server.theta["body"], key)
            return few_rounds(
                group,
                group.ids,
                (self.update, self.update),
                self.local,
                {"body": server.theta["body"], "head": head},
                self.local.slots(0),
                self.test_rounds,
                key,
                refresh=False,
            )

        return answer_group(self.local, server.stats, learn, questions, clients, key)
