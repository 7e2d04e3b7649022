"""The preparation of those that fine-tune for a few rounds: a classifier of all base classes.

Clients visit batches of their own, and an encoder under one classifier over all base classes
learns from them federatedly. Park et al. 2021 (few-round learning), section 4, say for how many
communication rounds and no more; the step is made as that of FRL is, so that neither is better off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import ConfigError, check_word
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.augment import Augment
from fedshot.data.episodes.episode import ClientData
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.classification import Batches, Classifier, check_batches, draw_batches
from fedshot.learners.local_training import mean_gradient, mean_metrics
from fedshot.methods.frl.schedule import check_decay, slowed
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.averaging import OF_EXAMPLES, average, changes, local_reply
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.reducers import Mean

StepBy = Literal["server", "clients"]


class Prepared(NamedTuple):
    """What the server remembers of a preparation."""

    theta: Tree  # {"body", "classifier"}; the classifier is of the preparation alone
    stats: Tree  # running statistics of batch norm
    outer: Tree  # the server's optimiser; {} where clients take the steps
    exchanges: Tensor  # int64 scalar: communication rounds so far


@dataclass(frozen=True)
class Preparation:
    """How the base clients learn. The fields are options of the methods that prepare so.

    Args:
        model: the encoder. It learns by batches' own statistics and keeps the running ones,
            whatever its test is by.
        classes: the dataset's numbers of the base classes.
        augment: of the batches.
        by: who takes the optimiser's step: the "server", on the clients' mean gradient, or each of
            the "clients", with one that is fresh at every visit, before their models are averaged.
        steps: of a visit; 1 where the server takes them.
        batch: examples of a step.
        optimizer: that takes the steps.
        decay: what a step is multiplied by after `decay_round` communication rounds.
        decay_round: 0 for never.
    """

    model: Model
    classes: tuple[int, ...]
    augment: Augment
    by: StepBy
    steps: int
    batch: int
    optimizer: Optimizer
    decay: float
    decay_round: int

    def __post_init__(self) -> None:
        check_word("prepare_by", self.by, ("server", "clients"))
        check_batches(self.steps, self.batch)
        check_decay(self.decay, self.decay_round)
        if self.by == "server" and self.steps > 1:
            raise ConfigError(
                f"prepare_steps is {self.steps} with prepare_by 'server', who takes one step a "
                "visit. Set prepare_steps to 1 and raise batch, or prepare_by to 'clients'."
            )
        _ = self.learner  # which checks the rest

    @property
    def learner(self) -> Classifier:
        """What is trained."""
        return Classifier(self.model, len(self.classes))

    def init(self, key: Key) -> Prepared:
        """Return a fresh encoder and classifier."""
        theta, stats = self.learner.init(key)
        outer: Tree = self.optimizer.init(theta) if self.by == "server" else {}
        return Prepared(theta, stats, outer, torch.tensor(0))

    def draw(self, data: ClientData, key: Key) -> Batches:
        """Draw the batches of a visit."""
        return draw_batches(data, self.classes, self.batch, self.steps, self.augment, key)

    def reply(self, down: Tree, private: Tree, drawn: Batches) -> Reply:
        """Answer with the gradient of the cross-entropy, or the change that steps on it make."""
        if self.by == "clients":
            return local_reply(self.learner.episode_loss, self.optimizer, down, private, drawn)
        (step,), noise = drawn.steps, Mode(seed=drawn.seed).layer(0)
        got = mean_gradient(self.learner.episode_loss, down["theta"], down["stats"], step, noise)
        up = {"gradient": got.grads, **changes({"stats": got.stats}, down)}
        return Reply(up, private, drawn.n, mean_metrics(got.metrics))

    def round(
        self, work: Callable[..., Reply], server: Prepared, clients: Clients, key: Key
    ) -> tuple[Prepared, Mapping[str, float]]:
        """Take a step by client work that answers by `reply`.

        By the server: a step of the optimiser by sum_k n_k g_k / sum_k n_k; by clients:
        theta <- theta + sum_k n_k (theta_k - theta) / sum_k n_k.
        """
        slower = slowed(self.decay, self.decay_round, server.exchanges)
        parts, outer = {"theta": server.theta, "stats": server.stats}, server.outer
        if self.by == "clients":
            new, got = average(clients, work, parts, key, max_weight=None)
            theta, stats = new["theta"], new["stats"]
            if slower < 1:
                theta = tree.map(lambda w, v: w + slower * (v - w), server.theta, theta)
        else:
            names = {"gradient": server.theta, "stats": server.stats}
            reduce = {
                name: Mean(part, OF_EXAMPLES, of_examples=True) for name, part in names.items()
            }
            got = clients.exchange(work, parts, to=clients.sample(key), reduce=reduce, key=key)
            optimizer = replace(self.optimizer, lr=self.optimizer.lr * slower)
            theta, outer = optimizer.update(got["gradient"], server.outer, server.theta)
            stats = tree.add(server.stats, got["stats"])
        return Prepared(theta, stats, outer, server.exchanges + 1), got.metrics


class Prepares:  # not a dataclass: the methods have the fields, in their own order
    """What the methods that prepare so have in common."""

    trains_on_pool: ClassVar[bool] = True  # where clients see a pool, and not what it deals them

    model: Model
    episode: EpisodeSpec
    classes: tuple[int, ...]
    prepare_by: StepBy
    prepare_steps: int
    batch: int
    optimizer: Optimizer
    decay: float
    decay_round: int

    @cached_property
    def preparation(self) -> Preparation:
        """How the base clients learn."""
        return Preparation(
            replace(self.model, head=None, norm_policy="running"),
            self.classes,
            self.episode.augment,
            self.prepare_by,
            self.prepare_steps,
            self.batch,
            self.optimizer,
            self.decay,
            self.decay_round,
        )

    @property
    def training(self) -> Preparation:
        """All of the options that the rounds depend on."""
        return self.preparation

    def tested(self, server: Prepared) -> Prepared:
        """Return the state as a test takes it: without running statistics if it has no use."""
        return server if self.model.norm_policy == "running" else server._replace(stats={})

    def init(self, key: Key) -> Prepared:
        """Return a fresh encoder and classifier."""
        return self.preparation.init(key)

    def init_client(self, client: int, key: Key) -> Tree:
        """Return `{}`: nothing stays with a client."""
        del client, key
        return {}

    def draw(self, data: ClientData, key: Key) -> Batches:
        """Draw the batches of a visit."""
        return self.preparation.draw(data, key)

    @client_work(draw="draw")
    def prepare(self, down: Tree, private: Tree, drawn: Batches) -> Reply:
        """Send what the cross-entropy over all base classes asks for, on a batch of a visit."""
        return self.preparation.reply(down, private, drawn)

    def round(
        self, server: Prepared, clients: Clients, key: Key
    ) -> tuple[Prepared, Mapping[str, float]]:
        """Take a step of the preparation."""
        return self.preparation.round(self.prepare, server, clients, key)
