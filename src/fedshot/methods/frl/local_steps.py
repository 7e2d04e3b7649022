"""Losses, prototypes and local steps of a client in few-round learning.

Source: Park et al., Few-Round Learning for Federated Learning, ICLR 2021 submission, section 3.2;
equations are numbered as in the paper. Symbols: theta_r the model of round r; S_k, Q_k supports and
queries of client k; C_k its classes; g the last feature map, f its average pool, the features;
P^c_r(k) the client's prototypes, P_r the global ones; d a squared distance. In shapes, d is the
length of a prototype, and classes the number of possible labels.

    P^c_r(k) = mean of f over S_k(c);                                                       (1)
    L_local = mean over x of d(f(x), P^c) + log sum_c' exp(-d(f(x), P^c'));                 (2)
    L_aux = the same, over the positions of g(x), against the global prototypes;            (3)
    F = L_local + gamma L_aux;  theta <- theta - alpha grad F                               (4)

As printed, the sum of (2) leaves the true class out: then the loss has no lower bound as classes
move apart, and for a client with a single class it takes the logarithm of an empty sum. Eq. (3) is
printed as a sum over positions. Here it is their mean, so gamma is the weight of a whole feature
map, however many positions it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.ranges import AtLeast1, NotNegative, check_options
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.learners.learner import check_body
from fedshot.methods.frl.client_share import EpisodeShare
from fedshot.nn.gradients import value_and_grad
from fedshot.nn.losses import accuracy, cross_entropy
from fedshot.nn.masking import mask_logits, masked_cross_entropy
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.prototypes import members, squared_distances

Variant = Literal["linear", "proto", "gpal"]


class Prototypes(NamedTuple):
    """Means of features by class, and for which classes they exist."""

    means: Tensor  # [classes, d]
    held: Tensor  # bool [classes]


class Learned(NamedTuple):
    """The result of a client's local steps on its supports in one round."""

    theta: Tree
    sums: Tensor  # [classes, d]: sums that prototypes are made of; [0, 0] under "linear"
    counts: Tensor  # [classes], in the model's dtype: their divisors
    loss: Tensor  # at the first step, in nats
    accuracy: Tensor  # at the first step, in [0, 1]


@dataclass(frozen=True)
class FewRoundLearner:
    """A client's losses and local steps, and the sums that it uploads for prototypes.

    The fields are options of the method `frl`.
    """

    model: Model
    variant: Variant = "proto"
    gamma: NotNegative = 0.2
    lr: NotNegative = 0.1
    steps: AtLeast1 = 1
    batch: AtLeast1 | None = None
    loss: Literal["softmax", "literal"] = "softmax"
    positions: Literal["mean", "pooled"] = "mean"
    prototypes: Literal["exact", "shrunk", "unweighted"] = "exact"
    uploaded: Literal["before", "last", "after"] = "before"

    def __post_init__(self) -> None:
        check_body(self.model, "few-round learning")
        if self.variant == "linear" and self.model.head is None:
            raise ConfigError(
                "variant is 'linear', but the model has no head; set model.head to linear."
            )
        check_options(self)

    @property
    def linear(self) -> bool:
        """Whether a linear head predicts, instead of prototypes."""
        return self.variant == "linear"

    @property
    def map_positions(self) -> int:
        """Number of positions of the last feature map; 1 for a backbone with flat features."""
        count = getattr(self.model.backbone, "positions", None)
        return 1 if count is None else int(count(self.model.shape))

    @property
    def d(self) -> int:
        """Length of a prototype: the channels of the last map; 0 for a linear classifier."""
        return 0 if self.linear else self.model.out_features // self.map_positions

    def slots(self, way: int) -> int:
        """Return the number of labels: the width of the head, or `way` without a head."""
        return self.model.head.way if self.linear and self.model.head is not None else way

    def maps(self, theta: Tree, stats: Tree, x: Tensor, mode: Mode) -> tuple[Tensor, Tree]:
        """Return the feature maps of a batch x, and the running statistics after the forward pass.

        The maps g are [n, d, positions], or under "linear" flat features [n, features].
        """
        h, stats = self.model.features(theta, stats, x, mode)
        return (h if self.linear else h.view(len(h), self.d, -1)), stats

    def features(self, g: Tensor) -> Tensor:
        """Return f [n, d]: the average pool of g."""
        return g.mean(-1)

    def logits(self, f: Tensor, prototypes: Prototypes) -> Tensor:
        """Return the logits -d(f, P), [n, classes]; a class without a prototype is masked."""
        return mask_logits(-squared_distances(f, prototypes.means), prototypes.held)

    def head_logits(self, theta: Tree, h: Tensor, used: Tensor) -> Tensor:
        """Return the head's logits [n, width] for flat features h; unused labels are masked."""
        return mask_logits(self.model.logits(theta, h), used)

    def prototypes_of(self, f: Tensor, y: Tensor, numbers: int) -> tuple[Prototypes, Tensor]:
        """Return the prototypes, eq. (1), and the number of examples of each class, [numbers].

        `f` are features [n, d], `y` labels [n], and `numbers` is the number of possible labels.
        """
        member = members(y, numbers).to(f.dtype)
        counts = member.sum(1)
        means = (member @ f) / counts.clamp_min(1.0)[:, None]
        return Prototypes(means, counts > 0), counts

    def summands(self, own: Prototypes, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a client uploads for the global prototypes: sums and counts by class.

        They are [classes, d] and [classes]; the option `prototypes` decides what is summed.
        """
        if self.prototypes == "exact":
            return own.means * counts[:, None], counts
        if self.prototypes == "shrunk":
            return own.means * counts.sum(), counts
        return own.means, own.held.to(counts.dtype)

    def global_prototypes(self, sums: Tensor, counts: Tensor) -> tuple[Prototypes, Tensor]:
        """Return the global prototypes, and the divisor of each class's sum, [classes].

        `sums` [classes, d] and `counts` [classes] are the clients' `summands`, added up. The
        divisor is the count of the class, or with `prototypes` "shrunk" that of all classes; it is
        at least 1.
        """
        divisor = counts.sum().expand_as(counts) if self.prototypes == "shrunk" else counts
        divisor = divisor.clamp_min(1.0)
        return Prototypes(sums / divisor[:, None], counts > 0), divisor

    def local_loss(self, f: Tensor, y: Tensor, prototypes: Prototypes) -> Tensor:
        """Return the loss of eq. (2), a scalar, for features f [n, d] with labels y [n]."""
        return masked_cross_entropy(self.logits(f, prototypes), y, prototypes.held, self.loss)

    def aux_loss(self, g: Tensor, y: Tensor, prototypes: Prototypes) -> Tensor:
        """Return the loss of eq. (3), a scalar, for feature maps g with labels y [n].

        `g` is [n, d, positions]. The loss compares each position, or the mean over positions if
        `positions` is "pooled", with the global `prototypes` [classes, d].
        """
        if self.positions == "pooled":
            return self.local_loss(self.features(g), y, prototypes)
        n, d, positions = g.shape
        each = g.permute(0, 2, 1).reshape(n * positions, d)
        labels = y[:, None].expand(n, positions).reshape(-1)
        return self.local_loss(each, labels, prototypes)

    def support_loss(
        self, g: Tensor, y: Tensor, numbers: int, prototypes: Prototypes | None
    ) -> tuple[Tensor, Tensor, Prototypes, Tensor]:
        """Return (F of eq. (4), accuracy, own prototypes, examples of each class) for supports.

        Args:
            g: feature maps [n, d, positions].
            y: labels [n].
            numbers: number of possible labels; the episode's classes have labels 0 to way - 1.
            prototypes: the global prototypes; None to leave out L_aux.
        """
        f = self.features(g)
        own, counts = self.prototypes_of(f, y, numbers)
        loss = self.local_loss(f, y, own)
        if prototypes is not None:
            loss = loss + self.gamma * self.aux_loss(g, y, prototypes)
        return loss, accuracy(self.logits(f, own).detach(), y), own, counts

    def query_loss(self, g: Tensor, y: Tensor, prototypes: Prototypes) -> tuple[Tensor, Tensor]:
        """Return (loss, accuracy) of queries compared with prototypes, as scalars.

        `g` are the queries' feature maps [n, d, positions], and `y` their labels [n].
        """
        logits = self.logits(self.features(g), prototypes)
        loss = masked_cross_entropy(logits, y, prototypes.held, self.loss)
        return loss, accuracy(logits.detach(), y)

    def head_loss(self, theta: Tree, h: Tensor, y: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
        """Return (loss, accuracy) of the head for flat features h [n, features], labels y [n]."""
        logits = self.head_logits(theta, h, used)
        return cross_entropy(logits, y), accuracy(logits.detach(), y)

    def own_prototypes(self, theta: Tree, share: EpisodeShare, mode: Mode) -> Prototypes:
        """Return the prototypes of a client's supports, differentiable with respect to theta."""
        g, _ = self.maps(theta, {}, share.support_x, mode)
        return self.prototypes_of(self.features(g), share.support_y, len(share.open))[0]

    def learn(
        self,
        theta: Tree,
        share: EpisodeShare,
        prototypes: Prototypes | None,
        *,
        differentiable: bool = False,
    ) -> Learned:
        """Take the local steps of one round.

        Args:
            theta: theta_r.
            share: the client's share of the episode.
            prototypes: the global prototypes of the previous round; None if there are none.
            differentiable: whether to keep the graph, as for `torch.func.vjp`.
        """
        y, numbers = share.support_y, len(share.open)
        x = self.model.prepare(share.support_x)
        mode = learning_mode(share)
        if not differentiable:
            theta = tree.detach(theta)

        def objective(w: Tree, x: Tensor, y: Tensor, mode: Mode) -> tuple[Tensor, Learned]:
            g, _ = self.maps(w, {}, x, mode)
            if self.linear:
                loss, found = self.head_loss(w, g, y, share.open)
                return loss, Learned(w, g.new_zeros(0, 0), g.new_zeros(numbers), loss, found)
            near = prototypes if self.variant == "gpal" else None
            loss, found, own, counts = self.support_loss(g, y, numbers, near)
            return loss, Learned(w, *self.summands(own, counts), loss, found)

        first: Learned | None = None
        start = theta
        for step in range(self.steps):
            start = theta if self.uploaded == "last" else start
            for i, at in enumerate(pieces(len(y), self.batch)):
                noise = mode.layer(step * len(y) + i)
                _, last, grads = value_and_grad(
                    lambda w, at=at, noise=noise: objective(w, x[at], y[at], noise),  # type: ignore[misc]
                    theta,
                    differentiable=differentiable,
                )
                first = last if first is None else first
                theta = tree.map(lambda w, g: w - self.lr * g, theta, grads)
        assert first is not None
        if not self.linear and (self.uploaded == "after" or self.batch is not None):
            # All supports, under the model after the steps or, with minibatches, before them.
            at_theta = theta if self.uploaded == "after" else start
            sums, counts = self.prototype_sums(at_theta, share)
            first = first._replace(sums=sums, counts=counts)
        elif self.uploaded == "last":
            first = first._replace(sums=last.sums, counts=last.counts)
        if not differentiable:
            first = tree.detach(first)
        return first._replace(theta=theta)

    def prototype_sums(
        self, theta: Tree, share: EpisodeShare, stats: Tree | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what a client uploads for the global prototypes, from its supports under theta.

        These are the `summands`: sums by class [classes, d], and counts [classes]. Batch norm uses
        the statistics of these supports, or `stats` if not None.
        """
        mode = learning_mode(share) if stats is None else Mode(norm="given")
        g, _ = self.maps(theta, stats or {}, share.support_x, mode)
        own, counts = self.prototypes_of(self.features(g), share.support_y, len(share.open))
        return self.summands(own, counts)


def learning_mode(share: EpisodeShare) -> Mode:
    """Return the mode of forward passes in training, with dropout if the share has a seed."""
    if isinstance(share.seed, Tensor):
        return Mode(True, "batch", seed=share.seed)
    return Mode(norm="batch")


def fresh_head(model: Model, theta: Tree, key: Key) -> Tree:
    """Return a random head for an episode, on the device of theta."""
    assert model.head is not None
    head = model.head.init(key.at("head"), model.out_features, model.torch_dtype)
    return tree.to(head, tree.leaves(theta)[0].device)


def pieces(n: int, size: int | None) -> list[slice]:
    """Return the minibatches of n examples as slices; one slice if `size` is None.

    The slices are consecutive, and every pass uses the same ones, without reshuffling. A client
    draws its examples in random order; those of a test episode that is not split are sorted by
    class. A last minibatch of less than half of `size` joins the one before, because it is too
    short for batch norm.
    """
    if size is None or size >= n:
        return [slice(0, n)]
    cuts = list(range(0, n - max(size // 2, 1) + 1, size))
    return [slice(a, b) for a, b in zip(cuts, [*cuts[1:], n], strict=True)]
