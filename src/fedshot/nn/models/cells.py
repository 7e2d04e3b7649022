"""Recurrent cells in torch operations of fixed shapes, for `vmap` and second derivatives.

Texts are x [n, L, d] with a mask [n, L]; a padding step keeps the state. The parameters of a layer
are {"input": {weight, bias}, "state": {weight, bias}}, with the gates stacked in torch's order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedshot.core.tree import Tree
from fedshot.nn.models.layers import linear

GRU_GATES = 3  # reset, update, new
LSTM_GATES = 4  # input, forget, cell, output


def gru_cells(p: Tree, x: Tensor, mask: Tensor) -> Tensor:
    """Return the state [n, hidden] of a GRU after each text's last word."""
    h = x.new_zeros(x.shape[0], p["state"]["weight"].shape[1])

    def step(h: Tensor, word: tuple[Tensor, Tensor]) -> Tensor:
        gates, real = word
        return torch.where(real[:, None] > 0, _gru_cell(p, gates, h), h)

    if torch.compiler.is_exporting():
        last: Tensor = _scanned(lambda h, word: (new := step(h, word), new), h, p, x, mask)[0]
        return last
    for word in zip(linear(p["input"], x).unbind(1), mask.unbind(1), strict=True):
        h = step(h, word)
    return h


def gru_states(p: Tree, x: Tensor) -> Tensor:
    """Return the states [n, L, hidden] of a GRU; padding is treated as words."""
    states = [x.new_zeros(x.shape[0], p["state"]["weight"].shape[1])]
    for gates in linear(p["input"], x).unbind(1):
        states.append(_gru_cell(p, gates, states[-1]))
    return torch.stack(states[1:], 1)


def lstm_cells(p: Tree, x: Tensor, mask: Tensor, *, backward: bool) -> tuple[Tensor, Tensor]:
    """Return (states [n, L, hidden], last state [n, hidden]) of an LSTM in one direction.

    With `backward`, it reads each text from the end, so the last state is that at the first word.
    """
    zeros = x.new_zeros(x.shape[0], p["state"]["weight"].shape[1])
    state = (zeros, zeros)

    def step(state: tuple[Tensor, Tensor], word: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        (h, c), (gates, real) = state, word
        i, f, g, o = (gates + linear(p["state"], h)).chunk(LSTM_GATES, -1)
        new_c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        new_h = torch.sigmoid(o) * torch.tanh(new_c)
        is_word = real[:, None] > 0
        return torch.where(is_word, new_h, h), torch.where(is_word, new_c, c)

    if torch.compiler.is_exporting():
        first = (zeros, zeros.clone())
        (h, _), every = _scanned(
            lambda state, word: (new := step(state, word), new[0]), first, p, x, mask, backward
        )
        return every, h
    steps = list(zip(linear(p["input"], x).unbind(1), mask.unbind(1), strict=True))
    states = []
    for word in reversed(steps) if backward else steps:
        state = step(state, word)
        states.append(state[0])
    return torch.stack(states[::-1] if backward else states, 1), state[0]


def lstm_states(p: Tree, x: Tensor) -> Tensor:
    """Return the states [n, L, hidden] of an LSTM; padding is treated as words."""
    return lstm_cells(p, x, x.new_ones(x.shape[:2]), backward=False)[0]


def _scanned(
    step: Callable[[Any, tuple[Tensor, Tensor]], tuple[Any, Tensor]],
    first: Any,
    p: Tree,
    x: Tensor,
    mask: Tensor,
    backward: bool = False,
) -> tuple[Any, Tensor]:
    """Return (last state, outputs [n, L, hidden]) of a loop over words, traced only once.

    This is for export: a Python loop would be traced word by word, which takes minutes and unrolls
    the program.
    """
    from torch._higher_order_ops.scan import scan  # takes a second; only needed for export

    def of_word(state: Any, word: Any) -> tuple[Any, Tensor]:
        new, out = step(state, word)
        return new, out.clone()  # scan forbids outputs that alias the state

    words = (linear(p["input"], x).transpose(0, 1), mask.T)
    if backward:
        words = (words[0].flip(0), words[1].flip(0))
    last, outs = scan(of_word, first, words)
    return last, (outs.flip(0) if backward else outs).transpose(0, 1)


def _gru_cell(p: Tree, gates: Tensor, h: Tensor) -> Tensor:
    r_x, z_x, n_x = gates.chunk(GRU_GATES, -1)
    r_h, z_h, n_h = linear(p["state"], h).chunk(GRU_GATES, -1)
    r, z = torch.sigmoid(r_x + r_h), torch.sigmoid(z_x + z_h)
    n = torch.tanh(n_x + r * n_h)
    return n + z * (h - n)
