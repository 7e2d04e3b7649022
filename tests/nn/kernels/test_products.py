"""Products of pairs of matrices by `products.c` against float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedshot.nn.kernels import products
from fedshot.nn.kernels.products import ours, packed
from fedshot.nn.kernels.tensors import library

pytestmark = pytest.mark.usefixtures("kernels")
# Strips of one to four registers, pieces that are full and not, both sides of the widest.
SIZES = [(16, 16), (32, 48), (64, 64), (80, 112), (144, 32), (192, 80), (16, 208)]
ROWS = [1, 2, 3, 5, 6, 7, 13, 70]


GAP = 7


def room(rows: int, columns: int, seed: int) -> Tensor:
    """Return three matrices with gaps between them."""
    apart = rows * columns + GAP
    numbers = torch.randn(3 * apart, generator=torch.Generator().manual_seed(seed))
    return numbers.as_strided((3, rows, columns), (apart, columns, 1))


def gaps(of: Tensor) -> Tensor:
    """Return what lies behind each matrix of a room."""
    n = of[0].numel()
    return of.as_strided((3, GAP), (n + GAP, 1), n)


def multiply(a: Tensor, factors: Tensor, out: Tensor) -> None:
    pairs, n, columns = factors.shape
    sizes = (a.shape[1], n, columns, a.stride(0), out.stride(0))
    library().fedshot_products(a.data_ptr(), factors.data_ptr(), 0, pairs, *sizes, out.data_ptr())


def sum_products(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    (pairs, n, columns), rows = b.shape, a.shape[2]
    sizes = (rows, n, columns, a.stride(0), b.stride(0), int(add))
    library().fedshot_products_over(a.data_ptr(), b.data_ptr(), 0, pairs, *sizes, out.data_ptr())


def close(found: Tensor, want: Tensor) -> bool:
    return float((found.double() - want).norm() / want.norm()) < 1e-6


@pytest.mark.parametrize("size", SIZES)
def test_they_are_the_products(size: tuple[int, int]) -> None:
    for turned in (False, True):
        n, columns = size
        draw = torch.Generator().manual_seed(1)
        b = torch.randn(3, *(size[::-1] if turned else size), generator=draw)
        b = b.transpose(1, 2) if turned else b
        factors = packed(b)
        for rows in ROWS:
            a, out = room(rows, n, 2), room(rows, columns, 3).fill_(math.nan)
            around = gaps(out).clone()
            multiply(a, factors, out)
            assert close(out, a.double() @ b.double())
            assert torch.equal(gaps(out), around)


@pytest.mark.parametrize("size", SIZES)
def test_they_are_summed_over_the_rows_of_both(size: tuple[int, int]) -> None:
    for rows in ROWS:
        a, b = room(rows, size[0], 2), room(rows, size[1], 3)
        out, want = torch.full((3, *size), math.nan), a.double().transpose(1, 2) @ b.double()
        sum_products(a, b, out, add=False)
        assert close(out, want)
        sum_products(a, b, out, add=True)
        assert close(out, 2 * want)


def test_what_is_not_a_number_reaches_its_row_alone() -> None:
    a, out = room(9, 64, 2), room(9, 64, 3)
    a[1, 4, 5] = math.nan
    multiply(a, packed(room(64, 64, 4).contiguous()), out)
    assert out[1, 4].isnan().all()
    assert out.isnan().sum() == 64


@pytest.mark.parametrize("faster", [True, False])
def test_they_are_taken_where_they_are_the_faster(
    faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "faster", lambda: faster)
    assert ours(192, 64) == faster
    assert not ours(64, 208)


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="the processor cannot be looked up")
def test_the_processor_is_known() -> None:
    """Whether the compiler may use AVX-512 is asked of the flags that Linux reports."""
    about = Path("/proc/cpuinfo").read_text()
    assert products.faster() == (" avx512f " in about)
