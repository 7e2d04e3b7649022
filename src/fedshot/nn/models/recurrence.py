"""Recurrent layers over texts of different lengths, by fused kernels or by cells.

Both kernels, "fused" and "cell", compute the same states. Texts are x [n, L, d] with a mask [n, L]
that is 1 for a word and 0 for the padding after the words. Padding does not affect results; the
state of a text without words is 0.

"fused" runs one layer over the texts and reads the states at their last words. In float32 on a CPU
it uses the C kernels of this package. Those for a GRU are used only in training, and treat padding
like words. Those for an LSTM skip padding, and are used unless gradients with respect to the texts
are needed. In all other cases torch's layers run on the padded texts, because torch's packed
sequences compute a gradient of the full size for each word (9 times the time at 500 words). Fused
kernels read the lengths on the CPU, so they do not work under `torch.func.vmap`; torch's LSTM and
cuDNN's kernels have no second derivative. Use "cell" in these cases; see `cells`.

The parameters of a layer are {"input": {weight, bias}, "state": {weight, bias}}, with the gates
stacked in torch's order.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fedshot.core.errors import ConfigError, DataError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.nn.kernels.layer_gradients import Gru, Lstm, torch_lstm
from fedshot.nn.kernels.lstm import BiLstm
from fedshot.nn.kernels.tensors import plain_floats
from fedshot.nn.models.cells import gru_cells, lstm_cells
from fedshot.nn.models.layers import init_uniform

Kernel = Literal["fused", "cell"]


def init_recurrence(key: Key, n_in: int, hidden: int, gates: int, dtype: torch.dtype) -> Tree:
    """Return random parameters of a layer in one direction, uniform in +-1/sqrt(hidden)."""
    bound = 1.0 / math.sqrt(hidden)
    return {
        "input": init_uniform(key.at("input"), n_in, gates * hidden, bound, dtype),
        "state": init_uniform(key.at("state"), hidden, gates * hidden, bound, dtype),
    }


def words_and_mask(x: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """Split prepared texts [n, L, d + 1] into word vectors [n, L, d] and the mask [n, L].

    Raises ConfigError for another shape.
    """
    if x.dim() != 3 or x.shape[-1] != d + 1:
        raise ConfigError(
            f"prepared texts have shape {list(x.shape)}; this net takes [n, words, {d + 1}], a "
            f"vector of {d} for each word and a last column that is 1 for a word and 0 for padding."
        )
    return x[..., :-1], x[..., -1]


def gru(p: Tree, x: Tensor, mask: Tensor, kernel: Kernel) -> Tensor:
    """Return the GRU's state [n, hidden] after each text's last word.

    Source: Cho et al. 2014, in torch's variant.
    """
    if kernel == "cell":
        return gru_cells(p, x, mask)
    x, lengths = _trim(x, mask)
    if torch.is_grad_enabled() and plain_floats(x, *_flat(p)):
        states: Tensor = Gru.apply(x, *_flat(p))  # type: ignore[no-untyped-call]
    else:
        start = x.new_zeros(1, len(x), p["state"]["weight"].shape[1])
        states, _ = torch.gru(x, start, _flat(p), True, 1, 0.0, True, False, True)
    return _at_last_word(states, lengths)


def bilstm(p: Tree, x: Tensor, mask: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """Return (states [n, m, 2 hidden], last states [n, 2 hidden]) of an LSTM in both directions.

    `p` is {"forward", "backward"}. The last states are the forward state after the last word and
    the backward state after the first word. States at padding are arbitrary; the fused kernel drops
    columns that are padding in every text, so m is at most L.
    """
    if kernel == "cell":
        there, last = lstm_cells(p["forward"], x, mask, backward=False)
        back, first = lstm_cells(p["backward"], x, mask, backward=True)
        return torch.cat([there, back], -1), torch.cat([last, first], -1)
    x, lengths = _trim(x, mask)
    weights = [*_flat(p["forward"]), *_flat(p["backward"])]
    if plain_floats(x, *weights) and not (x.requires_grad and torch.is_grad_enabled()):
        states: Tensor = BiLstm.apply(x, lengths, *weights)  # type: ignore[no-untyped-call]
        there, back = states.chunk(2, -1)
        return states, torch.cat([_at_last_word(there, lengths), back[:, 0]], -1)
    # Reverses the words of each text and keeps the padding behind them; it is its own inverse.
    turned = (lengths[:, None] - 1 - torch.arange(x.shape[1], device=x.device)) % x.shape[1]
    there = _lstm(p["forward"], x)
    back = _lstm(p["backward"], _pick(x, turned))
    last = torch.cat([_at_last_word(there, lengths), _at_last_word(back, lengths)], -1)
    return torch.cat([there, _pick(back, turned)], -1), last


def _flat(p: Tree) -> list[Tensor]:
    return [p["input"]["weight"], p["state"]["weight"], p["input"]["bias"], p["state"]["bias"]]


def _trim(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return texts x without the columns that are padding in every text, and the lengths [n].

    At least one column is kept.
    """
    lengths = mask.sum(1).to(torch.int64)
    words = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
    # One read, because a GPU first finishes all its work.
    longest, wrong = torch.stack([lengths.max(), (mask != words).sum()]).tolist()
    if wrong:
        if not ((mask == 0) | (mask == 1)).all():
            raise DataError(
                "the last column of prepared texts must be 1 for a word and 0 for padding."
            )
        row = int((mask[:, 1:] > mask[:, :-1]).any(1).nonzero()[0])
        raise DataError(f"text {row} has a word after padding; put the words of a text first.")
    return x[:, : max(longest, 1)], lengths


def _pick(rows: Tensor, at: Tensor) -> Tensor:
    """Return [n, m, d]: of each of n texts, the m rows with the indices `at` [n, m]."""
    return rows.gather(1, at[:, :, None].expand(-1, -1, rows.shape[-1]))


def _at_last_word(states: Tensor, lengths: Tensor) -> Tensor:
    """Return the states [n, hidden] after the last words; zero for a text without words."""
    last = _pick(states, (lengths - 1).clamp_min(0)[:, None])[:, 0]
    return last * (lengths > 0).to(states.dtype)[:, None]


def _lstm(p: Tree, x: Tensor) -> Tensor:
    """Return the states [n, L, hidden] of an LSTM that reads texts x in one direction."""
    if not torch.is_grad_enabled():
        return torch_lstm(x, *_flat(p))
    states: Tensor = Lstm.apply(x, *_flat(p))  # type: ignore[no-untyped-call]
    return states
