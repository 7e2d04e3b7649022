"""Every test of this folder runs for each method on each fleet, in one of three suites.

- Quick: a method of each kind trains and answers on threads as on the reference fleet; `synthetic`
  does so on every fleet, and all other tests run for it on the reference fleet.
- Slow: every method equals the reference on every fleet, its second forms on the vectorised fleet
  alone; what a method itself can get wrong is asked of every method on the reference fleet, second
  forms left out, what the host does with its replies and states of one method of each kind, and all
  of `synthetic` on every fleet.
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
from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.protocol.method import Method

EQUALITY = "test_a_fleet_trains_and_answers_as_the_reference_does"

# What the host and the protocol do with replies and states, whatever the method computes.
OF_THE_HOST = {
    "order_of_arrival_does_not_matter",
    "one_seed_gives_one_result",  # also asked by equality on threads, bit by bit
    "test_a_delayed_reply_counts_as_any_other",
    "test_trouble_that_is_over_leaves_no_trace_but_the_lost_work",
    "test_below_the_quorum_the_round_fails_and_can_be_voided",
}

# These say little of a method whose clients keep nothing.
OF_PRIVATE_STATES = {
    "private_tensors_stay_with_the_client",
    "private_tensors_reach_no_server",
    "unsampled_clients_keep_their_state",
    "initial_private_states_are_reproducible",
    "rewound_runs_equal_uninterrupted_ones",
    "private_states_keep_their_form",
    "test_training_changes_the_states_that_clients_keep",
    "test_a_client_that_is_not_accepted_goes_back_to_its_last_state",
}

KEEP_STATES = {name for name, m in METHODS.items() if tree.leaves(m.init_client(0, Key(0)))}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test its pairs; where exhaustive ones are not asked for, most are not even made."""
    if "runs" not in metafunc.fixturenames:
        return
    asked = metafunc.config.getoption("markexpr", "")
    fewer = "not exhaustive" in asked or "not slow" in asked
    equality = metafunc.definition.name == EQUALITY
    pairs = [
        (named, case)
        for named in METHODS
        for case in FLEETS
        if not fewer or equality or named == "synthetic" or case is REFERENCE
    ]
    ids = [f"{named}-{case.name}" for named, case in pairs]
    metafunc.parametrize(("named", "where"), pairs, indirect=True, ids=ids, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        case, named = params.get("where"), params.get("named")
        if not isinstance(case, FleetCase):
            continue
        test = getattr(item, "originalname", item.name)
        asked = getattr(params.get("check"), "__name__", test)
        for mark in marks(case, str(named), asked, params.get("trouble")):
            item.add_marker(mark)


def marks(case: FleetCase, named: str, asked: str, trouble: str | None) -> list[str]:
    """Return the marks of one test, by the rules at the head of this module."""
    demanding, second = named == "synthetic" and not case.slow, named in SECOND_FORMS
    if asked == EQUALITY:
        quick = case is not REFERENCE and (demanding or (case.quick and named in WHOLE))
        slow = case is VECTORISED if second else not case.slow or named in WHOLE
    else:
        quick = case is REFERENCE and demanding
        slow = demanding or (case is REFERENCE and not second)
        narrow = asked in OF_THE_HOST or trouble not in {None, "drop"}
        narrow |= asked in OF_PRIVATE_STATES and named not in KEEP_STATES
        if narrow and named not in WHOLE:
            slow = False
    return [] if quick else ["slow"] if slow else ["slow", "exhaustive"]


Begin = Callable[..., Federation]


@pytest.fixture(scope="session")
def where(request: pytest.FixtureRequest) -> FleetCase:
    return request.param


@pytest.fixture(scope="session")
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
