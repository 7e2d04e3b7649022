"""The guard: each kind of unsound reply is refused in words that say what was expected."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.fleets.guard import Guard
from fedshot.fleets.influence import Influence
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Arrival, Exchange, Fault, Reply
from fedshot.protocol.reducers import Gather, Mean, Sum

from .nobody import NOBODY, Nobody

LIKE = {"body": {"w": torch.zeros(2, 3)}, "b": torch.zeros(3)}
GOOD = {"delta": LIKE, "seen": torch.tensor([1, 2])}
REDUCE = {"delta": Mean(LIKE), "seen": Sum(torch.zeros(2, dtype=torch.int64))}


class Given:
    """A fleet of ready-made arrivals."""

    def __init__(self, *arrivals: Arrival) -> None:
        self.arrivals, self.validated = arrivals, []

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        yield from self.arrivals

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        self.validated.append(accepted)

    def void(self, round: int) -> None:
        raise AssertionError


def exchange(to: tuple[int, ...] = (7,), reduce: Any = REDUCE) -> Exchange:
    return Exchange(NOBODY, {}, to, reduce, Key(0), (1, 0))


def check(
    up: Any = GOOD, weight: Any = 2.0, metrics: Any = None, reduce: Any = REDUCE
) -> str | None:
    """Return why the guard refuses this reply of client 7; None when it passes it on."""
    reply = Reply(up, {}, weight, {} if metrics is None else metrics)
    (arrival,) = Guard(Given(Arrival(7, reply))).replies(exchange(reduce=reduce))
    assert arrival.client == 7
    if arrival.fault is None:
        assert arrival.reply is reply
        return None
    assert arrival.reply is None
    assert arrival.fault.kind == "refused"
    return arrival.fault.reason


def having(**changes: Any) -> Any:
    """GOOD with other leaves in part delta."""
    return GOOD | {"delta": LIKE | changes}


def test_a_sound_reply_passes_untouched() -> None:
    before = tree.digest(GOOD)
    assert check() is None
    assert check(weight=torch.tensor(3), metrics={"loss": torch.tensor(0.5)}) is None
    assert check(weight=1, metrics={"loss": torch.tensor([0.5])}) is None
    assert tree.digest(GOOD) == before


NOT_FINITE = "part 'delta': b holds a value that is not finite"


@pytest.mark.parametrize(
    ("up", "reason"),
    [
        (having(b=torch.tensor([0.0, math.nan, 0.0])), NOT_FINITE),
        (having(b=torch.tensor([0.0, math.inf, 0.0])), NOT_FINITE),
        (having(b=torch.zeros(4)), "part 'delta': b is float32[4], expected float32[3]"),
        (having(b=torch.zeros(1, 3)), "part 'delta': b is float32[1, 3], expected float32[3]"),
        (having(b=torch.zeros(3).double()), "part 'delta': b is float64[3], expected float32[3]"),
        (having(b=torch.zeros(3).int()), "part 'delta': b is int32[3], expected float32[3]"),
        (having(body={}), "part 'delta': body/w is missing"),
        (having(head=torch.zeros(1)), "part 'delta': head is not expected"),
        (having(b=[0.0, 0.0, 0.0]), "part 'delta': b is a list; a tree holds tensors"),
        ({"delta": LIKE}, "the parts are ['delta'], expected ['delta', 'seen']"),
        ({}, "the parts are [], expected ['delta', 'seen']"),
        (
            GOOD | {"extra": LIKE},
            "the parts are ['delta', 'extra', 'seen'], expected ['delta', 'seen']",
        ),
        (
            having(b=torch.tensor([0.0, -40000.0, 0.0])),
            "part 'delta': b holds 4e+04, more than the limit of 3.28e+04",
        ),
        (
            GOOD | {"seen": torch.tensor([0, 70000])},
            "part 'seen': . holds 7e+04, more than the limit of 6.55e+04",
        ),
        (GOOD | {"seen": torch.ones(2)}, "part 'seen': . is float32[2], expected int64[2]"),
    ],
)
def test_an_unsound_part_is_refused_with_the_reason(up: Any, reason: str) -> None:
    found = check(up)
    assert found is not None
    assert found.startswith(reason)


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (0.0, "the weight is 0.0, expected a finite number above 0"),
        (-1, "the weight is -1, expected a finite number above 0"),
        (math.nan, "the weight holds a value that is not finite: nan"),
        (torch.tensor(math.inf), "the weight holds a value that is not finite: inf"),
        (None, "the weight is None, expected one number"),
        ("many", "the weight is 'many', expected one number"),
        (torch.ones(2), "the weight is tensor([1., 1.]), expected one number"),
        (torch.ones(0), "the weight is tensor([]), expected one number"),
        pytest.param(10**400, "the weight is ", id="10**400"),
    ],
)
def test_an_unsound_weight_is_refused_with_the_reason(weight: Any, reason: str) -> None:
    found = check(weight=weight)
    assert found is not None
    assert found.startswith(reason)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.tensor(math.nan), "metric 'loss' holds a value that is not finite: nan"),
        (torch.tensor([math.inf]), "metric 'loss' holds a value that is not finite: inf"),
        (torch.ones(2), "metric 'loss' is tensor([1., 1.]), expected one finite number"),
        (torch.ones(0), "metric 'loss' is tensor([]), expected one finite number"),
    ],
)
def test_a_metric_that_is_not_one_finite_number_is_refused(
    value: torch.Tensor, reason: str
) -> None:
    assert check(metrics={"loss": value}) == reason


@pytest.mark.parametrize(
    ("changes", "diverged"),
    [
        ({"weight": 0.0}, False),
        ({"weight": 2.0**21}, False),
        ({"weight": None}, False),
        ({"weight": math.nan}, True),
        ({"metrics": {"loss": torch.ones(2)}}, False),
        ({"metrics": [0.5]}, False),
        ({"metrics": {"loss": torch.tensor(math.nan)}}, True),
        ({"metrics": {"loss": torch.tensor(1e300, dtype=torch.float64)}}, True),
        ({"up": {"delta": LIKE}}, False),
    ],
)
def test_a_weight_or_metric_in_a_wrong_form_is_malformed_and_one_not_finite_has_diverged(
    changes: dict[str, Any], diverged: bool
) -> None:
    """So that a run ends with an error that says to correct the method, or to lower the steps."""
    reason = check(**changes)
    assert reason is not None
    found = Fault("refused", reason)
    assert (found.diverged, found.malformed) == (diverged, not diverged)


def test_no_finite_metric_or_weight_ends_a_run() -> None:
    """Two clients told of losses whose sum is beyond float64, and of weights likewise."""
    huge = torch.tensor(1.7e308, dtype=torch.float64)
    largest = torch.tensor(torch.finfo(torch.float32).max)
    for value in (huge, -huge):
        found = check(metrics={"loss": value})
        assert found is not None
        assert found.endswith("1.7e+308, more than the limit of 3.4e+38")
    assert "the weight is 2.1e+06, expected at most 1.05e+06" in str(check(weight=2.0**21))
    fleet = Given(
        *(Arrival(c, Reply({"a": torch.ones(1)}, {}, 2**20, {"loss": largest})) for c in range(9)),
        Arrival(9, Reply({"a": torch.ones(1)}, {}, 1e308, {"loss": largest})),
        Arrival(10, Reply({"a": torch.ones(1)}, {}, 1, {"loss": huge})),
    )
    clients = Clients(Guard(fleet), range(11), round=1)
    got = clients.exchange(Nobody().work, {}, to=range(11), reduce={"a": Gather()}, key=Key(0))
    assert sorted(got.faults) == [9, 10]
    assert got.metrics == {"loss": float(largest)}
    assert got.weight == 9 * 2**20


@pytest.mark.parametrize("value", [None, "low", {"a": torch.ones(1)}])
def test_a_metric_that_is_no_tensor_is_refused_without_a_crash(value: Any) -> None:
    assert check(metrics={"loss": value}) is not None


@pytest.mark.parametrize("up", [None, [LIKE], LIKE["b"]])
def test_uploads_that_are_not_named_parts_are_refused_without_a_crash(up: Any) -> None:
    assert check(up) is not None


def test_gathered_parts_are_looked_through_too() -> None:
    reduce = {"logits": Gather()}
    assert check({"logits": {"3": torch.ones(2)}}, reduce=reduce) is None
    found = check({"logits": {"3": torch.tensor([math.nan])}}, reduce=reduce)
    assert found == "part 'logits': 3 holds a value that is not finite"


def test_a_reply_by_a_stranger_does_not_count() -> None:
    reply = Reply(GOOD, {}, 1.0)
    guard = Guard(Given(Arrival(9, reply), Arrival(7, reply)))
    assert [a.client for a in guard.replies(exchange())] == [7]


def test_of_two_replies_by_one_client_the_first_counts() -> None:
    first, second = Reply(GOOD, {}, 1.0), Reply(GOOD, {}, 1e6)
    guard = Guard(Given(Arrival(7, first), Arrival(7, second), Arrival(7, None)))
    (arrival,) = guard.replies(exchange())
    assert arrival.reply is first


def test_a_refused_reply_cannot_be_sent_again() -> None:
    bad, good = Reply(GOOD, {}, 0.0), Reply(GOOD, {}, 1.0)
    (arrival,) = Guard(Given(Arrival(7, bad), Arrival(7, good))).replies(exchange())
    assert arrival.reply is None


def test_a_client_that_is_silent_is_lost() -> None:
    guard = Guard(Given(Arrival(7, Reply(GOOD, {}, 1.0))))
    found = {a.client: a.fault for a in guard.replies(exchange(to=(8, 7, 2)))}
    assert found == {7: None, 2: Fault("lost", "no reply"), 8: Fault("lost", "no reply")}


def test_a_fault_of_the_fleet_is_passed_on() -> None:
    arrival = Arrival(7, None, Fault("lost", "timeout after 60 s"))
    assert list(Guard(Given(arrival)).replies(exchange())) == [arrival]


def test_the_round_goes_on_with_the_sound_replies() -> None:
    three = {"delta": tree.map(lambda leaf: leaf + 3, LIKE), "seen": torch.tensor([1, 1])}
    fleet = Given(
        Arrival(1, Reply(three, {}, 1.0)),
        Arrival(2, Reply(three, {}, math.nan)),
        Arrival(3, Reply(tree.map(lambda leaf: leaf * 3, three), {}, 1.0)),
    )
    clients = Clients(Guard(fleet), range(9), round=4)
    got = clients.exchange(Nobody().work, {}, to=(1, 2, 3), reduce=REDUCE, key=Key(0))
    assert got["delta"]["b"].tolist() == [6.0] * 3
    assert got["seen"].tolist() == [4, 4]
    assert clients.faults == [
        (2, Fault("refused", "the weight holds a value that is not finite: nan"))
    ]
    assert fleet.validated == [frozenset({1, 3})]


def test_what_passes_the_guard_does_not_break_the_sum() -> None:
    """The right leaves in other containers: refused or reduced, but the round must not fall."""
    sound = Reply(GOOD, {}, 1.0)
    for odd in (
        having(body=(torch.zeros(2, 3),)),
        having(nothing={}),
        {"delta": LIKE, "seen": torch.tensor([1, 2])},
    ):
        fleet = Given(Arrival(1, sound), Arrival(2, Reply(odd, {}, 1.0)))
        clients = Clients(Guard(fleet), range(9))
        got = clients.exchange(Nobody().work, {}, to=(1, 2), reduce=REDUCE, key=Key(0))
        assert 1 in got.accepted


def moved(policy: Any, fleet: Given, told: list[Any], said: list[str]) -> Any:
    """Return what an exchange comes to where norms are bounded at twice their median."""
    bounded = Influence(fleet, policy, 2.0, told.append, said.append)  # type: ignore[arg-type]
    clients = Clients(Guard(bounded), range(9), round=4)
    return clients.exchange(
        Nobody().work, {}, to=(1, 2, 3, 4), reduce={"delta": Mean(torch.zeros(2))}, key=Key(0)
    )


@pytest.mark.parametrize("order", [(1, 2, 3, 4), (4, 3, 2, 1)])
def test_a_change_far_larger_than_the_cohort_s_is_named_clipped_or_refused(
    order: tuple[int, ...],
) -> None:
    """Of four clients one sends [0, 300], the others norms of 5, 10, and 10."""
    sent = {1: [3.0, 4.0], 2: [6.0, 8.0], 3: [8.0, 6.0], 4: [0.0, 300.0]}
    fleet = Given(*(Arrival(c, Reply({"delta": torch.tensor(sent[c])}, {}, 1.0)) for c in order))
    expected = {"off": [4.25, 79.5], "warn": [4.25, 79.5], "clip": [4.25, 9.5]}
    for policy, mean in expected.items():
        told, said = [], []
        assert moved(policy, fleet, told, said)["delta"].tolist() == mean
        assert len(said) == (policy != "off")
        assert len(told) == (policy != "off")
    (line,) = told
    assert line["bounds"] == {"delta": 20.0}
    assert line["clients"]["4"] == {
        "weight": 1.0, "norms": {"delta": 300.0}, "share": 300 / 325
    }  # fmt: skip
    again = Arrival(4, Reply({"delta": torch.tensor([0.0, 900.0])}, {}, 1.0))
    for policy, mean in expected.items():  # the first reply of a client counts
        assert moved(policy, Given(*fleet.arrivals, again), [], [])["delta"].tolist() == mean
    got = moved("refuse", fleet, [], [])
    assert got["delta"].tolist() == pytest.approx([17 / 3, 6.0])
    assert got.faults[4] == Fault(
        "refused", "part 'delta' has norm 300, above 2 times the median of the cohort"
    )


def test_two_replies_have_no_median_and_unsound_ones_are_left_to_the_guard() -> None:
    fleet = Given(
        Arrival(1, Reply({"delta": torch.ones(2)}, {}, 1.0)),
        Arrival(2, Reply({"delta": torch.tensor([math.nan, 0.0])}, {}, 1.0)),
        Arrival(3, Reply({"delta": torch.full((2,), 300.0)}, {}, 1.0)),
        Arrival(4, None, Fault("lost", "gone")),
    )
    got = moved("refuse", fleet, told := [], [])
    assert sorted(got.faults) == [2, 4]
    assert got["delta"].tolist() == [150.5, 150.5]
    assert told[0]["bounds"] == {}
    for policy, multiple, words in (("warm", 2.0, "norms"), ("warn", 0.5, "norm_multiple is 0.5")):
        with pytest.raises(ConfigError, match=words):
            Influence(fleet, policy, multiple, print, print)  # type: ignore[arg-type]
