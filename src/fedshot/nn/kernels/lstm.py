"""A bidirectional LSTM for training on a CPU, with its recurrence in C.

Texts are concatenated without padding, repeated words are multiplied by the input weights only
once, and both directions share one matrix product. torch's layer also processes the padding, and
computes a gradient with respect to the words that is not needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  (the usual name)
from torch import Tensor

from fedshot.nn.gradients import with_graph
from fedshot.nn.kernels.repeats import Repeats, repeats
from fedshot.nn.kernels.tensors import checked, library, shared
from fedshot.nn.models.cells import LSTM_GATES, lstm_cells

_TEXTS, _LANES = 6, 16  # texts per block and numbers per vector, as in lstm.c
_LEAVES = 4  # tensors per direction: the weights of the input and of the state, and their biases


class Places(NamedTuple):
    """The positions of the words of texts [n, m] after the padding is removed.

    Args:
        of: for each word, its index in the padded texts, 0 to n m - 1.
        at: [n + 1], for each text the index of its first word, then the number of all words.
        order: order in which C takes the texts, in blocks of texts of similar length.
    """

    of: Tensor
    at: Tensor
    order: Tensor

    @classmethod
    def made(cls, lengths: Tensor, m: int) -> Places:
        """Return the word positions of texts with lengths [n], each at most m."""
        if ((lengths < 0) | (lengths > m)).any():
            raise ValueError(f"texts have {lengths.tolist()} words; expected 0 to {m}")
        of = (torch.arange(m, device="cpu") < lengths[:, None]).flatten().nonzero()[:, 0]
        order = lengths.argsort(descending=True)
        # Threads take consecutive blocks; interleaving gives each thread long and short texts.
        whole = len(order) // _TEXTS * _TEXTS
        blocks, threads = order[:whole].view(-1, _TEXTS), torch.get_num_threads()
        interleaved = [blocks[i::threads].flatten() for i in range(threads)]
        return cls(of, F.pad(lengths.cumsum(0), (1, 0)), torch.cat([*interleaved, order[whole:]]))


class BiLstm(torch.autograd.Function):
    """Computes the states [n, m, 2 hidden] of texts x [n, m, d] with `lengths` [n].

    States at the padding are 0. The weights are w, u, b, c of the forward direction, then of the
    backward one: w and b apply to the input, u and c to the previous state. They are float32 on the
    CPU. There is no gradient with respect to x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: Tensor, *weights: Tensor) -> Tensor:
        """Return the states [n, m, 2 hidden], and save the gates for `backward`."""
        (n, m, _), hidden = x.shape, weights[1].shape[1]
        places = Places.made(lengths, m)
        words = x.flatten(0, 1).index_select(0, places.of)
        same = repeats(words[None])
        rows = words if same is None else same.rows
        w, b = (torch.cat(weights[i::_LEAVES]) for i in (0, 2))
        gates = torch.addmm(b, rows, w.T)
        if same is not None:
            gates = same.spread(gates)
        kept = [gates.new_empty(len(gates), hidden) for _ in range(6)]
        for back in (0, 1):
            u, c = weights[_LEAVES * back + 1], weights[_LEAVES * back + 3]
            _forwards(u, c, places, gates, back, *kept[3 * back : 3 * back + 3])
        states = x.new_zeros(n * m, 2 * hidden)
        states[:, :hidden].index_copy_(0, places.of, kept[2])
        states[:, hidden:].index_copy_(0, places.of, kept[5])
        which = () if same is None else (same.which,)
        ctx.save_for_backward(x, lengths, *places, *weights, rows, gates, *kept, *which)
        return states.view(n, m, 2 * hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient with respect to each weight."""
        x, lengths, of, at, order, *saved = ctx.saved_tensors
        weights, (rows, gates, *kept) = saved[: 2 * _LEAVES], saved[2 * _LEAVES :]
        places, which = Places(of, at, order), kept[6:]
        if torch.is_grad_enabled():
            return None, None, *_again(x, lengths, weights, grad)
        by_x = torch.empty_like(gates)
        for back in (0, 1):
            cells, squashed = kept[3 * back : 3 * back + 2]
            u = weights[_LEAVES * back + 1]
            _backwards(u, places, gates, cells, squashed, grad, back, by_x)
        sums = Repeats(rows, *which).gather(by_x) if which else by_x
        by_w, by_b = (sums.T @ rows).chunk(2), sums.sum(0).chunk(2)
        by_u = [_by_state(by_x, kept[3 * back + 2], places, back) for back in (0, 1)]
        return (
            None,
            None,
            *(
                part
                for back in (0, 1)
                for part in (by_w[back], by_u[back], by_b[back], by_b[back].clone())
            ),
        )


def _forwards(
    u: Tensor, c: Tensor, places: Places, gates: Tensor, back: int,
    cells: Tensor, squashed: Tensor, states: Tensor,
) -> None:  # fmt: skip
    """Run one direction, the backward one if `back` is 1: fill in `cells`, `squashed` and `states`.

    `squashed` is tanh(cells); u and c are the weight and bias of the previous state. On entry the
    direction's half of `gates` holds the terms of the gates that come from the words.
    They are overwritten by the gates.
    """
    hidden, done = u.shape[1], _done()
    turned, bias = _padded(u.T), _padded(c)
    _check_weights(u, c)
    _check(places, gates, hidden, cells, squashed, states)
    given = [t.data_ptr() for t in (turned, bias, places.at, places.order)]
    rest = [len(places.order), hidden, turned.shape[1], back, gates.shape[1]]
    half = gates.data_ptr() + back * 4 * LSTM_GATES * hidden
    outs = [half, *(t.data_ptr() for t in (cells, squashed, states, done))]
    shared(_blocks(places), library().fedshot_lstm, given, rest, outs)
    _succeeded(done)


def _backwards(
    u: Tensor, places: Places, gates: Tensor, cells: Tensor, squashed: Tensor, grad: Tensor,
    back: int, by_x: Tensor,
) -> None:  # fmt: skip
    """Fill in one direction's half of `by_x`, the gradient with respect to the gates' inputs.

    These inputs are the values before the gates' activation functions. `back` is 1 for the backward
    direction, u the weight of the previous state, and `grad` is with respect to the layer's output.
    """
    hidden, done = u.shape[1], _done()
    turned = _padded(u)
    if grad.stride(2) != 1:
        grad = grad.clone(memory_format=torch.contiguous_format)
    _check(places, gates, hidden, cells, squashed)
    _check(places, by_x, hidden)
    skip = back * 4 * LSTM_GATES * hidden
    given = [t.data_ptr() for t in (turned, places.at, places.order)]
    given += [gates.data_ptr() + skip, cells.data_ptr(), squashed.data_ptr()]
    given += [grad.data_ptr() + back * 4 * hidden]
    sizes = [len(places.order), hidden, turned.shape[1], back, gates.shape[1], *grad.stride()[:2]]
    outs = [by_x.data_ptr() + skip, done.data_ptr()]
    shared(_blocks(places), library().fedshot_lstm_back, given, sizes, outs)
    _succeeded(done)


def _by_state(by_x: Tensor, states: Tensor, places: Places, back: int) -> Tensor:
    """Return the gradient with respect to u, the weight of the previous state, in one direction."""
    ends = places.at[1:] - 1 if back else places.at[:-1]
    before = states.roll(-1 if back else 1, 0)
    before[ends[places.at.diff() > 0]] = 0
    half: Tensor = by_x.chunk(2, 1)[back]
    return half.T @ before


def _again(x: Tensor, lengths: Tensor, weights: list[Tensor], grad: Tensor) -> list[Tensor | None]:
    """Return the gradient with respect to each weight, with a graph.

    `lstm_cells` computes the states again.
    """
    mask = (torch.arange(x.shape[1], device="cpu") < lengths[:, None]).to(x.dtype)

    def states(*own: Tensor) -> Tensor:
        both = []
        for back in (0, 1):
            w, u, b, c = own[_LEAVES * back : _LEAVES * (back + 1)]
            p = {"input": {"weight": w, "bias": b}, "state": {"weight": u, "bias": c}}
            both.append(lstm_cells(p, x, mask, backward=bool(back))[0])
        return torch.cat(both, -1) * mask[..., None]

    return with_graph(states, tuple(weights), grad)


def _padded(t: Tensor) -> Tensor:
    """Return a copy of t whose rows are padded by zeros to a multiple of the vector length in C."""
    return F.pad(t, (0, -t.shape[-1] % _LANES)).contiguous()


def _blocks(places: Places) -> int:
    return -(-len(places.order) // _TEXTS)


def _check(places: Places, gates: Tensor, hidden: int, *kept: Tensor) -> None:
    """Raise ValueError for tensors of other shapes than C reads and writes."""
    checked(gates, len(places.of), 2 * LSTM_GATES * hidden)
    for t in kept:
        checked(t, len(places.of), hidden)


def _check_weights(u: Tensor, c: Tensor) -> None:
    wide = LSTM_GATES * u.shape[1]
    if u.shape[0] != wide or c.shape != (wide,):
        raise ValueError(
            f"the state of an LSTM of {u.shape[1]} has a weight {list(u.shape)} and a bias "
            f"{list(c.shape)}; expected {[wide, u.shape[1]]} and {[wide]}"
        )


def _done() -> Tensor:
    return torch.ones(1, dtype=torch.int64, device="cpu")


def _succeeded(done: Tensor) -> None:
    if not done.item():
        raise MemoryError("no memory for an LSTM; use fewer or shorter texts in a batch")
