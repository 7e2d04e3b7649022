"""The same answer anywhere: on every fleet, in every order, for any split of the sums."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conformance.cases import METHODS, UNTRAINED, WHOLE
from conformance.conftest import Begin
from fedshot import methods
from fedshot.conformance import checks
from fedshot.conformance.checks import Runs
from fedshot.conformance.federation import COHORT, Federation, FleetCase
from fedshot.core import tree
from fedshot.protocol.reducers import Accumulator


def test_every_method_of_the_registry_is_tried() -> None:
    tried = {type(case) for case in METHODS.values()} | UNTRAINED.keys()
    ours = {m for m in methods.METHODS.values() if m.__module__.startswith("fedshot.")}
    assert len(ours) > 20
    assert ours <= tried


def test_a_fleet_trains_and_answers_as_the_reference_does(
    runs: Runs, where: FleetCase, named: str
) -> None:
    """For two rounds; on threads, which run the same kernels, for one of most methods."""
    checks.a_fleet_equals_the_reference(runs, 1 if where.quick and named not in WHOLE else 2)


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
    second.round = 1
    first.train(1, choose=COHORT)
    second.train(1, choose=COHORT)
    assert list(first.metrics.values()) != list(second.metrics.values())


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_partial_sums_merge_to_the_same_bits(undisturbed: Federation, data: st.DataObject) -> None:
    """One accumulator, or four merged in any order, with the clients' parts split in any way."""
    last = undisturbed.executions[-1].exchange
    executions = [execution for execution in undisturbed.executions if execution.exchange is last]
    order = data.draw(st.permutations(executions))
    weights = {v.client: data.draw(st.floats(1e-3, 1e3)) for v in executions}
    workers = [data.draw(st.integers(0, 3)) for _ in order]
    merging = data.draw(st.permutations(range(4)))
    for name, reducer in last.reduce.items():
        one = reducer.start(len(executions))
        four: list[Accumulator] = [reducer.start(len(executions)) for _ in range(4)]
        for execution in executions:
            one.add(execution.client, execution.reply.up[name], weights[execution.client])
        for worker, execution in zip(workers, order, strict=True):
            four[worker].add(execution.client, execution.reply.up[name], weights[execution.client])
        for other in merging[1:]:
            four[merging[0]].merge(four[other])
        found, expected = four[merging[0]].result(), one.result()
        if all(isinstance(sender, int) for sender in expected):  # gathered
            found = {str(sender): part for sender, part in found.items()}
            expected = {str(sender): part for sender, part in expected.items()}
        assert tree.digest(found) == tree.digest(expected)
