"""Optimisers as pure functions: (gradients, state, parameters) to (parameters, state).

They compute the same as `torch.optim.SGD` and `torch.optim.Adam`, with weight decay as an L2
penalty, but the state is a tree that can be sent or saved. Arguments are changed in place only with
`reuse`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.devices import CPU
from fedshot.core.errors import ConfigError
from fedshot.core.ranges import Above0, Below1, NotNegative, check_options
from fedshot.core.tree import Tree
from fedshot.nn.kernels.adam import adam_step


class OptState(NamedTuple):
    """The state of an optimiser: tensors only. An unused moment is `{}`."""

    step: Tensor  # int64 scalar, steps taken
    first: Tree  # Adam's mean of gradients, or SGD's momentum buffer
    second: Tree  # Adam's mean of squared gradients


class Steps(Protocol):
    """The interface of `Optimizer` and of the classes that extend it."""

    def init(self, params: Tree) -> OptState:
        """Return the state before the first step."""
        ...

    def update(
        self, grads: Tree, state: OptState, params: Tree, *, reuse: bool = False
    ) -> tuple[Tree, OptState]:
        """Return (parameters, state) after one step.

        `reuse` lets the call overwrite `state` and `params`, which the caller must not use again.
        """
        ...


@dataclass(frozen=True)
class Optimizer:
    """SGD (with momentum) or Adam (betas 0.9, 0.999), as torch defines them.

    Args:
        name: the optimiser, "sgd" or "adam".
        lr: step size.
        momentum: momentum of SGD; must be 0 for Adam.
        weight_decay: factor of the L2 penalty: weight_decay * w is added to the gradient.
    """

    name: Literal["sgd", "adam"] = "adam"
    lr: Above0 = 1e-3
    momentum: Below1 = 0.0
    weight_decay: NotNegative = 0.0

    def __post_init__(self) -> None:
        check_options(self)
        if self.name == "adam" and self.momentum:
            raise ConfigError(
                f"optimizer.momentum is {self.momentum}, but Adam has momentum of its own. Leave "
                "it at 0, or choose sgd."
            )

    def init(self, params: Tree) -> OptState:
        """Return the state before the first step."""
        adam = self.name == "adam"
        first = tree.zeros_like(params) if adam or self.momentum else {}
        second = tree.zeros_like(params) if adam else {}
        device = next((leaf.device for leaf in tree.leaves(params)), CPU)
        return OptState(torch.zeros((), dtype=torch.int64, device=device), first, second)

    def update(
        self, grads: Tree, state: OptState, params: Tree, *, reuse: bool = False
    ) -> tuple[Tree, OptState]:
        """Return (parameters, state) after one step. This also works under `torch.func.vmap`.

        `reuse` lets Adam overwrite `state` and `params`, which the caller must not use again.

        Each leaf is updated by itself: `torch._foreach_*` and one flat vector were no faster on a
        CPU, and the former does not work under `vmap`.
        """
        step = state.step + 1
        if self.name == "adam":
            params, *moments = adam_step(
                params, grads, state.first, state.second, step, self.lr, self.weight_decay,
                reuse=reuse,
            )  # fmt: skip
            return params, OptState(step, *moments)
        if self.weight_decay:
            grads = tree.map(lambda g, w: g.add(w, alpha=self.weight_decay), grads, params)
        first = state.first
        if self.momentum:
            # The buffer starts at zero, so after the first step it is the gradient, as in torch.
            first = tree.map(lambda b, g: g.add(b, alpha=self.momentum), first, grads)
            grads = first
        return tree.map(lambda w, g: w.sub(g, alpha=self.lr), params, grads), OptState(
            step, first, {}
        )


def clip_grad_norm(grads: Tree, max_norm: float) -> Tree:
    """Scale the gradient down so that its norm over all leaves is at most `max_norm`.

    Source: Pascanu et al. 2013, algorithm 1. A gradient with a smaller norm keeps its exact bits.
    """
    norm = torch.stack([g.square().sum() for g in tree.leaves(grads)]).sum().sqrt()
    scale = (max_norm / norm.clamp_min(max_norm)).detach()  # 1 for a shorter gradient
    return tree.map(lambda g: g * scale, grads)
