"""Exchanges of a private run: clipped contributions, noise of the stated size, and refusals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import kstest
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.fleets.guard import Guard
from fedshot.privacy.differential import Mechanism, Noisy, typed
from fedshot.privacy.private_clients import PrivateClients
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Arrival, Exchange, Fault, Outcome, Reply, client_work
from fedshot.protocol.reducers import TOO_LARGE, Gather, Mean, Reducer, Sum
from system.runs import experiment

KEY, IDS = Key(0), tuple(range(8))
ZEROS = torch.zeros(2, dtype=torch.float64)


class Method:
    name = "stub"

    @client_work()
    def train(self, down: Any, private: Any, drawn: Any) -> Reply:
        raise NotImplementedError


class Replies:
    """A fleet whose clients send given parts; a client without parts is lost."""

    def __init__(self, parts: Mapping[int, Mapping[str, Tensor]]) -> None:
        self.parts = parts

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        for client in exchange.to:
            if client in self.parts:
                metrics = {"loss": torch.tensor(1.0)}
                yield Arrival(client, Reply(self.parts[client], {}, 7.0, metrics))
            else:
                yield Arrival(client, None, Fault("lost", "no reply"))

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        pass


def exchanged(
    mechanism: Mechanism,
    parts: Mapping[int, Mapping[str, Tensor]],
    reduce: Mapping[str, Reducer],
    key: Key = KEY,
    **options: Any,
) -> Outcome:
    fleet: Any = Guard(Replies(parts))  # type: ignore[arg-type]
    clients = PrivateClients(fleet, IDS, mechanism, **options)
    to = clients.sample(key)
    return clients.exchange(Method().train, {}, to=to, reduce=reduce, key=key)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_noisy_integers_are_rounded_and_floats_keep_their_dtype() -> None:
    noisy = torch.tensor([1.6, -1.6, 0.4], dtype=torch.float64)
    assert typed(noisy, torch.zeros(3, dtype=torch.int32)).tolist() == [2, -2, 0]
    assert typed(noisy, torch.zeros(3)).dtype == torch.float32


def test_a_client_is_scaled_down_to_the_clip_over_all_parts_and_none_is_scaled_up() -> None:
    """Client 0 has norm 5 over both parts and clip 1; client 1 has norm 0.5."""
    parts = {
        0: {"a": vector(3, 0), "b": vector(0, 4)},
        1: {"a": vector(0.3, 0), "b": vector(0.4, 0)},
    }
    like = {"a": Sum(ZEROS), "b": Mean(ZEROS)}
    got = exchanged(Mechanism(0.0, 1.0), parts, like, quorum=0.0)
    torch.testing.assert_close(got["a"], vector(0.6 + 0.3, 0))
    torch.testing.assert_close(got["b"], vector(0.4, 0.8) / len(IDS))  # not by those that replied
    each = exchanged(Mechanism(0.0, {"a": 1.0, "b": 2.0}), parts, like, quorum=0.0)
    torch.testing.assert_close(each["a"], vector(1.3, 0))
    torch.testing.assert_close(each["b"], vector(0.4, 2.0) / len(IDS))
    assert dict(got.metrics) == {}
    assert got.weight == len(IDS)


@pytest.mark.parametrize(
    ("mechanism", "of_a", "of_b"),
    [
        (Mechanism(2.0, 3.0), 6.0, 6.0),
        (Mechanism(2.0, {"a": 3.0, "b": 0.5}), 6.0 * math.sqrt(2), math.sqrt(2)),
        (Mechanism(2.0, sensitivity=1.5), 3.0, 3.0),
        (Mechanism(2.0, 3.0, fixed=True), 12.0, 12.0),
        (Mechanism(2.0, 3.0, secret=True), 6.0, 6.0),
    ],
)
def test_the_noise_is_normal_with_the_stated_deviation(
    mechanism: Mechanism, of_a: float, of_b: float
) -> None:
    """Secret noise differs each time: of its tests one in a billion would fail."""
    zeros = torch.zeros(20_000, dtype=torch.float64)
    parts = {client: {"a": zeros, "b": zeros} for client in IDS}
    got = exchanged(mechanism, parts, {"a": Sum(zeros), "b": Mean(zeros)})
    for found, deviation in ((got["a"], of_a), (got["b"], of_b / len(IDS))):
        assert kstest(found.numpy() / deviation, "norm").pvalue > 1e-9
    assert not torch.equal(got["a"], got["b"] * len(IDS))
    again = exchanged(mechanism, parts, {"a": Sum(zeros), "b": Mean(zeros)})
    assert torch.equal(again["a"], got["a"]) != mechanism.secret


@pytest.mark.parametrize("population", [1, 3, 30, 1000])
def test_noise_covers_the_last_bits_of_a_sum(population: int) -> None:
    """Else the last bits of the sum would be those of the data."""
    like = torch.zeros(4000, dtype=torch.float64)
    noisy = Noisy(Sum(like), 1.0, 1, population, 1e-6, Mechanism(1.0).normals(KEY)).start(1)
    noisy.result()
    assert 0.45 < (noisy._sum.total % 2).double().mean() < 0.55


def test_noise_larger_than_a_sum_has_room_for_does_not_overflow() -> None:
    got = exchanged(Mechanism(1.0, 2.0**40), {0: {"a": ZEROS}}, {"a": Sum(ZEROS)}, quorum=0.0)
    assert 0 < float(got["a"].abs().max()) < 2.0**44


def test_counts_are_clipped_like_other_parts_and_stay_whole_numbers() -> None:
    counts = torch.tensor([30, 40])
    got = exchanged(Mechanism(0.0, 10.0), {0: {"n": counts}}, {"n": Sum(counts)}, quorum=0.0)
    assert torch.equal(got["n"], torch.tensor([6, 8]))
    noisy = exchanged(Mechanism(1.0, 10.0), {0: {"n": counts}}, {"n": Sum(counts)}, quorum=0.0)
    assert noisy["n"].dtype == torch.int64


def test_each_client_is_in_a_cohort_with_the_same_probability_independently() -> None:
    """Counts of 2,000 cohorts: binomial deviations, here within five of them."""
    clients = PrivateClients(Any, IDS, Mechanism(1.0, 1.0), cohort=2)  # type: ignore[arg-type]
    drawn = [clients.sample(KEY.at(i)) for i in range(2000)]
    for client in IDS:
        assert abs(sum(client in one for one in drawn) - 500) < 5 * math.sqrt(2000 * 0.25 * 0.75)
    both = sum(0 in one and 1 in one for one in drawn)
    assert abs(both - 125) < 5 * math.sqrt(125)
    assert min(map(len, drawn)) == 0  # probability 0.75^8


def test_a_cohort_of_a_fixed_size_is_that_of_a_run_without_privacy() -> None:
    fixed, secret = (Mechanism(1.0, 1.0, fixed=True, secret=hidden) for hidden in (False, True))
    fleet: Any = None
    plain = Clients(fleet, IDS, cohort=3)
    for i in range(20):
        found = PrivateClients(fleet, IDS, fixed, cohort=3).sample(KEY.at(i))
        assert found == plain.sample(KEY.at(i))
    hidden = {PrivateClients(fleet, IDS, secret, cohort=3).sample(KEY) for _ in range(20)}
    assert {len(cohort) for cohort in hidden} == {3}
    assert len(hidden) > 1  # all are the same with probability 56^-19


def test_an_empty_cohort_gives_noise_alone() -> None:
    clients = PrivateClients(Any, IDS, Mechanism(1.0, 1.0), cohort=2)  # type: ignore[arg-type]
    key = next(KEY.at(i) for i in range(2000) if not clients.sample(KEY.at(i)))
    got = exchanged(Mechanism(1.0, 1.0), {}, {"a": Mean(ZEROS)}, key, cohort=2)
    assert 0 < float(got["a"].abs().min()) < 4


@pytest.mark.parametrize(
    ("reduce", "options", "message"),
    [
        ({"a": Gather()}, {}, "keeps the part 'a' of 'train' of each client apart (Gather)"),
        ({"a": Sum(ZEROS)}, {"phase": "evaluate"}, "is tested by predictions of the clients' own"),
        ({"a": Sum(ZEROS)}, {"releases": 0}, "more than 0 exchanges in a round"),
        ({"b": Sum(ZEROS)}, {}, "privacy.clip has no 'b', a part that stub uploads"),
    ],
)
def test_an_exchange_that_is_not_covered_is_refused(
    reduce: Mapping[str, Reducer], options: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        exchanged(Mechanism(1.0, {"a": 1.0}), {}, reduce, **options)
    assert message in str(error.value)


def test_a_second_cohort_in_one_round_is_refused() -> None:
    fleet: Any = Replies({})
    clients = PrivateClients(fleet, IDS, Mechanism(1.0, 1.0))
    clients.sample(KEY)
    with pytest.raises(ConfigError, match="to other clients than the cohort"):
        clients.exchange(Method().train, {}, to=(0,), reduce={"a": Sum(ZEROS)}, key=KEY)


def test_the_guard_refuses_what_the_reducer_of_the_sum_refuses() -> None:
    reducer = Noisy(
        Mean(ZEROS, limit=1.0), 0.0, 1, 1, 1.0, lambda n: KEY.numpy().standard_normal(n)
    )
    assert TOO_LARGE in str(reducer.fault(0, vector(9, 0), 1.0))


def test_without_noise_and_clip_a_round_has_the_bits_of_a_plain_one(tmp_path: Path) -> None:
    """With one episode of each client, whose weight is then 1, as that of a private client."""
    method = {"name": "fl_proto", "local_steps": 1}
    made = experiment(tmp_path / "run", {"method": method, "run": {"cohort": None}})
    ids, key = made.prepared.clients, Key(3)
    plain, _ = made.method.round(made.server, Clients(made.fleet, ids, round=1), key)
    found = []
    for mechanism in (Mechanism(0.0, math.inf), Mechanism(1.0, 0.5)):
        clients = PrivateClients(made.fleet, ids, mechanism, round=1)
        found.append(made.method.round(made.server, clients, key)[0])
    assert tree.digest(found[0]) == tree.digest(plain) != tree.digest(found[1])
    threads = experiment(tmp_path / "run2", {"method": method, "run": {"workers": 2}})
    clients = PrivateClients(threads.fleet, ids, Mechanism(1.0, 0.5), round=1)
    assert tree.digest(threads.method.round(threads.server, clients, key)[0]) == tree.digest(
        found[1]
    )
