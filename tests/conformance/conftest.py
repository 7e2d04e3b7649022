"""Every test of this folder runs for each method on each fleet, in one of three suites.

- Quick: each method trains and answers on threads as on the reference fleet; `synthetic` does so on
  every fleet, and all other tests run for it on the reference fleet.
- Slow: every method equals the reference on every fleet, its second forms on the vectorised fleet
  alone; all other tests run for every method on the reference fleet, second forms left out, and for
  `synthetic` on every fleet.
- Exhaustive: the remaining pairs, for a change of a fleet. A fleet that trains and answers as the
  reference does has little left to get wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from conformance.cases import (
    FLEETS,
    METHODS,
    REFERENCE,
    REFUSED,
    SECOND_FORMS,
    VECTORISED,
    WHOLE,
)
from fedshot.conformance.checks import Runs
from fedshot.conformance.federation import Federation, FleetCase
from fedshot.protocol.method import Method

EQUALITY = "test_a_fleet_trains_and_answers_as_the_reference_does"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        case, named = params.get("where"), params.get("named")
        if not isinstance(case, FleetCase):
            continue
        equality = getattr(item, "originalname", item.name) == EQUALITY
        for mark in marks(case, str(named), equality=equality, trouble=params.get("trouble")):
            item.add_marker(mark)


def marks(case: FleetCase, named: str, *, equality: bool, trouble: str | None) -> list[str]:
    """Return the marks of one test, by the rules at the head of this module."""
    demanding, second = named == "synthetic" and not case.slow, named in SECOND_FORMS
    if equality:
        quick = case is not REFERENCE and (demanding or (case.quick and not second))
        slow = case is VECTORISED if second else not case.slow or named in WHOLE
    else:
        quick = case is REFERENCE and demanding
        slow = named == "synthetic" or (case is REFERENCE and not second)
        if trouble not in {None, "drop", "nan"} and named not in WHOLE:
            slow = False
    return [] if quick else ["slow"] if slow else ["slow", "exhaustive"]


Begin = Callable[..., Federation]


@pytest.fixture(scope="session", params=FLEETS, ids=lambda case: case.name)
def where(request: pytest.FixtureRequest) -> FleetCase:
    return request.param


@pytest.fixture(scope="session", params=METHODS)
def named(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def method(named: str, where: FleetCase) -> Method[Any]:
    """In float64 where the fleet regroups the arithmetic: in float32 that drifts apart."""
    if (named, where.name) in REFUSED:
        pytest.skip(REFUSED[named, where.name])
    found = METHODS[named]
    return found if where.exact else replace(found, model=replace(found.model, dtype="float64"))


@pytest.fixture(scope="session")
def runs(method: Method[Any], where: FleetCase, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(method, where, lambda: tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="session")
def begin(runs: Runs) -> Begin:
    """Start a run of the method on the fleet, or on the one that `on` names."""
    return runs.begin


@pytest.fixture(scope="session")
def undisturbed(runs: Runs) -> Federation:
    """Two rounds; for reading only."""
    return runs.undisturbed
