"""Clients: the cohort, the quorum, keys that may not repeat, and how replies become an outcome."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshot.core.errors import DivergenceError, MethodError, QuorumError, RefusedError
from fedshot.core.seeds import Key
from fedshot.protocol.clients import Clients, reduce_replies
from fedshot.protocol.exchange import (
    Arrival,
    ClientWork,
    Exchange,
    Fault,
    PerClient,
    Reply,
    client_work,
)
from fedshot.protocol.reducers import Mean

ONE = torch.zeros(1, dtype=torch.float64)
KEY = Key(0)


@dataclass(frozen=True)
class Echo:
    """Sends back the number it was sent, with its id as weight."""

    def draw(self, data: Any, key: Key) -> Any:
        return {"seed": key.tensor(), "client": torch.tensor(data)}

    @client_work(draw="draw")
    def echo(self, down: Any, private: Any, drawn: Any) -> Reply:
        return Reply({"x": down["x"]}, private, drawn["client"], {"seed": drawn["seed"].double()})

    @client_work()
    def quiet(self, down: Any, private: Any, drawn: Any) -> Reply:
        assert drawn == {}
        return Reply({"x": down["x"]}, private, 1.0)

    def unmarked(self, down: Any, private: Any, drawn: Any) -> Reply:
        return Reply({}, {}, 1.0)


class Loop:
    """The shortest fleet: a client's data is its number; those in `bad` are lost."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.bad, self.asked, self.validated, self.voided = bad, [], [], []

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        self.asked.append(exchange)
        for client in exchange.to:
            drawn = exchange.work.draw(client, exchange.client_key(client))
            if client in self.bad:
                yield Arrival(client, None, Fault("lost", f"gone {client}"))
            else:
                yield Arrival(client, exchange.work(exchange.message(client), {}, drawn))

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        self.validated.append(accepted)

    def void(self, round: int) -> None:
        self.voided.append(round)


def ask(clients: Clients, to: Any, key: Key = KEY, **options: Any) -> Any:
    arguments = {"work": Echo().echo, "down": {"x": ONE + 2}, "reduce": {"x": Mean(ONE)}}
    return clients.exchange(**(arguments | options), to=to, key=key)


@given(st.sets(st.integers(0, 500), min_size=1, max_size=40), st.data(), st.integers())
def test_a_cohort_is_sorted_without_repeats_and_within_the_ids(
    ids: set[int], data: st.DataObject, seed: int
) -> None:
    n = data.draw(st.integers(1, len(ids)))
    clients = Clients(Loop(), sorted(ids), cohort=n)
    cohort = clients.sample(Key(seed))
    assert len(cohort) == len(set(cohort)) == n
    assert list(cohort) == sorted(cohort)
    assert set(cohort) <= ids
    assert all(type(c) is int for c in cohort)
    assert clients.sample(Key(seed)) == cohort


def test_every_cohort_is_equally_likely() -> None:
    """Chi squared over the 10 pairs of 5 clients; 27.9 is passed once in 1000 (9 degrees)."""
    clients, n = Clients(Loop(), [3, 5, 8, 13, 21], cohort=2), 3000
    seen = Counter(clients.sample(Key(0).at(i)) for i in range(n))
    assert len(seen) == 10
    assert sum((count - n / 10) ** 2 / (n / 10) for count in seen.values()) < 27.9


@pytest.mark.parametrize("cohort", [None, 3, 99])
def test_without_a_smaller_cohort_everyone_is_asked(cohort: int | None) -> None:
    assert Clients(Loop(), [4, 7, 9], cohort=cohort).sample(Key(0)) == (4, 7, 9)


def test_a_key_is_used_once_for_each_work_in_a_round() -> None:
    clients = Clients(Loop(), range(4))
    ask(clients, [1, 2])
    ask(clients, [1, 2], work=Echo().quiet)
    ask(clients, [1, 2], Key(0).at("step", 1))
    text = r"a second exchange of 'echo' in one round .* use key.at\('step', r\)"
    with pytest.raises(ValueError, match=text):
        ask(clients, [1, 2])
    ask(Clients(Loop(), range(4)), [1, 2])  # another round is another matter


def test_exchanges_of_a_round_are_numbered_and_an_evaluation_comes_last() -> None:
    fleet = Loop()
    clients = Clients(fleet, range(4), round=7)
    ask(clients, [1])
    ask(clients, [1], Key(1))
    ask(Clients(fleet, range(4), round=7, phase="evaluate"), [1])
    versions = [exchange.version for exchange in fleet.asked]
    assert versions[:2] == [(7, 0), (7, 1)]
    assert versions[1] < versions[2] < (8, 0)
    assert [exchange.phase for exchange in fleet.asked] == ["train", "train", "evaluate"]


def test_each_client_draws_under_a_key_of_its_own() -> None:
    fleet = Loop()
    clients = Clients(fleet, range(4), round=7)
    ask(clients, [1, 2])
    ask(clients, [1, 2], work=Echo().quiet)
    keys = [exchange.client_key(c) for exchange in fleet.asked for c in (1, 2)]
    assert keys[0] == Key(0).at("work", "echo", "client", 1)
    assert len(set(keys)) == 4


def test_a_message_may_differ_by_client() -> None:
    outcome = ask(Clients(Loop(), range(4)), [1, 3], down=PerClient(lambda c: {"x": ONE + c}))
    assert outcome["x"].tolist() == [(1 * 1 + 3 * 3) / 4]


def test_an_outcome_tells_who_counted_and_with_what_weight() -> None:
    fleet = Loop(bad=(2,))
    clients = Clients(fleet, range(4))
    outcome = ask(clients, [3, 2, 1])
    assert outcome.accepted == (1, 3)
    assert outcome.weight == 4.0
    assert outcome.faults == {2: Fault("lost", "gone 2")} == dict(clients.faults)
    assert fleet.validated == [frozenset({1, 3})]
    assert list(outcome) == ["x"]
    assert len(outcome) == 1


@given(st.permutations(range(1, 6)))
def test_metrics_are_weighted_means_in_any_order(order: list[int]) -> None:
    outcome = ask(Clients(Loop(), range(6)), order)
    seeds = {c: float(Key(0).at("work", "echo", "client", c).seed) for c in range(1, 6)}
    exact = sum(Fraction(c) * Fraction(s) for c, s in seeds.items()) / 15
    assert abs(Fraction(outcome.metrics["seed"]) - exact) <= abs(exact) / 2**51
    assert outcome.metrics == ask(Clients(Loop(), range(6)), range(1, 6)).metrics


def test_a_metric_that_only_some_send_is_their_mean() -> None:
    class Some(Loop):
        def replies(self, exchange: Exchange) -> Iterator[Arrival]:
            for a in super().replies(exchange):
                assert a.reply is not None
                metrics = {"m": torch.tensor(float(a.client))} if a.client > 1 else {}
                yield a._replace(reply=a.reply._replace(metrics=metrics))

    assert ask(Clients(Some(), range(4)), [1, 2, 3]).metrics == {"m": (2 * 2 + 3 * 3) / 5}


@pytest.mark.parametrize(
    ("quorum", "asked", "lost", "holds"),
    [
        (0.5, 4, 2, True),
        (0.5, 4, 3, False),
        (0.5, 5, 2, True),
        (0.5, 5, 3, False),
        (0.0, 4, 3, True),
        (0.0, 4, 4, False),
        (1.0, 4, 0, True),
        (1.0, 4, 1, False),
    ],
)
def test_the_quorum_is_a_share_of_the_cohort_rounded_up_and_one_at_least(
    quorum: float, asked: int, lost: int, holds: bool
) -> None:
    clients = Clients(Loop(bad=tuple(range(1, lost + 1))), range(9), quorum=quorum)
    if holds:
        assert len(ask(clients, range(1, asked + 1)).accepted) == asked - lost
        return
    need = max(1, math.ceil(quorum * asked))
    text = f"round 0: {asked - lost} of {asked} clients gave a usable reply, the quorum is {need}"
    with pytest.raises(QuorumError, match=text):
        ask(clients, range(1, asked + 1))
    assert len(clients.faults) == lost  # told, although the round failed


def test_a_quorum_error_names_five_clients_and_counts_the_rest() -> None:
    with pytest.raises(QuorumError) as error:
        ask(Clients(Loop(bad=tuple(range(1, 9))), range(9)), range(1, 9))
    text = str(error.value)
    for c in range(1, 6):
        assert f"client {c}: lost, gone {c}" in text
    assert "client 6" not in text
    assert "; and 3 more. To continue, lower run.quorum" in text
    assert error.value.reason.endswith("; and 3 more.")


NAN = "part 'x': holds a value that is not finite"


@pytest.mark.parametrize(
    ("faults", "diverges"),
    [
        ([Fault("refused", NAN)] * 3, True),
        ([Fault("refused", "part 'x': holds 1e+12, more than the limit of 4e+09")] * 3, True),
        ([Fault("refused", NAN), Fault("refused", NAN), Fault("lost", "gone")], True),
        ([Fault("refused", NAN), Fault("lost", "gone")], False),
        ([Fault("lost", f"a node says that it {NAN}")] * 3, False),
        ([Fault("refused", "the weight is 0.0"), Fault("lost", "gone")], False),
    ],
)
def test_only_values_that_are_not_finite_or_too_large_are_divergence(
    faults: list[Fault], diverges: bool
) -> None:
    class Faulty(Loop):
        def replies(self, exchange: Exchange) -> Iterator[Arrival]:
            yield from (Arrival(c, None, f) for c, f in zip(exchange.to, faults, strict=True))

    with pytest.raises(QuorumError) as error:
        ask(Clients(Faulty(), range(9)), range(len(faults)))
    assert isinstance(error.value, DivergenceError) is diverges
    assert ("lower the step sizes" in str(error.value)) is diverges


@pytest.mark.parametrize(
    "reason",
    [
        "part 'x' is float32[1], expected float32[2]",
        "the weight is 0.0, expected a finite number above 0",
        "metric 'loss' is tensor([1., 1.]), expected one finite number",
        "the metrics are list, expected names and numbers",
    ],
)
def test_replies_that_are_all_refused_for_their_form_are_the_methods_fault(reason: str) -> None:
    """Neither a lower quorum nor another try can help: the error is not one to retry."""

    class Faulty(Loop):
        def replies(self, exchange: Exchange) -> Iterator[Arrival]:
            fault = Fault("refused", reason)
            yield from (Arrival(c, None, fault) for c in exchange.to if c < 3)
            yield from super().replies(replace(exchange, to=exchange.to[3:]))

    with pytest.raises(RefusedError, match=r"0 of 3 clients .* Correct the method: what") as error:
        ask(Clients(Faulty(), range(9)), range(3))
    assert not error.value.retryable
    with pytest.raises(QuorumError, match="3 of 6 clients") as few:
        ask(Clients(Faulty(), range(9), quorum=0.9), range(6))
    assert few.value.retryable, "other clients gave a usable reply"


def test_nobody_asked_is_no_quorum() -> None:
    with pytest.raises(QuorumError, match="0 of 0 clients"):
        ask(Clients(Loop(), range(4)), [])


def test_a_draw_function_that_does_not_exist_is_named() -> None:
    class Misspelt(Echo):
        @client_work(draw="drawn")
        def echo(self, down: Any, private: Any, drawn: Any) -> Any:
            return None

    with pytest.raises(MethodError, match=r"Misspelt has no function 'drawn'\. Correct the name"):
        ask(Clients(Loop(), range(4)), [1], work=Misspelt().echo)


@pytest.mark.parametrize("work", [Echo().unmarked, Echo.echo, lambda *_: None])
def test_only_marked_functions_passed_bound_are_client_work(work: Any) -> None:
    with pytest.raises(MethodError, match=r"is not client work: decorate .* pass it bound"):
        ask(Clients(Loop(), range(4)), [1], work=work)


def test_an_accumulator_serves_the_cohort_without_keeping_replies() -> None:
    """Memory is one sum, however many clients reply."""
    alive = []

    class Counting(Loop):
        def replies(self, exchange: Exchange) -> Iterator[Arrival]:
            import weakref

            for client in exchange.to:
                x = torch.ones(1).double()
                alive.append(weakref.ref(x))
                yield Arrival(client, Reply({"x": x}, {}, 1.0))
                del x
                assert sum(ref() is not None for ref in alive) <= 2

    work = ClientWork(Echo(), "echo")
    exchange = Exchange(work, {}, tuple(range(50)), {"x": Mean(ONE)}, Key(0), (1, 0))
    assert reduce_replies(Counting(), exchange)["x"].tolist() == [1.0]


def test_a_cohort_of_a_million_clients_is_uniform() -> None:
    clients = Clients(Loop(), range(10**6), cohort=1000)
    cohorts = [clients.sample(KEY.at(i)) for i in range(50)]
    assert all(len(set(cohort)) == 1000 for cohort in cohorts)
    tenths = Counter(c // 10**5 for cohort in cohorts for c in cohort)
    assert all(abs(tenths[i] - 5000) < 5 * math.sqrt(5000 * 0.9) for i in range(10))
