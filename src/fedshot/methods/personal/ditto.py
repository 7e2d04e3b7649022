"""Ditto: a global model as in FedAvg, and at each client a personal model that stays near it.

Source: Li et al. 2021, Ditto: Fair and Robust Federated Learning Through Personalization,
algorithm 1: client k takes part in G, the global training, and takes steps v_k <- v_k - eta
(grad F_k(v_k) + lambda (v_k - w^t)), which minimise
h_k(v_k; w^t) = F_k(v_k) + (lambda/2) ||v_k - w^t||^2, the paper's equation of Ditto.
Symbols: w^t the server's model at the start of the round; v_k personal models; lambda is
`lambda_prox`.
Departures from the paper: G is FedAvg weighted by examples; v_k starts as the server's model at
the client's first local update. The distance covers the weights only; both models use the server's
running statistics. At test, predictions are limited to the episode's classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fedshot.core.ranges import AtLeast1, NotNegative
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.learners.classification import Batches
from fedshot.learners.local_training import local_sgd
from fedshot.methods.personal.personal_model import PersonalModels, next_own
from fedshot.protocol.averaging import changes
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import ModelState


@dataclass(frozen=True)
class Ditto(PersonalModels[ModelState]):
    """A personal model at each client, near the global model that all clients train.

    Args:
        lambda_prox: weight of the distance from a personal model to the global one; with 0, the
            personal models are trained locally only.
        personal_steps: passes over a client's samples for the personal model.
        optimizer: the clients' optimiser for both models.
    """

    name: ClassVar[str] = "ditto"

    lambda_prox: NotNegative = 1.0
    personal_steps: AtLeast1 = 5

    def draw(self, data: ClientData, key: Key) -> tuple[Batches, Batches]:
        """Draw the batches of a local update, for the global and for the personal model."""
        return (
            self.passes(data, self.local_steps, key.at("global")),
            self.passes(data, self.personal_steps, key.at("personal")),
        )

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: tuple[Batches, Batches]) -> Reply:
        """Train the global model as in FedAvg; for the personal model, minimise h_k from v_k."""
        w, (v, stats) = down["theta"], self.own_model(down, private)
        new = local_sgd(self.learner.episode_loss, self.optimizer, w, stats, drawn[0])
        h = partial(self.proximal_loss, self.lambda_prox, w)
        episode_loss = h if self.lambda_prox else self.learner.episode_loss
        own = local_sgd(episode_loss, self.optimizer, v, stats, drawn[1])
        up = changes({"theta": new.params, "stats": new.stats}, down)
        kept = next_own(private, own.params)
        return Reply(up, kept, drawn[0].n, {**own.metrics, "global_loss": new.metrics["loss"]})
