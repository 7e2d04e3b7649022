"""The losses of few-round learning as C kernels.

In torch, forward and backward pass take some eighty operations on small tensors: a sixth of the
time of a client's round with 30 images. `fedshot.methods.frl.local_steps` has the equations, and
the torch operations for cases that have no kernel.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor

from fedshot.nn.gradients import differentiated_twice
from fedshot.nn.kernels.tensors import address, empty, followed, library, plain_floats
from fedshot.nn.stacks import stacked


def fits(g: Tensor) -> bool:
    """Whether the kernels support g: float32 on the CPU, no vmap, tracing or second derivative."""
    return plain_floats(g) and not stacked() and not differentiated_twice() and not followed()


def support_loss(
    g: Tensor, y: Tensor, numbers: int, prototypes: tuple[Tensor, Tensor] | None, gamma: float,
    *, pooled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (loss, accuracy, means [numbers, d], counts [numbers]) of supports: eqs. (1) to (4).

    The loss is L_local + gamma L_aux in nats. Only the loss is differentiable, with respect to `g`.

    Args:
        g: feature maps [n, d, positions], for which `fits` is true.
        y: labels, int64 [n], 0 to numbers - 1.
        numbers: number of possible labels.
        prototypes: global prototypes (means [numbers, d], held bool [numbers]: whether a class has
            one); None to leave out L_aux.
        gamma: weight of L_aux, a mean over positions.
        pooled: whether L_aux compares the mean over positions instead of each position.

    Raises ValueError for tensors that the C code would misread.
    """
    means, held = (None, None) if prototypes is None else prototypes
    made: tuple[Tensor, Tensor, Tensor, Tensor]
    made = _Supports.apply(g, y, numbers, means, held, gamma, pooled)  # type: ignore[no-untyped-call]
    return made


def query_loss(g: Tensor, y: Tensor, means: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """Return (loss in nats, accuracy) of queries that are compared with prototypes, eq. (2).

    The loss is differentiable with respect to `g` and `means`.

    Args:
        g: feature maps of the queries [n, d, positions], for which `fits` is true.
        y: labels, int64 [n].
        means: the prototypes [numbers, d].
        held: bool [numbers], whether a class has a prototype.

    Raises ValueError for tensors that the C code would misread.
    """
    loss, right = _Queries.apply(g, y, means, held)  # type: ignore[no-untyped-call]
    return loss, right


class _Supports(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, g: Tensor, y: Tensor, numbers: int, near: Tensor | None, held: Tensor | None,
        gamma: float, pooled: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        g, y, n, d, positions = _checked(g, y)
        given = (0, 0)
        if near is not None and held is not None:
            near, held = _prototypes(near, held, numbers, d)
            given = near.data_ptr(), held.data_ptr()
        room = empty((2 * n * (1 + positions) + numbers) * d + 2 * numbers)
        loss, right, means, counts = empty(), empty(), empty(numbers, d), empty(numbers)
        dg = torch.empty_like(g)
        wrong = array("q", [0])
        outs = [t.data_ptr() for t in (room, loss, right, means, counts, dg)]
        sizes = (n, d, positions, numbers)
        library().fedshot_few_round(
            g.data_ptr(), y.data_ptr(), *given, *sizes, pooled, gamma, *outs, address(wrong)
        )
        _check_labels(wrong[0], y, numbers)
        ctx.save_for_backward(dg)
        ctx.mark_non_differentiable(right, means, counts)
        ctx.set_materialize_grads(False)
        return loss, right, means, counts

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, *_: None) -> Any:
        _check_once()
        (dg,) = ctx.saved_tensors
        return None if dloss is None else dg * dloss, None, None, None, None, None, None


class _Queries(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, g: Tensor, y: Tensor, means: Tensor, held: Tensor
    ) -> tuple[Tensor, Tensor]:
        g, y, n, d, positions = _checked(g, y)
        numbers = len(held)
        means, held = _prototypes(means, held, numbers, d)
        room, loss, right = empty(2 * n * d + numbers), empty(), empty()
        dg, dmeans = torch.empty_like(g), empty(numbers, d)
        wrong = array("q", [0])
        ins, outs = (g, y, means, held), (room, loss, right, dg, dmeans)
        library().fedshot_few_round_answers(
            *(t.data_ptr() for t in ins), n, d, positions, numbers,
            *(t.data_ptr() for t in outs), address(wrong),
        )  # fmt: skip
        _check_labels(wrong[0], y, numbers)
        ctx.save_for_backward(dg, dmeans)
        ctx.mark_non_differentiable(right)
        ctx.set_materialize_grads(False)
        return loss, right

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, _: None) -> Any:
        _check_once()
        if dloss is None:
            return None, None, None, None
        dg, dmeans = ctx.saved_tensors
        return dg * dloss, None, dmeans * dloss, None


def _checked(g: Tensor, y: Tensor) -> tuple[Tensor, Tensor, int, int, int]:
    """Return contiguous feature maps and labels, and the maps' sizes n, d and positions."""
    labels = y.dtype == torch.int64 and y.is_cpu and y.shape == g.shape[:1]
    if g.dim() != 3 or not g.numel() or not labels:
        raise ValueError(
            f"maps {list(g.shape)} with labels {y.dtype} {list(y.shape)} on {y.device}; expected "
            "one or more maps [n, d, positions], and an int64 label for each, on the CPU."
        )
    return g.contiguous(), y.contiguous(), *g.shape


def _prototypes(means: Tensor, held: Tensor, numbers: int, d: int) -> tuple[Tensor, Tensor]:
    floats = plain_floats(means) and means.shape == (numbers, d)
    flags = held.dtype == torch.bool and held.is_cpu and held.shape == (numbers,)
    if not floats or not flags:
        raise ValueError(
            f"prototypes {means.dtype} {list(means.shape)} on {means.device}, held {held.dtype} "
            f"{list(held.shape)} on {held.device}; expected float32 [{numbers}, {d}] and bool "
            f"[{numbers}], on the CPU."
        )
    return means.contiguous(), held.contiguous()


def _check_labels(wrong: int, y: Tensor, numbers: int) -> None:
    if wrong:
        raise ValueError(f"the labels are {sorted(set(y.tolist()))}; expected 0 to {numbers - 1}.")


def _check_once() -> None:
    """Raise RuntimeError under create_graph=True, where the gradient would be a constant."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "this kernel of few-round learning has no second derivative, so create_graph=True is "
            "not possible; take the gradient with value_and_grad(..., differentiable=True)."
        )
