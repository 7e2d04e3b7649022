"""Recurrent cells written out: plain arithmetic of fixed shapes, for `vmap` and second derivatives.

Texts are x [n, L, d] with a mask [n, L]; a padding step keeps the state. A layer's parameters are
{"input": {weight, bias}, "state": {weight, bias}}, the gates stacked in torch's order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedshot.nn.layers import linear
from fedshot.tree import Tree

GRU_GATES = 3  # reset, update, new
LSTM_GATES = 4  # input, forget, cell, output


def gru_cells(p: Tree, x: Tensor, mask: Tensor) -> Tensor:
    """Return the states [n, hidden] after each text's last word."""
    h = x.new_zeros(x.shape[0], p["state"]["weight"].shape[1])
    for gates, word in zip(linear(p["input"], x).unbind(1), mask.unbind(1), strict=True):
        h = torch.where(word[:, None] > 0, _gru_cell(p, gates, h), h)
    return h


def gru_states(p: Tree, x: Tensor) -> Tensor:
    """Return the states [n, L, hidden], padding read as words."""
    states = [x.new_zeros(x.shape[0], p["state"]["weight"].shape[1])]
    for gates in linear(p["input"], x).unbind(1):
        states.append(_gru_cell(p, gates, states[-1]))
    return torch.stack(states[1:], 1)


def lstm_cells(p: Tree, x: Tensor, mask: Tensor, *, backward: bool) -> tuple[Tensor, Tensor]:
    """Return (states [n, L, hidden], state after the last step); backward starts at the end."""
    h = c = x.new_zeros(x.shape[0], p["state"]["weight"].shape[1])
    steps = list(zip(linear(p["input"], x).unbind(1), mask.unbind(1), strict=True))
    states = []
    for gates, word in reversed(steps) if backward else steps:
        i, f, g, o = (gates + linear(p["state"], h)).chunk(LSTM_GATES, -1)
        new_c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        new_h = torch.sigmoid(o) * torch.tanh(new_c)
        is_word = word[:, None] > 0
        h, c = torch.where(is_word, new_h, h), torch.where(is_word, new_c, c)
        states.append(h)
    return torch.stack(states[::-1] if backward else states, 1), h


def lstm_states(p: Tree, x: Tensor) -> Tensor:
    """Return the states [n, L, hidden], padding read as words."""
    return lstm_cells(p, x, x.new_ones(x.shape[:2]), backward=False)[0]


def _gru_cell(p: Tree, gates: Tensor, h: Tensor) -> Tensor:
    r_x, z_x, n_x = gates.chunk(GRU_GATES, -1)
    r_h, z_h, n_h = linear(p["state"], h).chunk(GRU_GATES, -1)
    r, z = torch.sigmoid(r_x + r_h), torch.sigmoid(z_x + z_h)
    n = torch.tanh(n_x + r * n_h)
    return n + z * (h - n)
