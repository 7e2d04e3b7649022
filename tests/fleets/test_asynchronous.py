"""Asynchronous rounds: schedules by a simulation second by second, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedshot.core.errors import CheckpointError, ConfigError
from fedshot.core.seeds import Key
from fedshot.fleets.asynchronous import Asynchronous
from fedshot.fleets.client_times import Availability, ClockOptions, Speed
from fedshot.fleets.guard import Guard
from fedshot.fleets.meter import Meter
from fedshot.fleets.unreliable import Unreliable
from fedshot.protocol.clients import reduce_replies
from fedshot.protocol.exchange import Arrival, ClientWork, Exchange, PerClient, Reply, client_work
from fedshot.protocol.reducers import Gather, Mean, Reducer

ONE = torch.zeros(1, dtype=torch.float64)


class Nobody:
    @client_work()
    def work(self, down: Any, private: Any, drawn: Any) -> Reply:
        raise AssertionError


class Loop:
    """Clients whose change is (client + 1) % of the model that they received; weight client + 1.

    Nothing else is kept: `settle` notes which clients may keep a private state.
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

    def seal(self, round: int, keep: Any) -> str:
        return "private"

    def open(self, round: int, sha: str) -> None:
        assert sha == "private"

    def rewind(self, round: int, sha: str) -> None:
        assert sha in ("private", "")


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
    return Exchange(ClientWork(Nobody(), "work"), down, to, options["reduce"], Key(0).at(round),
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
    working: dict[int, tuple[float, int, torch.Tensor]] = {}
    for r in range(1, rounds + 1):
        free = [c for c in range(clients) if c not in working]
        n = m - len(working) + k - 1
        to = sorted(free[i] for i in Key(1).at(r).numpy().permutation(len(free))[:n])
        waiting = [to[i] for i in Key(0).at(r).at("start").numpy().permutation(len(to))]
        buffer: list[tuple[int, int, torch.Tensor]] = []
        while True:
            while waiting and len(working) < m:
                client = waiting.pop(0)
                working[client] = now + seconds(client), r, w
            if not any(end <= now for end, _, _ in working.values()):
                now += 0.25
            done = sorted((e, c) for c, (e, _, _) in working.items() if e <= now)[:1]
            for _, client in done:
                _, begun, seen = working.pop(client)
                if client not in lost:
                    buffer.append((client, r - begun, seen))
            if len(buffer) == k or not (working or waiting):
                break
        n_all = sum(c + 1 for c, _, _ in buffer)
        step = sum((c + 1) ** 2 / 100 * seen / (1 + tau) ** 0.5 for c, tau, seen in buffer)
        w = w + step / n_all
        stale = sum((c + 1) * tau for c, tau, _ in buffer) / n_all
        found.append((now, tuple(sorted(c for c, _, _ in buffer)), stale))
    return w, found


@pytest.mark.parametrize("lost", [(), (3,), (0, 7)])
@pytest.mark.parametrize(("m", "k"), [(1, 1), (4, 1), (4, 3), (4, 4), (20, 5)])
def test_rounds_are_those_of_a_simulation_by_small_steps(
    tmp_path: Path, m: int, k: int, lost: tuple[int, ...]
) -> None:
    if m == 1:
        lost = ()  # a lost client would leave nobody
    fleet = clock(tmp_path, m, k, lost)
    w, found = play(fleet, range(1, 9), torch.ones(1, dtype=torch.float64), 20, k)
    expected, schedule = brute_force(m, k, 8, 20, lost)
    for (now, accepted, stale), (at, who, tau) in zip(found, schedule, strict=True):
        assert (now, accepted) == (at, who)
        assert stale == pytest.approx(tau, rel=1e-12)
    assert w.item() == pytest.approx(expected.item(), rel=1e-12)
    assert max(stale for _, _, stale in found) > 0 or m == 1


def test_held_replies_survive_a_restart_to_the_bit(tmp_path: Path) -> None:
    one = torch.ones(1, dtype=torch.float64)
    whole = play(clock(tmp_path / "whole", 6, 2, (3,)), range(1, 9), one, 20, 2)
    for cut in range(1, 8):
        folder = tmp_path / str(cut)
        first = clock(folder, 6, 2, (3,))
        w, found = play(first, range(1, cut + 1), one, 20, 2)
        sha = first.seal(cut, ())
        again = clock(folder, 6, 2, (3,))
        again.rewind(cut, sha)
        again.now = first.now
        w, more = play(again, range(cut + 1, 9), w, 20, 2)
        assert (w.item(), found + more) == (whole[0].item(), whole[1])


def test_a_changed_file_of_held_replies_is_refused(tmp_path: Path) -> None:
    first = clock(tmp_path, 4, 2)
    w, _ = play(first, range(1, 2), torch.ones(1, dtype=torch.float64), 20, 2)
    sha = first.seal(1, ())
    play(first, range(2, 3), w, 20, 2)
    first.seal(2, (1,))
    again = clock(tmp_path, 4, 2)
    again.rewind(1, sha)
    assert [p.name for p in tmp_path.iterdir()] == ["working-000001.safetensors"]
    (path,) = tmp_path.iterdir()
    with pytest.raises(CheckpointError, match="does not have the hash in the checkpoint"):
        again.rewind(1, "0" * 64 + "|private")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="working-000001"):
        again.rewind(1, sha)
    again.rewind(-1, "")
    assert list(tmp_path.iterdir()) == []


def test_private_states_are_kept_of_clients_that_will_reply(tmp_path: Path) -> None:
    fleet = clock(tmp_path, 4, 1, lost=(0, 1, 2))
    asked = exchange(1, ONE + 1, (0, 1, 2, 3), 1)
    (arrival,) = [a for a in fleet.replies(asked) if a.reply is not None]
    assert arrival.client == 3
    fleet.settle(asked, frozenset([3]))
    late = exchange(2, ONE + 1, (4, 8, 9), 1)  # 4 takes 10 s, 8 takes 9 s, and 9 takes 11.25 s
    assert [a.client for a in fleet.replies(late) if a.reply is not None] == [8]
    fleet.settle(late, frozenset([8]))
    loop: Any = fleet.fleet.fleet.fleet.fleet  # type: ignore[attr-defined]
    assert loop.settled == [{3}, {4, 8, 9}]
    assert set(fleet.online(range(10))) == {0, 1, 2, 3, 5, 6, 7, 8}
    fleet.void(2)
    assert set(fleet.online(range(10))) == set(range(10))


def test_a_client_that_goes_offline_is_lost_and_frees_its_place(tmp_path: Path) -> None:
    windows = np.array([[0, 0, 50], [4, 0, 5], [5, 0, 50], [6, 6, 7]], dtype=np.float64)
    trace = Availability(windows[:, 0].astype(np.int64), windows[:, 1], windows[:, 2])
    fleet = clock(tmp_path, 3, 3, trace=trace)
    assert list(fleet.online(range(9))) == [0, 4, 5]
    # 0 takes 1 s, 5 takes 2.25 s, and 4 takes 10 s but is online for 5 s.
    arrivals = list(fleet.replies(exchange(1, ONE + 1, (0, 4, 5), 3)))
    assert [(a.client, a.fault and a.fault.kind) for a in arrivals] == [
        (0, None), (5, None), (4, "lost"),
    ]  # fmt: skip
    assert (fleet.now, fleet.to_start) == (5, 5)


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
