"""`value_and_grad` and `descend` against torch.func, closed forms and finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from differences import noise
from fedshot.core import tree
from fedshot.core.tree import Tree
from fedshot.nn.gradients import descend, value_and_grad


def point() -> Tree:
    return {"body": {"a": noise(3, 2)}, "head": (noise(4, seed=1),)}


def bowl(w: Tree) -> Tensor:
    """A function with neither symmetry nor constant derivatives."""
    a, b = w["body"]["a"], w["head"][0]
    return (a.sin().sum() * b.square().sum()).tanh() + (a.exp().sum() + b.cos().sum()).log()


def hessian() -> Tensor:
    root = noise(4, 4, seed=3)
    return root @ root.T / 4 + torch.eye(4, dtype=torch.float64)


def test_value_and_gradient_equal_those_of_torch_func() -> None:
    want, value = torch.func.grad_and_value(bowl)(point())
    got_value, extra, got = value_and_grad(lambda w: (bowl(w), "kept"), point())
    assert extra == "kept"
    torch.testing.assert_close(got_value, value, rtol=1e-14, atol=0)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-15)


def test_a_leaf_that_is_not_used_has_a_gradient_of_zero() -> None:
    _, _, grad = value_and_grad(lambda w: (w["body"]["a"].sum(), None), point())
    assert torch.equal(grad["body"]["a"], torch.ones(3, 2, dtype=torch.float64))
    assert torch.equal(grad["head"][0], torch.zeros(4, dtype=torch.float64))


def test_a_plain_gradient_holds_no_graph_and_marks_nothing() -> None:
    w = point()
    value, _, grad = value_and_grad(lambda w: (bowl(w), None), w)
    assert not value.requires_grad
    assert not any(leaf.requires_grad for leaf in [*tree.leaves(grad), *tree.leaves(w)])


def test_a_gradient_is_taken_even_where_gradients_are_off() -> None:
    with torch.no_grad():
        _, _, grad = value_and_grad(lambda w: (bowl(w), None), point())
    torch.testing.assert_close(grad, torch.func.grad(bowl)(point()))


def test_a_differentiable_gradient_has_the_hessian_of_torch_func() -> None:
    w = noise(4).requires_grad_()
    _, _, grad = value_and_grad(lambda w: (w.sin().prod(), None), w, differentiable=True)
    got = torch.stack([torch.autograd.grad(g, w, retain_graph=True)[0] for g in grad])
    want = torch.func.hessian(lambda w: w.sin().prod())(noise(4))
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("second", [True, False])
def test_steps_on_a_quadratic_have_the_closed_form(second: bool) -> None:
    # grad f = A (w - c), so w_n - c = (I - lr A)^n (w - c).
    a, c, w = hessian(), noise(4, seed=4), noise(4, seed=5)

    def loss(w: Tensor, step: int) -> Tensor:
        return 0.5 * (w - c) @ a @ (w - c)

    got = descend(loss, w, lr=0.1, steps=7, second_order=second)
    shrink = torch.linalg.matrix_power(torch.eye(4, dtype=torch.float64) - 0.1 * a, 7)
    torch.testing.assert_close(got.detach(), c + shrink @ (w - c), rtol=1e-13, atol=1e-14)


def test_second_order_steps_on_a_quadratic_have_the_closed_jacobian() -> None:
    a, c, w = hessian(), noise(4, seed=4), noise(4, seed=5).requires_grad_()
    got = descend(lambda w, _: 0.5 * (w - c) @ a @ (w - c), w, lr=0.1, steps=7, second_order=True)
    rows = [torch.autograd.grad(g, w, retain_graph=True)[0] for g in got]
    shrink = torch.linalg.matrix_power(torch.eye(4, dtype=torch.float64) - 0.1 * a, 7)
    torch.testing.assert_close(torch.stack(rows), shrink, rtol=1e-13, atol=1e-14)


def test_the_jacobian_of_first_order_steps_is_the_identity() -> None:
    a, w = hessian(), noise(4, seed=5).requires_grad_()
    got = descend(lambda w, _: 0.5 * w @ a @ w, w, lr=0.1, steps=7, second_order=False)
    rows = [torch.autograd.grad(g, w, retain_graph=True)[0] for g in got]
    assert torch.equal(torch.stack(rows), torch.eye(4, dtype=torch.float64))


@pytest.mark.parametrize("second", [True, False])
def test_no_steps_return_the_start(second: bool) -> None:
    w = point()
    got = descend(lambda w, _: bowl(w), w, lr=0.1, steps=0, second_order=second)
    assert tree.digest(got) == tree.digest(w)


def test_both_orders_end_at_the_same_point() -> None:
    ends = [
        tree.detach(descend(lambda w, _: bowl(w), point(), lr=0.1, steps=4, second_order=second))
        for second in (True, False)
    ]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-14, atol=1e-15)


def test_the_loss_is_told_which_step_it_is() -> None:
    told = []

    def loss(w: Tensor, step: int) -> Tensor:
        told.append(step)
        return (step + 1) * w.sum()

    end = descend(loss, torch.zeros(2), lr=1.0, steps=3, second_order=False)
    assert told == [0, 1, 2]
    assert torch.equal(end, torch.full((2,), -6.0))


def support(w: Tree) -> Tensor:
    return ((w["head"][0].mean() * w["body"]["a"]).sin() - 0.3).square().mean()


def query(w: Tree) -> Tensor:
    return ((w["head"][0].sum() * w["body"]["a"]).cos() - 0.7).square().mean()


def by_torch_func(w: Tree, lr: float, steps: int) -> Tensor:
    """MAML's outer loss as one would write it with torch.func."""
    for _ in range(steps):
        grad = torch.func.grad(support)(w)
        w = tree.map(lambda p, g: p - lr * g, w, grad)
    return query(w)


def meta_gradient(w: Tree, steps: int, second: bool) -> Tree:
    def outer(w: Tree) -> tuple[Tensor, None]:
        end = descend(lambda v, _: support(v), w, lr=0.1, steps=steps, second_order=second)
        return query(end), None

    return value_and_grad(outer, w)[2]


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_meta_gradient_equals_that_of_torch_func(steps: int) -> None:
    want = torch.func.grad(by_torch_func)(point(), 0.1, steps)
    got = meta_gradient(point(), steps, second=True)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)


def test_the_first_order_gradient_is_the_query_gradient_where_the_steps_end() -> None:
    end = descend(lambda v, _: support(v), point(), lr=0.1, steps=4, second_order=False)
    want = torch.func.grad(query)(end)
    torch.testing.assert_close(
        meta_gradient(point(), 4, second=False), want, rtol=1e-14, atol=1e-16
    )


def test_the_orders_agree_where_the_hessian_is_zero_and_differ_where_it_is_not() -> None:
    slope = noise(3)

    def gradient(second: bool, curve: float) -> Tensor:
        def outer(w: Tensor) -> tuple[Tensor, None]:
            end = descend(
                lambda v, _: slope @ v + curve * v.square().sum(),
                w,
                lr=0.2,
                steps=3,
                second_order=second,
            )
            return end.sin().prod(), None

        return value_and_grad(outer, noise(3, seed=1))[2]

    torch.testing.assert_close(gradient(True, 0.0), gradient(False, 0.0), rtol=1e-14, atol=1e-16)
    assert (gradient(True, 0.5) - gradient(False, 0.5)).abs().max() > 1e-2


def test_a_frozen_part_does_not_cut_the_others_from_the_graph() -> None:
    # As when one stage trains the head and the body is a constant, and all of both adapts.
    body = {"a": noise(3, 2)}

    def outer(head: Tree) -> tuple[Tensor, None]:
        start = {"body": body, "head": head}
        end = descend(lambda v, _: support(v), start, lr=0.1, steps=2, second_order=True)
        return query(end), None

    got = value_and_grad(outer, point()["head"])[2]
    want = torch.func.grad(by_torch_func)(point(), 0.1, 2)["head"]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("second", [True, False])
def test_step_sizes_of_one_value_are_that_step_size(second: bool) -> None:
    sizes = tree.map(lambda leaf: torch.full_like(leaf, 0.1), point())
    ends = [
        tree.detach(descend(lambda w, _: bowl(w), point(), lr=lr, steps=4, second_order=second))
        for lr in (0.1, sizes)
    ]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-14, atol=1e-15)


def test_step_sizes_on_a_quadratic_have_the_closed_form_and_jacobian() -> None:
    # w_n - c = (I - diag(alpha) A)^n (w - c); after one step d w_1 / d alpha = -diag(A (w - c)).
    a, c, w = hessian(), noise(4, seed=4), noise(4, seed=5)
    alpha = torch.tensor([0.1, 0.02, 0.3, 0.0], dtype=torch.float64)

    def loss(w: Tensor, step: int) -> Tensor:
        return 0.5 * (w - c) @ a @ (w - c)

    shrink = torch.eye(4, dtype=torch.float64) - alpha[:, None] * a
    end = descend(loss, w, lr=alpha, steps=7, second_order=False)
    want = c + torch.linalg.matrix_power(shrink, 7) @ (w - c)
    torch.testing.assert_close(end, want, rtol=1e-13, atol=1e-14)
    for second in (True, False):
        at = alpha.clone().requires_grad_()
        one = descend(loss, w, lr=at, steps=1, second_order=second)
        rows = [torch.autograd.grad(v, at, retain_graph=True)[0] for v in one]
        torch.testing.assert_close(torch.stack(rows), -torch.diag(a @ (w - c)))
