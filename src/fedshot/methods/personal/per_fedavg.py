"""Per-FedAvg: MAML over clients. A client's task is its own data; one gradient step adapts to it.

Source: Fallah et al. 2020, Personalized Federated Learning with Theoretical Guarantees, algorithm
1, for min_w sum_i f_i(w - alpha grad f_i(w)). A local step on batches D, D', D'' is
w~ = w - alpha grad f(w; D); w <- w - beta (I - alpha Hess f(w; D'')) grad f(w~; D').
order "first" (FO) leaves the Hessian out; "hessian_free" (HF) replaces Hess f(w; D'') v by the
difference (grad f(w + delta v; D'') - grad f(w - delta v; D'')) / (2 delta), v = grad f(w~; D').
Symbols: alpha the learning rate of `optimizer`; beta, delta as in the paper.
Departures from the paper: by default each of the three batches has all samples of the client, so
that the step is a gradient step on the objective itself; clients upload w_i - w; the average is
plain, w <- sum_i w_i / (r n), as in the paper. At test the model takes `test_steps` steps with step
size alpha on the client's training samples, never on the queries. Predictions are limited to the
episode's classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.ranges import Above0, AtLeast0, NotNegative
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.learners.classification import Batch, Batches, base_numbers, draw_batches
from fedshot.learners.learner import EvalEpisode
from fedshot.learners.local_training import (
    GradientResult,
    mean_gradient,
    mean_metrics,
)
from fedshot.methods.personal.base_class_method import AmongBaseClasses
from fedshot.nn.gradients import descend
from fedshot.nn.losses import cross_entropy
from fedshot.nn.models.mode import Mode
from fedshot.nn.optim import Optimizer
from fedshot.protocol.averaging import changes
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import ModelState, Traits


@dataclass(frozen=True)
class PerFedAvg(AmongBaseClasses[ModelState]):
    """An initialisation from which one gradient step adapts to a client.

    Args:
        order: "first" leaves the Hessian out (FO), "hessian_free" approximates it (HF).
        beta: outer step size.
        delta: step size of the finite difference that approximates the Hessian-vector product.
        local_steps: outer steps per local update.
        batch: samples in each of a step's three batches; null for all samples.
        optimizer: the optimiser of the inner steps, which must be plain SGD; its lr is alpha.
        test_steps: inner steps at test.
    """

    name: ClassVar[str] = "per_fedavg"
    max_weight: ClassVar[int | None] = 1

    order: Literal["first", "hessian_free"] = "hessian_free"
    beta: NotNegative = 0.001
    delta: Above0 = 0.001
    test_steps: AtLeast0 = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer != Optimizer("sgd", self.optimizer.lr):
            raise ConfigError(
                "the inner steps of Per-FedAvg are plain SGD steps; set optimizer.name to 'sgd', "
                "and leave momentum and weight_decay at 0."
            )

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs."""
        return replace(super().traits, adapts=self.test_steps > 0)

    def draw(self, data: ClientData, key: Key) -> Batches:
        """Draw the three batches D, D', D'' of each step."""
        augment = self.episode.augment
        if self.batch is None:
            drawn = self.passes(data, self.local_steps, key)
            return drawn._replace(steps=tuple((one, one, one) for (one,) in drawn.steps))
        n = 3 * self.local_steps
        drawn = draw_batches(data, self.classes, self.batch, n, augment, key)
        one = [step[0] for step in drawn.steps]
        return drawn._replace(steps=tuple(tuple(one[i : i + 3]) for i in range(0, n, 3)))

    def outer_gradient(
        self, w: Tree, stats: Tree, step: tuple[Batch, ...], noise: Mode
    ) -> GradientResult:
        """Return (I - alpha Hess f(w; D'')) grad f(w~; D'), approximated as `order` says."""
        alpha = self.optimizer.lr

        def gradient(at: Tree, batch: Batch, site: int) -> GradientResult:
            return mean_gradient(self.learner.episode_loss, at, stats, (batch,), noise.layer(site))

        inner = gradient(w, step[0], 0).grads
        adapted = tree.map(lambda a, g: a - alpha * g, w, inner)
        gradients = gradient(adapted, step[1], 1)
        if self.order == "first":
            return gradients
        # Both gradients use the same dropout masks.
        way = tree.map(lambda v: self.delta * v, gradients.grads)
        up = gradient(tree.add(w, way), step[2], 2).grads
        down = gradient(tree.sub(w, way), step[2], 2).grads
        scale = alpha / (2 * self.delta)
        product = tree.map(lambda g, a, b: g - scale * (a - b), gradients.grads, up, down)
        return gradients._replace(grads=product)

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: Batches) -> Reply:
        """Take the outer steps from w; upload the change w_i - w."""
        w, stats = down["theta"], down["stats"]
        metrics: list[dict[str, Tensor]] = []
        noise = Mode(seed=drawn.seed)
        for s, step in enumerate(drawn.steps):
            gradients = self.outer_gradient(w, stats, step, noise.layer(s))
            w = tree.map(lambda a, g: a - self.beta * g, w, gradients.grads)
            stats, metrics = gradients.stats, metrics + gradients.metrics
        up = changes({"theta": w, "stats": stats}, down)
        return Reply(up, private, 1.0, mean_metrics(metrics))

    def logits(self, theta: Tree, stats: Tree, eval_episode: EvalEpisode) -> Tensor:
        """Adapt to the support set; return the logits [queries, way] for the episode's classes."""
        y = base_numbers(eval_episode.classes, self.classes)[eval_episode.support_y]
        x = self.model.prepare(eval_episode.support_x)

        def loss(w: Tree, step: int) -> Tensor:
            del step
            h, _ = self.model.features(w, stats, x, Mode(norm="batch"))
            return cross_entropy(self.learner.head.logits(w["classifier"], h), y)

        lr, steps = self.optimizer.lr, self.test_steps
        adapted = descend(loss, theta, lr=lr, steps=steps, second_order=False)
        return super().logits(adapted, stats, eval_episode)
