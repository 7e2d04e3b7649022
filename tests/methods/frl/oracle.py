"""One episode of few-round learning, written out from the paper's equations in plain torch.

Sums over samples, positions and classes are loops, as the paper has them, and prototypes are
dictionaries by class. Nothing here calls fedshot.nn but to draw the first weights and the shares.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import Partition
from fedshot.data.partitions.resampled import Resampled
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.meter import Meter
from fedshot.fleets.private import PrivateStore
from fedshot.fleets.sequential import Sequential
from fedshot.fleets.threads import Threads
from fedshot.methods.frl.client_share import EpisodeShare
from fedshot.methods.frl.frl import FRL
from fedshot.nn.heads import LinearHead
from fedshot.nn.models.backbones import MLP, Conv4
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.clients import Clients

CLASSES, K, ROUND = 6, 3, 7
SPEC = EpisodeSpec(way=3, shot=6, query=6)
SGD = Optimizer("sgd", 0.05)
CONV = Model(Conv4(width=3), LinearHead(3), (32, 32, 1), "support", "float64")
FLAT = Model(MLP((6, 5)), LinearHead(3), (6, 6, 1), dtype="float64")

Weights = dict[str, Tensor]
Means = dict[int, Tensor]


def data_of(shape: tuple[int, ...]) -> Dataset:
    rng = np.random.Generator(np.random.Philox(0))
    x = rng.integers(0, 256, (CLASSES * 24, *shape), dtype=np.uint8)
    return Dataset("noise", x, np.repeat(np.arange(CLASSES), 24), tuple("abcdef"))


def method(model: Model = CONV, **options: Any) -> FRL:
    """Return FRL with plain SGD at the server, whose step is its gradient."""
    given: dict[str, Any] = {"inner_rounds": 2, "inner_lr": 0.02, "optimizer": SGD}
    return FRL(model, SPEC, tuple(range(CLASSES)), resampled=True, **(given | options))


class Run:
    """A population whose images are dealt anew in each round."""

    def __init__(
        self,
        m: Any,
        folder: Path,
        by: Any = "shards",
        partition: Partition | None = None,
        workers: int = 1,
    ) -> None:
        dataset = data_of(m.model.shape)
        rows = np.arange(len(dataset))
        dealt = Resampled(K, by).assign(dataset, rows, Key(0), m.episode).train
        self.m, self.partition = m, partition or dealt
        self.host = Host(m, dataset, self.partition, PrivateStore(folder), Key(1))
        self.meter = Meter(Threads(self.host, workers) if workers > 1 else Sequential(self.host))
        self.server = m.init(Key(2))
        self.clients = Clients(Guard(self.meter), range(len(self.partition)), round=ROUND)
        self.key = Key(3).at("round", ROUND)
        self.metrics: dict[str, float] = {}

    def play(self) -> Any:
        server, metrics = self.m.round(self.server, self.clients, self.key)
        self.metrics = dict(metrics)
        return server

    def shares(self) -> list[EpisodeShare]:
        """Return what the clients draw in this round, whichever exchange asks."""
        at = self.key.at("step", 0, "work", "update", "client")
        return [self.m.draw(self.host.data(k), at.at(k)) for k in range(len(self.partition))]


def flat(w: Any) -> Weights:
    return {path: leaf.detach().clone() for path, leaf in tree.items(w)}


def net(w: Weights, x: Tensor) -> Tensor:
    """Return the last map g, [n, channels, positions], by the batch's own statistics."""
    h = x.permute(0, 3, 1, 2).double() / 127.5 - 1
    if "body/linear1/weight" in w:
        h = h.flatten(1)
        for i in (1, 2):
            h = F.linear(h, w[f"body/linear{i}/weight"], w[f"body/linear{i}/bias"]).relu()
        return h[:, :, None]
    for i in range(1, 5):
        h = F.conv2d(h, w[f"body/conv{i}/weight"], w[f"body/conv{i}/bias"], padding=1)
        scale, shift = w[f"body/norm{i}/weight"], w[f"body/norm{i}/bias"]
        h = F.relu(F.batch_norm(h, None, None, scale, shift, training=True))
        h = F.max_pool2d(h, 2)
    return h.flatten(2)


def net_by(w: Weights, x: Tensor, support: Tensor) -> Tensor:
    """Return the maps of x, every layer normalised by what it makes of the support."""
    h, s = (part.permute(0, 3, 1, 2).double() / 127.5 - 1 for part in (x, support))
    for i in range(1, 5):
        kernel, bias = w[f"body/conv{i}/weight"], w[f"body/conv{i}/bias"]
        h, s = F.conv2d(h, kernel, bias, padding=1), F.conv2d(s, kernel, bias, padding=1)
        mean = s.mean((0, 2, 3), keepdim=True)
        std = ((s - mean).square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()
        scale, shift = (w[f"body/norm{i}/{name}"].view(1, -1, 1, 1) for name in ("weight", "bias"))
        h, s = (F.max_pool2d(F.relu((part - mean) / std * scale + shift), 2) for part in (h, s))
    return h.flatten(2)


def means(f: Tensor, y: Tensor) -> Means:
    """Eq. (1)."""
    return {c: f[y == c].mean(0) for c in sorted(set(y.tolist()))}


def pull(f: Tensor, c: int, prototypes: Means, literal: bool) -> Tensor:
    """The braces of eqs. (2) and (3) for one feature vector of class c."""
    d = {k: (f - p).square().sum() for k, p in prototypes.items()}
    rest = [torch.exp(-d[k]) for k in d if k != c or not literal]
    return d[c] + torch.stack(rest).sum().log() if rest else d[c]


def l_local(f: Tensor, y: Tensor, prototypes: Means, literal: bool = False) -> Tensor:
    """Eq. (2)."""
    each = [pull(row, c, prototypes, literal) for row, c in zip(f, y.tolist(), strict=True)]
    return torch.stack(each).mean()


def l_aux(g: Tensor, y: Tensor, prototypes: Means, literal: bool = False) -> Tensor:
    """Eq. (3) as printed: a sum over positions."""
    each = [
        pull(g[j, :, i], c, prototypes, literal)
        for j, c in enumerate(y.tolist())
        for i in range(g.shape[-1])
    ]
    return torch.stack(each).sum() / len(y)


def head_loss(w: Weights, x: Tensor, y: Tensor) -> Tensor:
    h = net(w, x).flatten(1)
    return F.cross_entropy(F.linear(h, w["head/weight"], w["head/bias"]), y)


def gradient(loss: Tensor, w: Weights) -> Weights:
    found = torch.autograd.grad(loss, list(w.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(w, found, strict=True))


def leaf(w: Weights) -> Weights:
    return {name: value.detach().clone().requires_grad_() for name, value in w.items()}


def update(m: FRL, theta: Weights, s: EpisodeShare, told: Means | None) -> tuple[Weights, Means]:
    """Lines 12 to 16 with E = 1: the client's model and its prototypes, of theta_r."""
    w, x, y = leaf(theta), s.support_x, s.support_y
    if m.variant == "linear":
        loss, own = head_loss(w, x, y), {}
    else:
        g = net(w, x)
        own = means(g.mean(-1), y)
        loss = l_local(g.mean(-1), y, own, m.loss == "literal")
        if m.variant == "gpal" and told is not None:
            gamma = 0.2 if m.gamma is None else m.gamma
            loss = loss + gamma / g.shape[-1] * l_aux(g, y, told, m.loss == "literal")
    step = gradient(loss, w)
    new = {name: value.detach() - m.inner_lr * step[name] for name, value in w.items()}
    return new, {c: p.detach() for c, p in own.items()}


def joined(shares: list[EpisodeShare], own: list[Means], shrunk: bool) -> Means:
    """Line 20 with lambda_k = |S_k| / |S|, or over the clients' supports of the class alone."""
    found: Means = {}
    for c in sorted({c for mine in own for c in mine}):
        n = [len(s.support_y) if shrunk else int((s.support_y == c).sum()) for s in shares]
        held = [k for k, mine in enumerate(own) if c in mine]
        total = sum(n)
        found[c] = torch.stack([own[k][c] * n[k] / total for k in held]).sum(0)
    return found


def adapt(
    m: FRL, phi: Weights, shares: list[EpisodeShare], rounds: int, shrunk: bool, refresh: bool
) -> tuple[Weights, Means | None]:
    """Lines 4 to 21."""
    theta, told = phi, None
    for _ in range(rounds):
        got = [update(m, theta, s, told) for s in shares]
        supports = sum(len(s.support_y) for s in shares)
        theta = {
            name: torch.stack(
                [new[name] * len(s.support_y) / supports
                 for (new, _), s in zip(got, shares, strict=True)]
            ).sum(0)
            for name in theta
        }  # fmt: skip
        told = joined(shares, [own for _, own in got], shrunk)
    if m.variant != "linear" and (refresh or not rounds):
        own = [means(net(theta, s.support_x).mean(-1), s.support_y) for s in shares]
        told = joined(shares, own, shrunk)
    return theta, told if m.variant != "linear" else None


def episode(
    m: FRL, phi: Weights, shares: list[EpisodeShare], shrunk: bool, refresh: bool
) -> Weights:
    """Algorithm 1, lines 4 to 26, with a plain gradient step at the server."""
    theta, told = adapt(m, phi, shares, m.inner_rounds, shrunk, refresh)
    total = sum(len(s.support_y) + len(s.query_y) for s in shares)
    g = {name: torch.zeros_like(value) for name, value in phi.items()}
    for s in shares:
        w = leaf(theta)
        if told is None:
            loss = head_loss(w, s.query_x, s.query_y)
        else:
            f = net(w, s.query_x).mean(-1)
            loss = l_local(f, s.query_y, told, m.loss == "literal")
        mine, rho = gradient(loss, w), (len(s.support_y) + len(s.query_y)) / total
        g = {name: value + rho * mine[name] for name, value in g.items()}
    return {name: value - m.optimizer.lr * g[name] for name, value in phi.items()}


def small(m: FRL, **changes: Any) -> FRL:
    """Return the method on a network without batch norm."""
    return replace(m, model=FLAT, **changes)
