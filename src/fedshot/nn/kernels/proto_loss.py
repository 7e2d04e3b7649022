"""The loss of prototypical networks as one operation, by a C kernel if it applies.

Otherwise torch operations compute it. In torch, the loss of a small net takes thirty operations on
small tensors, and worker threads wait for Python's global lock at each of them.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor

from fedshot.nn.kernels.tensors import address, empty, followed, library, plain_floats, shared
from fedshot.nn.losses import accuracy, cross_entropy
from fedshot.nn.prototypes import class_means, prototype_logits


def prototype_loss(h: Tensor, y: Tensor, n: int, way: int) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy (nats) and the accuracy of queries, classified by prototypes.

    Source: Snell et al. 2017, eqs. (1) and (2). The accuracy has no gradient.

    Args:
        h: features [n + queries, d], the support first.
        y: labels of support and queries, int64 [n + queries], 0 to way - 1.
        n: number of support examples.
        way: number of classes.

    Raises ValueError for labels out of range.
    """
    if plain_floats(h) and not followed():
        loss, right, _ = _Loss.apply(h, y, n, way)  # type: ignore[no-untyped-call]
        return loss, right
    logits = _logits(h, y, n, way)
    return cross_entropy(logits, y[n:]), accuracy(logits.detach(), y[n:])


def _logits(h: Tensor, y: Tensor, n: int, way: int) -> Tensor:
    return prototype_logits(h[n:], class_means(h[:n], y[:n], way))


class _Loss(torch.autograd.Function):
    """Computes (loss, accuracy, gradient of the loss with respect to the features h).

    Leading dimensions of h and y stack episodes.
    """

    @staticmethod
    def forward(h: Tensor, y: Tensor, n: int, way: int) -> tuple[Tensor, Tensor, Tensor]:
        h, y = h.contiguous(), y.contiguous()
        *stack, rows, width = h.shape
        if y.dtype != torch.int64 or not y.is_cpu or y.shape != h.shape[:-1] or not 0 < n < rows:
            raise ValueError(
                f"features {list(h.shape)} with labels {y.dtype} {list(y.shape)} on {y.device}, "
                f"{n} of them support; expected one int64 label per row, on the CPU, and at least "
                "one query."
            )
        episodes = h.numel() // (rows * width)
        room = empty(episodes, way * (2 * width + 2))
        loss, right, dh = empty(*stack), empty(*stack), torch.empty_like(h)
        ins = [h.data_ptr(), y.data_ptr()]
        wrong = array("q", [0])
        outs = [*(t.data_ptr() for t in (room, loss, right, dh)), address(wrong)]
        sizes = (n, rows - n, width, way)
        shared(episodes, library().fedshot_prototypes, ins, sizes, outs, numbers=h.numel())
        if wrong[0]:
            raise ValueError(
                f"the labels of the queries are {sorted(set(y[..., n:].flatten().tolist()))}; "
                f"expected 0 to {way - 1}."
            )
        return loss, right, dh

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save the gradient for `backward`, and h and y for the second derivative."""
        h, y, *ctx.sizes = inputs
        _, right, dh = output
        ctx.mark_non_differentiable(right)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h, y, dh)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, _: None, ddh: Tensor | None) -> Any:
        h, y, dh = ctx.saved_tensors
        found = None if dloss is None else dh * dloss[..., None, None]
        if ddh is not None:  # the gradient is differentiated again
            second = _by_rows(ddh, h, y, *ctx.sizes)
            found = second if found is None else found + second
        return found, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, h: Tensor, y: Tensor, n: int, way: int) -> Any:
        h, y = (
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((h, y), dims, strict=False)
        )
        return _Loss.apply(h, y, n, way), (0, 0, 0)  # type: ignore[no-untyped-call]


def _by_rows(u: Tensor, h: Tensor, y: Tensor, n: int, way: int) -> Tensor:
    """Return the loss's Hessian times `u`, computed by torch operations.

    It is the gradient of sum(u * dloss/dh) with respect to the features h; u has the shape of h.
    """

    def one(u: Tensor, h: Tensor, y: Tensor) -> Tensor:
        gradient = torch.func.grad(lambda rows: cross_entropy(_logits(rows, y, n, way), y[n:]))
        found: Tensor = torch.func.vjp(gradient, h)[1](u)[0]
        return found

    of_all = one
    for _ in h.shape[:-2]:
        of_all = torch.func.vmap(of_all)
    return of_all(u, h, y)
