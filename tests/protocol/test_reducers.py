"""Reducers: exact sums, so that neither order nor grouping can change a bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshot.core import tree
from fedshot.core.tree import Tree
from fedshot.protocol.reducers import Gather, Mean, Reducer, Sum, all_finite

F64 = torch.zeros(3, dtype=torch.float64)
LIMIT = 2.0**16

VALUES = st.lists(st.floats(-8.0, 8.0), min_size=3, max_size=3)
WEIGHTS = st.floats(1e-3, 1e3)
REPLIES = st.lists(st.tuples(VALUES, WEIGHTS), min_size=1, max_size=9)
Replies = list[tuple[list[float], float]]


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def reduce(reducer: Reducer, replies: Replies, cohort: int | None = None) -> torch.Tensor:
    accumulator = reducer.start(len(replies) if cohort is None else cohort)
    for client, (values, weight) in enumerate(replies):
        assert reducer.fault(0, tensor(values), weight) is None
        accumulator.add(client, tensor(values), weight)
    return accumulator.result()


def resolution(cohort: int, limit: float = LIMIT) -> Fraction:
    """The step of the fixed point: room for `cohort` contributions of `limit` in 62 bits."""
    bits = 62 - math.ceil(math.log2(limit)) - math.ceil(math.log2(cohort))
    return Fraction(1, 2**bits)


def distance(found: torch.Tensor, exact: list[Fraction]) -> list[Fraction]:
    return [abs(Fraction(x) - e) for x, e in zip(found.tolist(), exact, strict=True)]


@given(REPLIES)
def test_a_mean_is_the_exact_mean_to_the_resolution(replies: Replies) -> None:
    """Each of n contributions is rounded to float64, then to half a step; the rest is exact."""
    found, n = reduce(Mean(F64), replies), len(replies)
    total = sum(Fraction(w) for _, w in replies)
    for i, x in enumerate(found.tolist()):
        terms = [Fraction(w) * Fraction(values[i]) for values, w in replies]
        exact = sum(terms) / total
        rounding = sum(abs(t) for t in terms) / 2**53 + n * resolution(n) / 2
        last = abs(exact) / 2**50  # int64 to float64, the division, and float(total)
        assert abs(Fraction(x) - exact) <= rounding / total + last


@given(st.lists(VALUES, min_size=1, max_size=9))
def test_a_sum_of_floats_is_the_exact_sum_to_the_resolution(rows: list[list[float]]) -> None:
    n = len(rows)
    found = reduce(Sum(F64), [(row, 1.0) for row in rows])
    exact = [sum(map(Fraction, column)) for column in zip(*rows, strict=True)]
    room = n * resolution(n) / 2
    for far, e in zip(distance(found, exact), exact, strict=True):
        assert far <= room + abs(e) / 2**52


@given(st.lists(st.lists(st.integers(-65536, 65536), min_size=2, max_size=2), min_size=1))
def test_a_sum_of_whole_numbers_is_exact(rows: list[list[int]]) -> None:
    reducer = Sum(torch.zeros(2, dtype=torch.int64))
    accumulator = reducer.start(len(rows))
    for client, row in enumerate(rows):
        assert reducer.fault(0, torch.tensor(row), 0.5) is None
        accumulator.add(client, torch.tensor(row), 0.5)  # a weight plays no role
    result = accumulator.result()
    assert result.dtype == torch.int64
    assert result.tolist() == [sum(column) for column in zip(*rows, strict=True)]


@given(REPLIES, st.data())
@pytest.mark.parametrize("kind", [Mean, Sum])
def test_any_order_gives_the_same_bits(kind: Any, replies: Replies, data: st.DataObject) -> None:
    reducer, n = kind(F64), len(replies)
    accumulator = reducer.start(n)
    for client in data.draw(st.permutations(range(n))):
        values, weight = replies[client]
        accumulator.add(client, tensor(values), weight)
    assert tree.digest(accumulator.result()) == tree.digest(reduce(reducer, replies))


def test_floats_summed_in_the_usual_way_would_depend_on_the_order() -> None:
    """The reason for whole numbers: this is what the reducers are there to avoid."""
    values = [1e4, 1e-13, -1e4]
    usual = {a + b + c for a, b, c in itertools.permutations(values)}
    ours = {
        float(reduce(Sum(F64), [([v] * 3, 1.0) for v in p])[0])
        for p in itertools.permutations(values)
    }
    assert len(usual) > 1
    assert len(ours) == 1


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (Mean, torch.float32),
        (Mean, torch.float64),
        (Mean, torch.float16),
        (Mean, torch.bfloat16),
        (Sum, torch.float32),
        (Sum, torch.float64),
    ],
)
def test_the_result_has_the_type_of_like(kind: Any, dtype: torch.dtype) -> None:
    like = {"w": torch.zeros(2, dtype=dtype)}
    accumulator = kind(like).start(2)
    for client in range(2):
        accumulator.add(client, {"w": torch.full((2,), 0.5, dtype=dtype)}, 3.0)
    expected = 0.5 if kind is Mean else 1.0
    assert torch.equal(accumulator.result()["w"], torch.full((2,), expected, dtype=dtype))


def test_one_client_alone_is_its_own_mean() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for weight in (1.0, 3.0, 0.1, 12345.0):
        accumulator = Mean(torch.zeros(1000)).start(1)
        accumulator.add(0, x, weight)
        torch.testing.assert_close(accumulator.result(), x, rtol=1e-7, atol=1e-12)


def test_contributions_are_left_as_they_were() -> None:
    x, like = torch.ones(3).double(), F64.clone()
    accumulator = Mean(like).start(2)
    accumulator.add(0, x, 2.0)
    first = accumulator.result()
    accumulator.add(1, 3 * x, 2.0)
    assert torch.equal(x, torch.ones(3).double())
    assert torch.equal(like, F64)
    assert torch.equal(first, x)  # a result does not move when more arrives
    assert torch.equal(accumulator.result(), 2 * x)


def test_a_scalar_and_an_empty_leaf_and_an_empty_tree_are_reduced() -> None:
    like = {"s": torch.tensor(0.0), "e": torch.zeros(0, 4), "none": {}}
    for kind in (Mean, Sum):
        reducer = kind(like)
        accumulator = reducer.start(1)
        part = {"s": torch.tensor(2.5), "e": torch.zeros(0, 4), "none": {}}
        assert reducer.fault(0, part, 1.0) is None
        accumulator.add(0, part, 1.0)
        assert tree.digest(accumulator.result()) == tree.digest(part)


@pytest.mark.parametrize("cohort", [1, 2, 3, 64, 1000, 10**6])
def test_a_full_cohort_at_the_limit_does_not_overflow(cohort: int) -> None:
    for sign in (1, -1):
        accumulator = Sum(F64).start(cohort)
        part = tensor([sign * LIMIT] * 3)
        assert Sum(F64).fault(0, part, 1.0) is None
        once = Sum(F64).start(cohort)
        once.add(0, part, 1.0)
        accumulator.total = once.total * cohort  # what `cohort` additions come to
        assert accumulator.result().tolist() == [sign * LIMIT * cohort] * 3


@pytest.mark.parametrize("weight", [1.0, 0.25, 1000.0])
def test_what_the_sum_has_no_room_for_is_refused(weight: float) -> None:
    reducer = Mean({"w": F64})
    most = LIMIT / weight
    assert reducer.fault(0, {"w": tensor([0.0, most, -most])}, weight) is None
    above = math.nextafter(most, math.inf)
    for sign in (1, -1):
        text = reducer.fault(0, {"w": tensor([0.0, sign * above, 0.0])}, weight)
        assert text == f"w holds {above:.3g}, more than the limit of {most:.3g}"
    assert Mean({"w": F64}, limit=8 * LIMIT).fault(0, {"w": tensor([above] * 3)}, weight) is None


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float16])
def test_a_sum_of_a_narrow_type_is_refused_before_it_wraps(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="takes int64, float32 or float64"):
        Sum(torch.zeros(2, dtype=dtype)).start(2)


def test_no_client_outweighs_the_others_by_claiming_more() -> None:
    reducer = Mean(F64, max_weight=10)
    assert reducer.fault(0, tensor([0.0] * 3), 10.0) is None
    text = reducer.fault(0, tensor([0.0] * 3), 2.0**32)
    assert text is not None
    assert "expected 1.53e-05 to 10" in text


def test_the_limit_of_a_sum_ignores_the_weight() -> None:
    assert Sum(F64).fault(0, tensor([LIMIT] * 3), 1000.0) is None
    assert Sum(F64).fault(0, tensor([LIMIT + 1] * 3), 0.001) is not None


def test_whether_a_part_is_refused_does_not_depend_on_who_came_first() -> None:
    reducer = Mean(F64)
    accumulator = reducer.start(2)
    part = tensor([LIMIT / 2] * 3)
    before = reducer.fault(0, part, 2.0)
    accumulator.add(0, part, 2.0)
    assert reducer.fault(0, part, 2.0) is before is None


@pytest.mark.parametrize("kind", [Mean, Sum, Gather, partial(Gather, limit=math.inf)])
def test_what_is_not_finite_is_refused(kind: Callable[[Tree], Reducer]) -> None:
    for dtype in (torch.float32, torch.float64):
        reducer = kind({"v": torch.ones(2, dtype=dtype), "w": torch.ones(3, dtype=dtype)})
        for value in (math.nan, math.inf, -math.inf):
            part = {
                "v": torch.ones(2, dtype=dtype),
                "w": torch.tensor([0.0, value, 1.0], dtype=dtype),
            }
            assert reducer.fault(0, part, 1.0) == "w holds a value that is not finite", value


def test_a_mean_of_whole_numbers_is_refused() -> None:
    with pytest.raises(TypeError, match=r"n is int64\[2\]; a Mean takes floats, use Sum"):
        Mean({"n": torch.zeros(2, dtype=torch.int64)}).start(1)


def test_a_mean_of_nothing_is_refused_and_a_sum_of_nothing_is_zero() -> None:
    with pytest.raises(ValueError, match="the mean of no contributions is not defined"):
        Mean(F64).start(3).result()
    assert Sum(F64).start(3).result().tolist() == [0.0] * 3


@given(
    st.integers(-300, 300), st.lists(st.tuples(VALUES, st.integers(1, 9)), min_size=1, max_size=4)
)
def test_weights_huge_and_tiny_are_refused_or_right(
    power: int, replies: list[tuple[list[float], int]]
) -> None:
    """A mean does not depend on the unit of the weights; what cannot be told is refused."""
    scaled = [(values, w * 10.0**power) for values, w in replies]
    reducer = Mean(F64)
    if any(reducer.fault(0, tensor(values), w) for values, w in scaled):
        return
    found = reduce(reducer, scaled)
    total = sum(Fraction(w) for _, w in scaled)
    exact = [
        sum(Fraction(w) * Fraction(values[i]) for values, w in scaled) / total for i in range(3)
    ]
    for far in distance(found, exact):
        assert far <= Fraction(1, 10**6)


def test_a_part_in_other_containers_is_refused_or_reduced_but_never_a_crash() -> None:
    """A reply with the right leaves in a tuple, or without an empty branch, passes for the same."""
    x = torch.ones(3).double()
    cases = [
        ({"w": {"0": F64}}, {"w": (x,)}),
        ({"w": F64, "none": {}}, {"w": x}),
        ({"w": F64}, {"w": x, "none": {}}),
    ]
    for kind, (like, part) in itertools.product((Mean, Sum), cases):
        reducer = kind(like)
        if reducer.fault(0, part, 1.0) is None:
            accumulator = reducer.start(1)
            accumulator.add(0, part, 1.0)
            assert tree.leaves(accumulator.result())[0].tolist() == [1.0] * 3


@given(st.permutations(range(6)))
def test_gathered_parts_are_in_the_order_of_the_ids(order: list[int]) -> None:
    accumulator = Gather().start(6)
    for client in order:
        accumulator.add(client, {"x": torch.ones(client + 1)}, 1.0)
    assert list(accumulator.result()) == list(range(6))
    sizes = [part["x"].numel() for part in accumulator.result().values()]
    assert sizes == [1, 2, 3, 4, 5, 6]


def test_gather_with_a_form_refuses_other_forms() -> None:
    assert Gather(F64).fault(0, torch.ones(4), 1.0) == ". is float32[4], expected float64[3]"
    assert Gather().fault(0, torch.ones(4), 1.0) is None
    assert Gather().fault(0, {"x": [1.0]}, 1.0) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_value_that_is_not_finite_is_found_in_any_leaf(dtype: torch.dtype) -> None:
    for value in (math.nan, math.inf, -math.inf):
        pixels = torch.zeros(1, 2, 2, 2, dtype=dtype).to(memory_format=torch.channels_last)
        leaves = [torch.tensor(7), torch.full((3,), 1e38, dtype=dtype), pixels, torch.zeros(0)]
        assert all_finite(leaves)
        for leaf in leaves[1:3]:
            was = leaf.clone()
            leaf[(-1,) * leaf.dim()] = value
            assert not all_finite(leaves)
            leaf.copy_(was)
        assert all_finite(leaves)
