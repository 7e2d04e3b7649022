"""The same answer anywhere: on every fleet, in every order, for any split of the sums."""

from __future__ import annotations

import pytest

from conformance.cases import METHODS, UNTRAINED
from conformance.conftest import Begin
from fedshot import methods
from fedshot.conformance import checks
from fedshot.conformance.checks import Runs
from fedshot.conformance.federation import COHORT, FleetCase


def test_every_method_of_the_registry_is_tried() -> None:
    tried = {type(case) for case in METHODS.values()} | UNTRAINED.keys()
    ours = {m for m in methods.METHODS.values() if m.__module__.startswith("fedshot.")}
    assert len(ours) > 20
    assert ours <= tried


def test_a_fleet_trains_and_answers_as_the_reference_does(
    runs: Runs, where: FleetCase, named: str
) -> None:
    """For two rounds; on threads, which run the same kernels, for one of all but `synthetic`."""
    checks.a_fleet_equals_the_reference(runs, 1 if where.quick and named != "synthetic" else 2)


CHECKS = (
    checks.one_seed_gives_one_result,
    checks.another_seed_gives_another_result,
    checks.order_of_the_cohort_does_not_matter,
    checks.order_of_arrival_does_not_matter,
    checks.storage_keeps_everything,
    checks.episodes_are_predicted_and_nothing_is_trained,
    checks.queries_are_predicted_independently,
    checks.is_made_of_hyper_parameters,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_answer_is_the_same(check: checks.Function, runs: Runs) -> None:
    check(runs)


def test_another_round_draws_other_things_from_the_same_state(begin: Begin) -> None:
    first, second = begin(), begin()
    if not first.method.trains_on_episodes:
        pytest.skip("the clients sum over all examples, and draw nothing")
    second.round = 1
    first.train(1, choose=COHORT)
    second.train(1, choose=COHORT)
    assert list(first.metrics.values()) != list(second.metrics.values())
