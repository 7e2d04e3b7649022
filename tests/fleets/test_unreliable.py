"""Trouble by plan: the same each time, and of the kind that was asked for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.fleets.guard import Guard
from fedshot.fleets.unreliable import CORRUPT, Trouble, Unreliable, by_chance
from fedshot.protocol.exchange import Arrival, Exchange, Fault, Reply
from fedshot.protocol.reducers import Gather, Mean, Sum

from .nobody import NOBODY

ONES = {"w": torch.ones(2, 3)}
FLOATS = ({"delta": ONES}, {"delta": Mean(ONES)})
WHOLE = ({"n": torch.tensor([1, 2])}, {"n": Sum(torch.tensor([0, 0]))})
MIXED = (FLOATS[0] | WHOLE[0], FLOATS[1] | WHOLE[1])
APART = ({"model": ONES}, {"model": Gather(ONES)})
NOTHING: tuple[dict[str, Any], dict[str, Any]] = ({}, {})


class Steady:
    """Every client sends the same."""

    def __init__(self, up: Any = FLOATS[0]) -> None:
        self.up = up

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        for client in exchange.to:
            yield Arrival(client, Reply(self.up, {}, 2.0))

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None: ...
    def void(self, round: int) -> None: ...


def exchange(n: int = 4, round: int = 1, reduce: Any = FLOATS[1]) -> Exchange:
    return Exchange(NOBODY, {}, tuple(range(n)), reduce, Key(0), (round, 0))


def plan_of(key: Key, rounds: int = 20, **chances: float) -> list[Trouble | None]:
    plan = by_chance(key, **chances)
    return [plan(exchange(100, r), c) for r in range(rounds) for c in range(100)]


def test_a_plan_is_the_same_each_time_and_another_under_another_key() -> None:
    chances = {"drop": 0.2, "delay": 0.2, "corrupt": 0.2}
    assert plan_of(Key(1), **chances) == plan_of(Key(1), **chances)
    assert plan_of(Key(1), **chances) != plan_of(Key(2), **chances)


def test_a_plan_does_not_depend_on_who_is_asked_before() -> None:
    plan = by_chance(Key(1), drop=0.3, corrupt=0.3)
    ask = exchange(50)
    assert [plan(ask, c) for c in range(50)] == [plan(ask, c) for c in range(49, -1, -1)][::-1]


def test_trouble_strikes_as_often_as_it_should() -> None:
    """Of 2000 replies; five standard deviations."""
    seen = Counter(plan_of(Key(3), drop=0.1, delay=0.2, corrupt=0.3))
    corrupt = sum(seen[kind] for kind in CORRUPT)
    for found, share in [
        (seen["drop"], 0.1),
        (seen["delay"], 0.2),
        (corrupt, 0.3),
        (seen[None], 0.4),
    ]:
        assert abs(found - 2000 * share) < 5 * math.sqrt(2000 * share * (1 - share))
    assert all(seen[kind] > 0 for kind in CORRUPT)


def test_no_chance_is_no_trouble() -> None:
    assert set(plan_of(Key(1))) == {None}
    assert set(plan_of(Key(1), drop=1.0)) == {"drop"}


def test_delayed_replies_arrive_last_and_the_latest_asked_first() -> None:
    fleet = Unreliable(Steady(), lambda _, client: "delay" if client in (0, 2) else None)
    assert [a.client for a in fleet.replies(exchange())] == [1, 3, 2, 0]


def test_a_dropped_reply_is_lost_by_plan() -> None:
    fleet = Unreliable(Steady(), lambda _, client: "drop" if client == 1 else None)
    found = list(fleet.replies(exchange()))
    assert found[1] == Arrival(1, None, Fault("lost", "dropped by plan"))
    assert all(found[c].fault is None for c in (0, 2, 3))


def test_a_fault_of_the_fleet_below_stays_what_it_is() -> None:
    lost = Unreliable(Steady(), lambda *_: "drop")
    assert all(
        a.fault == Fault("lost", "dropped by plan")
        for a in Unreliable(lost, lambda *_: "nan").replies(exchange())
    )


@pytest.mark.parametrize(
    "sent",
    [FLOATS, WHOLE, MIXED, APART, NOTHING],
    ids=["floats", "whole", "mixed", "apart", "none"],
)
def test_each_kind_of_corruption_is_refused_whatever_was_sent(sent: Any) -> None:
    """What cannot be done to what was sent (no NaN among whole numbers) is done in another way."""
    up, reduce = sent
    before = tree.digest(up)
    for trouble in CORRUPT:

        def plan(_: Any, client: int, trouble: Trouble = trouble) -> Trouble | None:
            return trouble if client == 1 else None

        fleet = Unreliable(Steady(up), plan)
        found = {a.client: a for a in Guard(fleet).replies(exchange(reduce=reduce))}
        assert found[1].reply is None, trouble
        assert found[1].fault is not None
        assert found[1].fault.kind == "refused", trouble
        assert all(found[c].fault is None for c in (0, 2, 3)), trouble
        assert tree.digest(up) == before, trouble
