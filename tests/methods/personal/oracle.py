"""Personal methods written out: a small net as plain tensors, and a few clients of unlike classes.

Nothing here calls fedshot.nn but to say what the model is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import Partition
from fedshot.evaluation.episodic_test import EpisodicTest
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.meter import Meter
from fedshot.fleets.private import PrivateStore
from fedshot.fleets.sequential import Sequential
from fedshot.nn.models.backbones import MLP, Conv4
from fedshot.nn.models.model import Model
from fedshot.protocol.clients import Clients
from fedshot.protocol.method import Prediction
from methods.classification_oracle import BASE, Spy, dataset

Weights = dict[str, Tensor]

MODEL = Model(MLP((8, 7)), None, (6, 6, 1), "support", dtype="float64")
CONV = Model(Conv4(width=6), None, (6, 6, 1), "support", dtype="float64")
SPEC = EpisodeSpec(2, 1, 1)
# Places among BASE of the classes that a client holds, and how many images of each.
HELD = (((0, 1), 4), ((0, 1, 2), 3), ((3, 4), 5), ((2, 3, 4), 2))
LATE = (10**6, 0)


def options(**changes: Any) -> dict[str, Any]:
    """Return what every method is given."""
    return {"model": MODEL, "episode": SPEC, "classes": BASE} | changes


class Group:
    """Four clients of one method."""

    def __init__(self, method: Any, folder: Path, held: Any = HELD) -> None:
        self.method, self.data = method, dataset()
        rows, tests, used = [], [], dict.fromkeys(range(5), 0)
        for places, n in held:
            mine, asked = [], []
            for p in places:
                start = BASE[p] * 30 + used[p]
                mine.append(np.arange(start, start + n))
                asked.append(np.arange(start + n, start + n + 2))
                used[p] += n + 2
            rows.append(np.concatenate(mine))
            tests.append(np.concatenate(asked))
        self.partition = Partition.of(rows)
        self.ids = list(range(len(held)))
        self.episodic_test = EpisodicTest.own(
            self.data, self.partition, Partition.of(tests), self.ids, Key(1)
        )
        store = PrivateStore(folder / "clients")
        self.host = Host(method, self.data, self.partition, store, Key(4))
        self.meter = Meter(Sequential(self.host))
        self.spy = Spy(Guard(self.meter))
        self.server = method.init(Key(9))
        self.t = 0

    def round(self, *, cohort: int | None = None) -> Any:
        self.t += 1
        clients = Clients(self.spy, self.ids, round=self.t, cohort=cohort)
        self.server, metrics = self.method.round(self.server, clients, Key(9).at("round", self.t))
        self.metrics = dict(metrics)
        return self.server

    def examples(self, k: int) -> tuple[Tensor, Tensor]:
        """Return client k's images, flat and normalised, and the places of their classes."""
        x, y = self.host.data(k).all()
        return pixels(x), torch.tensor([BASE.index(int(c)) for c in y])

    def answers(self) -> list[Prediction]:
        clients = Clients(self.spy, self.ids, round=self.t, phase="evaluate")
        found: list[Prediction] = self.method.evaluate(
            self.server, clients, self.episodic_test.eval_episodes, Key(7)
        )
        return sorted(found)

    def private(self, k: int) -> Tree:
        return self.host.private(k, LATE)

    def banked(self, k: int) -> Weights:
        """Return the weights that the server keeps of client k."""
        found = self.meter.fleet.bank.load(k, LATE)
        assert found is not None
        return {n.removeprefix("theta/"): w for n, w in found.items() if n.startswith("theta/")}

    def drawn(self, k: int) -> Any:
        exchange = self.spy.exchanges[-1]
        return exchange.work.draw(self.host.data(k), exchange.client_key(k))


def pixels(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2).double().flatten(1) / 127.5 - 1


def plain(theta: Tree) -> Weights:
    """Return a tree of weights by name."""
    return dict(tree.items(theta))


def features(w: Weights, x: Tensor) -> Tensor:
    h = (x @ w["body/linear1/weight"].T + w["body/linear1/bias"]).relu()
    return (h @ w["body/linear2/weight"].T + w["body/linear2/bias"]).relu()


def logits(w: Weights, x: Tensor) -> Tensor:
    return features(w, x) @ w["classifier/weight"].T + w["classifier/bias"]


def conv_features(w: Weights, support: Tensor, query: Tensor) -> Tensor:
    """Return the features of CONV of queries [n, 6, 6, 1], batch norm by the support's statistics.

    Four blocks: a padded 3x3 convolution, batch norm, 2x2 max-pool while there is room, ReLU.
    """
    s, q = (x.permute(0, 3, 1, 2).double() / 127.5 - 1 for x in (support, query))
    for i in range(1, 5):
        p = {n: w[f"body/conv{i}/{n}"] for n in ("weight", "bias")}
        s, q = (F.conv2d(x, p["weight"], p["bias"], padding=1) for x in (s, q))
        mean, var = s.mean((0, 2, 3)), s.var((0, 2, 3), correction=0)
        scale = w[f"body/norm{i}/weight"] / (var + 1e-5).sqrt()
        shift = w[f"body/norm{i}/bias"] - mean * scale
        s, q = (x * scale[:, None, None] + shift[:, None, None] for x in (s, q))
        if s.shape[-1] >= 2:
            s, q = F.max_pool2d(s, 2), F.max_pool2d(q, 2)
        s, q = s.relu(), q.relu()
    return q.flatten(1)


def cross_entropy(x: Tensor, y: Tensor) -> Callable[[Weights], Tensor]:
    return lambda w: F.cross_entropy(logits(w, x), y)


def gradient(loss: Callable[[Weights], Tensor], w: Weights) -> Weights:
    points = {n: v.detach().requires_grad_() for n, v in w.items()}
    found = torch.autograd.grad(loss(points), list(points.values()), allow_unused=True)
    return {
        n: torch.zeros_like(v) if g is None else g
        for (n, v), g in zip(w.items(), found, strict=True)
    }


def descend(loss: Callable[[Weights], Tensor], w: Weights, lr: float, steps: int) -> Weights:
    for _ in range(steps):
        g = gradient(loss, w)
        w = {n: v - lr * g[n] for n, v in w.items()}
    return w


def half_square(w: Weights, anchor: Weights) -> Tensor:
    return torch.stack([(w[n] - anchor[n]).square().sum() for n in w]).sum() / 2


def mean(models: list[Weights], weights: list[float]) -> Weights:
    total = sum(weights)
    return {
        n: torch.stack([b * m[n] for b, m in zip(weights, models, strict=True)]).sum(0) / total
        for n in models[0]
    }


def assert_close(found: Tree, want: Weights, tol: float = 1e-9) -> None:
    found = found if all(isinstance(v, Tensor) for v in found.values()) else plain(found)
    assert found.keys() == want.keys()
    for n, value in want.items():
        torch.testing.assert_close(found[n], value, rtol=tol, atol=tol, msg=lambda m, n=n: n + m)
