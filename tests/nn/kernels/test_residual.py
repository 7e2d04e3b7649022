"""The compiled operations of a residual block against torch's own, in values and in derivatives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fedshot.core import kernel_build, tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.nn.kernels import tensors as kernels
from fedshot.nn.kernels.residual import Normed, join, norm_leaky
from fedshot.nn.models.layers import EPS, batch_norm
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.models.resnet import ResNet12

pytestmark = pytest.mark.skipif(kernel_build.library() is None, reason="without the C kernels")
SHAPES = [(8, 16, 32, 32), (3, 5, 7, 9), (4, 64, 4, 4), (1, 3, 2, 3), (5, 33, 21, 10), (2, 1, 6, 6)]
LEAN = 0.1
BATCH = Mode(norm="batch")


def maps(shape: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """Return x, weight (of both signs) and bias."""
    n, c, h, w = shape
    draw = torch.Generator().manual_seed(seed)
    x = (torch.randn(n, h, w, c, generator=draw) * 3 + 1).permute(0, 3, 1, 2)
    return [x, torch.randn(c, generator=draw), torch.randn(c, generator=draw)]


def two(shape: tuple[int, ...]) -> list[Tensor]:
    return maps(shape) + maps(shape, seed=1)


def leaves(tensors: list[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    kept = torch.preserve_format
    return [t.to(dtype).clone(memory_format=kept).requires_grad_() for t in tensors]


def normed(x: Tensor, weight: Tensor, bias: Tensor) -> Normed:
    return Normed(x, {"weight": weight, "bias": bias}, {})


def one(*at: Tensor) -> Tensor:
    return norm_leaky(normed(*at), LEAN, BATCH)[0]


def both(*at: Tensor) -> Tensor:
    return join(normed(*at[:3]), normed(*at[3:]), LEAN, BATCH)[0]


def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, True, 0.0, EPS)


def plain_one(*at: Tensor) -> Tensor:
    return F.leaky_relu(plain(*at), LEAN)


def plain_both(*at: Tensor) -> Tensor:
    return F.leaky_relu(F.max_pool2d(plain(*at[:3]) + plain(*at[3:]), 2), LEAN)


Op = Callable[..., Tensor]
OPERATIONS = [
    pytest.param(maps, one, plain_one, id="norm_leaky"),
    pytest.param(two, both, plain_both, id="join"),
]


def close(found: Tensor, wanted: Tensor, share: float) -> None:
    assert float((found.double() - wanted).norm()) <= share * float(wanted.norm()) + 1e-6


@pytest.mark.parametrize(("start", "ours", "theirs"), OPERATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_torch_s_in_float64(
    shape: tuple[int, ...], start: Callable[..., list[Tensor]], ours: Op, theirs: Op
) -> None:
    single, double = leaves(start(shape)), leaves(start(shape), torch.float64)
    assert kernels.fits(single[0])
    y, expected = ours(*single), theirs(*double)
    torch.testing.assert_close(y.double(), expected, rtol=3e-6, atol=5e-6)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad(y, single, dy)
    wanted = torch.autograd.grad(expected, double, dy.double())
    for a, b in zip(found, wanted, strict=True):
        close(a, b, 3e-6)


@pytest.mark.parametrize(("start", "ours", "theirs"), OPERATIONS)
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_second_derivatives_are_those_of_the_separate_operations(
    shape: tuple[int, ...], start: Callable[..., list[Tensor]], ours: Op, theirs: Op
) -> None:
    def twice(op: Op, dtype: torch.dtype) -> tuple[Tensor, ...]:
        points = leaves(start(shape), dtype)
        y = op(*points)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
        dy.requires_grad_()
        first = torch.autograd.grad((y * dy).sum(), points, create_graph=True)
        total = sum((g * g.detach().sin()).sum() for g in first)
        assert isinstance(total, Tensor)
        return torch.autograd.grad(total, [*points, dy], allow_unused=True, materialize_grads=True)

    found, wanted = twice(ours, torch.float32), twice(theirs, torch.float64)
    for a, b in zip(found, wanted, strict=True):
        close(a, b, 1e-4)  # by the plain operations in float32


def test_scale_and_shift_may_hang_on_one_another() -> None:
    """A backward pass returns partial derivatives; autograd adds up the paths."""
    x, weight, _ = maps((3, 5, 7, 9))
    found = []
    for dtype, again in ((torch.float32, False), (torch.float32, True), (torch.float64, True)):
        (one,) = leaves([weight], dtype)
        if dtype == torch.float64:
            y = F.leaky_relu(F.batch_norm(x.double(), None, None, one, one * 2, True, 0, EPS), LEAN)
        else:
            y, _ = norm_leaky(Normed(x, {"weight": one, "bias": one * 2}, {}), LEAN, BATCH)
        (grad,) = torch.autograd.grad(y.sin().sum(), [one], create_graph=again)
        found.append(grad.detach().double())
    for grad in found[:2]:
        torch.testing.assert_close(grad, found[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("learned", [[0], [1], [2], [0, 2], [1, 2]])
@pytest.mark.parametrize(("start", "ours", "theirs"), OPERATIONS)
def test_what_is_frozen_has_no_gradient_and_disturbs_none(
    learned: list[int], start: Callable[..., list[Tensor]], ours: Op, theirs: Op
) -> None:
    def twice(op: Op, dtype: torch.dtype) -> tuple[Tensor, ...]:
        values = [t.to(dtype) for t in start((3, 5, 6, 7))]
        points = [values[i].requires_grad_() for i in learned]
        first = torch.autograd.grad(op(*values).square().sum(), points, create_graph=True)
        total = sum((g * g.detach().sin()).sum() for g in first)
        assert isinstance(total, Tensor)
        again = torch.autograd.grad(total, points, allow_unused=True, materialize_grads=True)
        return *(g.detach() for g in first), *again

    for a, b in zip(twice(ours, torch.float32), twice(theirs, torch.float64), strict=True):
        close(a, b, 1e-4)


@pytest.mark.parametrize(("start", "ours", "theirs"), OPERATIONS)
def test_the_first_of_equal_values_takes_the_gradient_as_in_torch(
    start: Callable[..., list[Tensor]], ours: Op, theirs: Op
) -> None:
    shape = (6, 4, 8, 8)
    values = start(shape)
    for i in range(0, len(values), 3):
        draw = torch.Generator().manual_seed(i)
        whole = torch.randint(0, 3, (6, 8, 8, 4), generator=draw)
        values[i] = whole.float().permute(0, 3, 1, 2)
        values[i + 1], values[i + 2] = torch.ones(4), torch.zeros(4)
    single, double = leaves(values), leaves(values, torch.float64)
    y, expected = ours(*single), theirs(*double)
    dy = torch.randn(y.shape)
    found = torch.autograd.grad(y, single, dy)
    if ours is both:  # sums of two maps tie to rounding, which another order of sums may break
        single[3], double[3] = single[0], double[0]
        found = torch.autograd.grad(ours(*single), single[:3], dy)
        double = double[:3] + double[:3]
        wanted = torch.autograd.grad(theirs(*double), double[:3], dy.double())
    else:
        wanted = torch.autograd.grad(expected, double, dy.double())
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", ["batch", "capture", "given"])
@pytest.mark.parametrize("kept", [True, False])
def test_statistics_are_those_of_batch_norm(norm: str, kept: bool) -> None:
    x, weight, bias, r, weight_r, bias_r = two((4, 6, 8, 8))
    s = {"mean": torch.randn(6), "var": torch.rand(6) + 0.5} if kept else {}
    t = {"mean": torch.randn(6), "var": torch.rand(6) + 0.5} if kept else {}
    a = Normed(x, {"weight": weight, "bias": bias}, s)
    b = Normed(r, {"weight": weight_r, "bias": bias_r}, t)
    mode = Mode(norm=norm)  # type: ignore[arg-type]
    if norm == "given" and not kept:
        for op in (lambda: norm_leaky(a, LEAN, mode), lambda: join(a, b, LEAN, mode)):
            with pytest.raises(ConfigError, match="batch norm needs statistics"):
                op()
        return
    (u, s_after), (v, t_after) = (batch_norm(of.p, of.s, of.x, mode) for of in (a, b))
    y, after = norm_leaky(a, LEAN, mode)
    torch.testing.assert_close(y, F.leaky_relu(u, LEAN), rtol=1e-4, atol=1e-4)
    joined, after_a, after_b = join(a, b, LEAN, mode)
    expected = F.leaky_relu(F.max_pool2d(u + v, 2), LEAN)
    torch.testing.assert_close(joined, expected, rtol=1e-4, atol=1e-4)
    for found, wanted in ((after, s_after), (after_a, s_after), (after_b, t_after)):
        assert found.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-5)


def test_not_a_number_wins_its_pool_under_given_statistics_and_passes_the_activation() -> None:
    x, weight, bias, r, *_ = two((3, 19, 6, 7))
    s = {"mean": torch.zeros(19), "var": torch.ones(19)}
    x[1, :, 3, 4] = float("nan")
    given = Mode(norm="given")
    a = Normed(x, {"weight": weight, "bias": bias}, s)
    y, *_ = join(a, a._replace(x=r), LEAN, given)
    assert torch.isnan(y[1, :, 1, 2]).all()
    assert int(torch.isnan(y).sum()) == 19
    alone, _ = norm_leaky(a, LEAN, given)
    assert torch.equal(torch.isnan(alone), torch.isnan(x))


@pytest.mark.parametrize(("start", "ours", "theirs"), OPERATIONS)
def test_what_is_not_finite_makes_nan_of_its_channel_and_of_its_gradient(
    start: Callable[..., list[Tensor]], ours: Op, theirs: Op
) -> None:
    del theirs
    values = start((2, 3, 6, 6))
    values[0][0, 1, 2, 3] = float("inf")
    points = leaves(values)
    y = ours(*points)
    assert torch.isnan(y[:, 1]).all()
    dx = torch.autograd.grad(y.sum(), points)[0]
    assert torch.isnan(dx[:, 1]).all()
    assert torch.isfinite(dx[:, [0, 2]]).all()


@pytest.mark.parametrize(("start", "ours", "theirs"), OPERATIONS)
def test_bits_do_not_depend_on_the_number_of_threads(
    start: Callable[..., list[Tensor]], ours: Op, theirs: Op
) -> None:
    del theirs
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            points = leaves(start((16, 32, 32, 32)))
            y = ours(*points)
            results.append((y, *torch.autograd.grad(y.square().sum(), points)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_single_value_per_channel_is_refused() -> None:
    x = torch.zeros(1, 3, 1, 1)
    with pytest.raises(ConfigError, match="1 value per channel"):
        norm_leaky(normed(x, torch.ones(3), torch.zeros(3)), LEAN, BATCH)


@pytest.mark.parametrize("norm", ["batch", "given", "capture"])
@pytest.mark.parametrize("shape", [(32, 32, 3), (28, 20, 1), (9, 13, 2)])
def test_a_resnet_is_the_same_with_and_without(
    norm: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(ResNet12((4, 6, 8, 10), slope=0.2), None, shape)
    params, stats = model.init(Key(1))
    images = torch.randint(0, 256, (6, *shape), dtype=torch.uint8)
    mode = Mode(norm=norm)  # type: ignore[arg-type]
    found = model.features(params, stats, images, mode)
    monkeypatch.setattr(kernels, "fits", lambda _: False)
    wanted = model.features(params, stats, images, mode)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-3, atol=1e-3)
    flat = dict(tree.items(found[1]))
    for name, value in tree.items(wanted[1]):
        torch.testing.assert_close(flat[name], value, rtol=1e-3, atol=1e-4)


def test_under_given_statistics_a_gradient_takes_the_plain_way() -> None:
    model = Model(ResNet12((4, 6, 8, 10)), None, (16, 16, 3))
    params, stats = model.init(Key(1))
    images = torch.randint(0, 256, (4, 16, 16, 3), dtype=torch.uint8)
    points = tree.map(lambda w: w.requires_grad_(), params)
    features, _ = model.features(points, stats, images, Mode(norm="given"))
    grads = torch.autograd.grad(features.sum(), tree.leaves(points))
    assert all(float(g.abs().sum()) > 0 for g in grads)
