"""Asynchronous rounds: schedules by a simulation second by second, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from covering import covering
from fedshot.core.errors import CheckpointError, ConfigError
from fedshot.core.seeds import Key
from fedshot.fleets.asynchronous import Asynchronous
from fedshot.fleets.client_times import Availability, ClockOptions, Speed
from fedshot.fleets.guard import Guard
from fedshot.fleets.meter import Meter
from fedshot.fleets.unreliable import Unreliable
from fedshot.protocol.clients import reduce_replies
from fedshot.protocol.exchange import Arrival, Exchange, PerClient, Reply
from fedshot.protocol.reducers import Gather, Mean, Reducer

from .nobody import NOBODY

ONE = torch.zeros(1, dtype=torch.float64)


class Loop:
    """Clients whose change is (client + 1) % of the model that they received; weight client + 1.

    `settle` notes which clients may keep a private state.
    """

    def __init__(self) -> None:
        self.settled: list[frozenset[int]] = []

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        for client in reversed(exchange.to):
            delta = (client + 1) / 100 * exchange.message(client)["w"]
            yield Arrival(client, Reply({"w": delta}, {}, client + 1.0))

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        self.settled.append(accepted)

    def void(self, round: int) -> None:
        pass


def seconds(client: int) -> float:
    return 1.0 + 2.0 * (client % 5) + 0.25 * client  # no two clients take equally long


def clock(
    folder: Path, m: int, k: int, lost: tuple[int, ...] = (), trace: Availability | None = None
) -> Asynchronous:
    loop: Any = Loop()
    meter = Meter(loop)
    fleet = Unreliable(meter, lambda _, client: "drop" if client in lost else None)
    options = ClockOptions(wait_for=k, asynchronous=True)
    inf = float("inf")
    return Asynchronous(
        m, folder, Guard(fleet), meter, options,
        lambda client: Speed(seconds(client), inf, inf), lambda _: 1, trace,
    )  # fmt: skip


def exchange(round: int, w: torch.Tensor, to: tuple[int, ...], buffer: int, **other: Any) -> Any:
    options: dict[str, Any] = {"reduce": {"w": Mean(ONE, max_weight=100.0)}, "number": 0}
    options |= other
    version = (round, options["number"])
    down = options.get("down", {"w": w})
    return Exchange(NOBODY, down, to, options["reduce"], Key(0).at(round),
                    version, buffer=buffer)  # fmt: skip


def play(
    fleet: Asynchronous, rounds: range, w: torch.Tensor, clients: int, buffer: int
) -> tuple[torch.Tensor, list[tuple[float, tuple[int, ...], float]]]:
    """Run rounds of averaging; return the model, and (time, who counted, staleness) of each."""
    found = []
    for r in rounds:
        free = list(fleet.online(range(clients)))
        chosen = Key(1).at(r).numpy().permutation(len(free))[: fleet.to_start]
        to = tuple(sorted(free[i] for i in chosen))
        asked = exchange(r, w, to, buffer)
        got = reduce_replies(fleet, asked)
        fleet.settle(asked, frozenset(got.accepted))
        w = w + got["w"]
        found.append((fleet.now, got.accepted, got.metrics["staleness"]))
    return w, found


def brute_force(
    m: int, k: int, rounds: int, clients: int, lost: tuple[int, ...]
) -> tuple[torch.Tensor, list[tuple[float, tuple[int, ...], float]]]:
    """Simulate the same federation in steps of a quarter of a second."""
    w, now, found = torch.ones(1, dtype=torch.float64), 0.0, []
    training: dict[int, tuple[float, int, torch.Tensor]] = {}

    def shuffled(clients: list[int], key: Key) -> list[int]:
        return [clients[i] for i in key.numpy().permutation(len(clients))]

    for r in range(1, rounds + 1):
        key = Key(0).at(r).at("start")
        free = [c for c in range(clients) if c not in training]
        asked = sorted(shuffled(free, Key(1).at(r))[: m - len(training) + k - 1])
        waiting = shuffled(asked, key)
        gone: list[int] = []
        buffer: list[tuple[int, int, torch.Tensor]] = []
        while len(buffer) < k:
            while len(training) < m:
                if not waiting:  # some were lost
                    free = [c for c in range(clients) if c not in {*training, *asked, *gone}]
                    waiting = shuffled(free, key.at(len(asked)))[: m - len(training)]
                    asked += waiting
                if not waiting:
                    break
                client = waiting.pop(0)
                training[client] = now + seconds(client), r, w
            if not training:
                break
            ended = sorted((e, r0, c) for c, (e, r0, _) in training.items() if e <= now)
            if not ended:
                now += 0.25
                continue
            client = ended[0][-1]
            _, begun, seen = training.pop(client)
            gone.append(client)
            if client not in lost:
                buffer.append((client, r - begun, seen))
        n_all = sum(c + 1 for c, _, _ in buffer)
        step = sum((c + 1) ** 2 / 100 * seen / (1 + tau) ** 0.5 for c, tau, seen in buffer)
        w = w + step / n_all
        stale = sum((c + 1) * tau for c, tau, _ in buffer) / n_all
        found.append((now, tuple(sorted(c for c, _, _ in buffer)), stale))
    return w, found


@pytest.mark.parametrize(
    ("size", "lost"),
    covering([(1, 1), (4, 1), (4, 3), (4, 4), (20, 5)], [(), (3,), tuple(range(0, 20, 2))]),
)
def test_rounds_are_those_of_a_simulation_by_small_steps(
    tmp_path: Path, size: tuple[int, int], lost: tuple[int, ...]
) -> None:
    m, k = size
    fleet = clock(tmp_path, m, k, lost)
    w, found = play(fleet, range(1, 9), torch.ones(1, dtype=torch.float64), 20, k)
    expected, schedule = brute_force(m, k, 8, 20, lost)
    for (now, accepted, stale), (at, who, tau) in zip(found, schedule, strict=True):
        assert (now, accepted) == (at, who)
        assert stale == pytest.approx(tau, rel=1e-12)
    assert w.item() == pytest.approx(expected.item(), rel=1e-12)
    assert max(stale for _, _, stale in found) > 0 or m == 1
    assert all(len(accepted) == k for _, accepted, _ in found)


def test_held_replies_survive_a_restart_to_the_bit(tmp_path: Path) -> None:
    one = torch.ones(1, dtype=torch.float64)
    whole = play(clock(tmp_path / "whole", 6, 2, (3,)), range(1, 9), one, 20, 2)
    for cut in range(1, 8):
        folder = tmp_path / str(cut)
        first = clock(folder, 6, 2, (3,))
        w, found = play(first, range(1, cut + 1), one, 20, 2)
        sha = first.save(cut, ())
        again = clock(folder, 6, 2, (3,))
        again.load(cut, sha)
        again.now = first.now
        w, more = play(again, range(cut + 1, 9), w, 20, 2)
        assert (w.item(), found + more) == (whole[0].item(), whole[1])


def test_a_changed_file_of_replies_is_refused(tmp_path: Path) -> None:
    first = clock(tmp_path, 4, 2)
    w, _ = play(first, range(1, 2), torch.ones(1, dtype=torch.float64), 20, 2)
    sha = first.save(1, ())
    play(first, range(2, 3), w, 20, 2)
    first.save(2, (1,))
    again = clock(tmp_path, 4, 2)
    again.load(1, sha)
    assert [p.name for p in tmp_path.iterdir()] == ["in-flight-000001.safetensors"]
    (path,) = tmp_path.iterdir()
    with pytest.raises(CheckpointError, match="does not have the hash in the checkpoint"):
        again.load(1, "0" * 64)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"in-flight-000001.*Restore"):
        again.load(1, sha)
    again.load(-1, "")
    assert list(tmp_path.iterdir()) == []


def test_private_states_are_kept_of_clients_that_will_reply(tmp_path: Path) -> None:
    fleet = clock(tmp_path, 4, 1, lost=(0, 1, 2))
    everyone = range(10)
    assert len(fleet.online(everyone)) == 10
    asked = exchange(1, ONE + 1, (0, 1, 2, 3), 1)  # these take 1, 3.25, 5.5 and 7.75 s
    arrivals = list(fleet.replies(asked))
    fleet.settle(asked, frozenset(a.client for a in arrivals if a.reply))
    loop: Any = fleet.fleet.fleet.fleet.fleet  # type: ignore[attr-defined]
    training = set(everyone) - set(fleet.online(everyone))
    assert loop.settled[0] == training | {a.client for a in arrivals if a.reply}
    assert len(training) == 3


def test_a_discarded_round_keeps_earlier_replies(tmp_path: Path) -> None:
    fleet = clock(tmp_path, 2, 1)
    fleet.online(range(2))
    (first,) = fleet.replies(exchange(1, ONE + 1, (0, 1), 1))  # 0 takes 1 s, and 1 takes 3.25 s
    fleet.online(range(2))
    (second,) = fleet.replies(exchange(2, ONE + 1, (0,), 1))  # 0 replies after another second
    assert (first.client, second.client, fleet.now) == (0, 0, 2)
    assert not fleet.online([1])
    (third,) = fleet.replies(exchange(3, ONE + 1, (), 1))
    assert (third.client, fleet.now) == (1, 3.25)
    fleet.void(3)
    fleet.now = 5.0  # time does not go back to that of the reply
    assert not fleet.online([1])
    (again,) = fleet.replies(exchange(4, ONE + 1, (), 1))
    stale = again.reply and again.reply.metrics["staleness"]
    assert (again.client, stale, fleet.now) == (1, 3, 5.0)


def test_old_statistics_are_approached_and_not_added(tmp_path: Path) -> None:
    fleet = clock(tmp_path, 2, 1)
    reduce = {"w": Mean(ONE, of_statistics=True)}
    fleet.online(range(2))
    (first,) = fleet.replies(exchange(1, ONE + 100, (0, 1), 1, reduce=reduce))
    assert (first.client, first.reply and first.reply.up["w"].item()) == (0, 1.0)
    sha = fleet.save(1, ())
    restarted = clock(tmp_path, 2, 1)
    restarted.load(1, sha)
    for one in (fleet, restarted):
        one.online([1])
        (stale,) = one.replies(exchange(2, ONE + 40, (), 1, reduce=reduce))
        assert stale.reply is not None
        # The client's statistics are 102, and the server's are now 40.
        assert stale.reply.up["w"].item() == pytest.approx((102 - 40) / 2**0.5)


def test_a_client_that_goes_offline_is_lost_and_frees_its_place(tmp_path: Path) -> None:
    windows = np.array([[0, 0, 50], [4, 0, 5], [5, 0, 50], [6, 2, 20]], dtype=np.float64)
    trace = Availability(windows[:, 0].astype(np.int64), windows[:, 1], windows[:, 2])
    fleet = clock(tmp_path, 3, 3, trace=trace)
    assert list(fleet.online(range(9))) == [0, 4, 5]
    # 0 takes 1 s, 5 takes 2.25 s, 4 takes 10 s and is online for 5 s; 6 takes 4.5 s, from 2.
    arrivals = list(fleet.replies(exchange(1, ONE + 1, (0, 4, 5), 3)))
    assert [(a.client, a.fault and a.fault.kind) for a in arrivals] == [
        (0, None), (5, None), (4, "lost"), (6, None),
    ]  # fmt: skip
    assert (fleet.now, fleet.to_start) == (6.5, 3)


@pytest.mark.parametrize("opens", [0.5, 30.0])
def test_a_free_place_is_filled_as_soon_as_a_client_is_online(tmp_path: Path, opens: float) -> None:
    windows = np.array([[0, 0, 50], [1, opens, 50]], dtype=np.float64)
    trace = Availability(windows[:, 0].astype(np.int64), windows[:, 1], windows[:, 2])
    fleet = clock(tmp_path, 3, 3, trace=trace)
    assert list(fleet.online(range(3))) == [0]
    assert [a.client for a in fleet.replies(exchange(1, ONE + 1, (0,), 3))] == [0, 1]
    assert fleet.now == opens + 3.25  # client 2 is never online, so the round ends


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"number": 1}, "'work' is a second exchange of the round"),
        ({"reduce": {"w": Gather(ONE)}}, "part 'w' of 'work' is not a mean of changes"),
        ({"reduce": {"w": Mean(ONE), "v": Mean(ONE)}}, "part 'v' of 'work' is not a mean"),
        ({"down": PerClient(lambda _: {"w": ONE})}, "part 'w' of 'work' is not a mean"),
    ],
)
def test_what_is_not_a_mean_of_changes_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    reducers: dict[str, Reducer] = changes.get("reduce", {})
    assert all(isinstance(one, Mean | Gather) for one in reducers.values())
    with pytest.raises(ConfigError, match=message):
        list(clock(tmp_path, 2, 1).replies(exchange(1, ONE, (0, 1), 1, **changes)))


@pytest.mark.parametrize("options", [{}, {"wait_for": 2, "deadline": 5.0}])
def test_a_round_ends_by_its_replies_alone(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"expected run\.clock\.wait_for, .* no run\.clock\.dead"):
        ClockOptions(asynchronous=True, **options)
