"""FedProx: FedAvg with a proximal term that keeps clients near the server's weights.

Source: Li et al. 2020, Federated Optimization in Heterogeneous Networks, algorithm 2: client k
minimises h_k(w; w^t) = F_k(w) + (mu/2) ||w - w^t||^2 inexactly; the server averages.
Symbols: w encoder and classifier; w^t those of the server at the start of round t.
Departures from the paper: every client takes the same number of local steps, so there is no partial
work; the average is weighted by examples, w <- sum_k n_k w_k / n as in FedAvg, where the paper
samples clients in proportion to their examples and takes the plain average. The distance covers the
weights, not the running statistics. mu = 0 is `fedavg`. At test, predictions are limited to the
episode's classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fedshot.core.ranges import NotNegative
from fedshot.core.tree import Tree
from fedshot.learners.classification import Batches
from fedshot.methods.personal.base_class_method import AmongBaseClasses
from fedshot.protocol.averaging import local_reply
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import ModelState


@dataclass(frozen=True)
class FedProx(AmongBaseClasses[ModelState]):
    """FedAvg with a proximal term.

    Args:
        mu: weight of the proximal term; 0 is FedAvg.
    """

    name: ClassVar[str] = "fedprox"

    mu: NotNegative = 0.01

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: Batches) -> Reply:
        """Minimise h_k with the local steps, starting at w^t; upload the change w_k - w^t."""
        h = partial(self.proximal_loss, self.mu, down["theta"])
        episode_loss = h if self.mu else self.learner.episode_loss
        return local_reply(episode_loss, self.optimizer, down, private, drawn)
