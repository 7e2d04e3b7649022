"""Dropout masks: a function of (seed, site, element), and good enough as chance."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.nn.models.layers import dropout
from fedshot.nn.models.mode import Mode, grid

N = 200_000


def mask(seed: int | Tensor, site: int = 0, rate: float = 0.5, n: int = N) -> Tensor:
    mode = Mode(train=True, seed=torch.as_tensor(seed))
    return (dropout(torch.ones(n), rate, mode, site) == 0).double()


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_dropped_share_is_the_rate(rate: float) -> None:
    for seed in (0, 1, -1, Key(5).seed):
        share = float(mask(seed, rate=rate).mean())
        assert abs(share - rate) < 5 * math.sqrt(rate * (1 - rate) / N), seed


def test_the_expected_output_is_the_input() -> None:
    mode = Mode(train=True, seed=torch.tensor(3))
    y = dropout(torch.ones(N), 0.2, mode, 0)
    assert set(y.unique().tolist()) == {0.0, 1.25}


def test_elements_apart_are_uncorrelated() -> None:
    m = mask(7, rate=0.3)
    for shift in (1, 2, 3, 8, 64, 784, 1024, 4096):
        assert abs(correlation(m[:-shift], m[shift:])) < 5 / math.sqrt(N), shift


@pytest.mark.parametrize("shift", [0, 1, 5])
def test_neighbouring_seeds_and_sites_are_uncorrelated(shift: int) -> None:
    end = N - shift
    for a, b in [(mask(10), mask(11)), (mask(0), mask(1)), (mask(10, 0), mask(10, 1))]:
        assert abs(correlation(a[:end], b[shift:])) < 5 / math.sqrt(N)
    # what seed s does at site 1 is not what seed s + 1 does at site 0
    assert abs(correlation(mask(10, 1)[:end], mask(11, 0)[shift:])) < 5 / math.sqrt(N)


def test_one_element_over_many_seeds_follows_the_rate() -> None:
    bits = torch.func.vmap(lambda seed: mask(seed, n=8, rate=0.25))(torch.arange(20_000))
    assert (bits.mean(0) - 0.25).abs().max() < 5 * math.sqrt(0.25 * 0.75 / 20_000)
    pairs = torch.corrcoef(bits.T) - torch.eye(8)
    assert pairs.abs().max() < 5 / math.sqrt(20_000)


@pytest.mark.parametrize("shape", [(6,), (3, 5), (2, 3, 4, 5)])
def test_stacked_clients_draw_the_masks_of_the_loop(shape: tuple[int, ...]) -> None:
    seeds = torch.tensor([0, 1, -5, Key(1).seed])
    x = torch.randn((4, *shape), generator=Key(0).torch())

    def f(x: Tensor, seed: Tensor) -> Tensor:
        return dropout(x, 0.4, Mode(train=True, seed=seed).layer(2), site=3)

    loop = torch.stack([f(a, s) for a, s in zip(x, seeds, strict=True)])
    assert torch.equal(torch.func.vmap(f)(x, seeds), loop)


def test_the_mask_ignores_threads_memory_layout_and_dtype() -> None:
    mode = Mode(train=True, seed=torch.tensor(3))
    x = torch.rand((8, 16, 32, 32), generator=Key(0).torch()) + 1
    want = dropout(x, 0.5, mode, 1)
    for n in (1, 2):
        torch.set_num_threads(n)
        assert torch.equal(dropout(x, 0.5, mode, 1), want)
    last = x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(dropout(last, 0.5, mode, 1), want)
    assert torch.equal(dropout(x.double(), 0.5, mode, 1) == 0, want == 0)


def test_the_mask_of_a_seed_is_the_same_in_every_release() -> None:
    # Printed by the left side when the hash was written; a change of it would break resumed runs.
    got = "".join(str(int(bit)) for bit in mask(12345, 2, n=32))
    assert got == "01101100010110010101011100100011"


def test_dropout_is_off_in_tests_and_at_rate_zero() -> None:
    x = torch.ones(5)
    assert dropout(x, 0.5, Mode(), 0) is x
    assert dropout(x, 0.0, Mode(train=True), 0) is x


def test_dropout_without_a_seed_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a seed"):
        dropout(torch.ones(5), 0.5, Mode(train=True), 0)


def test_a_layer_seed_differs_by_layer_and_a_mode_is_checked() -> None:
    mode = Mode(seed=torch.tensor(0))
    seeds = {int(mode.layer(i).seed) for i in range(100)}  # type: ignore[arg-type]
    assert len(seeds) == 100
    assert Mode().layer(3) == Mode()
    with pytest.raises(ConfigError, match="norm is 'none'"):
        Mode(norm="none")  # type: ignore[arg-type]


def test_a_stack_of_seeds_is_mixed_as_each_is_alone() -> None:
    """Alone by Python's integers, stacked by tensor arithmetic."""
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), *(Key(i).seed for i in range(50))])
    stacked = torch.func.vmap(lambda s: Mode(seed=s).layer(3).seed)(seeds)
    assert stacked.tolist() == [int(Mode(seed=seed).layer(3).seed) for seed in seeds]  # type: ignore[arg-type]
    assert not (stacked == seeds).any()


@pytest.mark.parametrize("seed", [0, -1, -(2**63), Key(5).seed])
def test_all_seeds_at_once_are_those_one_by_one(seed: int) -> None:
    word = torch.tensor(seed)
    mode = Mode(seed=word)
    wanted = [[mode.layer(i).layer(j).seed for j in range(2)] for i in range(4)]
    assert grid(word, 4, 2) == wanted
    stacked = torch.func.vmap(lambda s: torch.stack([torch.stack(row) for row in grid(s, 4, 2)]))
    assert stacked(word[None])[0].tolist() == [[int(one) for one in row] for row in wanted]  # type: ignore[arg-type]
    assert grid(word, 0, 0) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_left_is_divided_in_the_precision_of_the_rate(dtype: torch.dtype) -> None:
    """By 0.9, not by the number of a short type that is nearest to it."""
    x = torch.randn(3, 5, 4, 6, generator=Key(1).torch(), dtype=torch.float64).to(dtype)
    mode = Mode(train=True, seed=torch.tensor(7))
    y, plain = dropout(x, 0.1, mode, 0), dropout(torch.ones(3, 5, 4, 6), 0.1, mode, 0)
    assert torch.equal(y, x * (plain > 0).to(dtype) * (1.0 / 0.9))
