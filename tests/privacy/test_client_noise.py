"""Noise by the clients inside secure sums: its size, its privacy, and the sums without it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm
from torch import Tensor

pytest.importorskip("cryptography", reason="secure sums need the extra `secure`")

from fedshot.core import tree
from fedshot.core.errors import ConfigError, QuorumError
from fedshot.fleets.guard import Guard
from fedshot.fleets.unreliable import Unreliable
from fedshot.fleets.wrapper import Wrapper
from fedshot.privacy.differential import ClientLevel, Mechanism
from fedshot.privacy.private_clients import PrivateClients
from fedshot.privacy.secure_sums.client_noise import MAX_POPULATION, ClientNoise, NoisyClients
from fedshot.privacy.secure_sums.masking_clients import MaskingClients, simulated
from fedshot.privacy.secure_sums.neighbourhoods import LARGEST_COMPLETE, degree, needed
from fedshot.privacy.secure_sums.server_sum import SecureSums
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Arrival, Exchange, Fleet, Outcome
from fedshot.protocol.reducers import Mean, Reducer, Sum
from fedshot.runs.private_runs import client_noise
from privacy.test_private_clients import KEY, ZEROS, Method, Replies, vector
from system.runs import experiment, finished

THRESHOLD, N = 0.66, 8
IDS = tuple(range(N))
WIDE = torch.zeros(4000, dtype=torch.float64)


def summed(
    mechanism: Mechanism,
    parts: Mapping[int, Mapping[str, Tensor]],
    reduce: Mapping[str, Reducer],
    lost: Collection[int] = (),
) -> Outcome:
    noise = ClientNoise(mechanism, THRESHOLD, N, N)
    fleet: Fleet = MaskingClients(Replies(parts), simulated, noise)  # type: ignore[arg-type]
    fleet = Guard(
        Unreliable(fleet, lambda one, c: "drop" if one.work.name == "train" and c in lost else None)
    )
    combine = SecureSums(THRESHOLD, noise)
    clients = NoisyClients(fleet, IDS, mechanism, combine=combine)
    return clients.exchange(Method().train, {}, to=clients.sample(KEY), reduce=reduce, key=KEY)


@pytest.mark.parametrize("clip", [1.0, {"a": 1.0, "b": 2.0, "n": 3.0}])
def test_without_noise_the_sums_have_the_bits_of_clipped_plain_ones(clip: Any) -> None:
    draw = KEY.torch()
    like = {"a": torch.zeros(5), "b": ZEROS, "n": torch.zeros(3, dtype=torch.int64)}
    parts = {c: {"a": torch.randn(5, generator=draw), "b": vector(3, c - 4),
                 "n": torch.tensor([c, 7, 0])} for c in IDS}  # fmt: skip
    reduce = {"a": Mean(like["a"]), "b": Sum(like["b"]), "n": Sum(like["n"])}
    found = summed(Mechanism(0.0, clip), parts, reduce)
    fleet: Any = Guard(Replies(parts))  # type: ignore[arg-type]
    clients = PrivateClients(fleet, IDS, Mechanism(0.0, clip))
    plain = clients.exchange(Method().train, {}, to=clients.sample(KEY), reduce=reduce, key=KEY)
    assert tree.digest(dict(found.parts)) == tree.digest(dict(plain.parts))
    assert (found.accepted, found.weight, dict(found.metrics)) == (IDS, float(N), {})
    other = parts | {0: {**parts[0], "b": vector(-3, 4)}}
    assert tree.digest(dict(summed(Mechanism(0.0, clip), other, reduce).parts)) != tree.digest(
        dict(plain.parts)
    )


@pytest.mark.parametrize("lost", [set(), {2, 5}])
@pytest.mark.parametrize(
    ("mechanism", "of_a", "of_b"),
    [
        (Mechanism(2.0, 3.0), 6.0, 6.0),
        (Mechanism(2.0, {"a": 3.0, "b": 0.5}), 6.0 * math.sqrt(2), math.sqrt(2)),
        (Mechanism(2.0, 3.0, secret=True), 6.0, 6.0),
    ],
)
def test_a_sum_has_the_assumed_noise_at_least_and_a_share_more_for_each_further_client(
    mechanism: Mechanism, of_a: float, of_b: float, lost: set[int]
) -> None:
    """Of 8 clients 6 are needed. Of tests of secret noise one in a billion would fail."""
    parts = {client: {"a": WIDE, "b": WIDE} for client in IDS}
    got = summed(mechanism, parts, {"a": Sum(WIDE), "b": Mean(WIDE)}, lost)
    more = math.sqrt((N - len(lost)) / (needed(THRESHOLD, N) - 1))
    assert needed(THRESHOLD, N) == 6
    assert more > 1
    found = torch.cat([got["a"] / of_a, got["b"] * N / of_b]).numpy() / more
    assert kstest(found, "norm").pvalue > 1e-9
    assert found.std() == pytest.approx(1.0, rel=0.05)  # 6 deviations; a share of T is 0.09 off
    assert not torch.equal(got["a"], got["b"] * N)


def test_noise_follows_from_key_client_and_part() -> None:
    noise = ClientNoise(Mechanism(1.0, 1.0), THRESHOLD, N, N)
    sums = noise.sums({"a": Sum(ZEROS), "b": Sum(ZEROS)})
    (first, again, other), secret = (
        [noise.share(sums, N, KEY.at(c)) for c in (0, 0, 1)],
        ClientNoise(Mechanism(1.0, 1.0, secret=True), THRESHOLD, N, N),
    )
    assert np.array_equal(first, again)
    assert len({*first.tolist(), *other.tolist()}) == 8
    assert not np.array_equal(*(secret.share(sums, N, KEY) for _ in range(2)))


@pytest.mark.parametrize(("clip", "noise"), [(1e-6, 0.1), (1.0, 1.0), (1e4, 100.0)])
def test_the_integers_have_room_for_the_noise_and_the_noise_has_many_units(
    clip: float, noise: float
) -> None:
    for population in (3, 1000, MAX_POPULATION):
        found = ClientNoise(Mechanism(noise, clip), THRESHOLD, population, population).sums(
            {"a": Sum(ZEROS)}
        )
        unit = 2.0 ** -found["a"].start(population).bits
        assert 2**30 <= noise * clip / unit <= 2**32
        assert (population * clip + 2**29 * noise * clip) / unit <= 2**62


def test_rounded_shares_are_as_private_as_one_normal_variable() -> None:
    """The exact loss of the sum of 1 to 5 shares, of few units, beside that of the formula."""
    k = np.arange(-400, 401)
    for s in (1.5, 2.0, 6.0):
        one = norm.cdf((k + 0.5) / s) - norm.cdf((k - 0.5) / s)
        total = np.ones(1)
        for n in range(1, 6):
            total = np.convolve(total, one)
            bound = 4 * n * math.exp(-((math.pi * s) ** 2) / 2)
            for shift in (1, 7):
                moved, still = np.pad(total, (shift, 0)), np.pad(total, (0, shift))
                z = s * math.sqrt(n) / shift
                for epsilon in (0.1, 1.0, 3.0):
                    delta = np.maximum(moved - math.exp(epsilon) * still, 0).sum()
                    formula = norm.cdf(0.5 / z - epsilon * z) - math.exp(epsilon) * norm.cdf(
                        -0.5 / z - epsilon * z
                    )
                    assert delta <= formula + bound * math.exp(epsilon) * len(moved) + 1e-15
                    assert s < 6 or delta > 0.95 * formula - 1e-15  # not far below, either


def test_more_clients_than_the_integers_have_room_for_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"have room for 16,777,216\. Set run.secure_sums"):
        ClientNoise(Mechanism(1.0, 1.0), THRESHOLD, MAX_POPULATION + 1, N)


def test_a_node_needs_the_noise_multiplier_in_the_configuration() -> None:
    run = SimpleNamespace(secure_sums=True, secure_threshold=THRESHOLD, cohort=None)
    config: Any = SimpleNamespace(run=run, privacy=ClientLevel(epsilon=8.0, clip=2.0))
    with pytest.raises(ConfigError, match=r"add the noise, and privacy\.noise is missing"):
        client_noise(config, N)
    config.privacy = ClientLevel(noise=0.5, clip=2.0)
    expected = ClientNoise(Mechanism(0.5, 2.0, secret=True), THRESHOLD, N, N)
    assert client_noise(config, N, secret=True) == expected


def test_a_client_with_a_fault_sends_zeros_and_nobody_is_told() -> None:
    parts = {c: {"a": ZEROS + (math.nan if c == 3 else c)} for c in IDS}
    reduce = {"a": Sum(ZEROS)}
    found = summed(Mechanism(0.0, 100.0), parts, reduce)
    assert (found.accepted, dict(found.faults)) == (IDS, {})
    assert torch.equal(found["a"], ZEROS + sum(IDS) - 3)


def test_a_client_refuses_sums_with_less_noise_than_it_was_told() -> None:
    """A server that claims a larger cohort, and one that lets too few recover secrets."""
    noise = ClientNoise(Mechanism(1.0, 1.0), THRESHOLD, N, N - 1)
    parts = {c: {"a": ZEROS} for c in IDS}
    for clients, reason in (
        (MaskingClients(Replies(parts), simulated, noise), "one of 8 clients, not of 7"),  # type: ignore[arg-type]
        (MaskingClients(Replies(parts), simulated, threshold=0.9), "6 of 8 clients are too few"),  # type: ignore[arg-type]
    ):
        plain = Clients(clients, IDS, combine=SecureSums(THRESHOLD))
        with pytest.raises(QuorumError):
            plain.exchange(Method().train, {}, to=IDS, reduce={"a": Sum(ZEROS)}, key=KEY)
        assert all(reason in fault.reason for _, fault in plain.faults)
        assert len(plain.faults) == N


def test_a_client_counts_the_noise_of_its_neighbours_alone_where_it_sees_no_others() -> None:
    """A server could give each client few neighbours and claim a cohort of thousands."""
    noise = ClientNoise(Mechanism(1.0, 1.0), THRESHOLD, 10**4, 10**4)
    assert noise.seen(61, needed(THRESHOLD, 61)) == 1.0
    assert (degree(LARGEST_COMPLETE), degree(LARGEST_COMPLETE + 1)) == (60, 60)
    assert noise.seen(1000, needed(THRESHOLD, 101)) == pytest.approx(math.sqrt(66 / 659))
    parts = {c: {"a": ZEROS} for c in IDS}

    def reasons(min_noise: float) -> set[str]:
        fleet: Any = Claims(MaskingClients(Replies(parts), simulated, noise, min_noise=min_noise))  # type: ignore[arg-type]
        clients = Clients(fleet, IDS, quorum=0.0, combine=SecureSums(THRESHOLD, noise))
        with contextlib.suppress(QuorumError):
            clients.exchange(Method().train, {}, to=IDS, reduce={"a": Sum(ZEROS)}, key=KEY)
        return {fault.reason for _, fault in clients.faults}

    assert not reasons(0.0), "no policy asks"
    text = "the client's 7 neighbours add noise of 0.1, and the policy of this node has min_noise"
    assert {reason[: len(text)] for reason in reasons(0.5)} == {text}


class Claims(Wrapper):
    """A server that says that a cohort of 8 is one of 1,000."""

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        if exchange.masking is not None:
            exchange = replace(exchange, masking=replace(exchange.masking, cohort=1000))
        return self.fleet.replies(exchange)


def test_noise_is_twice_as_large_if_one_client_replaces_another() -> None:
    parts = {client: {"a": WIDE} for client in IDS}
    found = [summed(Mechanism(2.0, 3.0, fixed=fixed), parts, {"a": Sum(WIDE)})["a"]
             for fixed in (False, True)]  # fmt: skip
    torch.testing.assert_close(found[1], 2 * found[0], rtol=1e-6, atol=0)


PRIVATE: dict[str, Any] = {
    "method": {"name": "fl_proto", "local_steps": 1},
    "run": {"secure_sums": True, "cohort": 4, "rounds": 2},
    "privacy": {"name": "client", "noise": 1.0, "clip": 0.5, "delta": 0.01},
}


@pytest.mark.slow
def test_a_run_has_the_same_bits_on_every_fleet(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    runs = [finished(tmp_path / fleet, PRIVATE, {"run": {"fleet": fleet}})
            for fleet in ("sequential", "threads", "vectorised")]  # fmt: skip
    assert len({tree.digest(run.server) for run in runs}) == 1
    assert {part for _, _, to, part in runs[0].meter.bytes if to == "up"} >= {"masked"}


def test_clients_that_are_left_out_are_not_missed(tmp_path: Path) -> None:
    """A cohort of all clients that are feasible is smaller than the number of all clients."""
    pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    uneven = {
        "partition": {"name": "dirichlet", "clients": 12, "alpha": 0.5},
        "run": {"cohort": None, "infeasible_clients": "leave_out", "rounds": 1},
    }
    run = experiment(tmp_path, PRIVATE, uneven)
    assert 3 <= len(run.prepared.clients) < 12
    assert [len(record.faults) for record in run.run()] == [0, 0]


def test_a_sampled_cohort_costs_what_all_clients_cost(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    sampled = experiment(tmp_path / "sampled", PRIVATE).prepared
    central = {"run": {"secure_sums": False, "cohort": None}}
    whole = experiment(tmp_path / "whole", PRIVATE, central).prepared
    assert sampled.privacy.epsilon(2) == whole.privacy.epsilon(2) > 0  # type: ignore[union-attr]
    told = [any("a sampled cohort spends" in text for text in one.notices())
            for one in (sampled, whole)]  # fmt: skip
    assert told == [True, False]


def test_example_level_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    example = {"method": {"name": "fedncm"}, "privacy": {"name": "example", "noise": 1.0}}
    with pytest.raises(ConfigError, match=r"'example', and run.secure_sums is true: clients add"):
        experiment(tmp_path, {"run": {"secure_sums": True}, **example})
