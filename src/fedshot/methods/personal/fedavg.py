"""FedAvg: one classifier over all classes, averaged over clients.

Source: McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized
Data, algorithm 1: w_k <- w_k - eta grad F_k(w_k) for the local epochs, w <- sum_k n_k w_k / n.
Symbols: w encoder and classifier; n_k the examples of client k.
Departures from the paper: by default a local epoch is one step on all examples of the client, since
there are few; clients upload w_k - w, which averages to the same. At test, predictions are limited
to the episode's classes, because a client knows which classes it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedshot.core.tree import Tree
from fedshot.learners.classification import Batches
from fedshot.methods.personal.base_class_method import AmongBaseClasses
from fedshot.protocol.averaging import local_reply
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import ModelState


@dataclass(frozen=True)
class FedAvg(AmongBaseClasses[ModelState]):
    """A classifier over all classes, averaged over clients."""

    name: ClassVar[str] = "fedavg"

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: Batches) -> Reply:
        """Minimise F_k with the local steps, starting at w; upload the change w_k - w."""
        return local_reply(self.learner.episode_loss, self.optimizer, down, private, drawn)
