"""Federated averaging against the arithmetic mean, and against quadratics with a closed form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.episode import ClientData
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import Partition
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.private import PrivateStore
from fedshot.fleets.sequential import Sequential
from fedshot.fleets.wrapper import Wrapper
from fedshot.learners.learner import EpisodeLoss
from fedshot.learners.local_training import LocalEpisodes, local_sgd, sample_episodes
from fedshot.learners.maml import InnerLoop
from fedshot.methods.base.fl_proto import FLProto
from fedshot.methods.fedfsl.fedfsl_naive import FedFSLNaive
from fedshot.nn.heads import LinearHead
from fedshot.nn.models.backbones import Conv4
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Arrival, Exchange, PerClient, Reply, client_work
from fedshot.protocol.reducers import Mean

SPEC = EpisodeSpec(way=3, shot=1, query=3)
ROUND = Key(9).at("round", 1)


def dataset() -> Dataset:
    rng = np.random.Generator(np.random.Philox(0))
    x = rng.integers(0, 256, (5 * 30, 6, 6, 1), dtype=np.uint8)
    return Dataset("noise", x, np.repeat(np.arange(5), 30), tuple("abcde"))


def host(method: Any, folder: Path, clients: int) -> Host:
    """Client k holds every image whose number leaves k when divided by the number of clients."""
    data = dataset()
    rows = [np.arange(k, len(data), clients) for k in range(clients)]
    return Host(method, data, Partition.of(rows), PrivateStore(folder), Key(4))


class Spy(Wrapper):
    """A fleet that keeps what came by."""

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        self.seen: dict[int, Reply] = {}
        for arrival in self.fleet.replies(exchange):
            assert arrival.reply is not None
            self.seen[arrival.client] = arrival.reply
            yield arrival


class _UnequalDraw:
    """Client k draws k + 1 episodes a step."""

    def draw(self: Any, data: ClientData, key: Key) -> LocalEpisodes:
        return sample_episodes(data, SPEC, self.local_steps, 1 + int(data.indices[0]), key)


@dataclass(frozen=True)
class UnequalProto(_UnequalDraw, FLProto):
    pass


@dataclass(frozen=True)
class UnequalNaive(_UnequalDraw, FedFSLNaive):
    pass


def method(cls: type[Any], **changes: Any) -> Any:
    model = Model(Conv4(4), LinearHead(3), (6, 6, 1), dtype="float64")
    defaults = {"model": model, "episode": SPEC, "local_steps": 2, "episodes_per_step": 2}
    if issubclass(cls, FedFSLNaive):
        defaults["inner"] = InnerLoop(0.1, 2, 2)
    return cls(**(defaults | changes))


def weights_and_stats(server: Tree) -> tuple[Tree, Tree]:
    return server[0], server[1]


def client_model(m: Any, h: Host, server: Tree, k: int) -> tuple[Tree, Tree, int]:
    """Train client k by itself from the server's state, with a fresh optimiser."""
    drawn = m.draw(h.data(k), ROUND.at("work", "train", "client", k))
    got = local_sgd(m.learner.episode_loss, m.optimizer, *weights_and_stats(server), drawn)
    return got.params, got.stats, drawn.n_episodes


def close(a: Tree, b: Tree, tol: float = 1e-13) -> None:
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


METHODS = [FLProto, FedFSLNaive]


@pytest.mark.parametrize("cls", METHODS)
def test_with_equal_work_the_server_gets_the_arithmetic_mean_of_the_clients(
    cls: type[Any], tmp_path: Path
) -> None:
    m = method(cls)
    h = host(m, tmp_path, 3)
    server = m.init(Key(9))
    after, _ = m.round(server, Clients(Guard(Sequential(h)), [0, 1, 2], round=1), ROUND)
    models = [client_model(m, h, server, k)[:2] for k in range(3)]
    mean = tree.map(lambda *each: torch.stack(each).mean(0), *models)
    close(weights_and_stats(after), mean)
    apart = tree.sub(models[0], models[1])
    assert max(float(t.abs().max()) for t in tree.leaves(apart)) > 1e-3


@pytest.mark.parametrize("cls", [UnequalProto, UnequalNaive])
def test_with_unequal_work_the_mean_is_weighted_by_the_episodes(
    cls: type[Any], tmp_path: Path
) -> None:
    m = method(cls)
    h = host(m, tmp_path, 3)
    server = m.init(Key(9))
    spy = Spy(Sequential(h))
    after, _ = m.round(server, Clients(spy, [0, 1, 2], round=1), ROUND)
    models = [client_model(m, h, server, k) for k in range(3)]
    assert [n for _, _, n in models] == [2, 4, 6]
    assert [spy.seen[k].weight for k in range(3)] == [2, 4, 6]
    mean = tree.map(lambda a, b, c: (2 * a + 4 * b + 6 * c) / 12, *[x[:2] for x in models])
    close(weights_and_stats(after), mean)


@pytest.mark.parametrize("cls", METHODS)
def test_metrics_are_weighted_like_the_models(cls: type[Any], tmp_path: Path) -> None:
    m = method(UnequalProto if cls is FLProto else UnequalNaive)
    spy = Spy(Sequential(host(m, tmp_path, 3)))
    _, metrics = m.round(m.init(Key(9)), Clients(spy, [0, 1, 2], round=1), ROUND)
    for name in ("loss", "accuracy"):
        each = [float(spy.seen[k].metrics[name]) for k in range(3)]
        want = np.average(each, weights=[2, 4, 6])
        assert metrics[name] == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("cls", METHODS)
def test_the_optimiser_starts_afresh_at_every_visit(cls: type[Any], tmp_path: Path) -> None:
    m = method(cls, optimizer=Optimizer("adam", 0.01))
    h = host(m, tmp_path, 1)
    server = m.init(Key(9))
    for t in (1, 2):
        key = Key(9).at("round", t)
        drawn = m.draw(h.data(0), key.at("work", "train", "client", 0))
        want = local_sgd(m.learner.episode_loss, m.optimizer, *weights_and_stats(server), drawn)
        server, _ = m.round(server, Clients(Guard(Sequential(h)), [0], round=t), key)
        close(weights_and_stats(server), (want.params, want.stats))


@pytest.mark.parametrize("cls", METHODS)
def test_a_round_leaves_nothing_with_the_clients_and_no_graph_at_the_server(
    cls: type[Any], tmp_path: Path
) -> None:
    m = method(cls)
    server = m.init(Key(9))
    before = tree.digest(server)
    spy = Spy(Sequential(host(m, tmp_path, 2)))
    after, metrics = m.round(server, Clients(spy, [0, 1], round=1), ROUND)
    assert tree.digest(server) == before
    assert not any(t.requires_grad for t in tree.leaves(after))
    assert not any(t.requires_grad for r in spy.seen.values() for t in tree.leaves(dict(r.up)))
    assert all(type(v) is float for v in metrics.values())
    assert not list(tmp_path.iterdir())


# Quadratic clients: f_k(w) = 1/2 (w - c_k)^T A_k (w - c_k)

DIM, LR = 4, 0.1


def curve(k: int) -> Tensor:
    root = torch.randn(DIM, DIM, generator=Key(k).torch(), dtype=torch.float64)
    return root @ root.T / DIM + 0.5 * torch.eye(DIM, dtype=torch.float64)


def centre(k: int) -> Tensor:
    return torch.randn(DIM, generator=Key(k).at("c").torch(), dtype=torch.float64)


@dataclass(frozen=True)
class Quadratic:
    """FedAvg on quadratics: client k takes `steps[k]` gradient steps and weighs `weights[k]`."""

    steps: tuple[int, ...]
    weights: tuple[float, ...]

    def init_client(self, client: int, key: Key) -> Tree:
        return {}

    def episode_loss(self, w: Tree, stats: Tree, terms: Any, seed: Tensor) -> EpisodeLoss:
        a, c = terms
        return EpisodeLoss(0.5 * (w["w"] - c) @ a @ (w["w"] - c), stats, torch.tensor(0.0))

    @client_work()
    def train(self, down: Tree, private: Tree, drawn: Tree) -> Reply:
        steps = LocalEpisodes(
            (((down["a"], down["c"]),),) * int(down["steps"]), Key(0).tensor(), torch.tensor(1)
        )
        w = {"w": down["w"]}
        new = local_sgd(self.episode_loss, Optimizer("sgd", LR), w, {}, steps)
        return Reply({"delta": tree.sub(new.params, w)}, private, down["weight"])

    def message(self, w: Tensor, k: int) -> Tree:
        numbers = {"steps": torch.tensor(self.steps[k]), "weight": torch.tensor(self.weights[k])}
        return {"w": w, "a": curve(k), "c": centre(k), **numbers}

    def round(self, server: Tree, clients: Clients, key: Key) -> tuple[Tree, Any]:
        got = clients.exchange(
            self.train,
            PerClient(lambda k: self.message(server["w"], k)),
            to=clients.sample(key),
            reduce={"delta": Mean(server)},
            key=key,
        )
        return tree.add(server, got["delta"]), got.metrics

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return (M, b) of the round w -> M w + b."""
        eye = torch.eye(DIM, dtype=torch.float64)
        matrix, offset = torch.zeros_like(eye), torch.zeros(DIM, dtype=torch.float64)
        for k, (steps, weight) in enumerate(zip(self.steps, self.weights, strict=True)):
            share = weight / sum(self.weights)
            shrink = torch.linalg.matrix_power(eye - LR * curve(k), steps)
            matrix += share * shrink
            offset += share * (eye - shrink) @ centre(k)
        return matrix, offset


CASES = [
    Quadratic((5, 5, 5), (1.0, 1.0, 1.0)),
    Quadratic((1, 4, 9), (1.0, 4.0, 9.0)),
    Quadratic((3,), (7.0,)),
]


def quadratic_rounds(m: Quadratic, folder: Path, rounds: int) -> Iterator[Tensor]:
    n = len(m.steps)
    fleet = Guard(Sequential(host(m, folder, n)))
    server = {"w": torch.full((DIM,), 2.0, dtype=torch.float64)}
    yield server["w"]
    for t in range(1, rounds + 1):
        clients = Clients(fleet, list(range(n)), round=t)
        server, _ = m.round(server, clients, Key(0).at("round", t))
        yield server["w"]


@pytest.mark.parametrize("m", CASES, ids=str)
def test_a_round_on_quadratic_clients_equals_the_closed_form(m: Quadratic, tmp_path: Path) -> None:
    matrix, offset = m.affine()
    before, middle, after = quadratic_rounds(m, tmp_path, 2)
    close(middle, matrix @ before + offset, 1e-12)
    close(after, matrix @ middle + offset, 1e-12)


@pytest.mark.slow
def test_with_several_local_steps_the_fixed_point_is_not_the_minimum(tmp_path: Path) -> None:
    # Client drift, which averaging alone does not cure; with one step there is none.
    def minimum(m: Quadratic) -> Tensor:
        shares = torch.tensor(m.weights, dtype=torch.float64) / sum(m.weights)
        pairs = [(p * curve(k), centre(k)) for k, p in enumerate(shares)]
        whole = torch.stack([a for a, _ in pairs]).sum(0)
        return torch.linalg.solve(whole, torch.stack([a @ c for a, c in pairs]).sum(0))

    one, many = Quadratic((1, 1, 1), (1.0, 2.0, 3.0)), Quadratic((9, 9, 9), (1.0, 2.0, 3.0))
    *_, without = quadratic_rounds(one, tmp_path / "one", 400)
    *_, drifted = quadratic_rounds(many, tmp_path / "many", 60)
    close(without, minimum(one), 1e-10)
    assert (drifted - minimum(many)).abs().max() > 1e-2
