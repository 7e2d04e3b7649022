"""The ledger, against bytes counted by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import Partition
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.meter import Meter
from fedshot.fleets.private import PrivateStore
from fedshot.fleets.sequential import Sequential
from fedshot.fleets.unreliable import Unreliable
from fedshot.methods.base.fl_proto import FLProto
from fedshot.nn.models.backbones import Conv4
from fedshot.nn.models.model import Model
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Fleet

K, ROUNDS = 3, 2
# Conv4 of width 8 on one channel, float32: the first convolution, three more, four norms.
CONV1, CONVS, NORMS = 1 * 8 * 9 + 8, 3 * (8 * 8 * 9 + 8), 4 * (8 + 8)
THETA = 4 * (CONV1 + CONVS + NORMS)  # bytes
STATS = 4 * 4 * (8 + 8)  # mean and variance of four norms


def meter(folder: Path, method: FLProto) -> Meter:
    rng = Key(0).numpy()
    x = rng.integers(0, 256, (60, 4, 4, 1)).astype(np.uint8)
    dataset = Dataset("noise", x, np.repeat(np.arange(3), 20), ("a", "b", "c"))
    rows = [np.arange(k, 60, K) for k in range(K)]
    host = Host(method, dataset, Partition.of(rows), PrivateStore(folder), Key(1))
    return Meter(Sequential(host))


def play(method: FLProto, fleet: Fleet, rounds: int = ROUNDS) -> None:
    server = method.init(Key(2))
    for r in range(rounds):
        clients = Clients(Guard(fleet), range(K), round=r + 1, quorum=0.0)
        server, _ = method.round(server, clients, Key(3).at(r))


@pytest.fixture
def method() -> FLProto:
    return FLProto(Model(Conv4(width=8), None, (4, 4, 1)), EpisodeSpec(2, 1, 1), local_steps=1)


def test_the_bytes_of_fl_proto_are_those_counted_by_hand(tmp_path: Path, method: FLProto) -> None:
    ledger = meter(tmp_path, method)
    play(method, ledger)
    sent = K * ROUNDS
    assert ledger.to_json() == [
        dict(zip(("phase", "work", "direction", "part"), line, strict=True))
        | {"bytes": sent * n, "messages": sent}
        for line, n in [
            (("train", "train", "down", "stats"), STATS),
            (("train", "train", "down", "theta"), THETA),
            (("train", "train", "up", "stats"), STATS),
            (("train", "train", "up", "theta"), THETA),
        ]
    ]
    assert ledger.total("train", "down") == ledger.total("train", "up") == sent * (THETA + STATS)
    assert ledger.total("evaluate", "down") == 0


def test_a_lost_reply_is_not_counted_and_a_refused_one_is(tmp_path: Path, method: FLProto) -> None:
    """Client 0's is lost on the way, client 1's is sent in vain."""
    ledger = meter(tmp_path, method)
    plan = {0: "drop", 1: "zero_weight"}
    ledger.fleet = Unreliable(ledger.fleet, lambda _, client: plan.get(client))
    play(method, ledger, rounds=1)
    assert ledger.total("train", "down") == 3 * (THETA + STATS)
    assert ledger.total("train", "up") == 2 * (THETA + STATS)


def test_a_ledger_goes_on_from_its_rows(tmp_path: Path, method: FLProto) -> None:
    whole, half = meter(tmp_path, method), meter(tmp_path, method)
    play(method, whole)
    play(method, half, rounds=1)
    rest = meter(tmp_path, method)
    rest.bytes["train", "old", "up", "x"] = 1  # forgotten when it goes on from rows
    rest.load_json(half.to_json())
    play(method, rest, rounds=1)
    assert rest.to_json() == whole.to_json()


def test_the_meter_changes_nothing(tmp_path: Path, method: FLProto) -> None:
    ledger = meter(tmp_path, method)
    seen = []

    class Through(Unreliable):
        def replies(self, exchange):
            for arrival in self.fleet.replies(exchange):
                seen.append(arrival)
                yield arrival

    ledger.fleet = Through(ledger.fleet, lambda *_: None)
    clients = Clients(ledger, range(K))
    arrivals = []
    inner = ledger.replies
    ledger.replies = lambda exchange: (arrivals.append(a) or a for a in inner(exchange))
    method.round(method.init(Key(2)), clients, Key(3))
    assert len(arrivals) == K
    assert all(a is b for a, b in zip(arrivals, seen, strict=True))


def test_a_message_for_all_is_passed_on_as_one(tmp_path: Path, method: FLProto) -> None:
    """A fleet may then hold it once for a whole stack."""
    ledger, kinds = meter(tmp_path, method), []
    inner = ledger.fleet.replies
    ledger.fleet.replies = lambda exchange: kinds.append(type(exchange.down)) or inner(exchange)
    play(method, ledger, rounds=1)
    assert kinds == [dict]


def test_two_meters_count_the_same(tmp_path: Path, method: FLProto) -> None:
    inner = meter(tmp_path, method)
    outer = Meter(inner)
    play(method, outer)
    assert outer.to_json() == inner.to_json()
    assert outer.total("train", "down") == K * ROUNDS * (THETA + STATS)
