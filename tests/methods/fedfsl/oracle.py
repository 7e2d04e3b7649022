"""What the FedFSL papers' equations say, written out with torch.nn, torch.autograd and torch.optim.

Nothing here calls fedshot.nn, but to say what the model is and to have gradients to compare.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call

from differences import direction, dot, slope
from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.episode import Episode
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import Partition
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.meter import Meter
from fedshot.fleets.private import PrivateStore
from fedshot.fleets.sequential import Sequential
from fedshot.learners.maml import InnerLoop
from fedshot.nn.gradients import value_and_grad
from fedshot.nn.heads import LinearHead
from fedshot.nn.models.backbones import MLP
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Fleet
from torch_optimizers import torch_optimizer

SPEC = EpisodeSpec(way=3, shot=2, query=4)
SGD = Optimizer("sgd", 0.1, momentum=0.9)
ADAM = Optimizer("adam", 0.01)
INNER = InnerLoop(lr=0.1, steps=2)

Weights = dict[str, Tensor]

both_optimizers = pytest.mark.parametrize("opt", [SGD, ADAM], ids=["sgd", "adam"])


def options(**changes: Any) -> dict[str, Any]:
    """Return the options of a method on a model small enough to write out."""
    model = Model(MLP((8, 7)), LinearHead(3), (6, 6, 1), dtype="float64")
    found = {"model": model, "episode": SPEC, "inner": INNER, "local_steps": 2, "optimizer": SGD}
    return found | changes


class Run:
    """A federation of one method, one round after another."""

    def __init__(self, method: Any, folder: Path, clients: int) -> None:
        rng = np.random.Generator(np.random.Philox(0))
        x = rng.integers(0, 256, (5 * 30, 6, 6, 1), dtype=np.uint8)
        data = Dataset("noise", x, np.repeat(np.arange(5), 30), tuple("abcde"))
        rows = [np.arange(k, len(data), clients) for k in range(clients)]
        self.method, self.ids = method, list(range(clients))
        self.host = Host(method, data, Partition.of(rows), PrivateStore(folder), Key(4))
        self.meter = Meter(Sequential(self.host))
        self.fleet: Fleet = Guard(self.meter)
        self.server = method.init(Key(9))
        self.metrics: dict[str, float] = {}
        self.t = 0

    def round(self, to: list[int] | None = None) -> Any:
        """Train a round, of some clients or of all; return the server."""
        self.t += 1
        clients = Chosen(self.fleet, self.ids, round=self.t)
        clients.chosen = tuple(self.ids if to is None else to)
        key = Key(9).at("round", self.t)
        self.server, metrics = self.method.round(self.server, clients, key)
        self.metrics = dict(metrics)
        return self.server

    def drawn(self, k: int) -> Any:
        """Return what client k drew in this round."""
        key = Key(9).at("round", self.t).at("work", "train", "client", k)
        return self.method.draw(self.host.data(k), key)

    def episode(self) -> tuple[Episode, Tensor]:
        """Return the first episode that client 0 draws in round 1, and the seed of its noise."""
        self.t = 1
        drawn = self.drawn(0)
        local_episodes = getattr(drawn, "local_episodes", drawn)
        return local_episodes.steps[0][0], local_episodes.seed

    def private(self, k: int) -> Tree:
        return self.host.private(k, (10**6, 0))


class Chosen(Clients):
    chosen: tuple[int, ...]

    def sample(self, key: Key) -> tuple[int, ...]:
        return self.chosen


class Net(nn.Module):
    """The model as a torch module; its parameters are passed to it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"linear1": nn.Linear(36, 8), "linear2": nn.Linear(8, 7)})
        self.head = nn.Linear(7, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.body["linear2"](self.body["linear1"](x).relu()).relu()
        out: Tensor = self.head(h)
        return out


NET = Net()


def flat(w: Tree) -> Weights:
    return {path.replace("/", "."): leaf for path, leaf in tree.items(w)}


def logits(w: Weights, x: Tensor) -> Tensor:
    pixels = (x.permute(0, 3, 1, 2).double() / 127.5 - 1).flatten(1)
    out: Tensor = functional_call(NET, w, (pixels,))
    return out


def adapt(w: Weights, e: Episode, inner: InnerLoop = INNER) -> Weights:
    """Eq. (4), as often as there are steps, of all weights or of the head's.

    Differentiably; in first order the gradients of the steps are numbers.
    """
    w = {
        name: leaf if leaf.requires_grad else leaf.clone().requires_grad_()
        for name, leaf in w.items()
    }
    names = [name for name in w if inner.adapts == "all" or name.startswith("head")]
    for _ in range(inner.steps):
        loss = F.cross_entropy(logits(w, e.support_x), e.support_y)
        second = inner.order == "second"
        grads = torch.autograd.grad(loss, [w[name] for name in names], create_graph=second)
        steps = {name: w[name] - inner.lr * g for name, g in zip(names, grads, strict=True)}
        w = w | steps
    return w


def p(w: Weights, e: Episode, kind: str = "adapted_query", inner: InnerLoop = INNER) -> Tensor:
    """p(w): softmax over the classes, on the queries after adapting unless said otherwise."""
    v = w if kind == "unadapted_query" else adapt(w, e, inner)
    return logits(v, e.query_x).softmax(-1)


def task_loss(w: Weights, e: Episode, inner: InnerLoop = INNER) -> Tensor:
    """Eq. (5)."""
    return F.cross_entropy(logits(adapt(w, e, inner), e.query_x), e.query_y)


def divergence(reference: Tensor, mine: Tensor, clip: str = "none", eps: float = 0.2) -> Tensor:
    """Eq. (11) of the revised version for one task; a mean over the rows."""
    reference = reference.detach()
    if clip == "none":
        return F.kl_div(mine.log(), reference, reduction="batchmean")
    if clip == "log":
        ratio = (reference / mine).clamp(1 - eps, 1 + eps)
        return (reference * ratio.log()).sum() / len(mine)
    ratio = (reference / mine.detach()).clamp(1 - eps, 1 + eps)
    return -(ratio * mine).sum() / len(mine)


def regularizer(m: Any, reference: Weights, w: Weights, e: Episode) -> Tensor:
    """The term of eq. (12) for one task, as the options of a method say."""
    told, mine = (p(v, e, m.predictions, m.inner) for v in (reference, w))
    return m.gamma * divergence(told, mine, m.clip, m.epsilon)


def local_training(
    w: Weights, steps: Any, opt: Optimizer, loss: Callable[[Weights, Episode], Tensor]
) -> Weights:
    """Minimise the mean loss of each step's episodes, one step of the optimiser for each."""
    w = {name: leaf.detach().clone().requires_grad_() for name, leaf in w.items()}
    by = torch_optimizer(opt, w.values())
    for step in steps:
        by.zero_grad()
        (sum(loss(w, e) for e in step) / len(step)).backward()  # type: ignore[union-attr]
        by.step()
    return {name: leaf.detach() for name, leaf in w.items()}


def average(models: list[Weights]) -> Weights:
    """Eq. (10), for clients of as many episodes each."""
    return {name: torch.stack([m[name] for m in models]).mean(0) for name in models[0]}


def holds_less(run: Run, k: int) -> None:
    """Take half of its examples from a client."""
    rows = [run.host.data(c).indices for c in run.ids]
    rows[k] = rows[k][::2]
    run.host._partition = Partition.of(rows)


def mean_of(run: Run, models: list[Weights]) -> Weights:
    """Eq. (10), by what `weigh_by` says."""
    if run.method.weigh_by == "episodes":
        return average(models)
    held = [run.host.data(k).n for k in run.ids]
    return {
        name: sum(n * m[name] for n, m in zip(held, models, strict=True)) / sum(held)
        for name in models[0]
    }


def assert_rounds(n: int, run: Run, update: Callable[[Weights, int], Weights]) -> None:
    """Train n rounds; `update(w, k)` is what client k makes of the server's weights."""
    w = flat(run.server.w)
    for _ in range(n):
        run.round()
        w = average([update(w, k) for k in run.ids])
    close(run.server.w, w)


def assert_same_bits(*runs: Run) -> None:
    """Train two rounds of each; the models are the same, and so is what is reported."""
    for run in runs:
        run.round()
        run.round()
    models = [{"w": run.server.w, "stats": run.server.stats} for run in runs]
    assert {tree.digest(model) for model in models} == {tree.digest(models[0])}
    assert all(run.metrics == runs[0].metrics for run in runs)


def close(found: Tree, want: Weights, tol: float = 1e-9) -> None:
    found = flat(found)
    assert found.keys() == want.keys()
    for name, leaf in want.items():
        torch.testing.assert_close(found[name], leaf, rtol=tol, atol=tol / 10, msg=name)


def assert_objective(m: Any, folder: Path, by: float) -> None:
    """Compare the gradient of a method's objective, near the server's model, with differences."""
    run = Run(m, folder, 1)
    (e, seed), fixed = run.episode(), run.server.w
    assert_slopes(lambda w: m.objective(fixed, w, {}, e, seed).loss, beside(fixed, by))


def assert_slopes(fn: Callable[[Tree], Tensor], at: Tree) -> None:
    """Compare a gradient with finite differences along two directions."""
    _, _, grad = value_and_grad(lambda w: (fn(w), {}), at)
    for seed in (2, 3):
        along = direction(at, seed)
        torch.testing.assert_close(dot(grad, along), slope(fn, at, along), rtol=1e-6, atol=1e-8)


def beside(w: Tree, by: float) -> Tree:
    """Return a point near w."""
    return tree.map(lambda leaf, d: leaf + by * d, w, direction(w, 1))
