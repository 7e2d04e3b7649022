"""The vectorised fleet: what clients share is there once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshot.core.errors import QuorumError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.dataset import Dataset
from fedshot.data.partitions.partition import Partition
from fedshot.fleets.host import Host
from fedshot.fleets.meter import Meter
from fedshot.fleets.private import PrivateStore
from fedshot.fleets.sequential import Sequential
from fedshot.fleets.vectorised import Vectorised
from fedshot.fleets.worker_processes import Processes
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import PerClient, Reply, client_work
from fedshot.protocol.reducers import Gather

N = 10


class Look(NamedTuple):
    """What the work saw of the message: whether it was stacked, and where it lay."""

    stacked: bool
    at: int


class Reader:
    """A method whose clients look at a model of 1000 values."""

    def __init__(self) -> None:
        self.looks: list[Look] = []

    def init_client(self, client: int, key: Key) -> Tree:
        return {}

    def draw(self, data: Any, key: Key) -> Tree:
        return {"x": torch.tensor(data.dataset.y[data.indices], dtype=torch.float64)}

    @client_work(draw="draw")
    def read(self, down: Tree, private: Tree, drawn: Tree) -> Reply:
        theta: Tensor = down["theta"]
        stacked = torch._C._functorch.is_batchedtensor(theta)
        self.looks.append(Look(stacked, 0 if stacked else theta.data_ptr()))
        return Reply({"sum": theta.sum() * drawn["x"].sum()}, private, 1.0)

    @client_work()
    def only_read(self, down: Tree, private: Tree, drawn: Tree) -> Reply:
        return Reply({"sum": down["theta"].sum()}, private, 1.0)


@pytest.fixture
def method() -> Reader:
    return Reader()


@pytest.fixture
def host(method: Reader, tmp_path: Path) -> Host:
    y = np.repeat(np.arange(N), 3)
    dataset = Dataset("none", np.zeros((3 * N, 1, 1, 1), np.uint8), y, tuple("abcdefghij"))
    partition = Partition.of([np.arange(3 * k, 3 * k + 3) for k in range(N)])
    return Host(method, dataset, partition, PrivateStore(tmp_path), Key(0))  # type: ignore[arg-type]


def ask(fleet: Any, work: Callable[..., Reply], down: Any) -> dict[int, float]:
    clients = Clients(fleet, range(N))
    got = clients.exchange(work, down, to=range(N), reduce={"sum": Gather()}, key=Key(1))
    return {client: float(sent) for client, sent in got["sum"].items()}


THETA = torch.arange(1000, dtype=torch.float64)


def test_a_stack_of_ten_clients_holds_one_copy_of_the_model(method: Reader, host: Host) -> None:
    ask(Meter(Vectorised(host)), method.read, {"theta": THETA})
    assert method.looks == [Look(False, THETA.data_ptr())]


@pytest.mark.parametrize("fleet", [Sequential, Vectorised, partial(Processes, workers=2)])
def test_nobody_is_asked(fleet: Callable[[Host], Any], host: Host, method: Reader) -> None:
    clients = Clients(Meter(fleet(host)), range(N))
    with pytest.raises(
        QuorumError, match=r"0 of 0 clients gave a usable reply, the quorum is 1\. T"
    ):
        clients.exchange(method.read, {}, to=[], reduce={"sum": Gather()}, key=Key(1))


def test_messages_that_differ_are_stacked(method: Reader, host: Host) -> None:
    found = ask(Meter(Vectorised(host)), method.read, PerClient(lambda c: {"theta": THETA * c}))
    assert method.looks == [Look(True, 0)]
    assert found == {c: float(THETA.sum()) * c * 3 * c for c in range(N)}


@pytest.mark.parametrize("name", ["read", "only_read"])
@pytest.mark.parametrize("apart", [True, False])
def test_the_ledger_and_the_result_are_those_of_a_loop(
    method: Reader, host: Host, name: str, apart: bool
) -> None:
    down = PerClient(lambda _: {"theta": THETA}) if apart else {"theta": THETA}
    meters = Meter(Sequential(host)), Meter(Vectorised(host))
    one, many = (ask(meter, getattr(method, name), down) for meter in meters)
    assert one == many
    assert meters[0].to_json() == meters[1].to_json()
    assert meters[1].bytes["train", name, "down", "theta"] == N * 8000
    assert meters[1].messages["train", name, "down", "theta"] == N


def test_stacks_are_alike_in_size_and_any_number_of_workers_gives_the_same(
    method: Reader, host: Host
) -> None:
    down = PerClient(lambda c: {"theta": THETA.sin() * c})
    found = []
    for workers in (1, 2, 3):
        method.looks.clear()
        found.append(ask(Meter(Vectorised(host, 4, workers)), method.read, down))
        assert len(method.looks) == 3, "ten clients, at most four in a stack"
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == N
