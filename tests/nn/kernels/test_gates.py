"""The gates of recurrent layers in C, against torch's operations in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshot.core.seeds import Key
from fedshot.nn.kernels.layer_gradients import Gru, Lstm, gru_back, gru_gates
from fedshot.nn.models.cells import gru_states, lstm_states

pytestmark = pytest.mark.usefixtures("kernels")

# From -90 to 90, where a sigmoid is 0 and 1, and around 0, where a tanh is its argument.
ENDS = torch.cat([torch.linspace(-90, 90, 6001), torch.logspace(-30, 0, 500)])


def test_the_gates_of_a_gru_are_torch_s_from_one_end_to_the_other() -> None:
    hidden = len(ENDS)
    found, kept, states = ENDS.repeat(3)[None, None], torch.empty(1, 1, hidden), room(hidden)
    gru_gates(0, torch.zeros(1, 3 * hidden), found, kept, states)
    r, z, new = found[0, 0].chunk(3)
    exact = ENDS.double()
    torch.testing.assert_close(r.double(), exact.sigmoid(), rtol=2e-6, atol=1e-37)
    assert torch.equal(r, z)
    torch.testing.assert_close(new.double(), exact.tanh(), rtol=2e-6, atol=0)
    torch.testing.assert_close(states[0, 1], new * (1 - z))


def room(hidden: int) -> Tensor:
    return torch.zeros(1, 2, hidden)


def test_a_layer_that_meets_what_is_no_number_says_so() -> None:
    found, states = torch.zeros(1, 1, 3), room(1)
    found[0, 0, 2] = math.nan
    gru_gates(0, torch.zeros(1, 3), found, torch.empty(1, 1, 1), states)
    assert states[0, 1].isnan().all()


@pytest.mark.parametrize(
    "wrong", [torch.zeros(2, 5), torch.zeros(2, 6).double(), torch.zeros(6, 2).T]
)
def test_the_gates_refuse_what_c_would_read_past_the_end_of(wrong: Tensor) -> None:
    found, kept, states = torch.zeros(2, 1, 6), torch.zeros(2, 1, 2), torch.zeros(2, 2, 2)
    carry = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"expected contiguous float32 \[2, 6\]"):
        gru_gates(0, wrong, found, kept, states)
    with pytest.raises(ValueError, match=r"expected contiguous float32 \[2, 1, 6\]"):
        gru_back(0, found, kept, states, carry, wrong[:, None], kept, carry)
    apart = torch.zeros(2, 4)[:, ::2]
    with pytest.raises(ValueError, match="contiguous rows"):
        gru_back(0, found, kept, states, apart, found, kept, carry)
    with pytest.raises(IndexError, match="word 1 of 1"):
        gru_gates(1, torch.zeros(2, 6), found, kept, states)


@pytest.mark.parametrize(
    ("layer", "cells", "stacked"), [(Gru, gru_states, 3), (Lstm, lstm_states, 4)]
)
@pytest.mark.parametrize("words", [1, 2, 7])
def test_a_layer_and_its_gradients_are_those_of_the_cells(
    layer: Any, cells: Any, stacked: int, words: int
) -> None:
    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=Key(words).at(*shape).torch(), dtype=torch.float64)

    d, hidden = 5, 9
    wide = noise(4, words, d + 1)  # rows of words lie apart, as beside a mask
    shapes = [(stacked * hidden, d), (stacked * hidden, hidden), *[(stacked * hidden,)] * 2]
    exact = [wide[..., :-1], *(noise(*shape) for shape in shapes)]
    by = noise(4, words, hidden)
    own = [t.float().requires_grad_() for t in (wide, *exact[1:])]
    for t in exact:
        t.requires_grad_()
    x, w, u, b, c = exact
    want = cells({"input": {"weight": w, "bias": b}, "state": {"weight": u, "bias": c}}, x)
    got = layer.apply(own[0][..., :-1], *own[1:])
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad(got, own, by.float())
    for g, e in zip(found, torch.autograd.grad(want, exact, by), strict=True):
        torch.testing.assert_close(g.double()[..., : e.shape[-1]], e, rtol=1e-4, atol=1e-5)
