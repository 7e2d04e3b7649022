"""A request to mask replies survives the wire: the node finds the same faults and integers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from fedshot.core import tree
from fedshot.core.serialised import LIMITS, CodecError
from fedshot.deploy.flower.masking_request import masking_from_json, masking_to_json
from fedshot.protocol.exchange import Masking
from fedshot.protocol.reducers import Grid, Mean, Sum

GRID = Grid(7, {"w/0": 3.0})
LIKE = {"w": (torch.zeros(2, 3), {"b": torch.zeros((), dtype=torch.float64)}), "n": ()}
MASKING = Masking(
    frozenset({4, 1}),
    7,
    {
        "mean": Mean(LIKE, 1.5, 40),
        "rounded": Mean(LIKE, 1.5, 40, by_class=True, grid=GRID),
        "sum": Sum(torch.zeros(2, dtype=torch.int64), 2.0**40),
        "rounded sum": Sum(LIKE, grid=GRID),
    },
)


def sent() -> dict[str, Any]:
    return json.loads(json.dumps(masking_to_json(MASKING)))


def test_a_request_is_read_as_it_was_written() -> None:
    found = masking_from_json(sent(), LIMITS)
    assert (found.clients, found.cohort) == (MASKING.clients, MASKING.cohort)
    part = tree.map(lambda leaf: leaf + 1.25, LIKE)
    parts = dict.fromkeys(MASKING.reduce, part) | {"sum": torch.tensor([3, 2**41])}
    for name, reducer in MASKING.reduce.items():
        again = found.reduce[name]
        for weight in (0.5, 1.0, 41.0):
            faults = [one.fault(1, parts[name], weight) for one in (reducer, again)]
            assert faults[0] == faults[1]
        sums = [one.start(7) for one in (reducer, again)]
        for one in sums:
            one.add(1, parts[name], 0.5)
        assert torch.equal(sums[0].integers(), sums[1].integers())
        assert sums[0].in_grid == sums[1].in_grid
    assert [one.by_class for one in found.reduce.values() if isinstance(one, Mean)] == [False, True]
    assert "w/0 is float32[3]" in str(found.reduce["mean"].fault(1, {"w": (torch.zeros(3),)}, 1.0))


@pytest.mark.parametrize(
    "change",
    [
        {"form": {"a": 0}},
        {"form": 0},
        {"leaves": {"x": ["float32", 1]}},
        {"grid": {"most": 0, "ranges": {}}},
        {"grid": {"most": 7, "ranges": {"w/0": math.inf}}},
        {"grid": {"most": 7, "ranges": {"w/0": 0.0}}},
        {"grid": {"most": 7, "ranges": {"w/0": -1.0}}},
        {"grid": {"most": 7, "ranges": {"w/0": 2.0**-62}}},
        {"grid": {"most": 7, "ranges": {"w/0": 3.01}}},
        {"grid": {"most": 7, "ranges": {"w/0": math.nan}}},
        {"grid": {"most": 7, "ranges": {"w/1/b": 1.0}}},
        {"grid": {"most": 7, "ranges": {"other": 1.0}}},
    ],
)
def test_a_request_that_is_damaged_is_refused(change: dict[str, Any]) -> None:
    found = sent()
    found["reduce"]["mean"] |= change
    with pytest.raises(CodecError):
        masking_from_json(found, LIMITS)


@pytest.mark.parametrize("cohort", [0, -5, 2**32 + 1, 1e30])
def test_a_request_of_an_impossible_cohort_is_refused(cohort: float) -> None:
    with pytest.raises(CodecError, match="a cohort of"):
        masking_from_json({**sent(), "cohort": cohort}, LIMITS)
