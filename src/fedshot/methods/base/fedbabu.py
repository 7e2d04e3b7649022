"""FedBABU: clients train the body alone, under a classifier that nobody ever changes.

All clients share one classifier over the base classes, as it was drawn before round 1. They fit
the body to it, so that their bodies agree on what a feature means; the server averages the bodies.
At test a new head is made for the support.

Source: Oh et al. 2022, FedBABU: Towards Enhanced Representation for Federated Image Classification,
algorithm 1 (the head's step size is 0; "finetune" there is of the head or of all).
Symbols: theta the body; h the classifier; n_k the examples of client k.
Departures from the paper: it tests on the clients' own classes after fine-tuning; here the classes
are new, so the head is, too. It starts at zero on features of length 1, and the other probes of the
few-shot literature are offered beside it. Adam, a fixed number of local steps on batches drawn
afresh; clients upload theta_k - theta, which averages to the same; the optimiser starts afresh at
every visit. The classifier is sent down in every round, because clients keep nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.classification import Batch, Batches, Classifier, check_batches, draw_batches
from fedshot.learners.learner import EpisodeLoss, EvalEpisode
from fedshot.learners.probe import FeatureProbe
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.averaging import average, local_reply
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Prediction
from fedshot.protocol.probe_answers import predict_by_probe


class FedBABUState(NamedTuple):
    """What the server remembers."""

    theta: Tree  # {"body": ...}
    h: Tree  # the classifier over the base classes, as it was drawn
    stats: Tree  # running statistics of batch norm


@dataclass(frozen=True)
class FedBABU:
    """The body under a fixed random classifier, averaged over clients.

    Args:
        model: backbone; a head plays no part.
        episode: shape of the episodes that a client must be able to form; its `augment` is for
            the batches.
        classes: the dataset's numbers of the base classes.
        probe: at test, "finetune" takes gradient steps on a new head; "mean", "logistic" and
            "ridge" are the class mean, logistic and ridge regression. On features of length 1.
        local_steps: optimiser steps per visit.
        batch: examples per step.
        optimizer: of the clients.
        logistic_c: C of the logistic regression.
        ridge_lambda: weight of the ridge.
        finetune_lr: step size of the new head.
        finetune_steps: gradient steps on it.
    """

    name: ClassVar[str] = "fedbabu"

    model: Model
    episode: EpisodeSpec
    classes: tuple[int, ...]
    probe: Literal["finetune", "mean", "logistic", "ridge"] = "finetune"
    local_steps: int = 10
    batch: int = 64
    optimizer: Optimizer = Optimizer()
    logistic_c: float = 1.0
    ridge_lambda: float = 1.0
    finetune_lr: float = 0.1
    finetune_steps: int = 100

    def __post_init__(self) -> None:
        check_batches(self.local_steps, self.batch)
        _ = self.learner, self.probe_options  # which check the rest

    @staticmethod
    def norm_policy(options: Mapping[str, Any]) -> str:
        """Return the batch norm at test that suits features of a classifier: running ones."""
        del options
        return "running"

    @property
    def learner(self) -> Classifier:
        """What the clients train, but for its classifier."""
        return Classifier(self.model, len(self.classes))

    @property
    def probe_options(self) -> FeatureProbe:
        """What answers at test."""
        return FeatureProbe(
            self.probe,
            self.logistic_c,
            self.ridge_lambda,
            self.finetune_lr,
            self.finetune_steps,
        )

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
    def training(self) -> FedBABU:
        """All of the options that the rounds depend on."""
        plain = replace(self, probe="mean", logistic_c=1.0, ridge_lambda=1.0)
        return replace(plain, finetune_lr=0.1, finetune_steps=100)

    def init(self, key: Key) -> FedBABUState:
        """Return a fresh body, and the classifier for good."""
        params, stats = self.learner.init(key)
        return FedBABUState({"body": params["body"]}, params["classifier"], stats)

    def init_client(self, client: int, key: Key) -> Tree:
        """Return `{}`: nothing stays with a client."""
        del client, key
        return {}

    def draw(self, data: ClientData, key: Key) -> Batches:
        """Draw the batches of a visit."""
        augment = self.episode.augment
        return draw_batches(data, self.classes, self.batch, self.local_steps, augment, key)

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: Batches) -> Reply:
        """Take the local steps from theta, under h; send the change of theta."""
        h = down["h"]

        def episode_loss(w: Tree, stats: Tree, batch: Batch, seed: Tensor) -> EpisodeLoss:
            return self.learner.episode_loss({**w, "classifier": h}, stats, batch, seed)

        return local_reply(episode_loss, self.optimizer, down, private, drawn)

    def round(
        self, server: FedBABUState, clients: Clients, key: Key
    ) -> tuple[FedBABUState, Mapping[str, float]]:
        """theta <- theta + sum_k n_k (theta_k - theta) / sum_k n_k; h stays."""
        parts = {"theta": server.theta, "stats": server.stats}
        down = {"h": server.h}
        new, got = average(clients, self.train, parts, key, max_weight=None, down=down)
        return server._replace(**new), got.metrics

    def evaluate(
        self, server: FedBABUState, clients: Clients, eval_episodes: Sequence[EvalEpisode], key: Key
    ) -> list[Prediction]:
        """Answer with a new head, or with a probe, on features of the server's body."""
        del key
        theta, stats = server.theta, server.stats
        return predict_by_probe(
            self.learner, theta, stats, self.probe_options, eval_episodes, clients
        )
