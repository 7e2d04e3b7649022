"""What proposition 1 and lemma 1 of the FedFSL papers need, and where they fail.

`test_convergence.py` measures the rate that the proposition promises. Here are its assumptions, in
closed form on losses of one number, and the constants of the lemma.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedshot.core.seeds import Key
from fedshot.methods.fedfsl.fedfsl_mi import FedFSLMI
from fedshot.nn.gradients import descend
from fedshot.nn.losses import clipped_kl
from fedshot.nn.optim import Optimizer
from methods.fedfsl.oracle import Run, flat, local_training, options, regularizer, task_loss

Loss = Callable[[Tensor], Tensor]  # elementwise
EPS = 0.2


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def derivative(fn: Loss, w: Tensor, order: int) -> Tensor:
    """Return an elementwise derivative of an elementwise function."""
    w = w.detach().requires_grad_()
    value = fn(w)
    for _ in range(order):
        (value,) = torch.autograd.grad(value.sum(), w, create_graph=True)
    return value.detach()


def adapted(support: Loss, query: Loss, alpha: float, *, second: bool = True) -> Loss:
    """Eq. (5), f_Q(w - alpha f_S'(w)), elementwise."""

    def loss(w: Tensor) -> Tensor:
        end = descend(
            lambda v, _: support(v["w"]).sum(), {"w": w}, lr=alpha, steps=1, second_order=second
        )
        return query(end["w"])

    return loss


# ------------------------------------------------------------------------- proposition 1
def convex(seed: int) -> Loss:
    """A strongly convex loss whose curvature is not constant."""
    a, b, c, d = torch.rand(4, generator=Key(seed).torch(), dtype=torch.float64) + 0.5

    def loss(w: Tensor) -> Tensor:
        slope = torch.nn.functional.softplus(3 * b * (w - d))
        return 0.5 * (w - 2 * c + 1).square() * 0.4 + a * slope

    return loss


@pytest.mark.parametrize("seed", range(4))
def test_a_small_inner_step_keeps_the_adapted_loss_strongly_convex(seed: int) -> None:
    """With alpha at most 1/(2 beta) and mu/(8 rho G): curvature from mu/8 to 9/8 beta.

    Of support and query: mu and beta bound f'', rho f''' and G f', on the interval of the weights.
    """
    pair = convex(seed), convex(seed + 100)
    w = torch.linspace(-2, 2, 4001, dtype=torch.float64)
    g, h, third = (
        torch.stack([derivative(f, w, order).abs() for f in pair]).amax() for order in (1, 2, 3)
    )
    mu = torch.stack([derivative(f, w, 2) for f in pair]).amin()
    alpha = float(torch.minimum(1 / (2 * h), mu / (8 * third * g)))
    inside = w[(w.abs() < 2 - alpha * g)]  # so that the adapted weight is in the interval, too
    curvature = derivative(adapted(*pair, alpha), inside, 2)
    assert len(inside) > 1000
    assert mu / 8 <= curvature.min()
    assert curvature.max() <= 9 / 8 * h


def test_a_large_inner_step_makes_it_flat_or_concave() -> None:
    def parabola(w: Tensor) -> Tensor:
        return 0.5 * w.square()

    def bent(w: Tensor) -> Tensor:
        return 0.05 * w.square() + torch.nn.functional.softplus(4 * w)

    w = torch.linspace(-1, 1, 201, dtype=torch.float64)
    assert derivative(adapted(parabola, parabola, 1.0), w, 2).abs().max() < 1e-12
    assert derivative(bent, w, 2).min() >= 0.1
    curvature = derivative(adapted(bent, bent, 0.2), w, 2)
    assert float(curvature.min()) == pytest.approx(-0.3746, abs=1e-4)


@pytest.mark.parametrize("steps", [1, 5, 60])
def test_local_steps_of_constant_size_end_between_the_minimum_and_the_mean_of_minima(
    steps: int,
) -> None:
    """Clients h/2 (w - c)^2: E steps of eta leave a share a = (1 - eta h)^E of the way to c.

    The rounds end at sum (1 - a) c / sum (1 - a). That is the minimum, sum h c / sum h, for E = 1,
    and the mean of the clients' minima where they solve eq. (9).
    """
    h, c, eta = tensor(1, 4), tensor(0, 1), 0.1
    w = tensor(5, 5)
    for _ in range(100):
        end = descend(
            lambda v, _: (0.5 * h * (v["w"] - c).square()).sum(),
            {"w": w},
            lr=eta,
            steps=steps,
            second_order=False,
        )
        w = end["w"].detach().mean().expand(2)
    moved = 1 - (1 - eta * h) ** steps
    assert float(w[0]) == pytest.approx(float((moved * c).sum() / moved.sum()), abs=1e-9)
    want = {1: 0.8, 5: 0.693, 60: 0.5}
    assert float(w[0]) == pytest.approx(want[steps], abs=1e-3)


def test_first_order_ends_elsewhere() -> None:
    """Tasks h/2 (w - c)^2, support and query alike: the gradient lacks a factor 1 - alpha h."""
    h, c, alpha = tensor(1, 4), tensor(0, 1), 0.1

    def task(w: Tensor) -> Tensor:
        return 0.5 * h * (w - c).square()

    for second, power, want in ((True, 2, 0.6400), (False, 1, 0.7273)):
        weights = h * (1 - alpha * h) ** power
        end = float((weights * c).sum() / weights.sum())
        assert end == pytest.approx(want, abs=1e-4)
        gradient = derivative(adapted(task, task, alpha, second=second), tensor(end, end), 1)
        assert float(gradient.sum()) == pytest.approx(0, abs=1e-12)


# ------------------------------------------------------------------------- lemma 1
def gradient(p: Tensor, q: Tensor, along: Tensor, clip: str) -> Tensor:
    """Return the derivative of the clipped divergence where q moves with velocity `along` / s."""
    s = torch.zeros((), dtype=torch.float64, requires_grad=True)
    logits = q.log() + s * along / q  # dq/ds = along, as `along` sums to 0
    loss = clipped_kl(p.log()[None], logits[None], clip, EPS)  # type: ignore[arg-type]
    return torch.autograd.grad(loss, s)[0].abs()


def test_clipped_inside_the_logarithm_the_gradient_exceeds_the_printed_bound() -> None:
    """B_p (1 + eps), where B_p is the norm of dp(w)/dw; two of five ratios are inside the band."""
    inside, outside = 1.199, 0.79
    m = (1 - outside) / (inside - outside)  # so that p sums to 1
    q = tensor(m / 2, m / 2, (1 - m) / 3, (1 - m) / 3, (1 - m) / 3)
    p = q * tensor(inside, inside, outside, outside, outside)
    along = tensor(3, 3, -2, -2, -2)
    found = float(gradient(p, q, along, "log") / along.norm())
    assert found == pytest.approx(inside * 1.2**0.5)  # sqrt(2 * 3 / 5)
    assert 1 + EPS < found <= (1 + EPS) * 5**0.5


@pytest.mark.parametrize(("classes", "holds"), [(4, True), (36, True), (64, False)])
def test_clipped_in_the_gradient_the_bound_is_epsilon_by_the_root_of_the_classes(
    classes: int, holds: bool
) -> None:
    """As probabilities sum to 1, B_p eps sqrt(N); it is reached, and is the printed one at 36."""
    side = tensor(1, -1).repeat(classes // 2)
    q = torch.full((classes,), 1 / classes, dtype=torch.float64)
    found = float(gradient(q * (1 + EPS * side), q, side, "coef") / side.norm())
    assert found == pytest.approx(EPS * classes**0.5)
    assert (found <= 1 + EPS + 1e-9) == holds


def test_at_random_the_gradient_clip_stays_below_its_bound() -> None:
    rng = Key(1).torch()
    for n in (2, 5, 20):
        for spread in (0.1, 1.0, 5.0):
            p, q = (
                (spread * torch.randn(n, generator=rng, dtype=torch.float64)).softmax(0)
                for _ in range(2)
            )
            along = torch.randn(n, generator=rng, dtype=torch.float64)
            along -= along.mean()
            assert gradient(p, q, along, "coef") <= EPS * n**0.5 * along.norm() + 1e-12
            logits = along / q  # the velocity of the logits, for which no clip is needed
            assert gradient(p, q, along, "none") <= 2**0.5 * logits.norm()


@pytest.mark.parametrize("seed", range(3))
def test_descent_with_a_bounded_error_meets_the_lemma(seed: int) -> None:
    """One client: mean |grad L + b|^2 <= 4 (L_0 - L*) / (beta T) + 2 |b|^2, if beta <= 1/(2 l).

    It holds for any b of bounded norm, whatever gamma grad L_MI is.
    """
    rng = Key(seed).torch()
    rows = torch.randn(6, 3, generator=rng, dtype=torch.float64)

    def loss(w: Tensor) -> Tensor:  # not convex, at least -6
        return torch.cos(rows @ w).sum() + 0.5 * w.square().sum()

    smooth = float(torch.linalg.matrix_norm(rows, 2)) ** 2 + 1
    beta, bound, w = 1 / (2 * smooth), 0.3, 3 * torch.randn(3, generator=rng, dtype=torch.float64)
    first, squares = float(loss(w)), []
    for _ in range(200):
        b = torch.randn(3, generator=rng, dtype=torch.float64)
        g = torch.func.grad(loss)(w) + bound * b / b.norm()
        squares.append(float(g.square().sum()))
        w = w - beta * g
        limit = 4 * (first + 6) / (beta * len(squares)) + 2 * bound**2
        assert sum(squares) / len(squares) <= limit


@pytest.mark.parametrize("mode", ["v1", "paper", "strict"])
def test_the_gradient_of_mi_is_as_small_as_the_local_steps(mode: str, tmp_path: Path) -> None:
    """So the lemma's constant term falls with the step size: MI ends where naive ends."""
    norms = []
    for lr in (0.02, 0.01, 0.005):
        changes = {"local_steps": 4, "optimizer": Optimizer("sgd", lr), "mode": mode, "gamma": 1.0}
        run = Run(FedFSLMI(**options(**changes)), tmp_path / str(lr), 1)
        start = flat(run.server.w)
        run.t = 1
        steps = run.drawn(0).steps
        w = local_training(start, steps[:3], run.method.optimizer, task_loss)
        at = {name: leaf.clone().requires_grad_() for name, leaf in w.items()}
        loss = regularizer(run.method, start, at, steps[3][0])
        parts = torch.autograd.grad(loss, list(at.values()))
        norms.append(float(torch.stack([g.square().sum() for g in parts]).sum().sqrt()))
    for larger, smaller in pairwise(norms):
        assert larger / smaller == pytest.approx(2, rel=0.15)
