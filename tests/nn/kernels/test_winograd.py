"""Convolutions by Winograd's algorithm against torch's own, in values and in derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from covering import pairwise, slow
from fedshot.core import tree
from fedshot.core.machine import begin_thread
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.nn.gradients import value_and_grad
from fedshot.nn.kernels import winograd
from fedshot.nn.kernels.tensors import in_threads
from fedshot.nn.kernels.winograd import conv3x3, fits
from fedshot.nn.models.backbones import Conv4
from fedshot.nn.models.layers import conv
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.models.resnet import ResNet12

pytestmark = pytest.mark.usefixtures("kernels")
# n, channels, filters, height, width: even and odd sides, sides of 1, one block of tiles and many.
SHAPES = [
    (3, 64, 64, 6, 8),
    (2, 64, 80, 7, 5),
    (1, 96, 64, 1, 1),
    (2, 64, 64, 1, 4),
    (5, 128, 64, 3, 2),
    (24, 64, 64, 16, 16),
    (9, 320, 64, 17, 16),
    (4, 32, 48, 9, 6),
    (8, 256, 256, 8, 8),
]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> int:
    torch.set_num_threads(request.param)
    return int(request.param)


@pytest.fixture(params=["ours", "torch's"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose products are taken, whatever the processor."""
    theirs = request.param != "ours"
    monkeypatch.setattr(winograd, "ours", lambda *channels: not theirs and max(channels) <= 192)
    return str(request.param)


def given(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return maps, filters, bias, and the gradient of the result."""
    n, c, f, h, w = shape
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(n, h, w, c, generator=draw).permute(0, 3, 1, 2)
    filters = torch.randn(f, c, 3, 3, generator=draw) / math.sqrt(9 * c)
    return x, filters, torch.randn(f, generator=draw), torch.randn(n, f, h, w, generator=draw)


def derived(y: Tensor, at: list[Tensor], dy: Tensor) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad(y, at, dy)]


def wanted(at: list[Tensor], dy: Tensor) -> list[Tensor]:
    """Return the map and the derivatives in float64."""
    at = [t.detach().double().requires_grad_() for t in at]
    return derived(F.conv2d(*at, padding=1), at, dy.double())


def rounding(found: Tensor, want: Tensor) -> float:
    return float((found.double() - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("shape", "with_bias", "threads", "products"),
    pairwise(SHAPES, [True, False], [1, 2, 3], ["ours", "torch's"]),
    indirect=["threads", "products"],
)
@pytest.mark.usefixtures("products")
def test_it_is_the_convolution(shape: tuple[int, ...], with_bias: bool, threads: int) -> None:
    x, filters, bias, dy = given(shape)
    at = [t.requires_grad_() for t in (x, filters, *([bias] if with_bias else []))]
    if min(shape[1:3]) >= 64:  # narrower ones are for some processors
        assert fits(x, filters) == (min(shape[3:]) > 1)
    y = conv3x3(*at)
    assert y.permute(0, 2, 3, 1).is_contiguous()
    for found, want in zip(derived(y, at, dy), wanted(at, dy), strict=True):
        assert rounding(found, want) < 2e-6


@pytest.mark.parametrize("asked", [0, 1, 2])
@pytest.mark.usefixtures("products")
def test_only_what_is_asked_for_is_derived(asked: int) -> None:
    x, filters, bias, dy = given(SHAPES[1])
    at = [x, filters, bias]
    at[asked].requires_grad_()
    (found,) = torch.autograd.grad(conv3x3(*at), at[asked], dy)
    assert rounding(found, wanted(at, dy)[1 + asked]) < 2e-6


def test_filters_and_gradient_may_lie_in_memory_in_any_order() -> None:
    x, filters, _, dy = given(SHAPES[0])
    turned = filters.contiguous(memory_format=torch.channels_last).requires_grad_()
    (found,) = torch.autograd.grad(conv3x3(x, turned), turned, dy[:, :, :1].expand_as(dy))
    plain = filters.requires_grad_()
    apart = dy[:, :, :1].expand_as(dy).contiguous()
    (want,) = torch.autograd.grad(conv3x3(x, plain), plain, apart)
    assert torch.equal(found, want)


@pytest.mark.parametrize("first", [(0, 1, 2), *slow((0, 1), (0,), (1,), (2,))])
@pytest.mark.usefixtures("products")
def test_second_derivatives_are_torch_s_in_float64(first: tuple[int, ...]) -> None:
    """`first` are the arguments of the first derivative; the second is with respect to all."""

    def twice(op: Callable[..., Tensor], *at: Tensor) -> list[Tensor]:
        at = tuple(t.detach().requires_grad_() for t in at)
        y = op(*at)
        grads = torch.autograd.grad((y**3).sum(), [at[i] for i in first], create_graph=True)
        return list(torch.autograd.grad(sum((g**2).sum() for g in grads), at))

    x, filters, bias, _ = given(SHAPES[1])
    found = twice(conv3x3, x, filters, bias)
    wanted = twice(partial(F.conv2d, padding=1), x.double(), filters.double(), bias.double())
    for one, other in zip(found, wanted, strict=True):
        assert rounding(one, other) < 1e-5


@pytest.mark.usefixtures("products")
def test_what_is_not_a_number_is_not_lost() -> None:
    x, filters, *_ = given(SHAPES[0])
    x[1, 3, 2, 2] = math.nan
    y = conv3x3(x, filters)
    assert y[1, :, 1:4, 1:4].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("ours", "fewest"), [(True, 32), (False, 64)])
def test_it_begins_where_it_pays(ours: bool, fewest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedshot.nn.kernels.winograd.faster", lambda: ours)
    for narrow in (16, 32, 48, 64):
        for c, f in ((narrow, 64), (64, narrow)):
            x, filters, *_ = given((2, c, f, 4, 4))
            assert fits(x, filters) == (narrow >= fewest)


def test_others_go_the_plain_way() -> None:
    x, filters, *_ = given(SHAPES[0])
    assert fits(x, filters)
    assert not fits(x.contiguous(), filters)
    assert not fits(x.double(), filters.double())
    assert not fits(x, filters.double())
    assert not fits(x, filters[:, :, :1, :1])
    assert not fits(x, filters[:63])
    assert not fits(x, filters[:16])
    narrow = x[:, :16].contiguous(memory_format=torch.channels_last)
    assert not fits(narrow, filters[:, :16])
    with torch.autocast("cpu", torch.bfloat16):
        assert not fits(x, filters)
    seen = []
    torch.func.vmap(lambda t: seen.append(fits(t, filters)) or t)(x[None])
    assert seen == [False]


@pytest.mark.parametrize(
    ("shape", "net", "norm"),
    pairwise(
        [(32, 32, 3), (37, 37, 3)],
        [Conv4(width=64), ResNet12(widths=(64, 64, 80, 96), dropblock=0.0)],
        ["batch", "given"],
    ),
)
def test_nets_with_it_are_those_without(
    shape: tuple[int, int, int], net: Conv4 | ResNet12, norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(net, None, shape)
    params, stats = model.init(Key(1))
    images = torch.randint(256, (6, *shape), dtype=torch.uint8, generator=Key(2).torch())
    taken: list[bool] = []

    def run(able: bool) -> tuple[Tensor, Tensor]:
        def judged(x: Tensor, filters: Tensor) -> bool:
            taken.append(able and fits(x, filters))
            return taken[-1]

        monkeypatch.setattr("fedshot.nn.kernels.winograd.fits", judged)

        def fn(w: Tree) -> tuple[Tensor, Tensor]:
            h = model.features(w, stats, images, Mode(norm=norm))[0]  # type: ignore[arg-type]
            return h.square().sum(), h.detach()

        _, h, grads = value_and_grad(fn, params)
        return h, torch.cat([g.flatten() for g in tree.leaves(grads)])

    found = run(True)
    assert any(taken)
    taken.clear()
    want = run(False)
    assert not any(taken)
    torch.testing.assert_close(found[0], want[0], rtol=1e-3, atol=1e-3)
    # Rounding decides now and then which pixel of a pool is the largest, and gets the gradient.
    apart = (found[1] - want[1]).norm() / want[1].norm()
    assert apart < 0.05


@pytest.mark.parametrize("bias", [torch.ones(1), torch.ones(64).double(), torch.ones(64, 1)])
def test_a_bias_that_c_would_misread_is_refused(bias: Tensor) -> None:
    x, filters, *_ = given(SHAPES[0])
    with pytest.raises((TypeError, ValueError), match="the kernels were given"):
        conv3x3(x, filters, bias)


def test_shares_of_several_callers_do_not_wait_for_one_another(threads: int) -> None:
    """Nor do pools change how many threads torch uses in threads that begin later."""
    x, filters, *_ = given(SHAPES[5])
    want = conv3x3(x, filters)

    def visit(_: int) -> tuple[int, bool]:
        own = torch.get_num_threads()
        begin_thread(threads, flush=False)
        same = all(torch.equal(conv3x3(x, filters), want) for _ in range(5))
        return own, same and torch.get_num_threads() == threads

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(visit, range(4))) == [(threads, True)] * 4


def test_an_error_in_a_share_comes_out(threads: int) -> None:
    def work(items: Sequence[int]) -> int:
        if 5 in items:
            raise RuntimeError("five")
        return sum(items)

    assert sum(in_threads(work, range(5))) == 10
    with pytest.raises(RuntimeError, match="five"):
        in_threads(work, range(9))
    assert torch.get_num_threads() == threads


def test_a_layer_takes_it() -> None:
    x, filters, bias, _ = given(SHAPES[0])
    found = conv({"weight": filters, "bias": bias}, x)
    assert torch.equal(found, conv3x3(x, filters, bias))
