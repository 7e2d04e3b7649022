"""Every test of this folder runs for each method on each fleet.

The quick suite asks each method to train and answer on threads as on the reference fleet, and the
methods of `DEMANDING` so on every fleet but the five workers; of these methods it asks all else on
the reference fleet. The slow suite has the reference fleet for all methods, equality to it for all
fleets, and all tests of `DEMANDING` on all fleets. What equals the reference in what it trains and
answers has little left to get wrong: the remaining pairs are `exhaustive`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from conformance.cases import DEMANDING, FLEETS, METHODS, REFERENCE, REFUSED, SECOND_FORMS
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
        demanding = named in DEMANDING and not case.slow
        equality = getattr(item, "originalname", item.name) == EQUALITY
        if equality:
            quick = case is not REFERENCE and (
                demanding or (case.quick and named not in SECOND_FORMS)
            )
        else:
            quick = case is REFERENCE and demanding
        if not quick:
            item.add_marker(pytest.mark.slow)
        if not equality and (case.slow or (case is not REFERENCE and named not in DEMANDING)):
            item.add_marker(pytest.mark.exhaustive)


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
