"""The threads fleet: how many workers, which threads, and nothing left running."""

from __future__ import annotations

import operator
import threading
import time
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody reads)
from torch.utils.flop_counter import FlopCounterMode

from fedshot.config.load import Config
from fedshot.config.schema import RunOptions
from fedshot.core.errors import ConfigError
from fedshot.core.machine import arithmetic, denormals_flushed
from fedshot.core.seeds import Key
from fedshot.fleets.threads import Threads
from fedshot.nn.heads import LinearHead
from fedshot.nn.models.backbones import MLP, Conv4
from fedshot.nn.models.cost import _Counter, step_flops
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.models.resnet import ResNet12
from fedshot.protocol.exchange import Arrival, Reply
from fedshot.runs.prepare import threads_for, workers_for


class Stub:
    """A host whose clients take a moment, and which remembers what ran."""

    def __init__(self, fails: int = -1, meet: int = 1) -> None:
        self.meet, self.all_here = meet, threading.Barrier(meet)  # clients that are served at once
        self.fails, self.served, self.threads, self.now, self.most = fails, [], set(), 0, 0
        self.lock = threading.Lock()

    def serve(self, exchange: Any, client: int) -> Arrival:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.served.append(client)
            self.threads.add((threading.get_ident(), torch.get_num_threads()))
        if client < self.meet:
            self.all_here.wait()
        time.sleep(0.01 * (client % 3))
        with self.lock:
            self.now -= 1
        if client == self.fails:
            raise ValueError(f"client {client} has a bug")
        return Arrival(client, Reply({}, {}, 1.0))


def asked(n: int) -> Any:
    return SimpleNamespace(to=tuple(range(n)))


def test_every_client_answers_once_whatever_the_order() -> None:
    host = Stub(meet=2)
    found = [a.client for a in Threads(host, 3).replies(asked(20))]  # type: ignore[arg-type]
    assert sorted(found) == list(range(20))
    assert 1 < host.most <= 3


def test_workers_have_the_intra_op_threads_of_the_run() -> None:
    host = Stub()
    list(Threads(host, 2, intra_op=1).replies(asked(8)))  # type: ignore[arg-type]
    assert {n for _, n in host.threads} == {1}
    assert threading.get_ident() not in {thread for thread, _ in host.threads}


def test_a_bug_in_a_client_s_work_reaches_the_caller_and_nothing_keeps_running() -> None:
    host = Stub(fails=3)
    with pytest.raises(ValueError, match="client 3 has a bug"):
        list(Threads(host, 2).replies(asked(50)))  # type: ignore[arg-type]
    assert host.now == 0
    assert len(host.served) < 50


def test_a_caller_that_goes_leaves_no_client_running() -> None:
    host = Stub()
    replies = Threads(host, 2).replies(asked(50))  # type: ignore[arg-type]
    next(replies)
    replies.close()  # type: ignore[attr-defined]
    assert host.now == 0
    assert len(host.served) < 10, "clients were started far ahead of the one that was taken"


def test_work_of_the_server_keeps_its_order() -> None:
    fleet = Threads(Stub(), 3)  # type: ignore[arg-type]

    def slow(i: int) -> int:
        time.sleep(0.002 * (i % 4))
        return i * i

    assert fleet.parallel_map(slow, range(30)) == [i * i for i in range(30)]


def test_an_error_in_work_of_the_server_ends_the_rest_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Items but the first ones last until the caller has stopped the others and waits for them."""
    fleet, begun, ended = Threads(Stub(), 2), [], []  # type: ignore[arg-type]
    waited_for = threading.Event()

    def wait(tasks: Any, **options: Any) -> None:
        if not options:
            waited_for.set()
        futures.wait(tasks, **options)

    def work(i: int) -> None:
        begun.append(i)
        if i == 3:
            raise ValueError(f"item {i} has a bug")
        if i not in (1, 2):
            waited_for.wait()
        ended.append(i)

    monkeypatch.setattr("fedshot.fleets.threads.wait", wait)
    try:
        with pytest.raises(ValueError, match="item 3 has a bug"):
            fleet.parallel_map(work, range(100))
    finally:
        waited_for.set()
    assert sorted(begun) == sorted([*ended, 3]), "something still ran"
    assert len(begun) <= 5, "items were begun after the error"


@pytest.mark.slow
def test_steps_that_fill_the_machine_get_all_its_cores_by_a_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedshot.runs.prepare.cores", lambda: 6)
    conv = step_flops(Model(Conv4(64), None, (84, 84, 3)), 100)
    wide = step_flops(Model(ResNet12(), LinearHead(5), (32, 32, 3)), 80)
    big = step_flops(Model(ResNet12(), LinearHead(5), (84, 84, 3)), 80)
    assert threads_for(conv, None) == threads_for(wide, None) == 1
    assert threads_for(big, None) == 6
    assert threads_for(big, 2) == 2
    assert workers_for(conv, RunOptions(threads=1), text=False) == 6
    assert workers_for(conv, RunOptions(threads=2), text=False) == 3
    assert workers_for(big, RunOptions(threads=6), text=False) == 1
    assert workers_for(conv, RunOptions(threads=1, fleet="sequential"), text=False) == 1
    assert workers_for(conv, RunOptions(threads=1, workers=4), text=False) == 4
    assert workers_for(1000, RunOptions(threads=1), text=False) == 1
    assert workers_for(0, RunOptions(threads=1), text=True) == 6


def test_flops_are_those_of_the_papers_nets() -> None:
    # 251 GFLOP for one step of 80 images at 32 px with the widest ResNet-12, counted by hand.
    wide = Model(ResNet12(widths=(64, 160, 320, 640)), None, (32, 32, 3))
    assert step_flops(wide, 80) == pytest.approx(251e9, rel=0.02)
    # Conv4: 2 x 9 x c_in x c_out x pixels, for maps of 28, 14, 7 and 3.
    pixels = [28 * 28, 14 * 14, 49, 9]
    macs = sum(9 * c * 32 * p for c, p in zip([1, 32, 32, 32], pixels, strict=True))
    assert step_flops(Model(Conv4(32), None, (28, 28, 1)), 10) == 3 * 2 * macs * 10


@pytest.mark.parametrize(
    ("backbone", "shape"),
    [
        (MLP((16,)), (8, 8, 1)),
        (Conv4(8, features=3), (20, 20, 3)),
        (ResNet12((8, 12, 16, 20)), (32, 32, 3)),
        (ResNet12((8, 12, 16, 20), features=3), (20, 20, 3)),
    ],
)
def test_flops_are_those_that_torch_counts(backbone: Any, shape: tuple[int, ...]) -> None:
    model = Model(backbone, None, shape, dtype="float64")
    params, stats = model.init(Key(0))
    x = torch.zeros(2, shape[2], *shape[:2], dtype=torch.float64)
    with FlopCounterMode(display=False) as counter:
        model.features(params, stats, x, Mode(norm="batch"))
    assert step_flops(model, 4) == 3 * 2 * counter.get_total_flops()


@pytest.mark.parametrize(
    "product",
    [torch.matmul, torch.bmm, torch.Tensor.matmul, operator.matmul, F.linear],
)
def test_products_are_counted_however_they_are_written(product: Any) -> None:
    a, b = torch.zeros(3, 4, 5), torch.zeros(3, 5, 6)
    args = (a, b[0].T) if product is F.linear else (a, b)
    with FlopCounterMode(display=False) as theirs:
        product(*args)
    ours = _Counter()
    with ours:
        product(*args)
    assert ours.flops == theirs.get_total_flops() == 2 * 3 * 4 * 5 * 6


def test_workers_are_refused_below_one() -> None:
    with pytest.raises(
        ConfigError, match=r"run\.workers is 0; expected a whole number of at least 1"
    ):
        Config.of({"run": {"workers": 0}})


def test_workers_are_refused_where_there_is_one() -> None:
    with pytest.raises(ConfigError, match=r"run\.workers is 4 with run.fleet 'sequential', which"):
        RunOptions(workers=4, fleet="sequential")
    assert RunOptions(workers=1, fleet="sequential").workers == 1
    assert RunOptions(workers=4, fleet="vectorised").workers == 4


def test_runs_flush_denormals_in_every_worker_and_leave_the_caller_as_it_was() -> None:
    before = torch.get_num_threads()
    assert not denormals_flushed()
    with arithmetic(before + 1):
        assert denormals_flushed()
        assert torch.get_num_threads() == before + 1
        fleet = Threads(None, 2, 1)  # type: ignore[arg-type]
        found = fleet.parallel_map(
            lambda _: (denormals_flushed(), torch.get_num_threads()), range(9)
        )
        assert found == [(True, 1)] * 9
    assert not denormals_flushed()
    assert torch.get_num_threads() == before
