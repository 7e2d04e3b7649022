"""The compiled batch norm, pool and ReLU against torch's own, in values and in derivatives."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from covering import covering, pairwise
from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import Episode
from fedshot.learners.maml import InnerLoop, Maml
from fedshot.nn.gradients import value_and_grad
from fedshot.nn.heads import LinearHead
from fedshot.nn.kernels import fused
from fedshot.nn.kernels import tensors as kernels
from fedshot.nn.kernels.fused import RELU_FIRST, RELU_LAST, Cut
from fedshot.nn.models.backbones import Conv4
from fedshot.nn.models.layers import EPS, batch_norm
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model

pytestmark = pytest.mark.usefixtures("kernels")
SHAPES = [(8, 16, 32, 32), (3, 5, 7, 9), (4, 64, 4, 4), (1, 3, 2, 3), (5, 33, 21, 10), (2, 1, 6, 6)]
NORMS = ("batch", "capture", "given")
both_orders = pytest.mark.parametrize("cut", [RELU_LAST, RELU_FIRST], ids=["last", "first"])


def maps(shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, scale (of both signs), shift, and the gradient of the result."""
    n, c, h, w = shape
    draw = torch.Generator().manual_seed(seed)
    x = (torch.randn(n, h, w, c, generator=draw) * 3 + 1).permute(0, 3, 1, 2)
    weight, bias = torch.randn(c, generator=draw), torch.randn(c, generator=draw)
    return x, weight, bias, torch.randn(n, c, h // 2, w // 2, generator=draw)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]


def plain(x: Tensor, weight: Tensor, bias: Tensor, cut: Cut) -> Tensor:
    """Return what the separate operations do."""
    first = F.relu(x) if cut is RELU_FIRST else x
    y = F.max_pool2d(F.batch_norm(first, None, None, weight, bias, True, 0.0, EPS), 2)
    return y if cut is RELU_FIRST else F.relu(y)


@pytest.mark.parametrize(("shape", "cut"), covering(SHAPES, [RELU_LAST, RELU_FIRST]))
def test_values_and_gradients_are_torch_s_in_float64(shape: tuple[int, ...], cut: Cut) -> None:
    x, weight, bias, dy = maps(shape)
    ours = leaves(x, weight, bias)
    theirs = [t.double().requires_grad_() for t in (x, weight, bias)]
    assert kernels.fits(ours[0])
    y, mean, var = fused.pooled(ours[0], ours[1], ours[2], EPS, cut)
    expected = plain(theirs[0], theirs[1], theirs[2], cut)
    torch.testing.assert_close(y.double(), expected, rtol=3e-6, atol=3e-6)
    seen = F.relu(x.double()) if cut is RELU_FIRST else x.double()
    torch.testing.assert_close(mean.double(), seen.mean((0, 2, 3)), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        var.double(), seen.var((0, 2, 3), unbiased=False), rtol=1e-6, atol=1e-6
    )
    found = torch.autograd.grad(y, ours, dy)
    wanted = torch.autograd.grad(expected, theirs, dy.double())
    for a, b in zip(found, wanted, strict=True):
        assert float((a.double() - b).norm()) <= 3e-6 * float(b.norm()) + 1e-7


def test_large_means_do_not_spoil_the_variance() -> None:
    x, weight, bias, _ = maps((8, 16, 32, 32))
    _, _, var = fused.pooled(x + 300, weight, bias, EPS)
    exact = (x + 300).double().var((0, 2, 3), unbiased=False)
    torch.testing.assert_close(var.double(), exact, rtol=2e-6, atol=0)


@both_orders
def test_the_first_of_equal_values_takes_the_gradient_as_in_torch(cut: Cut) -> None:
    """Zeros too, which a ReLU before the norm lets no gradient through."""
    x = torch.randint(-1, 3, (6, 8, 8, 4)).float().permute(0, 3, 1, 2)
    ours, theirs = x.clone(memory_format=torch.preserve_format).requires_grad_(), x.double()
    theirs.requires_grad_()
    one, zero = torch.ones(4), torch.zeros(4)
    dy = torch.randn(6, 4, 4, 4)
    (found,) = torch.autograd.grad(fused.pooled(ours, one, zero, EPS, cut)[0], ours, dy)
    expected = plain(theirs, one.double(), zero.double(), cut)
    (wanted,) = torch.autograd.grad(expected, theirs, dy.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@both_orders
def test_not_a_number_stays_one(cut: Cut) -> None:
    x, weight, bias, _ = maps((4, 8, 6, 6))
    x[1, 3, 2, 2] = float("nan")
    y, _, _ = fused.pooled(x, weight, bias, EPS, cut)
    assert torch.isnan(y[:, 3]).all()
    assert not torch.isnan(y[:, [0, 1, 2, 4, 5, 6, 7]]).any()


@pytest.mark.parametrize("channels", [1, 16, 19])
@both_orders
def test_not_a_number_wins_its_pool_under_given_statistics(channels: int, cut: Cut) -> None:
    for row, column in ((2, 4), (2, 5), (3, 4), (3, 5)):  # the places of one pool
        x, scale, shift, _ = maps((3, channels, 6, 7))
        x[1, :, row, column] = float("nan")
        y = fused.pooled_given(x, scale, shift, cut)
        seen = F.relu(x) if cut is RELU_FIRST else x
        expected = F.max_pool2d(seen * scale[:, None, None] + shift[:, None, None], 2)
        expected = expected if cut is RELU_FIRST else F.relu(expected)
        torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-6, atol=1e-6)
        assert torch.isnan(y[1, :, 1, 2]).all()
        assert int(torch.isnan(y).sum()) == channels


@both_orders
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_what_is_not_finite_makes_nan_of_its_channel_and_of_its_gradient(
    bad: float, cut: Cut
) -> None:
    """Under the batch's own statistics, which is why the derivatives may compare as they do."""
    x, weight, bias, dy = maps((2, 3, 6, 6))
    x[0, 1, 2, 3] = x[0, 1, 2, 4] = bad
    points = leaves(x, weight, bias)
    y = fused.pooled(*points, EPS, cut)[0]
    assert torch.isnan(y[:, 1]).all()
    dx = torch.autograd.grad(y, points, dy)[0]
    passed = ~(x[:, 1] <= 0) if cut is RELU_FIRST else torch.ones_like(x[:, 1], dtype=torch.bool)
    assert torch.isnan(dx[:, 1][passed]).all()
    assert torch.isfinite(dx[:, [0, 2]]).all()


@pytest.mark.parametrize(("shape", "cut"), covering(SHAPES[1:], [RELU_LAST, RELU_FIRST]))
def test_second_derivatives_are_those_of_the_separate_operations(
    shape: tuple[int, ...], cut: Cut
) -> None:
    x, weight, bias, dy = maps(shape)

    def twice(op: object, *start: Tensor) -> tuple[Tensor, ...]:
        points = leaves(*start)
        y = op(*points)  # type: ignore[operator]
        first = torch.autograd.grad((y * dy.to(y.dtype)).sum(), points, create_graph=True)
        return torch.autograd.grad(
            sum((g**2).sum() for g in first), points, allow_unused=True, materialize_grads=True
        )

    found = twice(lambda *t: fused.pooled(*t, EPS, cut)[0], x, weight, bias)
    wanted = twice(lambda *t: plain(*t, cut), x.double(), weight.double(), bias.double())
    for a, b in zip(found, wanted, strict=True):
        assert float((a.double() - b).norm()) <= 1e-5 * float(b.norm()) + 1e-6


@both_orders
def test_the_gradient_of_the_result_s_own_gradient_is_right_too(cut: Cut) -> None:
    """By dy, which a further layer would have made of its weights."""
    x, weight, bias, dy = maps((3, 4, 6, 6))
    found, wanted = [], []
    for into, cast in ((found, Tensor.float), (wanted, Tensor.double)):
        points = leaves(*(cast(t) for t in (x, weight, bias, dy)))
        points[0] = cast(x).clone(memory_format=torch.preserve_format).requires_grad_()
        a, b, c = points[:3]
        y = fused.pooled(a, b, c, EPS, cut)[0] if into is found else plain(a, b, c, cut)
        first = torch.autograd.grad(y, points[:3], points[3], create_graph=True)
        total = sum((g * torch.sin(torch.arange(g.numel()).view(g.shape).to(g.dtype))).sum()
                    for g in first)  # fmt: skip
        into.extend(torch.autograd.grad(total, points, allow_unused=True, materialize_grads=True))
    for a, b in zip(found, wanted, strict=True):
        assert float((a.double() - b).norm()) <= 1e-5 * float(b.norm()) + 1e-6


@pytest.mark.parametrize("order", ["first", "second"])
@pytest.mark.parametrize("block", ["norm_relu", "relu_norm"])
def test_a_maml_lesson_has_the_gradient_that_it_has_in_float64(order: str, block: Any) -> None:
    single = Maml(Model(Conv4(width=8, order=block), LinearHead(way=3), (12, 12, 1), "support"),
                  InnerLoop(lr=0.05, steps=3, order=order))  # type: ignore[arg-type]  # fmt: skip
    double = replace(single, model=replace(single.model, dtype="float64"))
    x = torch.randint(0, 256, (3 * 6, 12, 12, 1), dtype=torch.uint8)
    y = torch.arange(3).repeat_interleave(2), torch.arange(3).repeat_interleave(4)
    episode = Episode(x[:6], y[0], x[6:], y[1], torch.arange(3))
    params, stats = single.init(Key(0))
    exact, _ = double.init(Key(0))

    def gradient(learner: Maml, at: Tree) -> Tree:
        def fn(w: Tree) -> tuple[Tensor, Tree]:
            return learner.episode_loss(w, stats, episode, Key(1).tensor()).loss, {}

        return value_and_grad(fn, at)[2]

    found, wanted = tree.leaves(gradient(single, params)), tree.leaves(gradient(double, exact))
    scale = max(float(g.norm()) for g in wanted)
    for a, b in zip(found, wanted, strict=True):
        assert float((a.double() - b).norm()) <= 1e-4 * scale


@pytest.mark.parametrize(
    ("norm", "kept", "cut"), pairwise(NORMS, [True, False], [RELU_LAST, RELU_FIRST])
)
def test_statistics_are_those_of_batch_norm(norm: str, kept: bool, cut: Cut) -> None:
    x, weight, bias, _ = maps((4, 6, 8, 8))
    p = {"weight": weight, "bias": bias}
    s = {"mean": torch.randn(6), "var": torch.rand(6) + 0.5} if kept else {}
    mode = Mode(norm=norm)  # type: ignore[arg-type]
    if norm == "given" and not kept:
        with pytest.raises(ConfigError, match="batch norm needs statistics"):
            fused.norm_pool_relu(p, s, x, None, mode, cut)
        return
    first = cut is RELU_FIRST
    normed, stats = batch_norm(p, s, F.relu(x) if first else x, mode)
    expected = F.max_pool2d(normed if first else F.relu(normed), 2)
    found, after = fused.norm_pool_relu(p, s, x, None, mode, cut)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert after.keys() == stats.keys()
    for name in stats:
        torch.testing.assert_close(after[name], stats[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("norm", "shape", "order"),
    pairwise(NORMS, [(32, 32, 3), (28, 28, 1), (13, 11, 2)], ["norm_relu", "relu_norm"]),
)
def test_a_conv4_is_the_same_with_and_without(
    norm: str, shape: tuple[int, int, int], order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(Conv4(width=8, order=order), None, shape)
    params, stats = model.init(Key(1))
    params = tree.map(lambda t: t + 0.1, params)  # shifts and biases that are not all zero
    images = torch.randint(0, 256, (6, *shape), dtype=torch.uint8)
    mode = Mode(norm=norm)  # type: ignore[arg-type]
    found = model.features(params, stats, images, mode)
    monkeypatch.setattr(kernels, "fits", lambda _: False)
    wanted = model.features(params, stats, images, mode)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-3, atol=1e-3)
    for name in ("norm1", "norm4"):
        torch.testing.assert_close(found[1][name], wanted[1][name], rtol=1e-3, atol=1e-4)


@both_orders
def test_bits_do_not_depend_on_the_number_of_threads(cut: Cut) -> None:
    x, weight, bias, dy = maps((7, 16, 10, 10))
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        points = leaves(x, weight, bias)
        y, mean, var = fused.pooled(*points, EPS, cut)
        results.append((y, mean, var, *torch.autograd.grad(y, points, dy)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_what_the_kernels_cannot_take_goes_the_plain_way() -> None:
    x, *_ = maps((2, 4, 6, 6))
    assert kernels.fits(x)
    assert not kernels.fits(x.double())
    assert not kernels.fits(x.contiguous())
    assert not kernels.fits(torch.zeros(1, 4, 6, 6, device="meta"))
    seen = []
    torch.func.vmap(lambda t: seen.append(kernels.fits(t)) or t)(torch.zeros(3, 1, 4, 6, 6))
    assert seen == [False]


def test_an_empty_batch_goes_the_plain_way() -> None:
    x = torch.zeros(0, 4, 6, 6).contiguous(memory_format=torch.channels_last)
    assert not kernels.fits(x)
    model = Model(Conv4(width=8), None, (12, 12, 1))
    params, stats = model.init(Key(1))
    images = torch.zeros(0, 12, 12, 1, dtype=torch.uint8)
    assert model.features(params, stats, images, Mode(norm="given"))[0].shape[0] == 0


@pytest.mark.parametrize("which", [0, 1])
def test_vectors_that_c_would_misread_are_refused(which: int) -> None:
    x, scale, shift, _ = maps((2, 4, 6, 6))
    vectors = [scale, shift]
    vectors[which] = vectors[which].double()
    with pytest.raises(ValueError, match=r"given torch\.float64 on cpu, .* float32"):
        fused.pooled_given(x, vectors[0], vectors[1])
    with pytest.raises(ValueError, match=r"given torch\.float64 on cpu"):
        fused.pooled(x, vectors[0], vectors[1], EPS)
    vectors[which] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"shape \[3\], .* float32 \[4\]"):
        fused.pooled_given(x, vectors[0], vectors[1])


def test_results_do_not_depend_on_torch_s_default_type() -> None:
    x, scale, shift, _ = maps((2, 4, 6, 6))
    expected = fused.pooled_given(x, scale, shift)
    torch.set_default_dtype(torch.float64)
    try:
        found = fused.pooled_given(x, scale, shift)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


FORK = """
import os, signal, torch
from fedshot.nn.kernels import fused
torch.set_num_threads(2)
x = torch.ones(4, 6, 6, 3).permute(0, 3, 1, 2)
one = torch.ones(3)
expected = fused.pooled_given(x, one, one)
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(0 if torch.equal(fused.pooled_given(x, one, one), expected) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
def test_a_forked_process_has_threads_of_its_own() -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout == "0\n"
