"""FedBABU: clients train only the body (the encoder), under a fixed classifier.

All clients share one random classifier over the base classes, which stays fixed. They fit the body
to it, so that features mean the same at every client; the server averages the bodies. At test a new
head is fitted to the support set.

Source: Oh et al. 2022, FedBABU: Towards Enhanced Representation for Federated Image Classification,
algorithm 1 (the head's step size is 0; the paper fine-tunes either the head or the whole model).
Symbols: theta the body; h the classifier; n_k the examples of client k.
Departures from the paper: it tests on the clients' own classes after fine-tuning; here the classes
are new, and so is the head, which starts at zero on features of length 1; other probes can be
chosen. Clients use Adam and take a fixed number of local steps on random batches. They upload
theta_k - theta, which averages to the same; the optimiser starts fresh in every local update. The
classifier is sent in every round, because clients keep no state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from fedshot.core.ranges import Above0, AtLeast1, check_options
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.learners.classification import Batch, Batches, Classifier, draw_batches
from fedshot.learners.learner import EpisodeLoss, EvalEpisode
from fedshot.learners.probe import FeatureProbe
from fedshot.nn.optim import Optimizer
from fedshot.protocol.averaging import average, local_reply
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Method, Prediction, Traits
from fedshot.protocol.probe_predictions import predict_by_probe


class FedBABUState(NamedTuple):
    """The server's state."""

    theta: Tree  # {"body": ...}
    h: Tree  # the classifier over the base classes, never trained
    stats: Tree  # running statistics of batch norm


@dataclass(frozen=True)
class FedBABU(Method[FedBABUState]):
    """A body trained under a fixed random classifier, averaged over clients.

    Args:
        model: the encoder; its head, if it has one, is not used.
        episode: shape of the episodes that a client must be able to form; its `augment` is used
            for the batches.
        classes: the base classes, as class indices of the dataset.
        probe: classifier at test, on features scaled to length 1: "finetune" takes gradient steps
            on a new head; "mean" is the nearest class mean; "logistic" and "ridge" are regressions.
        local_steps: optimiser steps per local update.
        batch: examples per step.
        optimizer: the optimiser of the clients.
        logistic_c: C of the logistic regression.
        ridge_lambda: weight of the ridge penalty.
        finetune_lr: step size of the new head.
        finetune_steps: gradient steps on the new head.
    """

    name: ClassVar[str] = "fedbabu"

    classes: tuple[int, ...]
    probe: Literal["finetune", "mean", "logistic", "ridge"] = "finetune"
    local_steps: AtLeast1 = 10
    batch: AtLeast1 = 64
    optimizer: Optimizer = Optimizer()
    logistic_c: Above0 = 1.0
    ridge_lambda: Above0 = 1.0
    finetune_lr: Above0 = 0.1
    finetune_steps: AtLeast1 = 100

    def __post_init__(self) -> None:
        check_options(self)
        _ = self.learner, self.probe_options  # their constructors check the rest

    @property
    def learner(self) -> Classifier:
        """The model of the clients, who train its body but not its classifier."""
        return Classifier(self.model, len(self.classes))

    @property
    def probe_options(self) -> FeatureProbe:
        """The probe that predicts at test."""
        ridge, lr, steps = self.ridge_lambda, self.finetune_lr, self.finetune_steps
        return FeatureProbe(self.probe, self.logistic_c, ridge, lr, steps)

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs."""
        return replace(
            super().traits,
            adapts=self.probe == "finetune",
            adds_examples=self.probe_options.adds_examples,
            sends_changes=True,
        )

    @property
    def training(self) -> FedBABU:
        """A copy in which options that only affect the test have their defaults."""
        plain = replace(self, probe="mean", logistic_c=1.0, ridge_lambda=1.0)
        return replace(plain, finetune_lr=0.1, finetune_steps=100)

    def init(self, key: Key) -> FedBABUState:
        """Return a random body and the fixed classifier."""
        params, stats = self.learner.init(key)
        return FedBABUState({"body": params["body"]}, params["classifier"], stats)

    def draw(self, data: ClientData, key: Key) -> Batches:
        """Draw the batches of a local update."""
        augment = self.episode.augment
        return draw_batches(data, self.classes, self.batch, self.local_steps, augment, key)

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: Batches) -> Reply:
        """Train the body theta under the fixed classifier h; upload theta_k - theta."""
        h = down["h"]

        def episode_loss(w: Tree, stats: Tree, batch: Batch, seed: Tensor) -> EpisodeLoss:
            return self.learner.episode_loss({**w, "classifier": h}, stats, batch, seed)

        return local_reply(episode_loss, self.optimizer, down, private, drawn)

    def round(
        self, server: FedBABUState, clients: Clients, key: Key
    ) -> tuple[FedBABUState, Mapping[str, float]]:
        """Run one round; theta <- theta + sum_k n_k (theta_k - theta) / sum_k n_k; h is fixed."""
        parts = {"theta": server.theta, "stats": server.stats}
        down = {"h": server.h}
        new, got = average(clients, self.train, parts, key, max_weight=None, down=down)
        return server._replace(**new), got.metrics

    def evaluate(
        self, server: FedBABUState, clients: Clients, eval_episodes: Sequence[EvalEpisode], key: Key
    ) -> list[Prediction]:
        """Predict with a new head, or with a probe, on features of the server's body."""
        del key
        theta, stats, probe = server.theta, server.stats, self.probe_options
        return predict_by_probe(self.learner, theta, stats, probe, eval_episodes, clients)
