"""Classification over base classes, written out with torch.nn and torch.optim.

Nothing here calls fedshot.nn, but to say what the model is and what a readout makes of features.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import Partition
from fedshot.evaluation.episodic_test import EpisodicTest
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.meter import Meter
from fedshot.fleets.private import PrivateStore
from fedshot.fleets.sequential import Sequential
from fedshot.fleets.wrapper import Wrapper
from fedshot.learners.feature_cache import worth_caching
from fedshot.learners.probe import FeatureProbe
from fedshot.nn.models.backbones import MLP, Conv4
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Arrival, Exchange, Reply
from torch_optimizers import torch_optimizer

SPEC = EpisodeSpec(way=3, shot=2, query=3)
BASE = (1, 3, 4, 7, 8)  # of the ten classes; the others are new
ADAM, SGD = Optimizer("adam", 0.01), Optimizer("sgd", 0.1, momentum=0.9, weight_decay=0.01)
BACKBONES: dict[str, Any] = {"mlp": MLP((8, 7)), "conv4": Conv4(4)}
VISITS = [
    (backbone, opt, steps)
    for backbone, opt in (("conv4", SGD), ("mlp", SGD), ("mlp", ADAM))
    for steps in (1, 4)
]

each_visit = pytest.mark.parametrize(("backbone", "opt", "steps"), VISITS)
unequal_clients = pytest.mark.parametrize("images", [(10, 10, 10), (3, 5, 9)])


def model(backbone: str, **changes: Any) -> Model:
    return Model(BACKBONES[backbone], None, (6, 6, 1), dtype="float64", **changes)


def options(backbone: str = "conv4", **changes: Any) -> dict[str, Any]:
    """Return the options of a method on a small model."""
    found = {"model": model(backbone), "episode": SPEC, "classes": BASE}
    return found | {"local_steps": 1, "batch": 12, "optimizer": SGD} | changes


def dataset() -> Dataset:
    rng = np.random.Generator(np.random.Philox(0))
    x = rng.integers(0, 256, (10 * 30, 6, 6, 1), dtype=np.uint8)
    return Dataset("noise", x, np.repeat(np.arange(10), 30), tuple("abcdefghij"))


class Spy(Wrapper):
    """A fleet that keeps what goes by, exchange after exchange."""

    def __init__(self, fleet: Any) -> None:
        super().__init__(fleet)
        self.exchanges: list[Exchange] = []
        self.seen: dict[int, Reply] = {}

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        self.exchanges.append(exchange)
        self.seen = {}
        for arrival in self.fleet.replies(exchange):
            assert arrival.reply is not None, arrival.fault
            self.seen[arrival.client] = arrival.reply
            yield arrival


class Run:
    """A federation of one method; client k holds `images[k]` images of each base class."""

    def __init__(self, method: Any, folder: Path, images: tuple[int, ...] = (10,)) -> None:
        self.method, self.data = method, dataset()
        ends = np.cumsum((0, *images))
        rows = [
            np.concatenate([c * 30 + np.arange(*ends[k : k + 2]) for c in BASE])
            for k in range(len(images))
        ]
        self.host = Host(method, self.data, Partition.of(rows), PrivateStore(folder), Key(4))
        self.ids = list(range(len(images)))
        self.meter = Meter(Sequential(self.host))
        self.spy = Spy(Guard(self.meter))
        self.server = method.init(Key(9))
        self.t = 0

    def round(self) -> Any:
        self.t += 1
        clients = Clients(self.spy, self.ids, round=self.t)
        self.server, metrics = self.method.round(self.server, clients, Key(9).at("round", self.t))
        self.metrics = dict(metrics)
        return self.server

    def drawn(self, k: int) -> Any:
        """Return what client k drew in this round."""
        exchange = self.spy.exchanges[-1]
        return exchange.work.draw(self.host.data(k), exchange.client_key(k))

    def episodic_test(self, eval_episodes: int = 4) -> EpisodicTest:
        """Draw questions from the classes that are not base classes."""
        return EpisodicTest.draw(self.data, [0, 2, 5, 6, 9], SPEC, eval_episodes, Key(8))

    def eval_episodes(self, many: bool) -> Any:
        """Draw questions; of many, embedding each example once pays."""
        eval_episodes = self.episodic_test(20 if many else 2).eval_episodes
        assert worth_caching(eval_episodes) == many
        return eval_episodes

    def answers(self, eval_episodes: Any) -> list[Tensor]:
        clients = Clients(self.spy, self.ids, round=self.t, phase="evaluate")
        found = self.method.evaluate(self.server, clients, eval_episodes, Key(7))
        assert [(a.eval_episode, a.client) for a in found] == [
            (u, None) for u in range(len(eval_episodes))
        ]
        return [a.logits for a in found]


class Layers(nn.Module):
    """Three linear layers, with a ReLU after the first."""

    def __init__(self, params: Tree) -> None:
        super().__init__()
        for name, part in params.items():
            self.add_module(name, _linear(part))

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.linear3(self.linear2(self.linear1(h).relu()))
        return out


def _linear(part: Tree) -> nn.Linear:
    layer = nn.Linear(*reversed(part["weight"].shape)).double()
    layer.load_state_dict(part)
    return layer


class Twin(nn.Module):
    """Backbone and classifier, of one layer or three, in torch, with the server's values."""

    def __init__(self, body: Tree, classifier: Tree, stats: Tree) -> None:
        super().__init__()
        self.body = nn.ModuleDict()
        for name, part in body.items():
            if name.startswith("conv"):
                n_out, n_in, _, _ = part["weight"].shape
                layer: nn.Module = nn.Conv2d(n_in, n_out, 3, padding=1)
            elif name.startswith("norm"):
                layer = nn.BatchNorm2d(len(part["weight"]))
            else:
                layer = nn.Linear(*reversed(part["weight"].shape))
            seen = {f"running_{key}": value for key, value in stats.get(name, {}).items()}
            layer.double().load_state_dict({**part, **seen}, strict=False)
            self.body[name] = layer
        self.classifier = _linear(classifier) if "weight" in classifier else Layers(classifier)

    def features(self, x: Tensor) -> Tensor:
        h = x.permute(0, 3, 1, 2).double() / 127.5 - 1
        if "linear1" in self.body:
            h = self.body["linear1"](h.flatten(1)).relu()
            out: Tensor = self.body["linear2"](h).relu()
            return out
        for i in range(1, 5):
            h = self.body[f"norm{i}"](self.body[f"conv{i}"](h)).relu()
            h = F.max_pool2d(h, 2) if min(h.shape[-2:]) >= 2 else h
        return h.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.features(x))
        return out

    def assert_is(self, body: Tree, classifier: Tree, stats: Tree) -> None:
        for name, part in body.items():
            for key, value in part.items():
                _close(value, getattr(self.body[name], key))
        held = self.classifier.state_dict()
        for name, value in tree.items(classifier):
            _close(value, held[name.replace("/", ".")])
        for name, part in stats.items():
            _close(part["mean"], self.body[name].running_mean)
            _close(part["var"], self.body[name].running_var)


def _close(found: Tensor, want: Any) -> None:
    torch.testing.assert_close(found, want.detach(), rtol=1e-10, atol=1e-11)


def train(twin: Twin, opt: Optimizer, steps: Any) -> list[Tensor]:
    """Take the steps of one visit; return the losses."""
    by, losses = torch_optimizer(opt, [p for p in twin.parameters() if p.requires_grad]), []
    for (batch,) in steps:
        by.zero_grad()
        losses.append(F.cross_entropy(twin(batch.x), batch.y))
        losses[-1].backward()
        by.step()
    return [loss.detach() for loss in losses]


def assert_readout(
    probe_options: FeatureProbe, twin: Twin, eval_episodes: Any, answers: list[Tensor]
) -> None:
    """The answers are read out of the features under running statistics."""
    twin.eval()
    for q, found in zip(eval_episodes, answers, strict=True):
        with torch.no_grad():
            support, query = twin.features(q.support_x), twin.features(q.query_x)
        want = probe_options(support, q.support_y, query, len(q.classes))
        tol = (
            1e-4 if probe_options.probe == "logistic" else 1e-9
        )  # its solver stops when near enough
        torch.testing.assert_close(found, want, rtol=tol, atol=tol)
