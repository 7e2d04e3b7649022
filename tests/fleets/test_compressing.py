"""Error feedback, by its own equation and on a quadratic; decoding by the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshot.conformance.small import DATASET, PARTITION
from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.fleets.compressing import ClientSide, Compressed
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.private import PrivateStore
from fedshot.fleets.sequential import Sequential
from fedshot.protocol.clients import reduce_replies
from fedshot.protocol.compressors import Compression, Compressor, Int4, Int8, TopK, decoded
from fedshot.protocol.exchange import (
    Arrival,
    ClientWork,
    Exchange,
    PerClient,
    Reply,
    client_work,
)
from fedshot.protocol.reducers import Gather, Mean, Reducer, Sum

ONE = torch.zeros(4, 4, dtype=torch.float64)


class Descent:
    """The clients' losses are |x - b_k|^2 / 2; each uploads a step of gradient descent."""

    name = "descent"

    def __init__(self, targets: Tensor, step: float = 0.05) -> None:
        self.targets, self.step = targets, step

    def init_client(self, client: int, key: Key) -> Any:
        return {"asked": torch.tensor(0)}

    @client_work()
    def train(self, down: Any, private: Any, drawn: Any) -> Reply:
        change = self.step * (self.targets[int(down["client"])] - down["x"])
        return Reply({"x": change}, {"asked": private["asked"] + 1}, 1.0)


def exchange(work: Any, x: Tensor, round: int, to: tuple[int, ...], reduce: Any = None) -> Exchange:
    def message(client: int) -> Any:
        return {"x": x, "client": torch.tensor(client)}

    return Exchange(
        ClientWork(work, "train"), PerClient(message), to, reduce or {"x": Mean(ONE)},
        Key(0).at(round), (round, 0),
    )  # fmt: skip


def fleet_of(work: Any, folder: Path, options: Compression) -> Guard:
    host = Host(
        work, DATASET, PARTITION, PrivateStore(folder / "clients"), Key(0),
        compressing=ClientSide(options),
    )  # fmt: skip
    return Guard(Compressed(Sequential(host), options))


def distance_after(rounds: int, options: Compression, folder: Path) -> float:
    """Return |x - mean b|, where the minimum is, after rounds of all clients."""
    targets = torch.randn(3, 4, 4, generator=Key(5).torch(), dtype=torch.float64)
    work, x = Descent(targets), ONE
    fleet = fleet_of(work, folder, options)
    for round in range(1, rounds + 1):
        asked = exchange(work, x, round, (0, 1, 2))
        outcome = reduce_replies(fleet, asked)
        fleet.settle(asked, frozenset(outcome.accepted))
        fleet.seal(round, [])
        x = x + outcome["x"]
    return float((x - targets.mean(0)).norm())


def test_topk_comes_to_the_minimum_of_a_quadratic_with_error_feedback_alone(tmp_path: Path) -> None:
    """Clients disagree, so at the minimum their changes are large, and only cancel in the mean."""
    topk, n = TopK(share=1 / 8), 60
    plain = distance_after(n, Compression(), tmp_path / "plain")
    assert distance_after(n, Compression(topk), tmp_path / "with") < 1.3 * plain
    without = distance_after(n, Compression(topk, error_feedback=False), tmp_path / "without")
    assert without > 10 * plain


def test_topk_of_everything_gives_the_bits_of_a_run_without_compression(tmp_path: Path) -> None:
    plain = distance_after(5, Compression(), tmp_path / "plain")
    assert distance_after(5, Compression(TopK(share=1.0)), tmp_path / "all") == plain


@pytest.mark.parametrize("compressor", [TopK(share=0.2), Int8()], ids=["topk", "int8"])
def test_what_was_sent_and_what_is_remembered_are_the_sum_of_the_changes(
    compressor: Compressor,
) -> None:
    """In multiples of 2**-20, and a largest entry that makes a step of int8 one, too: exactly."""
    side, memory, sent = ClientSide(Compression(compressor)), {}, torch.zeros(6, 6).double()
    total = torch.zeros(6, 6).double()
    for round in range(1, 6):
        change = (
            torch.randint(-1000, 1000, (6, 6), generator=Key(round).torch()).double() * 2.0**-20
        )
        held = sum(memory.values(), torch.zeros(()))
        change[0, 0] = 127 * 2.0**-12 - (held[0, 0] if memory else 0)
        asked = exchange(None, ONE, round, (0,))
        reply = Reply({"x": {"w": change}}, {}, 1.0)
        up, memory = side.upload(asked, 0, reply, memory)
        total, sent = total + change, sent + decoded(up["x"], {"w": change})["w"]
        assert torch.equal(sent + memory["train:x:w"], total)
        assert memory["train:x:w"].any()


def test_memory_is_that_of_the_last_accepted_upload_however_long_ago(tmp_path: Path) -> None:
    work = Descent(torch.randn(2, 4, 4, generator=Key(5).torch(), dtype=torch.float64))
    fleet = fleet_of(work, tmp_path, Compression(TopK(share=0.1)))
    host = fleet.fleet.fleet.host  # type: ignore[attr-defined]

    def upload(round: int, to: tuple[int, ...], *, accept: bool) -> None:
        asked = exchange(work, ONE, round, to)
        list(fleet.replies(asked))
        fleet.settle(asked, frozenset(to if accept else ()))
        fleet.seal(round, [])

    def state(round: int) -> str:
        return tree.digest([host.private(0, (round, 9)), host._memory(0, (round, 9))][1])

    upload(1, (0, 1), accept=True)
    first = state(1)
    upload(2, (0,), accept=False)
    for round in range(3, 8):
        upload(round, (1,), accept=True)
    assert state(8) == first
    assert host.private(0, (8, 0))["asked"] == 1
    upload(8, (0,), accept=True)
    assert state(8) != first
    again = PrivateStore(tmp_path / "clients")  # a process that goes on reads the same bits
    again.open(8, fleet.seal(8, []).partition("/")[0])
    assert tree.digest_of((again.load(0, (8, 0)) or {}).items()) == tree.digest_of(
        (host.store.load(0, (8, 0)) or {}).items()
    )


class Replies:
    """Every client sends the same part."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        for client in exchange.to:
            yield Arrival(client, Reply({"x": self.part}, {}, 1.0))


def test_an_upload_that_cannot_be_decoded_is_refused_with_the_reason() -> None:
    flawed = Int4().encode(torch.ones(2, 2))
    fleet: Any = Compressed(Replies(flawed), Compression(Int4()))
    (arrival,) = Guard(fleet).replies(exchange(Descent(ONE), ONE, 1, (0,)))
    assert arrival.fault is not None
    assert arrival.fault.kind == "refused"
    assert "part 'x': its codes are uint8[2], not 16 packed in bytes" in arrival.fault.reason


def test_an_upload_that_is_not_finite_is_refused_and_changes_no_memory(tmp_path: Path) -> None:
    target = torch.zeros(1, 4, 4).double()
    target[0, 1, 2] = torch.inf
    work = Descent(target)
    fleet = fleet_of(work, tmp_path, Compression(Int8()))
    asked = exchange(work, ONE, 1, (0,))
    (arrival,) = fleet.replies(asked)
    fleet.settle(asked, frozenset())
    assert arrival.fault is not None
    assert arrival.fault.diverged
    assert "part 'x'" in arrival.fault.reason
    assert fleet.fleet.fleet.host.store.load(0, (1, 0)) is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("reducer", "options", "reason"),
    [
        (Sum(ONE), Compression(TopK(parts=("x",))), "only changes that add up over rounds"),
        (Gather(), Compression(Int8(parts=("x",))), "whose size differs by client"),
    ],
)
def test_a_part_that_a_compressor_does_not_suit_is_refused(
    reducer: Reducer, options: Compression, reason: str
) -> None:
    fleet: Any = Compressed(Replies(ONE), options)
    with pytest.raises(ConfigError, match=reason):
        list(fleet.replies(exchange(Descent(ONE), ONE, 1, (0,), {"x": reducer})))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (Compression(Int8(parts=("y",))), "compress.up.parts has 'y', which is not a part"),
        (Compression(down=Int8(parts=("client",))), "compress.down.parts has 'client'"),
        (Compression(TopK()), "compress.up has no effect"),
    ],
)
def test_a_compressor_without_anything_to_compress_is_refused(
    options: Compression, reason: str
) -> None:
    fleet: Any = Compressed(Replies(ONE), options)
    reducer = Sum(ONE)
    for arrival in fleet.replies(exchange(Descent(ONE), ONE, 1, (0,), {"x": reducer})):
        assert arrival.reply is not None
    with pytest.raises(ConfigError, match=reason):
        fleet.check_used()
