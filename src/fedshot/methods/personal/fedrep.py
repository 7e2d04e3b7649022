"""FedRep: a shared encoder, and a private classifier at each client.

Source: Collins et al. 2021, Exploiting Shared Representations for Personalized Federated Learning,
algorithm 1: client i takes tau_h steps on its head h_i with the encoder phi^t fixed, then steps on
the encoder with the new head fixed; the server averages the encoders, phi = sum_i phi_i / (r n).
Symbols: phi the encoder, "body"; h_i the classifier; tau_h `head_steps`.
Departures from the paper: the head has a row for every base class, including those that a client
lacks, because the server does not know which classes it has; at test, predictions are limited to
the episode's classes. Clients upload phi_i - phi. As a control, personal_head=False also shares the
classifier and trains both together, which is FedAvg with a plain mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

from torch import Tensor

from fedshot.core.ranges import AtLeast0
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.learners.classification import Batch, Batches
from fedshot.learners.learner import EpisodeLoss
from fedshot.learners.local_training import local_sgd
from fedshot.methods.personal.personal_model import PersonalModels
from fedshot.protocol.averaging import changes
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import ModelState


class FedRepData(NamedTuple):
    """The data of a local update."""

    head: Batches
    body: Batches


@dataclass(frozen=True)
class FedRep(PersonalModels[ModelState]):
    """A shared encoder with a classifier for each client.

    Args:
        personal_head: whether the classifier stays with the client; if not, it is averaged, too.
        head_steps: passes over a client's samples for the classifier; 0 does not train it.
        local_steps: passes over a client's samples for the encoder.
        optimizer: the clients' optimiser for classifier and encoder.
    """

    name: ClassVar[str] = "fedrep"
    max_weight: ClassVar[int | None] = 1

    personal_head: bool = True
    head_steps: AtLeast0 = 10

    def init(self, key: Key) -> ModelState:
        """Return a random encoder, with a classifier if `personal_head` is False."""
        theta, stats = self.learner.init(key)
        return ModelState({"body": theta["body"]} if self.personal_head else theta, stats)

    def init_client(self, client: int, key: Key) -> Tree:
        """Return a random classifier; `{}` if `personal_head` is False."""
        del client
        if not self.personal_head:
            return {}
        return {"classifier": self.learner.init(key)[0]["classifier"]}

    def own_model(self, down: Tree, private: Tree) -> tuple[Tree, Tree]:
        """Return the server's encoder with the client's classifier, and the running statistics."""
        return {**down["theta"], **private}, down["stats"]

    def draw(self, data: ClientData, key: Key) -> FedRepData:
        """Draw the batches of a local update, for the classifier and for the encoder."""
        head = self.head_steps if self.personal_head else 0
        return FedRepData(
            self.passes(data, head, key.at("head")),
            self.passes(data, self.local_steps, key.at("body")),
        )

    def episode_loss(
        self, fixed: Tree, moving: Tree, stats: Tree, batch: Batch, seed: Tensor
    ) -> EpisodeLoss:
        """Return the cross-entropy of the model {**fixed, **moving}; only `moving` is trained."""
        return self.learner.episode_loss({**fixed, **moving}, stats, batch, seed)

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: FedRepData) -> Reply:
        """Train the classifier under the server's encoder, then the encoder; upload phi_i - phi."""
        phi, stats, h = down["theta"], down["stats"], dict(private)
        if drawn.head.steps:
            new = local_sgd(partial(self.episode_loss, phi), self.optimizer, h, stats, drawn.head)
            h = new.params
        new = local_sgd(partial(self.episode_loss, h), self.optimizer, phi, stats, drawn.body)
        up = changes({"theta": new.params, "stats": new.stats}, down)
        return Reply(up, h, 1.0, new.metrics)
