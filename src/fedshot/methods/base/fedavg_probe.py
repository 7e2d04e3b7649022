"""FedAvg with a probe: a classifier over all base classes, then a few-shot answer on its features.

Clients learn to tell the base classes apart by cross-entropy; the server averages encoder and
classifier. At test the classifier is set aside: a probe on the features of the support answers.
With `classify_rounds` the training goes on, from the encoder that it has then, with episodes of
prototypes: Meta-Baseline, federated.

Source: McMahan et al. 2017, algorithm 1 (FedAvg); the probes are those of Chen et al. 2021,
Meta-Baseline, section 3.2 (mean), and Tian et al. 2020, RFS (logistic); the episodes are
section 3.3 of Chen et al.: the logit of a class is tau cos(f(x), mean of the class), tau learned.
Symbols: theta encoder and classifier; n_k the examples of client k; tau the scale of the cosines.
Departures from the papers: Adam instead of SGD; a fixed number of local steps on batches drawn
afresh, where McMahan passes over the client's data in epochs; clients upload theta_k - theta, which
averages to the same; the optimiser starts afresh at every visit. Features are scaled to length 1
before their mean is taken, in the probe and in the episodes, where Chen et al. take the mean as it
is; with one shot that is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedshot.core.errors import ConfigError, check_word
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData, Episode
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.classification import Batches, Classifier, check_batches, draw_batches
from fedshot.learners.learner import EpisodeLoss, EvalEpisode
from fedshot.learners.local_training import (
    LocalEpisodes,
    check_budget,
    check_not_negative,
    sample_episodes,
)
from fedshot.learners.probe import PROBES, FeatureProbe, Probe
from fedshot.nn.losses import accuracy, cross_entropy
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.nn.prototypes import class_means, cosine_logits, unit_rows
from fedshot.protocol.averaging import average, local_reply
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Prediction
from fedshot.protocol.probe_answers import predict_by_probe


class FedAvgProbeState(NamedTuple):
    """What the server remembers."""

    body: Tree
    classifier: Tree  # stays as it is once prototypes have taken over
    tau: Tensor  # scale of the cosines to prototypes
    stats: Tree  # running statistics of batch norm
    rounds: Tensor  # int64 scalar: rounds trained so far


@dataclass(frozen=True)
class FedAvgProbe:
    """A classifier over the base classes, averaged over clients; a probe at test.

    Args:
        model: backbone; a head plays no part.
        episode: shape of the training episodes, after `classify_rounds`; its `augment` is for
            the batches, too.
        classes: the dataset's numbers of the base classes.
        probe: at test, the class "mean", "logistic" regression or "ridge" regression, on features
            of length 1.
        classifier: in training, "linear" or "cosine".
        local_steps: optimiser steps per visit.
        batch: examples per step.
        optimizer: of the clients.
        logistic_c: C of the logistic regression.
        ridge_lambda: weight of the ridge.
        scale: of the cosines: of a cosine classifier, and where tau starts.
        classify_rounds: rounds of classification before prototypes take over; null for all.
        episodes_per_step: episodes whose gradients are averaged in a step of prototypes.
        meta_optimizer: of the clients, for prototypes.
    """

    name: ClassVar[str] = "fedavg_probe"
    trains_on_pool: ClassVar[bool] = True  # where clients see a pool, and not what it deals them

    model: Model
    episode: EpisodeSpec
    classes: tuple[int, ...]
    probe: Probe = "mean"
    classifier: Literal["linear", "cosine"] = "linear"
    local_steps: int = 10
    batch: int = 64
    optimizer: Optimizer = Optimizer()
    logistic_c: float = 1.0
    ridge_lambda: float = 1.0
    scale: float = 10.0
    classify_rounds: int | None = None
    episodes_per_step: int = 1
    meta_optimizer: Optimizer = Optimizer()

    def __post_init__(self) -> None:
        check_batches(self.local_steps, self.batch)
        check_budget(self.local_steps, self.episodes_per_step)
        check_word("probe", self.probe, PROBES)
        check_not_negative(classify_rounds=self.classify_rounds or 0)
        if not 0 < self.scale < float("inf"):
            raise ConfigError(f"scale is {self.scale}; expected a finite number above 0.")
        _ = self.learner, self.probe_options  # which check the rest

    @staticmethod
    def norm_policy(options: Mapping[str, Any]) -> str:
        """Return the batch norm at test that suits features of a classifier: running ones."""
        del options
        return "running"

    @property
    def learner(self) -> Classifier:
        """What the clients train, at first."""
        return Classifier(self.model, len(self.classes), self.classifier, self.scale)

    @property
    def probe_options(self) -> FeatureProbe:
        """What answers at test."""
        return FeatureProbe(self.probe, self.logistic_c, self.ridge_lambda)

    @property
    def transductive(self) -> bool:
        """Whether predictions for one query depend on the others."""
        return self.model.norm_policy == "transductive"

    @property
    def max_way(self) -> int | None:
        """None: an episode may have any number of classes."""
        return None

    @property
    def adds_examples(self) -> bool:
        """Whether an answer is made of the support's examples one by one: means and ridges are."""
        return self.probe_options.adds_examples

    @property
    def training(self) -> FedAvgProbe:
        """All of the options that the rounds depend on."""
        return replace(self, probe="mean", logistic_c=1.0, ridge_lambda=1.0)

    def init(self, key: Key) -> FedAvgProbeState:
        """Return a fresh encoder and classifier."""
        theta, stats = self.learner.init(key)
        tau = torch.tensor(self.scale, dtype=self.model.torch_dtype)
        return FedAvgProbeState(theta["body"], theta["classifier"], tau, stats, torch.tensor(0))

    def init_client(self, client: int, key: Key) -> Tree:
        """Return `{}`: nothing stays with a client."""
        del client, key
        return {}

    def draw(self, data: ClientData, key: Key) -> Batches:
        """Draw the batches of a visit."""
        augment = self.episode.augment
        return draw_batches(data, self.classes, self.batch, self.local_steps, augment, key)

    @client_work(draw="draw")
    def classify(self, down: Tree, private: Tree, drawn: Batches) -> Reply:
        """Take the local steps on the cross-entropy over all base classes; send the change."""
        return local_reply(self.learner.episode_loss, self.optimizer, down, private, drawn)

    def draw_episodes(self, data: ClientData, key: Key) -> LocalEpisodes:
        """Draw the episodes of a visit."""
        steps, each = self.local_steps, self.episodes_per_step
        return sample_episodes(data, self.episode, steps, each, key)

    @client_work(draw="draw_episodes")
    def compare(self, down: Tree, private: Tree, drawn: LocalEpisodes) -> Reply:
        """Take the local steps on episodes of cosine prototypes; send the change."""
        return local_reply(self.episode_loss, self.meta_optimizer, down, private, drawn)

    def episode_loss(
        self, params: Tree, stats: Tree, episode: Episode, seed: Tensor
    ) -> EpisodeLoss:
        """Return the cross-entropy of the queries under tau times their cosines to prototypes."""
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
        """theta <- theta + sum_k n_k (theta_k - theta) / sum_k n_k."""
        classifying = self.classify_rounds is None or int(server.rounds) < self.classify_rounds
        work = self.classify if classifying else self.compare
        theta = {"body": server.body}
        theta |= {"classifier": server.classifier} if classifying else {"tau": server.tau}
        parts = {"theta": theta, "stats": server.stats}
        new, got = average(clients, work, parts, key, max_weight=None)
        moved = {**new["theta"], "stats": new["stats"]}
        return server._replace(**moved, rounds=server.rounds + 1), got.metrics

    def evaluate(
        self,
        server: FedAvgProbeState,
        clients: Clients,
        eval_episodes: Sequence[EvalEpisode],
        key: Key,
    ) -> list[Prediction]:
        """Answer with the probe, on features of the server's encoder."""
        del key
        theta, stats = {"body": server.body}, server.stats
        return predict_by_probe(
            self.learner, theta, stats, self.probe_options, eval_episodes, clients
        )
