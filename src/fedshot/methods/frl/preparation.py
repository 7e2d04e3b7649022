"""Pre-training of the methods that fine-tune for a few rounds: a classifier of all base classes.

Clients train an encoder under one classifier over all base classes on batches of their own, by
federated averaging. Of this pre-training, Park et al. 2021 (few-round learning), section 4, give
only the number of communication rounds. The server's step is that of FRL, so that neither method
has an advantage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.ranges import AtLeast0, AtLeast1, PositiveShare, check_options
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.learners.classification import Batches, Classifier, draw_batches
from fedshot.learners.local_training import mean_gradient, mean_metrics
from fedshot.methods.frl.few_round_method import FewRoundMethod, decay_factor, decayed
from fedshot.methods.frl.local_steps import fresh_head
from fedshot.nn.models.mode import Mode
from fedshot.nn.optim import Optimizer
from fedshot.protocol.averaging import OF_EXAMPLES, average, changes, local_reply
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Traits
from fedshot.protocol.reducers import Mean

StepBy = Literal["server", "clients"]


class Prepared(NamedTuple):
    """The server's state in pre-training."""

    theta: Tree  # {"body", "classifier"}; tests replace the classifier
    stats: Tree  # running statistics of batch norm
    outer: Tree  # the server's optimiser; {} if clients take the steps
    exchanges: Tensor  # int64 scalar: communication rounds so far


@dataclass(frozen=True)
class Pretrained(FewRoundMethod[Prepared]):
    """A method that pre-trains a classifier; a group fine-tunes its encoder under a fresh head.

    The encoder trains with batch statistics and also updates running statistics, whether or not the
    test uses these. A subclass whose groups take steps declares the options of the test,
    `test_rounds`, `inner_lr`, `local_steps` and `inner_batch`.

    Args:
        model: backbone, and a head with an output for each class of a test episode.
        episode: its `augment` is used for the batches of pre-training.
        classes: the base classes, as class indices of the dataset.
        test_rounds: number of rounds at test, R.
        inner_lr: step size of the clients of a test group.
        local_steps: passes of a client over its supports in each round of a test, E.
        inner_batch: examples per step; null for all supports of a client, in one step per pass.
        prepare_by: who takes the optimiser's step in pre-training: the "server", on the mean
            gradient, or each of the "clients", with a fresh optimiser in every round.
        prepare_steps: steps of a local update in pre-training; must be 1 if the server takes them.
        batch: examples per step of pre-training.
        optimizer: the optimiser of pre-training.
        decay: factor that multiplies the step size of pre-training after `decay_round`
            communication rounds.
        decay_round: communication rounds before the decay; 0 for no decay.
    """

    classes: tuple[int, ...]
    prepare_by: StepBy = "server"
    prepare_steps: AtLeast1 = 1
    batch: AtLeast1 = 60
    optimizer: Optimizer = Optimizer("sgd", 0.1)
    decay: PositiveShare = 0.1
    decay_round: AtLeast0 = 20000

    def __post_init__(self) -> None:
        check_options(self)
        if self.prepare_by == "server" and self.prepare_steps > 1:
            raise ConfigError(
                f"prepare_steps is {self.prepare_steps}, but with prepare_by 'server' there is one "
                "step per round. Set prepare_steps to 1 and raise batch, or set prepare_by to "
                "'clients'."
            )
        _ = self.local, self.classifier  # their constructors check the rest

    @cached_property
    def classifier(self) -> Classifier:
        """The learner of pre-training."""
        encoder = replace(self.model, head=None, norm_policy="running")
        return Classifier(encoder, len(self.classes))

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs."""
        return replace(super().traits, trains_on_pool=True)

    @property
    def training(self) -> tuple[Any, ...]:
        """All options that pre-training depends on."""
        return (
            self.classifier, self.classes, self.episode.augment, self.prepare_by,
            self.prepare_steps, self.batch, self.optimizer, self.decay, self.decay_round,
        )  # fmt: skip

    def init(self, key: Key) -> Prepared:
        """Return a random encoder and classifier."""
        theta, stats = self.classifier.init(key)
        outer: Tree = self.optimizer.init(theta) if self.prepare_by == "server" else {}
        return Prepared(theta, stats, outer, torch.tensor(0))

    def draw(self, data: ClientData, key: Key) -> Batches:
        """Draw the batches of a local update."""
        augment = self.episode.augment
        return draw_batches(data, self.classes, self.batch, self.prepare_steps, augment, key)

    @client_work(draw="draw")
    def prepare(self, down: Tree, private: Tree, drawn: Batches) -> Reply:
        """Upload the gradient of the cross-entropy, or theta's change after local steps on it.

        `prepare_by` "server" is for the gradient, "clients" for the change.
        """
        episode_loss = self.classifier.episode_loss
        if self.prepare_by == "clients":
            return local_reply(episode_loss, self.optimizer, down, private, drawn)
        (step,), noise = drawn.steps, Mode(seed=drawn.seed).layer(0)
        got = mean_gradient(episode_loss, down["theta"], down["stats"], step, noise)
        up = {"gradient": got.grads, **changes({"stats": got.stats}, down)}
        return Reply(up, private, drawn.n, mean_metrics(got.metrics))

    def round(
        self, server: Prepared, clients: Clients, key: Key
    ) -> tuple[Prepared, Mapping[str, float]]:
        """Run one round of pre-training.

        With prepare_by "server", the server takes an optimiser step on the mean gradient
        sum_k n_k g_k / sum_k n_k. With "clients", it averages the clients' changes:
        theta <- theta + sum_k n_k (theta_k - theta) / sum_k n_k.
        """
        parts, outer = {"theta": server.theta, "stats": server.stats}, server.outer
        decay = self.decay, self.decay_round, server.exchanges
        if self.prepare_by == "clients":
            new, got = average(clients, self.prepare, parts, key, max_weight=None)
            theta, stats = new["theta"], new["stats"]
            if (factor := decay_factor(*decay)) < 1:
                theta = tree.map(lambda w, v: w + factor * (v - w), server.theta, theta)
        else:
            names = {"gradient": server.theta, "stats": server.stats}
            reduce = {
                name: Mean(part, OF_EXAMPLES, of_examples=True) for name, part in names.items()
            }
            to = clients.sample(key)
            got = clients.exchange(self.prepare, parts, to=to, reduce=reduce, key=key)
            optimizer = decayed(self.optimizer, *decay)
            theta, outer = optimizer.update(got["gradient"], server.outer, server.theta)
            stats = tree.add(server.stats, got["stats"])
        return Prepared(theta, stats, outer, server.exchanges + 1), got.metrics

    def test_start(self, server: Prepared, key: Key) -> Tree:
        """Return theta_0, from which a test episode starts: the encoder with a random head."""
        body = server.theta["body"]
        return {"body": body, "head": fresh_head(self.model, body, key)}

    def test_stats(self, server: Prepared) -> Tree:
        """Return the running batch-norm statistics if the test's policy is "running", else `{}`."""
        return server.stats if self.model.norm_policy == "running" else {}
