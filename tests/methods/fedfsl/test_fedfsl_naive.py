"""FedFSL-naive against algorithm 1 of the paper, written out with torch.func and torch.optim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from covering import slow
from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.episode import Episode
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import Partition
from fedshot.evaluation.episodic_test import EpisodicTest
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.private import PrivateStore
from fedshot.fleets.sequential import Sequential
from fedshot.learners.maml import InnerLoop
from fedshot.methods.fedfsl.fedfsl_naive import FedFSLNaive
from fedshot.nn.heads import LinearHead
from fedshot.nn.models.backbones import MLP
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.clients import Clients

SPEC = EpisodeSpec(way=3, shot=2, query=4)


def method(**changes: Any) -> FedFSLNaive:
    model = Model(MLP((8, 7)), LinearHead(3), (6, 6, 1), dtype="float64")
    defaults: dict[str, Any] = {"model": model, "episode": SPEC, "local_steps": 2}
    return FedFSLNaive(**(defaults | changes))


def host(m: FedFSLNaive, folder: Path, clients: int) -> Host:
    rng = np.random.Generator(np.random.Philox(0))
    x = rng.integers(0, 256, (5 * 30, 6, 6, 1), dtype=np.uint8)
    data = Dataset("noise", x, np.repeat(np.arange(5), 30), tuple("abcde"))
    rows = [np.arange(k, len(data), clients) for k in range(clients)]
    return Host(m, data, Partition.of(rows), PrivateStore(folder), Key(4))


def one_round(m: FedFSLNaive, h: Host, server: Any, t: int, clients: int) -> Any:
    ids = list(range(clients))
    key = Key(9).at("round", t)
    return m.round(server, Clients(Guard(Sequential(h)), ids, round=t), key)[0]


def episodes(m: FedFSLNaive, h: Host, t: int, k: int) -> tuple[tuple[Episode, ...], ...]:
    key = Key(9).at("round", t).at("work", "train", "client", k)
    return m.draw(h.data(k), key).steps


def pixels(x: Tensor) -> Tensor:
    return (x.permute(0, 3, 1, 2).double() / 127.5 - 1).flatten(1)


def logits(w: Tree, x: Tensor) -> Tensor:
    h = pixels(x)
    for name in ("linear1", "linear2"):
        h = F.linear(h, w["body"][name]["weight"], w["body"][name]["bias"]).relu()
    return F.linear(h, w["head"]["weight"], w["head"]["bias"])


def support_loss(w: Tree, e: Episode) -> Tensor:
    return F.cross_entropy(logits(w, e.support_x), e.support_y)


def adapt(w: Tree, e: Episode, lr: float, steps: int) -> Tree:
    for _ in range(steps):  # eq. (4)
        w = tree.map(lambda p, g: p - lr * g, w, torch.func.grad(support_loss)(w, e))
    return w


def task_loss(w: Tree, e: Episode, inner: InnerLoop) -> Tensor:
    adapted = adapt(w, e, inner.lr, inner.steps)  # eq. (5)
    return F.cross_entropy(logits(adapted, e.query_x), e.query_y)


def optimizer(opt: Optimizer, w: list[Tensor]) -> torch.optim.Optimizer:
    if opt.name == "adam":
        return torch.optim.Adam(w, opt.lr, weight_decay=opt.weight_decay)
    return torch.optim.SGD(w, opt.lr, momentum=opt.momentum, weight_decay=opt.weight_decay)


def client_update(m: FedFSLNaive, w: Tree, steps: Any) -> Tree:
    """ClientUpdate of algorithm 1."""
    w = tree.map(lambda t: t.clone().requires_grad_(), w)
    leaves = tree.leaves(w)
    stepper = optimizer(m.optimizer, leaves)
    for step in steps:
        grads = [torch.func.grad(task_loss)(tree.detach(w), e, m.inner) for e in step]
        mean = tree.map(lambda *each: torch.stack(each).mean(0), *grads)
        for leaf, grad in zip(leaves, tree.leaves(mean), strict=True):
            leaf.grad = grad
        stepper.step()
    return tree.detach(w)


@pytest.mark.parametrize(
    "opt", [Optimizer("adam", 0.01), Optimizer("sgd", 0.1, momentum=0.9)], ids=str
)
@pytest.mark.parametrize("inner_steps", [*slow(1), 3])
def test_two_rounds_equal_algorithm_1(opt: Optimizer, inner_steps: int, tmp_path: Path) -> None:
    m = method(inner=InnerLoop(0.1, inner_steps), episodes_per_step=2, optimizer=opt)
    h = host(m, tmp_path, 3)
    server = m.init(Key(9))
    w = server.w
    for t in (1, 2):
        server = one_round(m, h, server, t, 3)
        models = [client_update(m, w, episodes(m, h, t, k)) for k in range(3)]
        w = tree.map(lambda *each: torch.stack(each).mean(0), *models)  # eq. (10)
    torch.testing.assert_close(server.w, w, rtol=1e-9, atol=1e-10)


class Twin(nn.Module):
    """The same network as a torch.nn module."""

    def __init__(self, w: Tree) -> None:
        super().__init__()
        parts = [w["body"]["linear1"], w["body"]["linear2"], w["head"]]
        self.layers = nn.ModuleList()
        for part in parts:
            n_out, n_in = part["weight"].shape
            layer = nn.Linear(n_in, n_out).double()
            layer.load_state_dict(part)
            self.layers.append(layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        out: Tensor = self.layers[-1](x)
        return out

    def tree(self) -> Tree:
        one, two, head = (
            {"weight": layer.weight.detach(), "bias": layer.bias.detach()} for layer in self.layers
        )
        return {"body": {"linear1": one, "linear2": two}, "head": head}


def test_without_inner_steps_one_client_is_plain_sgd_on_the_queries(tmp_path: Path) -> None:
    m = method(
        inner=InnerLoop(steps=0), local_steps=4, optimizer=Optimizer("sgd", 0.1, weight_decay=0.01)
    )
    h = host(m, tmp_path, 1)
    server = m.init(Key(9))
    twin = Twin(server.w)
    sgd = torch.optim.SGD(twin.parameters(), 0.1, weight_decay=0.01)
    for t in (1, 2):
        server = one_round(m, h, server, t, 1)
        for (e,) in episodes(m, h, t, 0):
            sgd.zero_grad()
            F.cross_entropy(twin(pixels(e.query_x)), e.query_y).backward()
            sgd.step()
    torch.testing.assert_close(server.w, twin.tree(), rtol=1e-11, atol=1e-12)


def test_without_inner_steps_many_clients_of_one_step_are_one_big_batch(tmp_path: Path) -> None:
    # One SGD step each, averaged, is one SGD step on the mean of the clients' losses.
    m = method(inner=InnerLoop(steps=0), local_steps=1, optimizer=Optimizer("sgd", 0.1))
    h = host(m, tmp_path, 3)
    server = m.init(Key(9))
    twin = Twin(server.w)
    sgd = torch.optim.SGD(twin.parameters(), 0.1)
    server = one_round(m, h, server, 1, 3)
    every = [episodes(m, h, 1, k)[0][0] for k in range(3)]
    x, y = torch.cat([e.query_x for e in every]), torch.cat([e.query_y for e in every])
    F.cross_entropy(twin(pixels(x)), y).backward()
    sgd.step()
    torch.testing.assert_close(server.w, twin.tree(), rtol=1e-11, atol=1e-12)


def test_at_test_the_averaged_model_adapts_with_its_own_number_of_steps(tmp_path: Path) -> None:
    m = method(inner=InnerLoop(0.1, steps=1, test_steps=6))
    h = host(m, tmp_path, 2)
    server = one_round(m, h, m.init(Key(9)), 1, 2)
    episodic_test = EpisodicTest.draw(h._dataset, range(5), SPEC, 4, Key(8))
    clients = Clients(Guard(Sequential(h)), [0, 1], round=1, phase="evaluate")
    answers = m.evaluate(server, clients, episodic_test.eval_episodes, Key(7))
    assert [(a.eval_episode, a.client) for a in answers] == [(u, None) for u in range(4)]
    for u, answer in enumerate(answers):
        q = episodic_test.eval_episodes[u]
        e = Episode(q.support_x, q.support_y, q.query_x, episodic_test.labels(u), q.classes)
        want = logits(adapt(server.w, e, 0.1, 6), q.query_x)
        torch.testing.assert_close(answer.logits, want, rtol=1e-11, atol=1e-12)


def test_a_test_leaves_the_server_as_it_was(tmp_path: Path) -> None:
    m = method(inner=InnerLoop(0.1, 1, 2))
    h = host(m, tmp_path, 1)
    server = m.init(Key(9))
    before = tree.digest(server)
    episodic_test = EpisodicTest.draw(h._dataset, range(5), SPEC, 2, Key(8))
    clients = Clients(Guard(Sequential(h)), [0], phase="evaluate")
    first = m.evaluate(server, clients, episodic_test.eval_episodes, Key(7))
    again = m.evaluate(server, clients, episodic_test.eval_episodes, Key(7))
    assert tree.digest(server) == before
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(first, again, strict=True))
