"""GRU and LSTM layers whose gradients can be differentiated again.

If a gradient is differentiated again, it is computed by the torch operations of `cells.py`. The
GRU, in float32 on a CPU, computes its gates and their gradients in C. The gradient of each weight
is one matrix product, where torch has one for each word. The layout is [texts, words, features] and
nothing is transposed: the rows of one word of every text are not adjacent, but that does not slow
matrix products down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedshot.core.tree import Tree
from fedshot.nn.gradients import with_graph
from fedshot.nn.kernels.repeats import Repeats, repeats
from fedshot.nn.kernels.tensors import checked, library
from fedshot.nn.models.cells import gru_states, lstm_states


class Gru(torch.autograd.Function):
    """Computes a GRU's states [n, L, hidden] from x [n, L, d].

    The weight w and bias b apply to the input; u and c apply to the previous state.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, u: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Return the states [n, L, hidden], and save the gates for `backward`."""
        (n, length, _), (wide, hidden) = x.shape, u.shape
        same = repeats(x)
        if same is None:
            gates = torch.addmm(b, _flat(x), w.T).view(n, length, wide)
        else:
            gates = same.spread(torch.addmm(b, same.rows, w.T)).view(n, length, wide)
        states, kept = x.new_empty(n, length + 1, hidden), x.new_empty(n, length, hidden)
        states[:, 0] = 0
        of_h, turned = x.new_empty(n, wide), u.T.contiguous()
        for t in range(length):
            torch.addmm(c, states[:, t], turned, out=of_h)
            gru_gates(t, of_h, gates, kept, states)
        ctx.save_for_backward(x, w, u, b, c, gates, kept, states, *(same or ()))
        return states[:, 1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient with respect to each argument of `forward`."""
        x, w, u, _, _, gates, kept, states, *same = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _again(ctx, gru_states, grad)
        grad, two = _in_rows(grad), 2 * u.shape[1]
        by_x, by_n = torch.empty_like(gates), torch.empty_like(kept)
        carry = torch.zeros_like(kept[:, 0])
        for t in reversed(range(x.shape[1])):
            gru_back(t, gates, kept, states, grad[:, t], by_x, by_n, carry)
            if t:  # nothing depends on the state before the first word
                carry.addmm_(by_x[:, t, :two], u[:two]).addmm_(by_n[:, t], u[two:])
        flat_x, flat_n, before = _flat(by_x), _flat(by_n), _flat(states[:, :-1])
        du = torch.cat([flat_x[:, :two].T @ before, flat_n.T @ before])
        dc = torch.cat([flat_x[:, :two].sum(0), flat_n.sum(0)])
        dx = by_x @ w if ctx.needs_input_grad[0] else None
        rows, by_rows = _flat(x), flat_x
        if same:
            rows, by_rows = same[0], Repeats(*same).gather(flat_x)
        return dx, by_rows.T @ rows, du, by_rows.sum(0), dc


class Lstm(torch.autograd.Function):
    """torch's LSTM with a second derivative, which torch's float32 CPU kernel lacks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        """Return the states [n, L, hidden], and save torch's graph for `backward`."""
        ctx.save_for_backward(x, *weights)
        with torch.enable_grad():
            ctx.own = [t.detach().requires_grad_(t.requires_grad) for t in (x, *weights)]
            ctx.states = torch_lstm(*ctx.own)
        states: Tensor = ctx.states.detach()
        return states

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient with respect to each argument of `forward`."""
        if torch.is_grad_enabled():
            return _again(ctx, lstm_states, grad)
        needs = ctx.needs_input_grad
        asked = [t for t, need in zip(ctx.own, needs, strict=True) if need]
        found = iter(torch.autograd.grad(ctx.states, asked, grad, retain_graph=True))
        return tuple(next(found) if need else None for need in needs)


def torch_lstm(x: Tensor, *weights: Tensor) -> Tensor:
    """Return the states [n, L, hidden] that torch's LSTM computes.

    `weights` are w, u, b and c, as for `Gru`.
    """
    start = x.new_zeros(1, len(x), weights[1].shape[1])
    states: Tensor = torch.lstm(x, (start, start), weights, True, 1, 0.0, True, False, True)[0]
    return states


def _flat(x: Tensor) -> Tensor:
    """Return the rows [n L, .] of x [n, L, .], without a copy if their stride is uniform."""
    return x.flatten(0, 1)


def _in_rows(grad: Tensor) -> Tensor:
    """Return `grad` with contiguous rows, even if each row has only one element."""
    if grad.stride(2) == 1:
        return grad
    return grad.clone(memory_format=torch.contiguous_format)


def _again(
    ctx: Any, cells: Callable[[Tree, Tensor], Tensor], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradient with respect to each argument of `forward`, with a graph.

    `cells` computes the states again.
    """

    def states(x: Tensor, w: Tensor, u: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return cells({"input": {"weight": w, "bias": b}, "state": {"weight": u, "bias": c}}, x)

    return tuple(with_graph(states, ctx.saved_tensors[:5], grad))


# The gates for one word of every text, by the C functions of `recurrent.c`. Tensors are contiguous
# float32 on the CPU. For n texts of L words: gates and by_x [n, L, 3 hidden]; kept and by_n [n, L,
# hidden]; states [n, L + 1, hidden], beginning with the state before the first word; of_h [n,
# 3 hidden]; carry [n, hidden]; grad [n, hidden], whose rows need not be adjacent. Shapes are
# checked, because C would read out of bounds.


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
