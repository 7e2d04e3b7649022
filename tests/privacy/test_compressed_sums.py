"""Compressed uploads in secure sums: sums of integers, their room, ranges, bytes and masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

pytest.importorskip("cryptography", reason="secure sums need the extra `secure`")

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.fleets.compressing import LARGEST, RISE, ClientSide, mean_size, reported_size
from fedshot.fleets.guard import Guard
from fedshot.fleets.meter import Meter
from fedshot.fleets.unreliable import Unreliable
from fedshot.fleets.wrapper import Wrapper
from fedshot.privacy.secure_sums.masking_clients import (
    KEYS,
    SHARES,
    UNMASK,
    MaskingClients,
    simulated,
)
from fedshot.privacy.secure_sums.public_ranges import HEADROOM, PublicRanges
from fedshot.privacy.secure_sums.ring import Element, Layout, decode, encode
from fedshot.privacy.secure_sums.server_sum import SecureSums
from fedshot.protocol.clients import reduce_replies
from fedshot.protocol.compressors import Compression, Compressor, Int4, Int8
from fedshot.protocol.exchange import Arrival, ClientWork, Exchange, Fleet, Outcome, Reply
from fedshot.protocol.reducers import MIN_RANGE, TOO_LARGE, Grid, Mean, Sum

LIKE = {"w": torch.zeros(5, 7), "v": torch.zeros(3, 2), "b": torch.zeros(3)}
LARGE = ("v", "w")
WORK, THRESHOLD = "train", 0.66


class Clients(Wrapper):
    """A fleet whose clients round random changes; client 1 has some far above the range."""

    def __init__(self, compressor: Compressor) -> None:
        self.side = ClientSide(Compression(compressor))

    def replies(self, asked: Exchange) -> Iterator[Arrival]:
        for client in asked.to:
            asked.message(client)
            reply = Reply({"x": change(client)}, {}, weight(client), {"loss": torch.tensor(1.0)})
            up, _ = self.side.upload(asked, client, reply, {})
            yield Arrival(client, reply._replace(up=up))


def weight(client: int) -> float:
    return 0.5 + client


def change(client: int) -> dict[str, Tensor]:
    draw = Key(1).at(client).torch()
    scale = torch.where(torch.rand(5, 7, generator=draw) < 0.1, 100.0, 1.0) if client == 1 else 1.0
    found = {name: torch.randn(leaf.shape, generator=draw) for name, leaf in LIKE.items()}
    return {**found, "w": found["w"] * scale}


def exchange(number: int, n: int = 7) -> Exchange:
    work: Any = ClientWork(SimpleNamespace(name="stub"), WORK)
    return Exchange(work, {}, tuple(range(n)), {"x": Mean(LIKE)}, Key(number), (1, number))


def losing(lost: Mapping[str, set[int]]) -> Callable[[Fleet], Fleet]:
    return lambda fleet: Unreliable(
        fleet,
        lambda one, c: "drop" if one.version[1] and c in lost.get(one.work.name, ()) else None,
    )


def summed(
    compressor: Compressor, lost: Mapping[str, set[int]] = {}
) -> tuple[Outcome, Outcome, dict[str, float], Meter]:
    """Return two outcomes, the ranges before the second, and what it has sent."""
    ranges: dict[str, float] = {}
    combine = SecureSums(THRESHOLD, ranges=PublicRanges(compressor, ranges))
    meter = Meter(MaskingClients(Clients(compressor), simulated))
    fleet = Guard(losing(lost)(meter))
    first = combine(fleet, exchange(0))
    held = dict(ranges)
    meter.load_json([])
    return first, combine(fleet, exchange(1)), held, meter


def mean_of(clients: set[int]) -> Callable[[str, Callable[[float, float], Fraction]], Tensor]:
    """Return a function to the mean of one tensor, whose entries w * x are first rounded."""
    total = sum(Fraction(weight(c)) for c in clients)

    def mean(name: str, rounded: Callable[[float, float], Fraction]) -> Tensor:
        found = np.vectorize(lambda *xs: float(
            sum(rounded(weight(c), float(x)) for c, x in zip(clients, xs, strict=True)) / total
        ))(*(change(c)[name].numpy() for c in clients))  # fmt: skip
        return torch.from_numpy(found).float()

    return mean


@pytest.mark.parametrize(
    ("compressor", "stage"),
    [(Int4(), WORK), *((Int8(), step) for step in (KEYS, SHARES, WORK, UNMASK))],
)
def test_a_sum_is_that_of_the_clients_integers_whoever_is_lost(
    compressor: Compressor, stage: str
) -> None:
    """Also of client 1, much of which is cut off."""
    lost = {2, 5}
    _, found, ranges, _ = summed(compressor, {stage: lost})
    left = set(range(7)) - (set() if stage == UNMASK else lost)
    assert set(found.accepted) == left
    assert set(found.parts) == {"x"}
    most, mean = compressor.most, mean_of(left)
    assert most is not None
    for name in LARGE:
        step = ranges[f"train:x:{name}"] / most

        def rounded(w: float, x: float, step: float = step) -> Fraction:
            whole = round(Fraction(w) * Fraction(x) / Fraction(step))
            return max(-most, min(most, whole)) * Fraction(step)

        torch.testing.assert_close(found["x"][name], mean(name, rounded), rtol=1e-6, atol=0)
    exact = mean("b", lambda w, x: Fraction(w) * Fraction(x))
    torch.testing.assert_close(found["x"]["b"], exact, rtol=1e-6, atol=1e-9)


def test_the_first_exchange_is_exact_and_the_next_range_is_twice_the_mean_largest_value() -> None:
    first, _, ranges, _ = summed(Int8())
    for name in LARGE:
        exact = mean_of(set(range(7)))(name, lambda w, x: Fraction(w) * Fraction(x))
        torch.testing.assert_close(first["x"][name], exact, rtol=1e-6, atol=1e-9)
        largest = [weight(c) * float(change(c)[name].abs().max()) for c in range(7)]
        assert ranges[f"train:x:{name}"] == pytest.approx(HEADROOM * np.mean(largest), rel=1e-12)


@pytest.mark.parametrize("n", [1, 16, 256])
def test_a_range_holds_the_largest_of_unequal_clients(n: int) -> None:
    """One client has all the weight, so the mean of the largest values says little of its own."""
    for limit in (1.0, 2.0**16, 2.0**40):
        sizes = torch.full((n,), 1e-3, dtype=torch.float64)
        sizes[0] = 3.0
        total = Sum(torch.zeros((), dtype=torch.float64), limit).start(n)
        for size in sizes:
            total.add(0, reported_size(size, 2.0, limit), 1.0)
        found = mean_size(float(total.result()) / n, 2.0, limit)
        assert found == pytest.approx(float((sizes**8).mean()) ** (1 / 8), rel=1e-6)
        assert HEADROOM * found >= 3.0 * (1 - 1e-6)


def test_a_size_is_at_most_so_many_ranges_and_of_equal_clients_the_mean_is_exact() -> None:
    far = reported_size(torch.tensor(1e30).double(), 0.5, 100.0)
    assert float(far) == 100.0
    assert mean_size(100.0, 0.5, 100.0) == RISE * 0.5
    assert float(reported_size(torch.tensor(1e30).double(), None, 100.0)) == 100.0
    named = float(reported_size(torch.tensor(0.3, dtype=torch.float64), 0.5, 100.0))
    assert mean_size(named, 0.5, 100.0) == pytest.approx(0.3, rel=1e-12)


@pytest.mark.parametrize("total", [-60_000.0, -1.0, 0.0, 1e9, 3 * MIN_RANGE])
def test_a_range_that_cannot_be_is_forgotten(total: float) -> None:
    for held in ({}, {"train:x:w": 1.0, "train:x:v": 1.0}):
        ranges = dict(held)
        public = PublicRanges(Int8(), ranges)
        asked = public.in_grids(exchange(1))
        named = {f"x:{name}": torch.tensor(total, dtype=torch.float64) for name in LARGE}
        public.updated(asked, Outcome({"x": {}, LARGEST: named}, (0, 1, 2)))
        possible = 0 < total < 1e9 and held  # a small sum of sizes in units of a range
        assert set(ranges) == set(held if possible or (total == 1e9 and held) else ())
        assert all(0 < one < 2**17 for one in ranges.values())


def test_a_tensor_of_zeros_has_no_range_and_is_sent_exactly() -> None:
    ranges = {"train:x:w": 1.0}
    public = PublicRanges(Int8(), ranges)
    asked = public.in_grids(exchange(1))
    reducer, largest = asked.reduce["x"], asked.reduce[LARGEST]
    assert isinstance(reducer, Mean)
    assert isinstance(largest, Sum)
    assert reducer.grid == Grid(127, {"w": 1.0})
    assert set(largest.like) == {"x:w", "x:v"}
    none = {name: torch.zeros((), dtype=torch.float64) for name in largest.like}
    public.updated(asked, Outcome({"x": {}, LARGEST: none}, (0, 1, 2)))
    assert ranges == {}


@pytest.mark.parametrize(
    ("most", "cohort", "bits"),
    [(127, 258, 16), (127, 259, 17), (7, 18, 8), (7, 19, 9), (127, 10, 12), (127, 3, 10)],
)
def test_all_clients_at_an_end_of_the_range_fit_and_one_bit_less_does_not_hold_them(
    most: int, cohort: int, bits: int
) -> None:
    """Through packing, with masks that cancel."""
    grid = Grid(most, {"w": 1.0})
    reduce = {"x": Mean({"w": torch.zeros(3, 1)}, grid=grid)}
    layout = Layout.of(reduce, cohort)
    assert (layout.bits, grid.bits(cohort)) == (bits, bits)
    ends = torch.tensor([[9.0], [-9.0], [0.0]])  # above the range
    total, masks = Element.zero(3, 1), Key(0).numpy()
    for i in range(cohort):
        one, mask = (
            encode(reduce, cohort, Reply({"x": {"w": ends}}, {}, 1.0)),
            masks.bytes(24 + 160),
        )
        one.add_mask(mask, 1)
        total.add(Element(layout.received(layout.sent(one.vector)), one.scalars))
        total.add_mask(mask, -1)
        assert i or layout.sent(one.vector)["packed"].numel() == -(-3 * bits // 8)
    parts, _, _ = decode(reduce, cohort, (), total, cohort)
    assert parts["x"]["w"].tolist() == [[1.0], [-1.0], [0.0]]
    short = replace(layout, bits=bits - 1)
    assert (short.summed(total.vector, cohort) != layout.summed(total.vector, cohort))[:2].all()


def test_a_sum_beyond_the_range_of_its_clients_is_refused() -> None:
    grid = Grid(7, {"w": 1.0})
    layout = Layout.of({"x": Mean({"w": torch.zeros(1, 1)}, grid=grid)}, 5)
    assert layout.summed(np.array([-21]), 3) == [-21]
    with pytest.raises(ValueError, match="larger than valid replies"):
        layout.summed(np.array([22]), 3)


def test_the_ledger_counts_packed_bytes_and_ranges() -> None:
    """For 7 clients an integer of int8 has 11 bits, as 2 * 127 * 7 + 1 values are below 2**11."""
    *_, meter = summed(Int8())
    found = {(way, part): n for (_, work, way, part), n in meter.bytes.items() if work == WORK}
    masked = -(-(35 + 6) * 11 // 8) + 8 * (3 + len(LARGE)) + 160 * 2
    assert found == {("up", "masked"): 7 * masked, ("down", "ranges"): 7 * 8 * len(LARGE)}


class Log(Wrapper):
    """A server that keeps the masked integers of the second exchange."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.seen: list[bytes] = []

    def replies(self, asked: Exchange) -> Iterator[Arrival]:
        for arrival in self.fleet.replies(asked):
            if asked.version[1] and asked.work.name == WORK and arrival.reply:
                self.seen.append(arrival.reply.up["masked"]["packed"].numpy().tobytes())
            yield arrival


def test_masked_integers_are_uniform_and_unlike_in_two_uploads() -> None:
    """Of clients with equal changes, each of which would have one value in all its entries."""

    class Equal(Clients):
        def replies(self, asked: Exchange) -> Iterator[Arrival]:
            for client in asked.to:
                reply = Reply({"x": torch.ones(60, 100)}, {}, 1.0)
                yield Arrival(client, reply._replace(up=self.side.upload(asked, 0, reply, {})[0]))

    log = Log(MaskingClients(Equal(Int4()), simulated))
    combine = SecureSums(THRESHOLD, ranges=PublicRanges(Int4(), {}))
    for number in (0, 1):
        asked = replace(exchange(number, 6), reduce={"x": Mean(torch.zeros(60, 100))})
        found = combine(log, asked)
    assert torch.equal(found["x"], torch.full((60, 100), round(3.5) * 2 / 7))
    assert len(log.seen) == 6
    pairs = zip(log.seen, [*log.seen[1:], log.seen[0]], strict=True)
    for one, other in pairs:
        a, b = (np.frombuffer(text, np.uint8) for text in (one, other))
        assert len(a) == 6000 * 7 // 8  # 2 * 7 * 6 + 1 values take 7 bits
        for digits in (a, a - b):
            assert stats.chisquare(np.bincount(digits, minlength=256)).pvalue > 1e-6


# The clients' side.


def test_what_was_summed_and_what_is_remembered_are_the_sum_of_the_changes() -> None:
    """Exactly, in a range and a weight that are powers of two; half of the entries are cut off."""
    side, memory = ClientSide(Compression(Int8())), dict[str, Tensor]()
    zeros = torch.zeros(6, 6, dtype=torch.float64)
    total, sent = zeros, zeros
    for round in range(1, 6):
        draw = Key(round).torch()
        now = torch.randint(-1000, 1000, (6, 6), generator=draw).double() * 2.0**-20
        grid = Grid(127, {"w": 127 * 2.0**-18})
        asked = replace(exchange(round, 1), reduce={"x": Mean({"w": zeros}, grid=grid)})
        up, memory = side.upload(asked, 0, Reply({"x": {"w": now}}, {}, 4.0), memory)
        total, sent = total + now, sent + up["x"]["w"]
        assert torch.equal(sent + memory["train:x:w"], total)
        assert tree.leaves(up["x"])[0].abs().max() == 127 * 2.0**-20


@pytest.mark.parametrize("bad", [1, 6])
@pytest.mark.parametrize("remembered", [0.0, 1e5])
def test_a_change_above_the_limit_is_refused_and_changes_neither_memory_nor_range(
    remembered: float, bad: int
) -> None:
    """The change itself, or its sum with the error that is remembered, of one or most clients."""
    like = torch.zeros(2, 3)
    ranges, far = {"train:x:.": 1.0}, torch.full((2, 3), 1.0 if remembered else 1e9)

    class One(Clients):
        def __init__(self) -> None:
            super().__init__(Int8())
            self.kept = {c: {"train:x:.": torch.zeros(2, 3)} for c in range(7)}
            for c in range(bad):
                self.kept[c]["train:x:."] += remembered

        def replies(self, asked: Exchange) -> Iterator[Arrival]:
            for c in asked.to:
                reply = Reply({"x": torch.full((2, 3), 0.25) if c >= bad else far}, {}, 1.0)
                up, new = self.side.upload(asked, c, reply, self.kept[c])
                assert tree.digest(new) == tree.digest(self.kept[c]) or c >= bad
                yield Arrival(c, reply._replace(up=up))

    combine = SecureSums(THRESHOLD, ranges=PublicRanges(Int8(), ranges))
    asked = replace(exchange(1), reduce={"x": Mean(like)})
    found = combine(Guard(MaskingClients(One(), simulated)), asked)
    assert all(found.faults[c].diverged for c in range(bad))
    assert TOO_LARGE in found.faults[0].reason
    if bad > 1:
        assert (found.accepted, ranges) == ((), {"train:x:.": 1.0})
        return
    assert set(found.accepted) == set(range(1, 7))
    assert ranges == {"train:x:.": pytest.approx(HEADROOM * 0.25)}
    torch.testing.assert_close(found["x"], torch.full((2, 3), 32 / 127))


def distance_after(rounds: int, options: Compression) -> float:
    """Return how far descent on |x - b_k|^2 / 2 is from the minimum; b_0 is 30 times as large."""
    targets = torch.randn(5, 4, 4, generator=Key(5).torch(), dtype=torch.float64)
    targets[0] *= 30
    x, side = torch.zeros(4, 4, dtype=torch.float64), ClientSide(options)
    public = None if options.up is None else PublicRanges(options.up, {})
    memory: dict[int, dict[str, Tensor]] = {}

    class Descent(Wrapper):
        def replies(self, asked: Exchange) -> Iterator[Arrival]:
            for client in asked.to:
                reply = Reply({"x": 0.05 * (targets[client] - x)}, {}, 1.0)
                up, memory[client] = side.upload(asked, client, reply, memory.get(client, {}))
                yield Arrival(client, reply._replace(up=up))

    for number in range(rounds):
        asked = replace(exchange(number, 5), reduce={"x": Mean(x)})
        asked = asked if public is None else public.in_grids(asked)
        found = reduce_replies(Guard(Descent(Clients(Int8()))), asked)
        x = x + (found if public is None else public.updated(asked, found))["x"]
    return float((x - targets.mean(0)).norm())


def test_a_client_far_above_the_others_is_cut_off_once_and_that_comes_later() -> None:
    """With the mean in place of the power mean, it was cut off in every exchange.

    Without error feedback, that was 100 times as far from the minimum; now random rounding is left.
    """
    plain = distance_after(150, Compression())
    assert distance_after(150, Compression(Int8())) < 2 * plain
    assert distance_after(150, Compression(Int8(), error_feedback=False)) < 20 * plain


def test_without_error_feedback_integers_are_rounded_without_bias() -> None:
    x = torch.full((100, 200), 0.3, dtype=torch.float64)
    side = ClientSide(Compression(Int8(), error_feedback=False))
    asked = replace(exchange(1, 1), reduce={"x": Mean(x, grid=Grid(127, {".": 127.0}))})
    up, memory = side.upload(asked, 0, Reply({"x": x}, {}, 1.0), {})
    assert memory == {}
    assert set(up["x"].unique().tolist()) == {0.0, 1.0}
    assert float(up["x"].mean()) == pytest.approx(0.3, abs=4 * (0.21 / 20_000) ** 0.5)
