"""How a client of an episode learns in few-round learning: losses, prototypes, local steps.

Source: Park et al., Few-Round Learning for Federated Learning, ICLR 2021 submission, section 3.2
(the equations' numbers are its). Symbols: theta_r the model of round r; S_k, Q_k supports and
queries of client k; C_k its classes; f features, g the last map before the average pool; P^c_r(k)
the client's prototypes, P_r the global ones; d a squared distance.

    P^c_r(k) = mean of f over S_k(c)                                                        (1)
    L_local = mean over x of d(f(x), P^c) + log sum_c' exp(-d(f(x), P^c'))                  (2)
    L_aux = the same, over the positions of g(x), against the global prototypes             (3)
    F = L_local + gamma L_aux;  theta <- theta - alpha grad F                               (4)

As printed, the sum of (2) leaves the true class out: then a client gains without end by moving
classes apart, and one with a single class has the logarithm of nothing. Printed is a sum over
positions; here it is their mean, and gamma the weight of a map.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody reads)
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import ConfigError, check_word
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.learners.learner import check_body
from fedshot.methods.frl import losses_fused as quick
from fedshot.methods.frl.client_share import EpisodeShare
from fedshot.nn.gradients import value_and_grad
from fedshot.nn.losses import accuracy
from fedshot.nn.masking import mask_logits, masked_cross_entropy
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.prototypes import members, squared_distances, unit_rows

Variant = Literal["linear", "proto", "gpal"]


class Prototypes(NamedTuple):
    """Means of features by class, and which classes have one."""

    means: Tensor  # [numbers, d]
    held: Tensor  # bool [numbers]


class Learnt(NamedTuple):
    """What a client's supports taught it in a round."""

    theta: Tree
    sums: Tensor  # [numbers, d]: what prototypes are summed of; [0, 0] under "linear"
    counts: Tensor  # [numbers], in the model's dtype: what they are divided by
    loss: Tensor
    accuracy: Tensor


@dataclass(frozen=True)
class FewRoundLearner:
    """How a client learns, and what it tells of its prototypes. The fields are options of `frl`."""

    model: Model
    variant: Variant = "proto"
    gamma: float = 0.2
    lr: float = 0.1
    steps: int = 1
    batch: int | None = None
    loss: Literal["softmax", "literal"] = "softmax"
    own_sample: Literal["included", "left_out"] = "included"
    through_prototypes: bool = True
    positions: Literal["mean", "pooled"] = "mean"
    distance: Literal["plain", "mean", "unit"] = "plain"
    prototypes: Literal["exact", "shrunk", "unweighted"] = "exact"
    uploaded: Literal["before", "last", "after"] = "before"

    def __post_init__(self) -> None:
        check_body(self.model, "few-round learning")
        if self.variant == "linear" and self.model.head is None:
            raise ConfigError(
                "variant is 'linear', and there is no head; set model.head to linear."
            )
        check_word("variant", self.variant, ("linear", "proto", "gpal"))
        check_word("loss", self.loss, ("softmax", "literal"))
        check_word("own_sample", self.own_sample, ("included", "left_out"))
        check_word("positions", self.positions, ("mean", "pooled"))
        check_word("distance", self.distance, ("plain", "mean", "unit"))
        check_word("prototypes", self.prototypes, ("exact", "shrunk", "unweighted"))
        check_word("uploaded", self.uploaded, ("before", "last", "after"))
        if not 0 <= self.lr < float("inf"):
            raise ConfigError(f"inner_lr is {self.lr}; expected a finite number from 0.")
        if not 0 <= self.gamma < float("inf"):
            raise ConfigError(f"gamma is {self.gamma}; expected a finite number from 0.")
        for name, value in (("local_steps", self.steps), ("inner_batch", self.batch)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; expected a whole number from 1.")

    @property
    def linear(self) -> bool:
        """Whether a head answers, not prototypes."""
        return self.variant == "linear"

    @property
    def map_positions(self) -> int:
        """Positions of the last map; 1 where the backbone's features are no map."""
        count = getattr(self.model.backbone, "positions", None)
        return 1 if count is None else int(count(self.model.shape))

    @property
    def d(self) -> int:
        """Length of a prototype: the channels of the last map; 0 under "linear"."""
        return 0 if self.linear else self.model.out_features // self.map_positions

    def slots(self, way: int) -> int:
        """Return how many numbers there are for the classes of an episode: a head has its own."""
        return self.model.head.way if self.linear and self.model.head is not None else way

    def params(self, params: Tree) -> Tree:
        """Return the part of a model's parameters that is trained."""
        return params if self.linear else {"body": params["body"]}

    def maps(self, theta: Tree, stats: Tree, x: Tensor, mode: Mode) -> tuple[Tensor, Tree]:
        """Return (g [n, d, positions], or flat features [n, features] under "linear"; stats)."""
        h, stats = self.model.features(theta, stats, x, mode)
        return (h if self.linear else h.view(len(h), self.d, -1)), stats

    def rows(self, g: Tensor) -> Tensor:
        """Return f [n, d]: the average pool of g."""
        f = g.mean(-1)
        return unit_rows(f) if self.distance == "unit" else f

    def logits(self, f: Tensor, told: Prototypes) -> Tensor:
        """Return -d(f, P), [n, numbers]; hardly any for a class without a prototype."""
        found = -squared_distances(f, told.means)
        if self.distance == "mean":
            found = found / f.shape[-1]
        return mask_logits(found, told.held)

    def head_logits(self, theta: Tree, h: Tensor, used: Tensor) -> Tensor:
        """Return the head's outputs for the numbers in use, of flat features."""
        return mask_logits(self.model.logits(theta, h), used)

    def prototypes_of(self, f: Tensor, y: Tensor, numbers: int) -> tuple[Prototypes, Tensor]:
        """Return eq. (1), and how many examples [numbers] each prototype is the mean of."""
        member = members(y, numbers).to(f.dtype)
        counts = member.sum(1)
        means = (member @ f) / counts.clamp_min(1.0)[:, None]
        return Prototypes(means, counts > 0), counts

    def tell(self, own: Prototypes, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (sums [numbers, d], counts [numbers]) uploaded for the global prototypes."""
        if self.prototypes == "exact":
            return own.means * counts[:, None], counts
        if self.prototypes == "shrunk":
            return own.means * counts.sum(), counts
        return own.means, own.held.to(counts.dtype)

    def join(self, sums: Tensor, counts: Tensor) -> tuple[Prototypes, Tensor]:
        """Return the global prototypes of summed uploads, and what [numbers] divided the sums.

        `sums` are [numbers, d], `counts` [numbers]: what clients `tell`, added up.
        """
        divisor = counts.sum().expand_as(counts) if self.prototypes == "shrunk" else counts
        divisor = divisor.clamp_min(1.0)
        return Prototypes(sums / divisor[:, None], counts > 0), divisor

    def local_loss(self, f: Tensor, y: Tensor, own: Prototypes, counts: Tensor) -> Tensor:
        """Return eq. (2), a scalar, on the examples that the prototypes are the means of.

        Args:
            f: features [n, d].
            y: labels [n].
            own: the client's prototypes, [numbers, d].
            counts: examples [numbers] that each is the mean of.
        """
        through = self.through_prototypes
        fixed = own if through else own._replace(means=own.means.detach())
        logits = self.logits(f, fixed)
        if self.own_sample == "left_out":
            n = counts[y][:, None]
            left = (n * own.means[y] - f) / (n - 1).clamp_min(1.0)  # the class mean without x
            left = left if through else left.detach()
            mine = y[:, None] == torch.arange(len(counts), device=y.device)
            apart = (f - left).square().sum(1, keepdim=True)
            apart = apart / f.shape[-1] if self.distance == "mean" else apart
            logits = torch.where(mine & (n > 1), -apart, logits)
        return masked_cross_entropy(logits, y, own.held, self.loss)

    def aux_loss(self, g: Tensor, y: Tensor, told: Prototypes) -> Tensor:
        """Return eq. (3), a scalar: positions of the maps g [n, d, positions], or their pool.

        `y` is [n]; `told` are the global prototypes, [numbers, d].
        """
        if self.positions == "pooled":
            return masked_cross_entropy(self.logits(self.rows(g), told), y, told.held, self.loss)
        n, d, positions = g.shape
        each = g.permute(0, 2, 1).reshape(n * positions, d)
        each = unit_rows(each) if self.distance == "unit" else each
        labels = y[:, None].expand(n, positions).reshape(-1)
        return masked_cross_entropy(self.logits(each, told), labels, told.held, self.loss)

    def support_loss(
        self, g: Tensor, y: Tensor, numbers: int, told: Prototypes | None
    ) -> tuple[Tensor, Tensor, Prototypes, Tensor]:
        """Return (F of eq. (4), accuracy by their own prototypes, these, counts) of supports.

        F alone is to be differentiated; whether the prototypes have a graph hangs on the options.

        Args:
            g: maps [n, d, positions].
            y: labels [n].
            numbers: how many there are for classes.
            told: the global prototypes; None for no L_aux.
        """
        plain = self._plain and self.own_sample == "included" and self.through_prototypes
        fixed = told is None or not told.means.requires_grad
        if plain and fixed and quick.fits(g):
            pooled = self.positions == "pooled"
            loss, hits, means, counts = quick.support_loss(
                g, y, numbers, told, self.gamma, pooled=pooled
            )
            return loss, hits, Prototypes(means, counts > 0), counts
        f = self.rows(g)
        own, counts = self.prototypes_of(f, y, numbers)
        loss = self.local_loss(f, y, own, counts)
        if told is not None:
            loss = loss + self.gamma * self.aux_loss(g, y, told)
        return loss, accuracy(self.logits(f, own).detach(), y), own, counts

    def query_loss(self, g: Tensor, y: Tensor, told: Prototypes) -> tuple[Tensor, Tensor]:
        """Return the (loss, accuracy) of queries by prototypes; maps g [n, d, positions], y [n]."""
        if self._plain and quick.fits(g):
            return quick.query_loss(g, y, *told)
        logits = self.logits(self.rows(g), told)
        return masked_cross_entropy(logits, y, told.held, self.loss), accuracy(logits.detach(), y)

    @property
    def _plain(self) -> bool:
        """Whether its loss by given prototypes is the one that has a kernel."""
        return self.loss == "softmax" and self.distance == "plain"

    def learn(
        self,
        theta: Tree,
        share: EpisodeShare,
        told: Prototypes | None,
        *,
        differentiable: bool = False,
    ) -> Learnt:
        """Take the local steps of one round; `told` are the last round's global prototypes.

        `differentiable` is for `torch.func.vjp` and its like.
        """
        y, numbers = share.support_y, len(share.open)
        x = self.model.prepare(share.support_x)
        mode = learning_mode(share)
        if not differentiable:
            theta = tree.detach(theta)

        def objective(w: Tree, x: Tensor, y: Tensor, mode: Mode) -> tuple[Tensor, Learnt]:
            g, _ = self.maps(w, {}, x, mode)
            if self.linear:
                logits = self.head_logits(w, g, share.open)
                none = g.new_zeros(0, 0), g.new_zeros(numbers)
                loss = F.cross_entropy(logits, y)
                return loss, Learnt(w, *none, loss, accuracy(logits.detach(), y))
            near = told if self.variant == "gpal" else None
            loss, hits, own, counts = self.support_loss(g, y, numbers, near)
            return loss, Learnt(w, *self.tell(own, counts), loss, hits)

        first: Learnt | None = None
        start = theta
        for step in range(self.steps):
            start = theta if self.uploaded == "last" else start
            for i, at in enumerate(pieces(len(y), self.batch)):
                noise = mode.layer(step * len(y) + i)
                _, found, grads = value_and_grad(
                    lambda w, at=at, noise=noise: objective(w, x[at], y[at], noise),  # type: ignore[misc]
                    theta,
                    differentiable=differentiable,
                )
                first = found if first is None else first
                theta = tree.map(lambda w, g: w - self.lr * g, theta, grads)
        assert first is not None
        if not self.linear and (self.uploaded == "after" or self.batch is not None):
            # The whole support, by the model after the steps or, in minibatches, before them.
            at_theta = theta if self.uploaded == "after" else start
            sums, counts = self.census(at_theta, share)
            first = first._replace(sums=sums, counts=counts)
        elif self.uploaded == "last":
            first = first._replace(sums=found.sums, counts=found.counts)
        if not differentiable:
            first = tree.detach(first)
        return first._replace(theta=theta)

    def census(
        self, theta: Tree, share: EpisodeShare, stats: Tree | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the (sums [numbers, d], counts [numbers]) of a client's supports under theta.

        Batch norm goes by the support's own statistics, or by running ones, where they are given.
        """
        mode = learning_mode(share) if stats is None else Mode(norm="given")
        g, _ = self.maps(theta, stats or {}, share.support_x, mode)
        return self.tell(*self.prototypes_of(self.rows(g), share.support_y, len(share.open)))


def learning_mode(share: EpisodeShare) -> Mode:
    """Return how supports and queries pass the network while something is learnt."""
    if isinstance(share.seed, Tensor):
        return Mode(True, "batch", seed=share.seed)
    return Mode(norm="batch")


def fresh_head(model: Model, theta: Tree, key: Key) -> Tree:
    """Draw a head for an episode, on the device of theta."""
    assert model.head is not None
    head = model.head.init(key.at("head"), model.out_features, model.torch_dtype)
    return tree.to(head, tree.leaves(theta)[0].device)


def check_slots(local: FewRoundLearner, numbers: int) -> None:
    """Refuse a head with fewer outputs than an episode of training may have classes."""
    way = local.slots(numbers)
    if way < numbers:
        raise ConfigError(
            f"model.head.way is {way}, and the clients of an episode may hold {numbers} classes: "
            "those of its way where images are dealt anew (partition 'redealt'), else all base "
            f"classes. Set model.head.way to {numbers}."
        )


def pieces(n: int, size: int | None) -> list[slice]:
    """Return the minibatches of n examples; one for all of them without a size.

    They are cut in the order of the examples, the same in every step: that of a client's hand is
    random, that of a question in nobody's hand goes by class. A last one that is too short for
    batch norm joins the one before.
    """
    if size is None or size >= n:
        return [slice(0, n)]
    cuts = list(range(0, n - max(size // 2, 1) + 1, size))
    return [slice(a, b) for a, b in zip(cuts, [*cuts[1:], n], strict=True)]
