"""The pure optimisers against torch.optim."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.nn.optim import Optimizer
from torch_optimizers import torch_optimizer


def start(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    g = Key(0).torch()
    return {
        "a": torch.randn(4, 3, generator=g, dtype=torch.float64).to(dtype),
        "b": torch.randn(5, generator=g, dtype=torch.float64).to(dtype),
    }


def loss(w: dict[str, Tensor]) -> Tensor:
    return (w["a"].sin() ** 2).sum() + (w["b"] - 3).square().sum() * w["a"].mean().exp()


CASES = [
    Optimizer("sgd", 0.01),
    Optimizer("sgd", 0.01, momentum=0.9),
    Optimizer("sgd", 0.01, momentum=0.9, weight_decay=0.1),
    Optimizer("adam", 0.05),
    Optimizer("adam", 0.05, weight_decay=0.1),
]


@pytest.mark.parametrize("opt", CASES, ids=str)
def test_thirty_steps_equal_those_of_torch(opt: Optimizer) -> None:
    w, theirs = start(), {k: v.requires_grad_() for k, v in start().items()}
    state, torch_opt = opt.init(w), torch_optimizer(opt, theirs.values())
    for _ in range(30):
        w, state = opt.update(torch.func.grad(loss)(w), state, w)
        torch_opt.zero_grad()
        loss(theirs).backward()
        torch_opt.step()
    for name, value in theirs.items():
        torch.testing.assert_close(w[name], value.detach(), rtol=1e-12, atol=1e-12)
    assert state.step.item() == 30
    assert state.step.dtype == torch.int64


@pytest.mark.parametrize("opt", CASES[::2], ids=str)
def test_float32_stays_float32_and_near_torch(opt: Optimizer) -> None:
    w = start(torch.float32)
    theirs = {k: v.requires_grad_() for k, v in start(torch.float32).items()}
    state, torch_opt = opt.init(w), torch_optimizer(opt, theirs.values())
    for _ in range(5):
        w, state = opt.update(torch.func.grad(loss)(w), state, w)
        torch_opt.zero_grad()
        loss(theirs).backward()
        torch_opt.step()
    for name, value in theirs.items():
        assert w[name].dtype == torch.float32
        torch.testing.assert_close(w[name], value.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("opt", CASES[::2], ids=str)
def test_a_step_changes_none_of_its_arguments_and_the_state_is_a_tree(opt: Optimizer) -> None:
    w = start()
    state = opt.init(w)
    for _ in range(2):
        g = torch.func.grad(loss)(w)
        before = tree.digest((g, state, w))
        new, later = opt.update(g, state, w)
        assert tree.digest((g, state, w)) == before
        w, state = new, later
    assert tree.difference(opt.init(w), state) is None


@pytest.mark.parametrize("opt", CASES[::2], ids=str)
def test_steps_of_stacked_clients_equal_the_loop(opt: Optimizer) -> None:
    def two_steps(w: tree.Tree) -> tree.Tree:
        state = opt.init(w)
        for _ in range(2):
            w, state = opt.update(torch.func.grad(loss)(w), state, w)
        return w

    many = [tree.map(lambda t, i=i: t + i, start()) for i in range(3)]
    got = torch.func.vmap(two_steps)(tree.stack(many))
    for i, one in enumerate(many):
        for a, b in zip(tree.leaves(tree.index(got, i)), tree.leaves(two_steps(one)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("opt", CASES[::2], ids=str)
def test_a_step_can_be_differentiated(opt: Optimizer) -> None:
    def after(scale: Tensor) -> Tensor:
        w = start()
        g = tree.map(lambda t: t * scale, start())
        new, _ = opt.update(g, opt.init(w), w)
        return torch.cat([t.flatten() for t in tree.leaves(new)])

    at = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(after, at)
