"""Rows that repeat: found as brute force finds them, and a GRU that multiplies each once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshot.nn.kernels import repeats
from fedshot.nn.kernels.layer_gradients import Gru

pytestmark = pytest.mark.usefixtures("kernels")


def texts(n: int = 6, words: int = 9, width: int = 7, vocabulary: int = 10) -> Tensor:
    """Rows of a small vocabulary, in memory as prepared texts are: a column more lies between."""
    table = torch.randn(vocabulary, width + 1, generator=torch.Generator().manual_seed(0))
    which = torch.randint(vocabulary, (n, words + 2), generator=torch.Generator().manual_seed(1))
    return table[which][:, :words, :width]


@pytest.mark.parametrize("width", [1, 2, 7, 8])
def test_the_different_rows_are_those_of_brute_force(width: int) -> None:
    x = texts(width=width)
    found = repeats.repeats(x)
    assert found is not None
    flat = x.reshape(-1, width)
    assert torch.equal(found.rows[found.which], flat)
    _, first = np.unique(flat.numpy(), axis=0, return_index=True)
    assert torch.equal(found.rows, flat[np.sort(first)])


def test_rows_that_differ_in_their_last_number_are_two() -> None:
    x = torch.zeros(2, 50, 33)
    x[0, ::2, 32] = 1
    found = repeats.repeats(x)
    assert found is not None
    assert len(found.rows) == 2
    assert torch.equal(found.rows[found.which], x.reshape(-1, 33))


def test_where_little_repeats_nothing_is_said() -> None:
    assert repeats.repeats(torch.randn(4, 5, 3)) is None
    assert repeats.repeats(texts().double()) is None
    assert repeats.repeats(texts().transpose(1, 2)) is None


def test_equal_rows_are_summed() -> None:
    found = repeats.repeats(texts())
    assert found is not None
    x = torch.randn(len(found.which), 11)
    wanted = torch.zeros(len(found.rows), 11, dtype=torch.float64)
    wanted.index_add_(0, found.which, x.double())
    torch.testing.assert_close(found.gather(x).double(), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.gather(x.T.contiguous().T).double(), wanted, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"expected float32 \[54"):
        found.gather(x[1:])


def test_threads_share_the_sums() -> None:
    found = repeats.repeats(texts())
    assert found is not None
    x = torch.randn(len(found.which), 11)
    one = found.gather(x)
    torch.set_num_threads(2)
    assert torch.equal(found.gather(x), one)


@pytest.mark.parametrize("asks", [False, True])
def test_a_gru_of_repeated_words_is_that_of_any_others(
    asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = texts()
    shapes = ((12, 7), (12, 4), (12,), (12,))
    weights = [torch.randn(s, generator=torch.Generator().manual_seed(2)) for s in shapes]

    def run() -> list[Tensor]:
        own = [t.clone().requires_grad_() for t in weights]
        words = x.clone().requires_grad_(asks)
        states = Gru.apply(words, *own)
        wanted = [*own, *([words] if asks else [])]
        return [states, *torch.autograd.grad(states.square().sum(), wanted)]

    assert repeats.repeats(x) is not None
    found = run()
    monkeypatch.setattr("fedshot.nn.kernels.layer_gradients.repeats", lambda _: None)
    for one, other in zip(found, run(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
