"""Every test of this folder runs for each method on each fleet.

The quick suite runs all of them on the reference fleet for the methods of `WHOLE`, one of each
kind; of the others it asks what `EVERYWHERE` asks, there and on threads. The slow suite has the
rest of the reference fleet, `EVERYWHERE` on all fleets, and all tests of `WHOLE` on all fleets.
What equals the reference in what it trains and answers has little left to get wrong: the remaining
pairs are `exhaustive`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from conformance.cases import FLEETS, METHODS, REFERENCE, REFUSED, SECOND_FORMS, WHOLE
from fedshot.conformance import Runs
from fedshot.conformance.federation import Federation, FleetCase
from fedshot.protocol import Method

EVERYWHERE = {
    "test_a_fleet_equals_the_reference",
    "test_an_exam_is_answered_as_on_the_reference_fleet",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        case = params.get("where")
        if not isinstance(case, FleetCase):
            continue
        everywhere = getattr(item, "originalname", item.name) in EVERYWHERE
        whole, named = params.get("named") in WHOLE, params.get("named")
        if case is REFERENCE:
            quick = whole or (everywhere and named not in SECOND_FORMS)
        else:
            quick = everywhere and case.quick and named not in SECOND_FORMS
        if not quick:
            item.add_marker(pytest.mark.slow)
        if not everywhere and (case.slow or (case is not REFERENCE and not whole)):
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
