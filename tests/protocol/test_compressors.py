"""Compressors against closed forms and brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.protocol.compressors import (
    BFloat16,
    Cast,
    Compressor,
    Float16,
    Int4,
    Int8,
    Nibbles,
    Quantised,
    Sparse,
    TopK,
    decoded,
)

QUANTISERS = [(Int8(), 127), (Int4(), 7)]
EVERY = [Int8(), Int4(), Float16(), BFloat16(), TopK(share=0.5)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=Key(seed).torch())


def after(compressor: Compressor, x: Tensor, rng: Any = None) -> Tensor:
    return decoded(compressor.encode(x, rng), x)


class Fixed:
    """Draws the same number always."""

    def __init__(self, u: float) -> None:
        self.u = u

    def random(self, n: int) -> np.ndarray[Any, Any]:
        return np.full(n, self.u)


@pytest.mark.parametrize(("compressor", "most"), QUANTISERS)
def test_the_error_is_half_a_step_to_nearest_and_below_a_step_at_random(
    compressor: Compressor, most: int
) -> None:
    x = normal(33, 7)
    step = float(x.abs().max()) / most
    nearest = (after(compressor, x) - x).abs().max()
    at_random = (after(compressor, x, Key(1).numpy()) - x).abs().max()
    assert 0.4 * step < nearest <= step * (0.5 + 1e-6)
    assert 0.6 * step < at_random < step * (1 + 1e-6)
    extreme = x.abs() == x.abs().max()
    torch.testing.assert_close(after(compressor, x)[extreme], x[extreme])


@pytest.mark.parametrize(("compressor", "most"), QUANTISERS)
def test_rounding_at_random_is_unbiased_by_its_exact_expectation(
    compressor: Compressor, most: int
) -> None:
    """Entries are multiples of 1/8 of a step, so the mean over eight draws is the expectation."""
    x = (torch.arange(-8 * most, 8 * most + 1).double() / 8).view(1, -1)
    found = [after(compressor, x, Fixed(i / 8)) for i in range(8)]
    assert torch.equal(torch.stack(found).mean(0), x)
    assert not torch.equal(found[1], x)


def test_the_generator_decides_how_entries_are_rounded() -> None:
    x = normal(20, 5)
    a, b, c = (Int8().encode(x, Key(seed).numpy()).codes for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.parametrize("n", [14, 15])
def test_nibbles_come_back_whether_their_number_is_even_or_odd(n: int) -> None:
    x = torch.arange(-7.0, 8.0)[:n].flip(0).view(1, n)
    short = Int4().encode(x)
    assert short.codes.shape == ((n + 1) // 2,)
    assert torch.equal(decoded(short, x), x)


def test_bytes_are_those_of_the_formats() -> None:
    x = normal(300, 300)
    found = {type(c): tree.nbytes(c.encode(x)) for c in EVERY}
    n, k = 90_000, 45_000
    assert found == {
        Int8: n + 4, Int4: n // 2 + 4, Float16: 2 * n, BFloat16: 2 * n, TopK: 6 * k + 2 * 4,
    }  # fmt: skip


def test_topk_keeps_what_a_sort_keeps_also_beyond_the_first_block() -> None:
    x = normal(3, 50_000)
    order = sorted(range(x.numel()), key=lambda i: -abs(float(x.flatten()[i])))
    expected = torch.zeros(x.numel())
    expected[order[:1500]] = x.flatten()[order[:1500]]
    assert torch.equal(after(TopK(share=0.01), x), expected.view(x.shape))


def test_topk_of_equal_entries_keeps_the_first_and_of_all_the_same_bits() -> None:
    x = torch.tensor([[1.0, -1.0], [1.0, 1.0]])
    assert torch.equal(after(TopK(share=0.5), x), torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
    whole = normal(7, 9)
    assert torch.equal(after(TopK(share=1.0), whole), whole)
    assert int((after(TopK(share=1e-9), whole) != 0).sum()) == 1


@pytest.mark.parametrize(("compressor", "bits"), [(Float16(), 11), (BFloat16(), 8)])
def test_a_cast_keeps_its_bits_of_precision(compressor: Compressor, bits: int) -> None:
    x = normal(40, 40).double()
    error = (after(compressor, x) - x).abs() / x.abs()
    assert 2.0 ** (-bits - 2) < error[x.abs() > 1e-3].max() <= 2.0**-bits
    assert after(compressor, x).dtype == torch.float64


def test_a_value_beyond_half_precision_becomes_its_largest() -> None:
    assert after(Float16(), torch.tensor([[1e6, -1e6]])).tolist() == [[65504.0, -65504.0]]


@pytest.mark.parametrize("compressor", EVERY, ids=lambda one: type(one).__name__)
def test_zeros_stay_zeros(compressor: Compressor) -> None:
    x = torch.zeros(3, 3)
    assert torch.equal(after(compressor, x), x)


def test_vectors_and_integers_are_sent_as_they_are() -> None:
    part = {"bias": normal(5), "n": torch.ones(2, 2, dtype=torch.int64), "w": normal(2, 2)}
    short = Int8().encoded(part)
    assert short["bias"] is part["bias"]
    assert short["n"] is part["n"]
    assert isinstance(short["w"], Quantised)


LIKE = torch.zeros(3, 5)
ONE = torch.tensor(1.0)
FLAWED = {
    "codes of another type": Quantised(torch.zeros(3, 5), ONE),
    "a scale for each entry": Quantised(torch.zeros(3, 5, dtype=torch.int8), torch.ones(3, 5)),
    "too few nibbles": Nibbles(torch.zeros(7, dtype=torch.uint8), ONE),
    "counts that do not add up": Sparse(torch.ones(2), torch.zeros(2).short(), torch.ones(1).int()),
    "a place twice": Sparse(torch.ones(2), torch.zeros(2).short(), torch.tensor([2]).int()),
    "a place beyond the end": Sparse(
        torch.ones(1), torch.tensor([15]).short(), torch.ones(1).int()
    ),
    "too many blocks": Sparse(torch.ones(1), torch.zeros(1).short(), torch.tensor([0, 1]).int()),
    "no tensor": Cast({}, torch.empty(0)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("flaw", FLAWED)
def test_an_encoding_that_no_compressor_writes_is_refused(flaw: str) -> None:
    with pytest.raises((ValueError, AttributeError)):
        decoded({"w": FLAWED[flaw]}, {"w": LIKE})
