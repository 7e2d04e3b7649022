"""FedAvg with a probe: clients train a classifier of the base classes; at test a probe replaces it.

Clients train a classifier of the base classes by cross-entropy; the server averages encoder and
classifier. At test the classifier is dropped, and a probe is fitted to the features of the support
set. After `classify_rounds` the clients continue to train the encoder on episodes with prototypes,
which is a federated Meta-Baseline.

Source: McMahan et al. 2017, algorithm 1 (FedAvg); the probes are those of Chen et al. 2021,
Meta-Baseline, section 3.2 (mean), and Tian et al. 2020, RFS (logistic); the episodes are
section 3.3 of Chen et al.: the logit of a class is tau cos(f(x), mean of the class), tau learned.
With `decay_rounds`, the step size of classification falls along half a cosine from round to round,
Loshchilov & Hutter 2017 (SGDR), eq. (5), without restarts.
Symbols: theta encoder and classifier; n_k the examples of client k; tau the scale of the cosines.
Departures from the papers: Adam instead of SGD; a fixed number of local steps on random batches,
where McMahan et al. pass over the client's data in epochs; clients upload theta_k - theta, which
averages to the same; the optimiser starts fresh in every local update. Features are scaled to
length 1 before the mean is taken, in the probe and in the episodes. Chen et al. do not scale them;
with one shot, scaling makes no difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedshot.core.ranges import Above0, AtLeast0, AtLeast1
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData, Episode
from fedshot.learners.classification import Batches, Classifier, draw_batches
from fedshot.learners.learner import EpisodeLoss, EvalEpisode
from fedshot.learners.local_training import LocalEpisodes
from fedshot.learners.probe import FeatureProbe, Probe
from fedshot.nn.losses import accuracy, cross_entropy
from fedshot.nn.models.mode import Mode
from fedshot.nn.optim import Optimizer
from fedshot.nn.prototypes import class_means, cosine_logits, unit_rows
from fedshot.protocol.averaging import average, local_reply
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import EpisodicMethod, Prediction, Traits
from fedshot.protocol.probe_predictions import predict_by_probe


class FedAvgProbeState(NamedTuple):
    """The server's state."""

    body: Tree
    classifier: Tree  # not trained after `classify_rounds`
    tau: Tensor  # scale of the cosines to prototypes
    stats: Tree  # running statistics of batch norm
    rounds: Tensor  # int64 scalar: rounds trained so far


@dataclass(frozen=True)
class FedAvgProbe(EpisodicMethod[FedAvgProbeState]):
    """A classifier over the base classes, averaged over clients; a probe at test.

    Args:
        model: the encoder; its head, if it has one, is not used.
        episode: shape of the training episodes after `classify_rounds`; its `augment` is also used
            for the batches.
        classes: the base classes, as class indices of the dataset.
        probe: classifier at test, on features scaled to length 1: "mean" is the nearest class
            mean; "logistic" and "ridge" are regressions.
        classifier: classifier in training, "linear" or "cosine".
        local_steps: optimiser steps per local update.
        batch: examples per step.
        optimizer: the optimiser of the clients.
        decay_rounds: rounds in which the step size of classification falls to nearly 0; null for a
            constant step size.
        logistic_c: C of the logistic regression.
        ridge_lambda: weight of the ridge penalty.
        scale: factor that multiplies the cosines of a cosine classifier; also the initial value
            of tau, which is learned.
        classify_rounds: rounds of classification before training on prototypes; null for all.
        episodes_per_step: episodes whose gradients are averaged in a step on prototypes.
        meta_optimizer: the clients' optimiser for training on prototypes.
    """

    name: ClassVar[str] = "fedavg_probe"

    classes: tuple[int, ...]
    probe: Probe = "mean"
    classifier: Literal["linear", "cosine"] = "linear"
    local_steps: AtLeast1 = 10
    batch: AtLeast1 = 64
    optimizer: Optimizer = Optimizer()
    decay_rounds: AtLeast1 | None = None
    logistic_c: Above0 = 1.0
    ridge_lambda: Above0 = 1.0
    scale: Above0 = 10.0
    classify_rounds: AtLeast0 | None = None
    episodes_per_step: AtLeast1 = 1
    meta_optimizer: Optimizer = Optimizer()

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.learner, self.probe_options  # their constructors check the rest

    @property
    def learner(self) -> Classifier:
        """The learner that clients train during classification."""
        return Classifier(self.model, len(self.classes), self.classifier, self.scale)

    @property
    def probe_options(self) -> FeatureProbe:
        """The probe that predicts at test."""
        return FeatureProbe(self.probe, self.logistic_c, self.ridge_lambda)

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs."""
        return replace(
            super().traits,
            adds_examples=self.probe_options.adds_examples,
            trains_on_pool=True,
            sends_changes=self.classify_rounds is None,  # later, other trees are sent
        )

    @property
    def training(self) -> FedAvgProbe:
        """A copy in which options that only affect the test have their defaults."""
        return replace(self, probe="mean", logistic_c=1.0, ridge_lambda=1.0)

    def init(self, key: Key) -> FedAvgProbeState:
        """Return a random encoder and classifier."""
        theta, stats = self.learner.init(key)
        tau = torch.tensor(self.scale, dtype=self.model.torch_dtype)
        return FedAvgProbeState(theta["body"], theta["classifier"], tau, stats, torch.tensor(0))

    def draw(self, data: ClientData, key: Key) -> Batches:
        """Draw the batches of a local update."""
        n, augment = self.local_steps, self.episode.augment
        return draw_batches(data, self.classes, self.batch, n, augment, key)

    @client_work(draw="draw")
    def classify(self, down: Tree, private: Tree, drawn: Batches) -> Reply:
        """Take local steps on the cross-entropy over all base classes; upload theta_k - theta."""
        optimizer = self.optimizer
        if self.decay_rounds is not None:
            done = min(int(down["rounds"]) / self.decay_rounds, 1 - 1 / self.decay_rounds)
            optimizer = replace(optimizer, lr=optimizer.lr * (1 + math.cos(math.pi * done)) / 2)
        return local_reply(self.learner.episode_loss, optimizer, down, private, drawn)

    def draw_episodes(self, data: ClientData, key: Key) -> Tree:
        """Draw the episodes of a local update."""
        return super().draw(data, key)

    @client_work(draw="draw_episodes")
    def compare(self, down: Tree, private: Tree, drawn: LocalEpisodes) -> Reply:
        """Take local steps on episodes of cosine prototypes; upload theta_k - theta."""
        return local_reply(self.episode_loss, self.meta_optimizer, down, private, drawn)

    def episode_loss(
        self, params: Tree, stats: Tree, episode: Episode, seed: Tensor
    ) -> EpisodeLoss:
        """Return the cross-entropy of the queries; logits are tau times cosines to prototypes."""
        n, way = len(episode.support_y), len(episode.classes)
        both = torch.cat([episode.support_x, episode.query_x])
        h, stats = self.model.features(params, stats, both, Mode(True, "batch", seed=seed))
        h = unit_rows(h)
        means = class_means(h[:n], episode.support_y, way)
        logits = cosine_logits(h[n:], means, params["tau"])
        y = episode.query_y
        return EpisodeLoss(cross_entropy(logits, y), stats, accuracy(logits.detach(), y))

    def round(
        self, server: FedAvgProbeState, clients: Clients, key: Key
    ) -> tuple[FedAvgProbeState, Mapping[str, float]]:
        """Run one round; theta <- theta + sum_k n_k (theta_k - theta) / sum_k n_k."""
        classifying = self.classify_rounds is None or int(server.rounds) < self.classify_rounds
        work = self.classify if classifying else self.compare
        theta = {"body": server.body}
        theta |= {"classifier": server.classifier} if classifying else {"tau": server.tau}
        parts = {"theta": theta, "stats": server.stats}
        down = {"rounds": server.rounds} if classifying and self.decay_rounds is not None else {}
        new, got = average(clients, work, parts, key, max_weight=None, down=down)
        moved = {**new["theta"], "stats": new["stats"]}
        return server._replace(**moved, rounds=server.rounds + 1), got.metrics

    def evaluate(
        self,
        server: FedAvgProbeState,
        clients: Clients,
        eval_episodes: Sequence[EvalEpisode],
        key: Key,
    ) -> list[Prediction]:
        """Predict with the probe, on features of the server's encoder."""
        del key
        theta, stats, probe = {"body": server.body}, server.stats, self.probe_options
        return predict_by_probe(self.learner, theta, stats, probe, eval_episodes, clients)
