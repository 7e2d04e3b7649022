"""Recurrent layers over texts of unequal length, by torch's fused kernels or by cells written out.

Both kernels compute the same. Texts are x [n, L, d] with a mask [n, L] that is 1 for a word and 0
for the padding after the words. Padding has no influence on any result, and a text without words
has a state of zero.

"fused" packs the texts, so padding costs nothing either; it is the quicker one for a client by
itself, and on a CPU it can be differentiated twice. It reads the lengths on the host, so it does
not run under `torch.func.vmap`, and cuDNN's kernels have no second derivative. "cell" is for these
two cases: plain arithmetic of fixed shapes, where a padding step keeps the state.

A layer's parameters are {"input": {weight, bias}, "state": {weight, bias}}, the gates stacked in
torch's order.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fedshot.errors import ConfigError, DataError
from fedshot.keys import Key
from fedshot.nn.layers import init_uniform, linear
from fedshot.tree import Tree

Kernel = Literal["fused", "cell"]

GRU_GATES = 3  # reset, update, new
LSTM_GATES = 4  # input, forget, cell, output


def init_recurrence(key: Key, n_in: int, hidden: int, gates: int, dtype: torch.dtype) -> Tree:
    """Draw a layer of one direction, all uniform in +-1/sqrt(hidden), as torch does."""
    bound = 1.0 / math.sqrt(hidden)
    return {
        "input": init_uniform(key.at("input"), n_in, gates * hidden, bound, dtype),
        "state": init_uniform(key.at("state"), hidden, gates * hidden, bound, dtype),
    }


def words_and_mask(x: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """Split prepared texts [n, L, d + 1] into word vectors [n, L, d] and the mask [n, L]."""
    if x.dim() != 3 or x.shape[-1] != d + 1:
        raise ConfigError(
            f"prepared texts have shape {list(x.shape)}; this net takes [n, words, {d + 1}], a "
            f"vector of {d} for each word and a last column that is 1 for a word and 0 for padding."
        )
    return x[..., :-1], x[..., -1]


def gru(p: Tree, x: Tensor, mask: Tensor, kernel: Kernel) -> Tensor:
    """Return the state [n, hidden] after each text's last word: Cho et al. 2014, as in torch."""
    if kernel == "cell":
        return _gru_cells(p, x, mask)
    packed, present = _pack(x, mask)
    start = x.new_zeros(1, len(x), p["state"]["weight"].shape[1])
    _, end = torch.gru(packed.data, packed.batch_sizes, start, _flat(p), True, 1, 0.0, False, False)
    return end[0][packed.unsorted_indices] * present


def bilstm(p: Tree, x: Tensor, mask: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """Return (states [n, m, 2 hidden], last states [n, 2 hidden]) of an LSTM in both directions.

    `p` is {"forward", "backward"}. The last state is the forward one after the last word and the
    backward one after the first. States at padding are arbitrary, and the fused kernel leaves out
    columns that are padding in every text: m is at most L.
    """
    if kernel == "cell":
        there, last = _lstm_cells(p["forward"], x, mask, backward=False)
        back, first = _lstm_cells(p["backward"], x, mask, backward=True)
        return torch.cat([there, back], -1), torch.cat([last, first], -1)
    packed, present = _pack(x, mask)
    start = x.new_zeros(2, len(x), p["forward"]["state"]["weight"].shape[1])
    weights = _flat(p["forward"]) + _flat(p["backward"])
    data, end, _ = torch.lstm(
        packed.data, packed.batch_sizes, (start, start), weights, True, 1, 0.0, False, True
    )
    states, _ = pad_packed_sequence(packed._replace(data=data), batch_first=True)
    return states, end.transpose(0, 1).flatten(1)[packed.unsorted_indices] * present


def _flat(p: Tree) -> list[Tensor]:
    return [p["input"]["weight"], p["state"]["weight"], p["input"]["bias"], p["state"]["bias"]]


def _pack(x: Tensor, mask: Tensor) -> tuple[PackedSequence, Tensor]:
    """Return the words of all texts, time by time, and a column that is 0 for an empty text."""
    if (mask[:, 1:] > mask[:, :-1]).any():
        row = int((mask[:, 1:] > mask[:, :-1]).any(1).nonzero()[0])
        raise DataError(f"text {row} has a word after padding; put the words of a text first.")
    lengths = mask.sum(1)
    # torch refuses a length of 0: an empty text passes one step of padding, and is then zeroed.
    at_least = lengths.clamp_min(1.0).to("cpu", torch.int64)
    packed = pack_padded_sequence(x, at_least, batch_first=True, enforce_sorted=False)
    return packed, (lengths > 0).to(x.dtype)[:, None]


def _gru_cells(p: Tree, x: Tensor, mask: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], p["state"]["weight"].shape[1])
    for gates, word in zip(linear(p["input"], x).unbind(1), mask.unbind(1), strict=True):
        r_x, z_x, n_x = gates.chunk(GRU_GATES, -1)
        r_h, z_h, n_h = linear(p["state"], h).chunk(GRU_GATES, -1)
        r, z = torch.sigmoid(r_x + r_h), torch.sigmoid(z_x + z_h)
        n = torch.tanh(n_x + r * n_h)
        h = torch.where(word[:, None] > 0, n + z * (h - n), h)
    return h


def _lstm_cells(p: Tree, x: Tensor, mask: Tensor, *, backward: bool) -> tuple[Tensor, Tensor]:
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
