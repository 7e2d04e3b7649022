"""Secure sums of a small cohort: the bits of the plain sum, losses or not, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("cryptography", reason="secure sums need the extra `secure`")

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.fleets.guard import Guard
from fedshot.fleets.meter import Meter
from fedshot.fleets.unreliable import Unreliable
from fedshot.fleets.wrapper import Wrapper
from fedshot.privacy.secure_sums.masking_clients import (
    KEYS,
    SHARES,
    STEPS,
    UNMASK,
    MaskingClients,
    simulated,
)
from fedshot.privacy.secure_sums.neighbourhoods import degree, needed, neighbourhoods
from fedshot.privacy.secure_sums.server_sum import SecureSums
from fedshot.protocol.clients import reduce_replies
from fedshot.protocol.exchange import (
    Arrival,
    ClientWork,
    Exchange,
    Fleet,
    Masking,
    Outcome,
    PerClient,
    Reply,
)
from fedshot.protocol.reducers import Gather, Mean, Sum

WORK = "train"
LIKE = {"theta": torch.zeros(2, 3), "b": torch.zeros(())}
REDUCE = {
    "mean": Mean(LIKE),
    "count": Sum(torch.zeros(4, dtype=torch.int64)),
    "sum": Sum({"x": torch.zeros(5, dtype=torch.float64)}, limit=2.0**20),
}
THRESHOLD = 0.66
STAGES = (KEYS, SHARES, WORK, UNMASK)


class Replies(Wrapper):
    """A fleet whose clients reply with random numbers."""

    def __init__(self, seed: int = 0, scale: float = 1.0) -> None:
        self.seed, self.scale = seed, scale

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        for client in exchange.to:
            yield Arrival(client, self.reply(client))

    def reply(self, client: int) -> Reply:
        draw = Key(self.seed).at(client).torch()
        up = {
            "mean": tree.map(
                lambda leaf: self.scale * torch.randn(leaf.shape, generator=draw), LIKE
            ),
            "count": torch.randint(0, 100, (4,), generator=draw),
            "sum": {"x": torch.randn(5, generator=draw, dtype=torch.float64) * 1e3},
        }
        metrics = {"loss": torch.rand((), generator=draw), "tiny": torch.tensor(1e-30 * client)}
        return Reply(up, {}, 0.1 * (client + 1), metrics)


def exchange(n: int, **changes: Any) -> Exchange:
    work: Any = ClientWork(SimpleNamespace(name="stub"), WORK)
    return replace(Exchange(work, {}, tuple(range(n)), REDUCE, Key(3), (1, 0)), **changes)


def lose(lost: Mapping[str, set[int]]) -> Callable[[Fleet], Fleet]:
    """Return a wrapper that drops the replies of clients in a step."""
    return lambda fleet: Unreliable(
        fleet, lambda one, c: "drop" if c in lost.get(one.work.name, ()) else None
    )


def secure(
    asked: Exchange, lost: Mapping[str, set[int]] = {}, fleet: Fleet | None = None
) -> Outcome:
    clients = MaskingClients(fleet or Replies(), simulated)
    return SecureSums(THRESHOLD)(Guard(lose(lost)(clients)), asked)


def plain(asked: Exchange, lost: set[int]) -> Outcome:
    return reduce_replies(Guard(lose({WORK: lost})(Replies())), asked)


def assert_equal(found: Outcome, expected: Outcome) -> None:
    assert tree.digest(dict(found.parts)) == tree.digest(dict(expected.parts))
    assert found.accepted == expected.accepted
    assert (found.weight, found.metrics) == (expected.weight, expected.metrics)


@pytest.mark.parametrize(("stage", "lost"), [(WORK, set()), *((step, {0, 5}) for step in STAGES)])
def test_the_sum_has_the_bits_of_the_plain_sum_whoever_is_lost(stage: str, lost: set[int]) -> None:
    """Of 7 clients 5 are needed, so any 2 may be lost at a step."""
    assert needed(THRESHOLD, 7) == 5
    found = secure(exchange(7), {stage: lost})
    assert_equal(found, plain(exchange(7), set() if stage == UNMASK else lost))
    assert set(found.faults) == (set() if stage == UNMASK else lost)


def test_clients_may_be_lost_at_different_steps() -> None:
    lost = {KEYS: {0}, SHARES: {4}, WORK: {2}, UNMASK: {1}}
    assert_equal(secure(exchange(14), lost), plain(exchange(14), {0, 4, 2}))


@pytest.mark.parametrize("stage", STAGES)
def test_with_fewer_than_the_threshold_nobody_is_accepted(stage: str) -> None:
    found = secure(exchange(7), {stage: {0, 3, 5}})
    assert (found.parts, found.accepted) == ({}, ())
    reason = f"4 of 7 clients were left in step {stage!r} of the secure sum, which needs 5"
    assert found.faults[1] == ("lost", reason)
    assert set(found.faults) == set(range(7))


def test_a_fault_in_a_reply_is_found_by_its_client() -> None:
    class Diverged(Replies):
        def reply(self, client: int) -> Reply:
            reply = super().reply(client)
            bad = {"x": torch.full((5,), math.nan).double()}
            return reply._replace(up={**reply.up, "sum": bad}) if client == 3 else reply

    found = secure(exchange(7), fleet=Diverged())
    assert_equal(found, plain(exchange(7), {3}))
    assert found.faults[3] == ("refused", "part 'sum': x holds a value that is not finite")
    assert found.faults[3].diverged


def test_metrics_of_other_names_than_those_of_most_clients_are_refused() -> None:
    class Other(Replies):
        def reply(self, client: int) -> Reply:
            reply = super().reply(client)
            return reply._replace(metrics={"own": torch.ones(())}) if client == 2 else reply

    found = secure(exchange(7), fleet=Other())
    assert_equal(found, plain(exchange(7), {2}))
    reason = "its metrics are not loss, tiny, as those of most clients"
    assert found.faults == {2: ("refused", reason)}


@pytest.mark.parametrize(
    ("names", "reason"),
    [(map(str, range(65)), "more than 64 metrics"), (["<b>"], "a metric named '<b>'")],
)
def test_names_of_metrics_are_bounded(names: Iterable[str], reason: str) -> None:
    metrics = {name: torch.ones(()) for name in names}

    class Odd(Replies):
        def reply(self, client: int) -> Reply:
            return super().reply(client)._replace(metrics=metrics)

    found = secure(exchange(4), fleet=Odd())
    assert found.accepted == ()
    assert all(reason in fault.reason for fault in found.faults.values())


def test_a_sum_out_of_range_is_not_used() -> None:
    class Cheat(Wrapper):
        """A client that is lost after it has masked with others, and lies about a share."""

        def replies(self, asked: Exchange) -> Iterator[Arrival]:
            for arrival in self.fleet.replies(asked):
                if asked.work.name == UNMASK and arrival.reply and arrival.client == 1:
                    arrival.reply.up["answer"]["others"][0, -1] ^= 1
                yield arrival

    found = SecureSums(THRESHOLD)(Cheat(MaskingClients(Replies(), simulated)), exchange(4))
    assert found.accepted == ()
    assert found.faults[0].reason == "the sum is larger than valid replies allow"


@pytest.mark.parametrize("reducer", [Gather(), object()])
def test_what_is_not_a_sum_is_refused_by_name(reducer: Any) -> None:
    asked = exchange(7, reduce={"models": reducer})
    words = (
        "run.secure_sums is true, and method 'stub' needs the part 'models' of each client in its "
        "exchange 'train', not only a sum. Set run.secure_sums to false, or choose another method "
        "or option."
    )
    with pytest.raises(ConfigError) as error:
        secure(asked)
    assert str(error.value) == words


def test_an_evaluation_is_not_masked() -> None:
    asked = exchange(7, phase="evaluate", reduce={**REDUCE, "count": Gather()})
    assert len(secure(asked)["count"]) == 7


# The steps, as a client sees them.


class Server:
    """Sends a client of five the messages of a secure sum."""

    def __init__(self, n: int = 5, min_cohort: int = 0) -> None:
        self.clients = MaskingClients(Replies(), simulated, threshold=0.6, min_cohort=min_cohort)
        self.asked = exchange(n)
        self.ids = list(range(n))

    def ask(self, step: str, client: int, message: Tree = (), **changes: Any) -> Any:
        asked = replace(self.asked, work=ClientWork(None, step), down=PerClient(lambda _: message),
                        to=(client,), **changes)  # fmt: skip
        (arrival,) = self.clients.replies(asked)
        return arrival.fault.reason if arrival.reply is None else arrival.reply.up["answer"]

    def neighbours(self, client: int, **changes: Any) -> Tree:
        others = [c for c in self.ids if c != client]
        message = {"clients": torch.tensor(others), "threshold": torch.tensor(4)}
        return message | {"keys": torch.stack([self.keys[c] for c in others])} | changes

    def to_shares(self) -> Server:
        self.keys = {c: self.ask(KEYS, c) for c in self.ids}
        return self

    def to_masks(self) -> Server:
        self.to_shares()
        self.sent = {c: self.ask(SHARES, c, self.neighbours(c)) for c in self.ids}
        return self

    def mask(self, client: int) -> Any:
        masking = Masking(frozenset(self.ids), len(self.ids), REDUCE)
        asked = replace(self.asked, to=(client,), masking=masking)
        (arrival,) = self.clients.replies(asked)
        return arrival.fault.reason if arrival.reply is None else arrival.reply.up["masked"]

    def unmask(self, client: int, **changes: Any) -> Tree:
        others = [c for c in self.ids if c != client]
        texts = [self.sent[c][client - (client > c)] for c in others]
        return {
            "clients": torch.tensor(others), "lost": torch.tensor([False] * len(others)),
            "shares": torch.stack(texts),
        } | changes  # fmt: skip


def test_a_client_refuses_what_would_reveal_its_upload() -> None:
    server = Server()
    assert server.ask(SHARES, 0) == "it has no keys for this exchange"
    server.to_shares()
    few = server.neighbours(0, threshold=torch.tensor(2))
    assert server.ask(SHARES, 0, few) == "2 of 5 clients are too few, or too many, for a secret"
    twice = server.neighbours(0, clients=torch.tensor([1, 2, 3, 3]))
    assert "a neighbour is named twice" in server.ask(SHARES, 0, twice)
    itself = server.neighbours(0, clients=torch.tensor([0, 1, 2, 3]))
    assert "a neighbour is named twice" in server.ask(SHARES, 0, itself)
    zero = server.neighbours(0, clients=torch.tensor([-1, 1, 2, 3]))
    assert server.ask(SHARES, 0, zero) == "client -1 is negative", "its share is the secret"
    weak = server.neighbours(0, keys=torch.zeros(4, 2, 32, dtype=torch.uint8))
    assert "key" in server.ask(SHARES, 0, weak)


def test_a_client_never_gives_shares_of_both_secrets_of_another() -> None:
    server = Server().to_masks()
    assert server.ask(UNMASK, 0, server.unmask(0)) == (
        "the server asks for shares of other clients than it has masked with"
    )
    server.mask(0)
    both = server.unmask(
        0, clients=torch.tensor([1, 1, 2, 3]), lost=torch.tensor([True, False, False, False])
    )
    reason = "the server asks twice for a share of one client: of both secrets"
    assert server.ask(UNMASK, 0, both) == reason
    few = server.unmask(0, lost=torch.tensor([True, True, False, False]))
    assert server.ask(UNMASK, 0, few) == "3 clients are too few for a sum"
    fewer = server.unmask(0, clients=torch.tensor([1, 2, 3]))
    assert "of other clients" in server.ask(UNMASK, 0, fewer)
    assert server.ask(UNMASK, 0, server.unmask(0), key=Key(4)) == "it has no keys for this exchange"
    assert server.ask(UNMASK, 0, server.unmask(0))["others"].shape == (4, 17)
    assert server.ask(UNMASK, 0, server.unmask(0)) == "it has no keys for this exchange"


def test_a_client_masks_one_upload_in_an_exchange_and_not_with_too_few() -> None:
    server = Server().to_masks()
    assert server.mask(0)["vector"].shape == (16,)
    assert server.mask(0) == "it has sent a masked upload in this exchange already"
    server.ids = [0, 1, 2]
    assert server.mask(1) == "2 of its 4 neighbours are left"
    server = Server(min_cohort=9).to_masks()
    assert server.mask(0) == "4 of its 4 neighbours are left", "0.6 of 9 are 6"
    assert Server(min_cohort=8).to_masks().mask(0)["vector"].shape == (16,)


def test_a_share_that_was_changed_on_the_way_is_refused() -> None:
    server = Server().to_masks()
    server.mask(0)
    server.sent[2][0, 5] ^= 1
    assert "was changed" in server.ask(UNMASK, 0, server.unmask(0))


# What the server sees.


class Log(Wrapper):
    """A server that keeps the masked uploads."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.seen: list[bytes] = []

    def replies(self, asked: Exchange) -> Iterator[Arrival]:
        for arrival in self.fleet.replies(asked):
            if asked.work.name == WORK and arrival.reply:
                leaves = tree.leaves(dict(arrival.reply.up))
                self.seen.append(b"".join(leaf.numpy().tobytes() for leaf in leaves))
            yield arrival


class Wide(Replies):
    """Clients with 4,000 numbers; those of two data sets differ in scale."""

    def reply(self, client: int) -> Reply:
        draw = Key(self.seed).at(client).torch()
        return Reply({"mean": self.scale * torch.randn(4000, generator=draw)}, {}, 1.0)


def uploads(fleet: Fleet, combine: Callable[[Fleet, Exchange], Outcome], seed: int) -> list[bytes]:
    log = Log(fleet)
    combine(log, exchange(6, reduce={"mean": Mean(torch.zeros(4000))}, key=Key(seed)))
    return log.seen


def p_value(*runs: list[bytes]) -> float:
    """Return the p-value of a chi-square test that the bytes of all runs are distributed alike."""
    counts = [np.bincount(np.frombuffer(b"".join(run), np.uint8), minlength=256) for run in runs]
    table = np.stack(counts)
    return float(stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue)


def test_masked_uploads_of_different_data_look_alike_and_plain_ones_do_not() -> None:
    small, large = Wide(1), Wide(2, scale=1000.0)
    bare = [uploads(fleet, reduce_replies, 5) for fleet in (small, large)]
    assert p_value(*bare) < 1e-12
    masked = [
        uploads(MaskingClients(fleet, simulated), SecureSums(THRESHOLD), seed)
        for fleet, seed in ((small, 5), (large, 6))
    ]
    assert p_value(*masked) > 1e-3
    uniform = np.bincount(np.frombuffer(b"".join(masked[0]), np.uint8), minlength=256)
    assert stats.chisquare(uniform).pvalue > 1e-3


def test_two_masked_uploads_differ_even_for_equal_replies() -> None:
    """Every pair of uploads, and one client's in two exchanges."""

    class Equal(Wide):
        def reply(self, client: int) -> Reply:
            return super().reply(0)

    seen = [
        *uploads(MaskingClients(Equal(), simulated), SecureSums(THRESHOLD), 5),
        *uploads(MaskingClients(Equal(), simulated), SecureSums(THRESHOLD), 6),
    ]
    for a, b in combinations(seen, 2):
        difference = np.frombuffer(a, np.int64) - np.frombuffer(b, np.int64)
        digits = np.bincount(difference.view(np.uint8), minlength=256)
        assert stats.chisquare(digits).pvalue > 1e-6


def test_random_bytes_of_the_system_give_other_masks_and_the_same_sum() -> None:
    runs = []
    for _ in range(2):
        log = Log(MaskingClients(Replies()))
        runs.append((SecureSums(THRESHOLD)(Guard(log), exchange(5)), log.seen))
    (first, masks), (second, others) = runs
    assert_equal(first, second)
    assert not set(masks) & set(others)


def test_the_ledger_counts_every_step() -> None:
    meter = Meter(MaskingClients(Replies(), simulated))
    SecureSums(THRESHOLD)(Guard(meter), exchange(5))
    up = {(work, part): n for (_, work, to, part), n in meter.bytes.items() if to == "up"}
    numbers, scalars = 6 + 1 + 4 + 5, 1 + 2
    assert up == {
        (KEYS, "answer"): 5 * 2 * 32,
        (SHARES, "answer"): 5 * 4 * (2 * 17 + 16),
        (WORK, "masked"): 5 * (8 * numbers + 160 * scalars),
        (UNMASK, "answer"): 5 * 5 * 17,
    }
    assert {work for _, work, to, _ in meter.bytes if to == "down"} == {SHARES, UNMASK}
    assert {KEYS, SHARES, UNMASK} == set(STEPS)


# Large cohorts.


@pytest.mark.parametrize("n", [3, 7, 61, 62, 200])
def test_neighbours_are_mutual_and_join_all_clients(n: int) -> None:
    clients = [3 * c for c in range(n)]
    near = neighbourhoods(clients, Key(0))
    assert near.keys() == set(clients)
    assert all(len(others) == degree(n) for others in near.values())
    assert all(c in near[other] and c != other for c in clients for other in near[c])
    reached, front = {0}, [0]
    while front:
        front = [c for c in {*near[front.pop()]} - reached if not reached.add(c)] + front
    assert reached == set(clients)
    assert (degree(n) == n - 1) == (n < 62)


@pytest.mark.slow
def test_a_sparse_graph_gives_the_bits_of_the_plain_sum() -> None:
    lost = {KEYS: {0, 9}, SHARES: {4}, WORK: {2, 6, 70}, UNMASK: {1, 33}}
    found = secure(exchange(80), lost)
    assert_equal(found, plain(exchange(80), {0, 9, 4, 2, 6, 70}))
    assert degree(78) < 77
