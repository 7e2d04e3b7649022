"""No silent poison: what is lost or unsound is named, and the rest goes on without it."""

from __future__ import annotations

import pytest

from conformance.conftest import Begin
from fedshot.conformance import checks
from fedshot.conformance.checks import Runs
from fedshot.conformance.federation import COHORT, OTHERS, assert_same, with_trouble
from fedshot.core import tree
from fedshot.core.errors import QuorumError
from fedshot.fleets.unreliable import CORRUPT, Trouble, Unreliable
from fedshot.protocol.exchange import Exchange


@pytest.mark.parametrize("trouble", ["drop", *CORRUPT])
def test_the_round_is_as_if_the_victim_had_not_been_asked(runs: Runs, trouble: Trouble) -> None:
    checks.a_faulty_client_has_no_effect(runs, trouble)


def test_a_delayed_reply_counts_as_any_other(runs: Runs) -> None:
    checks.a_delayed_reply_counts(runs)


def test_trouble_that_is_over_leaves_no_trace_but_the_lost_work(begin: Begin) -> None:
    """After a bad round the victim trains on from where it was."""
    run = begin(around=with_trouble("nan", when=lambda exchange: exchange.version[0] == 1))
    run.train(1, choose=COHORT).train(1, choose=COHORT)
    expected = begin().train(1, choose=OTHERS).train(1, choose=COHORT)
    assert_same(run.everything(), expected.everything())


def test_below_the_quorum_the_round_fails_and_can_be_voided(begin: Begin) -> None:
    run = begin()
    last = len(run.train(1).outcomes) - 1  # number of the last exchange of a round
    before, server = run.privates(), tree.digest(run.server)

    def plan(exchange: Exchange, client: int) -> Trouble | None:
        hit = {0: "drop", 2: "zero_weight", 3: "drop"} if exchange.version == (2, last) else {}
        return hit.get(client)

    bad = Unreliable(run.meter.fleet, plan)
    run.meter.fleet = bad
    with pytest.raises(QuorumError) as error:
        run.train(1, choose=COHORT)
    for part in (
        "round 2: 1 of 4 clients gave a usable reply, the quorum is 2",
        "client 0: lost, dropped by plan",
        "client 2: refused, the weight is 0.0, expected a finite number above 0",
        "client 3: lost, dropped by plan",
    ):
        assert part in str(error.value)
    assert "client 5" not in str(error.value)
    run.fleet.void(2)
    assert run.privates() == before
    assert tree.digest(run.server) == server

    run.train(1)
    skipped = begin().train(1)
    skipped.round = 2
    assert tree.digest(run.server) == tree.digest(skipped.train(1).server)
    assert run.privates() == skipped.privates()
