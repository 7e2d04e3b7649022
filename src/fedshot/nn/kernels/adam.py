"""One step of Adam on trees, by the C kernel if it supports them, else by torch operations.

Kingma & Ba 2015, algorithm 1, with weight decay as an L2 penalty, as in `torch.optim.Adam`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.tree import Tree
from fedshot.nn.kernels import tensors
from fedshot.nn.stacks import is_batched, stack, stacked

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8

Moved = Sequence[tuple[Tensor, ...]]  # w, m and v of every leaf after the step


def adam_step(
    params: Tree, grads: Tree, first: Tree, second: Tree, step: Tensor, lr: float, decay: float,
    *, reuse: bool = False,
) -> tuple[Tree, Tree, Tree]:  # fmt: skip
    """Return (parameters, first moments, second moments) after step `step`, counted from 1.

    It works under `torch.func.vmap`. With `reuse` the results may overwrite the arguments, which
    saves a third of the memory traffic.
    """
    four: list[tuple[Tensor, ...]] = []
    tree.map(lambda *leaves: four.append(leaves), params, grads, first, second)
    if not four:
        return params, first, second
    every = [leaf for leaves in four for leaf in leaves]
    differentiated = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in every)
    moved = None
    if tensors.plain_floats(*every) and not differentiated:
        moved = _compiled(four, lr, decay, step, reuse)
    if moved is None and every[0].is_cuda and not stacked() and not differentiated:
        moved = _fused(four, lr, decay, step)
    if moved is None:
        moved = _plain(four, lr, decay, step)
    w, m, v = zip(*moved, strict=True)
    return tree.unflatten(params, w), tree.unflatten(params, m), tree.unflatten(params, v)


def _compiled(
    four: Sequence[Sequence[Tensor]], lr: float, decay: float, step: Tensor, reuse: bool
) -> Moved | None:
    """Return the result of the C kernel for all leaves, or None if it cannot be used.

    `four` has (parameter, gradient, first moment, second moment) for each leaf. The kernel cannot
    be used if transforms are nested, or if stacked clients are at different steps.
    """
    clients = stack()
    if (clients is None and stacked()) or is_batched(step):
        return None
    size, eps = _sizes(lr, int(step))
    rule = {"decay": decay, "rise": 1 - BETA1, "grow": 1 - BETA2, "step": size, "eps": eps}
    if clients is None:
        return tensors.adam(four, **rule, reuse=reuse)
    whole = [[clients.whole(t) for t in leaves] for leaves in four]
    made = tensors.adam(whole, **rule, reuse=reuse)
    return [tuple(clients.each(t) for t in outs) for outs in made]


def _plain(four: Sequence[Sequence[Tensor]], lr: float, decay: float, step: Tensor) -> Moved:
    size, eps = _sizes(lr, step.to(torch.float64))
    moved = []
    for w, g, m, v in four:
        d = g.add(w, alpha=decay) if decay else g
        mean, square = m.lerp(d, 1 - BETA1), (v * BETA2).addcmul(d, d, value=1 - BETA2)
        by = size.to(w.dtype) * (mean / (square.sqrt() + eps.to(w.dtype)))
        moved.append((w - by, mean, square))
    return moved


def _fused(four: Sequence[Sequence[Tensor]], lr: float, decay: float, step: Tensor) -> Moved:
    """Return the result of torch's CUDA kernel, which updates all leaves at once.

    `four` has (parameter, gradient, first moment, second moment) for each leaf.
    """
    w, g, m, v = ([leaf.detach() for leaf in leaves] for leaves in zip(*four, strict=True))
    layout = torch.contiguous_format  # the kernel takes the four of a leaf in one layout
    w, m, v = ([leaf.clone(memory_format=layout) for leaf in leaves] for leaves in (w, m, v))
    g = [a if a.stride() == b.stride() else torch.empty_like(b).copy_(a)
         for a, b in zip(g, w, strict=True)]  # fmt: skip
    torch._fused_adam_(
        w, g, m, v, [], [step.to(torch.float32)] * len(w), lr=lr, beta1=BETA1, beta2=BETA2,
        weight_decay=decay, eps=EPS, amsgrad=False, maximize=False,
    )  # fmt: skip
    return list(zip(w, m, v, strict=True))


def _sizes(lr: float, t: Any) -> tuple[Any, Any]:
    """Return the step size and eps after t steps, with the moments' bias correction included.

    They follow from lr m/(1 - b1^t) / (sqrt(v/(1 - b2^t)) + eps), with numerator and denominator
    multiplied by sqrt(1 - b2^t). `t` is a number or a float64 tensor, because 1 - 0.999^t would
    lose too many digits in float32.
    """
    root = (1 - BETA2**t) ** 0.5
    return lr * root / (1 - BETA1**t), EPS * root
