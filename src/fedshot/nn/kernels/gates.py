"""The gates of a GRU for one word of every text, by the C functions of `recurrent.c`.

Tensors are contiguous float32 on the CPU. For n texts of L words: gates and by_x [n, L, 3 hidden];
kept and by_n [n, L, hidden]; states [n, L + 1, hidden], beginning with the state before the first
word; of_h [n, 3 hidden]; carry [n, hidden]; grad [n, hidden], whose rows need not be adjacent.
Shapes are checked, because C would read out of bounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedshot.nn.kernels.tensors import checked, library


def gru_gates(t: int, of_h: Tensor, gates: Tensor, kept: Tensor, states: Tensor) -> None:
    """Compute the gates and the state of word t.

    On entry `gates` holds the terms of the gates that come from the inputs, and `of_h` has those
    that come from the state before word t. The gates of word t are written to `gates`, the state
    after it to `states`. `kept` gets the state's term of torch's new gate, for `gru_back`.
    """
    n, words, hidden = kept.shape
    given = checked(of_h, n, 3 * hidden)
    outs = [
        _word(t, gates, n, words, 3 * hidden),
        _word(t, kept, n, words, hidden),
        _word(t, states, n, words + 1, hidden),
    ]
    library().fedshot_gru_gates(given, 0, n, words, hidden, *outs)


def gru_back(
    t: int, gates: Tensor, kept: Tensor, states: Tensor, grad: Tensor, by_x: Tensor, by_n: Tensor,
    carry: Tensor,
) -> None:  # fmt: skip
    """Fill in the gradients of word t, and update `carry`.

    `grad` is the gradient with respect to the state after word t as an output of the layer.
    `by_x` gets the gradient with respect to the input's terms of the gates, and `by_n` that with
    respect to the state's term of the new gate. On entry `carry` is the gradient with respect to
    the state after word t, from later words. On return it is the gradient with respect to the state
    before word t, without the terms through the state's weight.
    """
    n, words, hidden = kept.shape
    ins = [
        _word(t, gates, n, words, 3 * hidden),
        _word(t, kept, n, words, hidden),
        _word(t, states, n, words + 1, hidden),
    ]
    outs = [
        _word(t, by_x, n, words, 3 * hidden),
        _word(t, by_n, n, words, hidden),
        checked(carry, n, hidden),
    ]
    if grad.dtype != torch.float32 or grad.shape != (n, hidden) or grad.stride(1) != 1:
        raise ValueError(
            f"the gradient of a state is {grad.dtype} {list(grad.shape)}, strides {grad.stride()}; "
            f"expected float32 {[n, hidden]} with contiguous rows"
        )
    own = (grad.data_ptr(), grad.stride(0))
    library().fedshot_gru_back(*ins, *own, 0, n, words, hidden, *outs)


def _word(t: int, x: Tensor, *shape: int) -> int:
    """Return the address of word t of the first text in x, a tensor of this shape."""
    if not 0 <= t < shape[1]:
        raise IndexError(f"word {t} of {shape[1]}")
    return checked(x, *shape) + 4 * t * shape[2]
