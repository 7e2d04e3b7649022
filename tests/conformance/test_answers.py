"""The same answer anywhere: on every fleet, in every order, for any split of the sums."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conformance.cases import METHODS, REFERENCE, UNTRAINED, WHOLE, FleetCase
from conformance.conftest import Begin
from conformance.federation import COHORT, Everything, Federation, Shuffled, assert_same
from conformance.small import exam
from fedshot import methods, storage, tree
from fedshot.protocol import Accumulator, Method


def test_every_method_of_the_registry_is_tried() -> None:
    tried = {type(case) for case in METHODS.values()} | UNTRAINED.keys()
    ours = {m for m in methods.METHODS.values() if m.__module__.startswith("fedshot.")}
    assert len(ours) > 20
    assert ours <= tried


def test_a_fleet_trains_and_answers_as_the_reference_does(
    begin: Begin, where: FleetCase, named: str
) -> None:
    """For two rounds; on threads, which run the same kernels, for one of most methods."""
    rounds = 1 if where.quick and named not in WHOLE else 2
    found, reference = (begin(on=fleet).play(rounds) for fleet in (where, REFERENCE))
    assert_same(found.everything(), reference.everything())
    assert_same(found.logits(), reference.logits())


def test_the_same_seed_gives_the_same_bits(begin: Begin, undisturbed: Federation) -> None:
    assert_same(begin().play(2).everything(), undisturbed.everything())


def test_another_seed_gives_another_result(begin: Begin, undisturbed: Federation) -> None:
    found, expected = begin(seed=1).play(2).everything(), undisturbed.everything()
    assert any(not torch.equal(found[name], leaf) for name, leaf in expected.items())


def test_another_round_draws_other_things_from_the_same_state(begin: Begin) -> None:
    first, second = begin(), begin()
    second.round = 1
    first.play(1, choose=COHORT)
    second.play(1, choose=COHORT)
    assert list(first.metrics.values()) != list(second.metrics.values())


def test_the_order_of_the_cohort_does_not_matter(begin: Begin, quiet: Federation) -> None:
    back = begin().play(2, choose=COHORT[::-1])
    assert_same(back.everything(), quiet.everything())
    assert back.sealed == quiet.sealed or not back.where.exact


def test_the_order_of_arrival_does_not_matter(begin: Begin, undisturbed: Federation) -> None:
    shuffled = begin(around=lambda fleet: Shuffled(fleet, seed=1)).play(2)
    assert_same(shuffled.everything(), undisturbed.everything())
    assert shuffled.sealed == undisturbed.sealed or not shuffled.where.exact


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_partial_sums_merge_to_the_same_bits(undisturbed: Federation, data: st.DataObject) -> None:
    """One accumulator, or four merged in any order, with the clients' parts split in any way."""
    last = undisturbed.visits[-1].exchange
    visits = [visit for visit in undisturbed.visits if visit.exchange is last]
    order = data.draw(st.permutations(visits))
    weights = {v.client: data.draw(st.floats(1e-3, 1e3)) for v in visits}
    workers = [data.draw(st.integers(0, 3)) for _ in order]
    merging = data.draw(st.permutations(range(4)))
    for name, reducer in last.reduce.items():
        one = reducer.start(len(visits))
        four: list[Accumulator] = [reducer.start(len(visits)) for _ in range(4)]
        for visit in visits:
            one.add(visit.client, visit.reply.up[name], weights[visit.client])
        for worker, visit in zip(workers, order, strict=True):
            four[worker].add(visit.client, visit.reply.up[name], weights[visit.client])
        for other in merging[1:]:
            four[merging[0]].merge(four[other])
        found, expected = four[merging[0]].result(), one.result()
        if all(isinstance(sender, int) for sender in expected):  # gathered
            found = {str(sender): part for sender, part in found.items()}
            expected = {str(sender): part for sender, part in expected.items()}
        assert tree.digest(found) == tree.digest(expected)


def test_what_travels_and_what_is_kept_survives_storage(
    undisturbed: Federation, tmp_path: Any
) -> None:
    """A codec that names leaves by path loses neither bits nor structure."""
    last = undisturbed.visits[-1]
    for content in (undisturbed.server, last.down, last.reply.up, last.private):
        storage.write(tmp_path / "content", content, sync=False)
        flat, _, _ = storage.read(tmp_path / "content")
        again = tree.rebuild(content, flat)
        assert type(again) is type(content)
        assert tree.digest(again) == tree.digest(content)


def test_every_question_is_answered_and_nothing_is_learnt(undisturbed: Federation) -> None:
    privates, server = undisturbed.privates(), tree.digest(undisturbed.server)
    answers = undisturbed.answer()
    assert {a.question for a in answers} == set(range(5))
    assert all(a.logits.shape == (9, 3) for a in answers)
    assert all(bool(a.logits.isfinite().all()) for a in answers)
    again = {f"{a.question} by {a.client}": a.logits for a in answers}
    assert_same(undisturbed.logits(), Everything(again, undisturbed.where))
    assert (undisturbed.privates(), tree.digest(undisturbed.server)) == (privates, server)


def test_an_inductive_method_answers_each_query_by_itself(
    begin: Begin, method: Method[Any], undisturbed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    if method.transductive:
        pytest.skip("marked transductive")
    whole = undisturbed.logits()

    def fewer(n: int) -> Any:
        whole = exam(n)
        whole.questions = [q._replace(query_x=q.query_x[:4]) for q in whole.questions]  # type: ignore[assignment]
        return whole

    monkeypatch.setattr("conformance.federation.exam", fewer)
    # Not to the bit: a convolution over fewer images may be computed by another kernel.
    for name, logits in undisturbed.logits().items():
        torch.testing.assert_close(logits, whole[name][:4], rtol=1e-4, atol=1e-5)


def test_a_method_is_made_of_hyper_parameters_only(method: Method[Any]) -> None:
    """Frozen and comparable, so that a run cannot leave anything behind in it."""
    assert type(method).__dataclass_params__.frozen
    assert method == dataclasses.replace(method)
    assert inspect.getdoc(type(method))
