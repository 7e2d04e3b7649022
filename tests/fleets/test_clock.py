"""The clock: schedules worked out by hand, files, and runs that do not change without limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.fleets.client_times import Availability, ClockOptions, Speed, speeds
from fedshot.fleets.clock import Clock
from fedshot.fleets.guard import Guard
from fedshot.fleets.meter import Meter
from fedshot.fleets.unreliable import Unreliable
from fedshot.protocol.exchange import (
    Arrival,
    Exchange,
    PerClient,
    Reply,
)
from fedshot.protocol.reducers import Mean

from .nobody import NOBODY

DOWN = {"theta": torch.zeros(1000, dtype=torch.float32)}  # 4,000 bytes
UP = torch.zeros(500, dtype=torch.float32)  # 2,000 bytes


class Loop:
    """Clients that reply in the order `order`."""

    def __init__(self, order: tuple[int, ...]) -> None:
        self.order, self.asked = order, ()

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        self.asked = exchange.to
        for client in self.order:
            if client in exchange.to:
                exchange.message(client)
                yield Arrival(client, Reply({"delta": UP}, {}, 1.0))


# Client k downloads 4 kB in 1 s, works 2 steps of (k + 1) s, and uploads 2 kB in 4 s: 2 k + 7 s.
TIMES = {k: 2.0 * k + 7 for k in range(5)}


def clock(
    options: ClockOptions,
    order: tuple[int, ...] = (3, 0, 4, 2, 1),
    lost: tuple[int, ...] = (),
    availability: Availability | None = None,
) -> Clock:
    meter = Meter(Loop(order))  # type: ignore[arg-type]
    fleet = Unreliable(meter, lambda _, k: "drop" if k in lost else None)
    return Clock(
        Guard(fleet), meter, options, lambda k: Speed(k + 1.0, 0.004, 0.0005), lambda _: 2,
        availability,
    )  # fmt: skip


def exchange(down: Any = DOWN, phase: Any = "train") -> Exchange:
    reduce = {"delta": Mean(UP)}
    return Exchange(NOBODY, down, (0, 1, 2, 3, 4), reduce, Key(0), (1, 0), phase)


def outcome(fleet: Clock, **options: Any) -> tuple[set[int], dict[int, str]]:
    """Return the clients that count, and the kind of fault of the others."""
    arrivals = list(fleet.replies(exchange(**options)))
    assert sorted(a.client for a in arrivals) == [0, 1, 2, 3, 4]
    return (
        {a.client for a in arrivals if a.reply is not None},
        {a.client: a.fault.kind for a in arrivals if a.fault is not None},
    )


def test_without_limits_an_exchange_takes_as_long_as_its_slowest_client() -> None:
    fleet = clock(ClockOptions())
    assert outcome(fleet) == ({0, 1, 2, 3, 4}, {})
    assert fleet.now == pytest.approx(TIMES[4])
    outcome(fleet)
    assert fleet.now == pytest.approx(2 * TIMES[4])


@pytest.mark.parametrize("wait_for", [None, 1, 3, 5])
def test_an_exchange_ends_as_in_a_schedule_by_brute_force(wait_for: int | None) -> None:
    deadlines = (None, 8.0, 11.0, 12.0, 99.0)
    for deadline, lost in itertools.product(deadlines, ((), (1,), (0, 4))):
        counted: set[int] = set()
        gone: set[int] = set()
        at = 0.0
        for at in np.arange(0.0, 100.0, 0.5):  # the server looks at its inbox twice a second
            gone |= {k for k in lost if TIMES[k] <= at}
            counted |= {k for k in TIMES if TIMES[k] <= at and k not in lost}
            if len(counted) == wait_for or len(counted) + len(gone) == 5 or at == deadline:
                break
        late = {k: "late" for k in TIMES if k not in counted and k not in lost}
        for order in list(itertools.permutations(range(5)))[::17]:
            fleet = clock(ClockOptions(wait_for=wait_for, deadline=deadline), order, lost)
            assert outcome(fleet) == (counted, late | dict.fromkeys(lost, "lost")), deadline
            assert fleet.now == pytest.approx(at)


def test_a_message_of_its_own_takes_each_client_its_own_time() -> None:
    fleet = clock(ClockOptions())
    messages = PerClient(lambda k: {"theta": torch.zeros(1000 * (5 - k), dtype=torch.float32)})
    outcome(fleet, down=messages)
    assert fleet.now == pytest.approx(max(TIMES[k] - 1 + (5 - k) for k in TIMES))


def test_an_evaluation_takes_no_time_and_waits_for_all() -> None:
    fleet = clock(ClockOptions(wait_for=1, deadline=1.0))
    assert outcome(fleet, phase="evaluate") == ({0, 1, 2, 3, 4}, {})
    assert fleet.now == 0


WINDOWS = [(0, 0, 9), (1, 0, 8), (2, 5, 50), (4, 0, 4), (4, 40, 50)]


def trace(windows: Any = WINDOWS) -> Availability:
    table = np.array(windows, dtype=np.float64)
    return Availability(table[:, 0].astype(np.int64), table[:, 1], table[:, 2])


def test_clients_that_go_offline_are_lost_and_those_offline_are_not_asked() -> None:
    fleet = clock(ClockOptions(), availability=trace())
    assert list(fleet.online([0, 1, 2, 3, 4])) == [0, 1, 4]
    # 0 needs 7 s of its 9, 1 needs 9 s of its 8, and 4 needs 15 s of its 4; 2 and 3 are offline.
    assert outcome(fleet) == ({0}, dict.fromkeys([1, 2, 3, 4], "lost"))
    assert fleet.fleet.fleet.fleet.fleet.asked == (0, 1, 4)  # type: ignore[attr-defined]
    assert fleet.now == pytest.approx(8)


def test_an_exchange_with_nobody_online_asks_nobody_and_takes_no_time() -> None:
    fleet = clock(ClockOptions(deadline=5.0), availability=trace([(2, 90, 100)]))
    assert outcome(fleet) == (set(), dict.fromkeys(range(5), "lost"))
    assert fleet.now == 0
    assert fleet.fleet.fleet.fleet.fleet.asked == ()  # type: ignore[attr-defined]


def test_a_trace_agrees_with_a_search_second_by_second() -> None:
    found = trace()

    def is_online(client: int, second: int) -> bool:
        return any(c == client and a <= second % 50 < b for c, a, b in WINDOWS)

    for second in range(120):
        expected = [c for c in range(5) if is_online(c, second)]
        assert found.online(float(second)).tolist() == expected
        for client in range(5):
            last = next(s for s in range(second, 999) if not is_online(client, s))
            assert found.until(client, float(second)) == pytest.approx(last)


def test_a_client_whose_windows_cover_the_trace_is_always_online() -> None:
    found = trace([(0, 0, 30), (0, 20, 50), (1, 7, 8)])
    assert found.until(0, 123.25) == math.inf
    assert found.until(1, 57.5) == 58


def test_the_server_waits_until_a_client_is_online() -> None:
    fleet = clock(ClockOptions(), availability=trace([(2, 5, 6), (3, 90, 100)]))
    assert (list(fleet.online([2, 3])), fleet.now) == ([2], 5)
    assert (list(fleet.online([3])), fleet.now) == ([3], 90)
    fleet.now = 100.0
    assert (list(fleet.online([3])), fleet.now) == ([3], 190)
    with pytest.raises(ConfigError, match="no client that takes part in training is ever online"):
        fleet.online([0, 1])


def test_drawn_speeds_have_their_median_and_depend_on_the_client_alone() -> None:
    options = ClockOptions(compute=3.0, upload=2.0, spread=0.5)
    speed = speeds(options, 10**6, Key(1))
    drawn = [speed(k) for k in range(2000)]
    assert speeds(options, 10, Key(1))(7) == drawn[7] != speeds(options, 10, Key(2))(7)
    logs = np.log([s.compute / 3 for s in drawn]), np.log([s.upload / 2 for s in drawn])
    for log in logs:
        assert abs(np.median(log)) < 5 * 0.5 * 1.2533 / math.sqrt(2000)
        assert np.std(log) == pytest.approx(0.5, rel=5 / math.sqrt(4000))
    assert abs(np.corrcoef(*logs)[0, 1]) < 5 / math.sqrt(2000)
    assert all(s.download == math.inf for s in drawn)
    even = speeds(ClockOptions(compute=2.0, distribution="uniform", spread=0.5), 9, Key(1))
    assert all(1 <= even(k).compute <= 3 for k in range(100))


def test_speeds_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "speeds.csv"
    path.write_text("client,compute,download,upload\n1,0.5,2,1\n0,1,4,3\n")
    speed = speeds(ClockOptions(speeds=str(path)), 2, Key(0))
    assert (speed(0), speed(1)) == ((1, 4, 3), (0.5, 2, 1))
    assert speed(1).seconds(6, down=4_000_000, up=1_000_000) == 2 + 3 + 1


HEAD = "client,compute,download,upload\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,speed\n", "the first line is 'client,speed'; expected 'client,compute,down"),
        (HEAD + "0,1,1,1\n", "no line for client 1"),
        (HEAD + "0,1,1,1\n2,1,1,1\n", "line 3: client is 2; expected a client of this run, 0 to 1"),
        (HEAD + "0,1,1,1\n0,1,1,1\n", "line 3: client 0 occurs twice"),
        (HEAD + "0,1,0,1\n", "line 2: expected seconds from 0, and MB per second above 0"),
        (HEAD + "0,1,nan,1\n", "line 2 is '0,1,nan,1'; expected 4 numbers"),
        (HEAD + "0,1\n", "line 2 is '0,1'; expected 4 numbers"),
    ],
)
def test_a_file_of_speeds_that_is_wrong_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "speeds.csv").write_text(text)
    with pytest.raises(ConfigError, match=message):
        speeds(ClockOptions(speeds=str(tmp_path / "speeds.csv")), 2, Key(0))


def test_a_trace_that_is_missing_or_wrong_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    with pytest.raises(ConfigError, match=r"trace\.csv cannot be read: .*No such file"):
        Availability.read(path, 2)
    path.write_text("client,from,to\n0,5,5\n")
    with pytest.raises(ConfigError, match="line 2: from is 5 and to is 5; expected seconds"):
        Availability.read(path, 2)
    path.write_text("client,from,to\n")
    with pytest.raises(ConfigError, match="has no window in which a client is online"):
        Availability.read(path, 2)
    path.write_text("client,from,to\n1,5,6.5\n")
    assert Availability.read(path, 2).online(6).tolist() == [1]
