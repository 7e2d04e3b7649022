"""The first block of a Conv4 without its map, against torch's separate operations in float64."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fedshot.core import kernel_build, tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import Episode
from fedshot.learners.proto import Proto
from fedshot.nn.gradients import value_and_grad
from fedshot.nn.kernels import stem
from fedshot.nn.models.backbones import Conv4
from fedshot.nn.models.layers import batch_norm, conv
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model

pytestmark = pytest.mark.usefixtures("kernels")
SHAPES = [  # images, channels, height, width, filters
    (9, 1, 28, 28, 32),
    (8, 3, 32, 32, 64),
    (1, 3, 2, 2, 32),
    (17, 1, 3, 2, 96),
    (3, 3, 9, 7, 32),
    (2, 1, 5, 42, 256),
    (2, 3, 84, 84, 32),
]
Block = tuple[Tensor, Tree, Tree, Tree, Tensor]


def block(shape: tuple[int, ...], seed: int = 0) -> Block:
    """Return images, convolution, norm, statistics, and the gradient of the result."""
    n, c, h, w, f = shape
    draw = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw)

    x = (normal(n, h, w, c) * 2 + 0.5).permute(0, 3, 1, 2)
    filters = {"weight": normal(f, c, 3, 3) / 3, "bias": normal(f)}
    norm = {"weight": normal(f), "bias": normal(f)}  # scales of both signs
    stats = {"mean": normal(f), "var": normal(f).abs() + 0.5}
    return x, filters, norm, stats, normal(n, f, h // 2, w // 2)


def plain(x: Tensor, filters: Tree, norm: Tree, stats: Tree, mode: Mode) -> tuple[Tensor, Tree]:
    h, after = batch_norm(norm, stats, conv(filters, x), mode)
    return F.relu(F.max_pool2d(h, 2)), after


def double(one: Tree) -> Tree:
    return tree.map(Tensor.double, one)


def close(found: Tensor, wanted: Tensor, share: float = 3e-6) -> None:
    assert found.shape == wanted.shape
    found, wanted = found.detach(), wanted.detach()
    assert float((found.double() - wanted).norm()) <= share * float(wanted.norm()) + 1e-6


def points(filters: Tree, norm: Tree) -> tuple[list[Tensor], Tree, Tree]:
    """Return leaves to differentiate by, and the trees that they are of."""
    of = [filters["weight"], norm["weight"], norm["bias"]]
    of = [leaf.clone().requires_grad_() for leaf in of]
    return of, {**filters, "weight": of[0]}, {"weight": of[1], "bias": of[2]}


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_statistics_are_torch_s_in_float64(shape: tuple[int, ...]) -> None:
    for norm in ("batch", "capture", "given"):
        x, filters, p, s, _ = block(shape)
        mode = Mode(norm=norm)  # type: ignore[arg-type]
        assert stem.fits(x, filters["weight"])
        y, after = stem.stem(filters, p, s, x, mode)
        wanted, expected = plain(x.double(), double(filters), double(p), double(s), mode)
        torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=2e-5)
        assert y.permute(0, 2, 3, 1).is_contiguous()
        for name in ("mean", "var"):
            torch.testing.assert_close(after[name].double(), expected[name], rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_torch_s_in_float64(shape: tuple[int, ...]) -> None:
    x, filters, p, s, dy = block(shape)
    mode = Mode(norm="batch")
    ours, a, b = points(filters, p)
    theirs, u, v = points(double(filters), double(p))
    found = torch.autograd.grad(stem.stem(a, b, s, x, mode)[0], ours, dy)
    wanted = torch.autograd.grad(plain(x.double(), u, v, double(s), mode)[0], theirs, dy.double())
    for g, h in zip(found, wanted, strict=True):
        close(g, h, 1e-5)


HARD = {
    "large mean": lambda x: x + 300,
    "larger mean": lambda x: 1000 + x / 4,
    "smooth": lambda x: torch.linspace(0, 1, x.shape[2])[:, None].sin().expand(x.shape) + 1e-3 * x,
    "black but for a few": lambda x: (x > 6).float(),
}


def contrasts(f: int) -> Tensor:
    """Return filters whose maps are small beside what they are sums of, but for single pixels."""
    step = torch.tensor([1.0, -2.0, 1.0])
    some = torch.stack([step[:, None] * step, step[:, None] * torch.tensor([0.0, 1, 0])])
    some = torch.cat([some, some.new_zeros(1, 3, 3)])
    some[2, 1, 1] = 1
    return some[torch.arange(f) % 3][:, None].expand(f, 3, 3, 3) / 3


@pytest.mark.parametrize("images", HARD)
def test_small_variances_are_as_exact_as_the_map_would_have_been(images: str) -> None:
    """They are small parts of what they are made of, and of rows of 84 places."""
    x, filters, p, _, dy = block((4, 3, 20, 84, 32))
    x = HARD[images](x)
    x[:, :, :3] = x[:, :, -3:] = x[:, :, :, :3] = x[:, :, :, -3:] = (
        0  # a frame: no steps at the rim
    )
    filters["weight"] = contrasts(32)
    mode = Mode(norm="capture")
    ours, a, b = points(filters, p)
    y, after = stem.stem(a, b, {}, x, mode)
    theirs, u, v = points(double(filters), double(p))
    wanted, exact = plain(x.double(), u, v, {}, mode)
    torch.testing.assert_close(after["var"].double(), exact["var"], rtol=1e-6, atol=1e-12)
    close(y, wanted, 1e-4 if "mean" in images else 1e-5)
    found = torch.autograd.grad(y, ours, dy)
    for g, h in zip(found, torch.autograd.grad(wanted, theirs, dy.double()), strict=True):
        close(g, h, 3e-3 if "mean" in images else 1e-4)  # rounding decides who wins some pools


def test_sums_over_many_pools_stay_exact() -> None:
    x, filters, p, _, dy = block((2, 1, 60, 512, 32))
    dy = dy.abs() + 1
    ours, a, b = points(filters, p)
    theirs, u, v = points(double(filters), double(p))
    mode = Mode(norm="batch")
    found = torch.autograd.grad(stem.stem(a, b, {}, x, mode)[0], ours, dy)
    wanted = torch.autograd.grad(plain(x.double(), u, v, {}, mode)[0], theirs, dy.double())
    for g, h in zip(found, wanted, strict=True):
        close(g, h, 2e-6)


def test_black_images_teach_nothing_where_the_shift_is_zero() -> None:
    """A ReLU at exactly zero has no gradient, as in torch."""
    _, filters, p, _, dy = block((2, 3, 8, 8, 32))
    ours, a, b = points(filters, {**p, "bias": torch.zeros(32)})
    y, _ = stem.stem(a, b, {}, torch.zeros(2, 8, 8, 3).permute(0, 3, 1, 2), Mode(norm="batch"))
    assert not y.any()
    assert all(not g.any() for g in torch.autograd.grad(y, ours, dy))


def test_equal_images_have_no_variance_and_a_finite_gradient() -> None:
    """Its rounding may not come out below zero. With a rim of zeros, only the inside is equal."""
    _, filters, p, s, _ = block((4, 1, 8, 8, 32))
    filters["weight"][:, :, 0] = filters["weight"][:, :, 2] = 0  # nothing from beyond the rim
    filters["weight"][:, :, 1, 0] = filters["weight"][:, :, 1, 2] = 0
    x = torch.full((4, 1, 8, 8), 0.1)
    ours, a, b = points(filters, p)
    y, after = stem.stem(a, b, s, x, Mode(norm="capture"))
    assert float(after["var"].abs().max()) < 1e-12
    assert float(after["var"].min()) >= 0
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(y.sum(), ours))


def test_the_first_of_equal_values_takes_the_gradient_as_in_torch() -> None:
    x, _, _, _, dy = block((6, 1, 8, 8, 32))
    x = (x > 0).float()
    weight = torch.zeros(32, 1, 3, 3)
    weight[:, :, 1, 1] = torch.linspace(0.2, 0.8, 32)[:, None]
    weight[:, :, 0, 1] = 1  # so that values are equal where pixels are, and only there
    filters = {"weight": weight, "bias": torch.zeros(32)}
    norm = {"weight": torch.ones(32), "bias": torch.ones(32)}
    ours, a, b = points(filters, norm)
    theirs, u, v = points(double(filters), double(norm))
    found = torch.autograd.grad(stem.stem(a, b, {}, x, Mode(norm="batch"))[0], ours, dy)
    mode = Mode(norm="batch")
    wanted = torch.autograd.grad(plain(x.double(), u, v, {}, mode)[0], theirs, dy.double())
    for g, h in zip(found, wanted, strict=True):
        close(g, h, 1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_makes_nan_of_every_filter(bad: float) -> None:
    """As of a channel whose statistics it is in."""
    x, filters, p, s, dy = block((2, 3, 6, 6, 32))
    x[0, 1, 2, 3] = x[0, 1, 2, 4] = bad
    ours, a, b = points(filters, p)
    y, after = stem.stem(a, b, s, x, Mode(norm="batch"))
    assert torch.isnan(y).all()
    assert torch.isnan(after["var"]).all()
    by_filters, by_weight, by_bias = torch.autograd.grad(y, ours, dy)
    assert torch.isnan(by_filters).all()
    assert torch.isnan(by_weight).all()
    torch.testing.assert_close(by_bias, dy.sum((0, 2, 3)))  # as in torch: NaN is not cut off


@pytest.mark.parametrize("place", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_not_a_number_wins_its_pool_under_given_statistics(place: tuple[int, int]) -> None:
    x, filters, p, s, _ = block((3, 3, 6, 10, 32))
    filters["weight"][:, :, 0] = filters["weight"][:, :, 2] = 0
    filters["weight"][:, :, 1, 0] = filters["weight"][:, :, 1, 2] = 0
    x[1, 0, 2 + place[0], 4 + place[1]] = float("nan")  # is then in one pool alone, but in patches
    y, _ = stem.stem(filters, p, s, x, Mode(norm="given"))
    expected, _ = plain(x, filters, p, s, Mode(norm="given"))
    torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-4, atol=1e-4)
    assert torch.isnan(y[1, :, 1, 2]).all()


@pytest.mark.parametrize("shape", [SHAPES[0], *SHAPES[3:6]])
def test_second_derivatives_are_those_of_the_separate_operations(shape: tuple[int, ...]) -> None:
    x, filters, p, _, dy = block(shape)

    def twice(op: object, cast: object) -> tuple[Tensor, ...]:
        of, a, b = points(cast(filters), cast(p))  # type: ignore[operator]
        y = op(a, b)[0]  # type: ignore[operator]
        loss = (y * dy.to(y.dtype)).sum() + (y**2).sum() / 2  # its gradient depends on y, too
        first = torch.autograd.grad(loss, of, create_graph=True)
        return torch.autograd.grad(sum((g**2).sum() / len(y) for g in first), of)

    mode = Mode(norm="batch")
    found = twice(lambda a, b: stem.stem(a, b, {}, x, mode), lambda t: t)
    wanted = twice(lambda a, b: plain(x.double(), a, b, {}, mode), double)
    for g, h in zip(found, wanted, strict=True):
        close(g, h, 1e-4)


@pytest.mark.parametrize("again", [False, True])
def test_scale_and_shift_may_hang_on_one_another(again: bool) -> None:
    """A backward pass returns partial derivatives; autograd adds up the paths."""
    x, filters, _, _, dy = block((3, 1, 8, 6, 32))
    one = torch.linspace(-1, 1, 32).requires_grad_()
    wide = one.detach().double().requires_grad_()
    mode = Mode(norm="batch")
    # Images of one channel may lie as [n, c, h, w] in memory: it is the same.
    for images in (x, x.contiguous().view(3, 1, 8, 6)):
        y, _ = stem.stem(filters, {"weight": one, "bias": one * 2}, {}, images, mode)
        (found,) = torch.autograd.grad(y, [one], dy, create_graph=again)
        norm = {"weight": wide, "bias": wide * 2}
        z, _ = plain(x.double(), double(filters), norm, {}, mode)
        close(found.detach(), torch.autograd.grad(z, [wide], dy.double())[0], 1e-5)


def test_a_filter_alone_may_be_trained() -> None:
    x, filters, p, _, dy = block((3, 3, 8, 6, 32))
    weight = filters["weight"].clone().requires_grad_()
    for again in (False, True):
        y, _ = stem.stem({**filters, "weight": weight}, p, {}, x, Mode(norm="batch"))
        (found,) = torch.autograd.grad(y, [weight], dy, create_graph=again)
        wide = weight.detach().double().requires_grad_()
        mode = Mode(norm="batch")
        z, _ = plain(x.double(), {**double(filters), "weight": wide}, double(p), {}, mode)
        close(found.detach(), torch.autograd.grad(z, [wide], dy.double())[0], 1e-5)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    x, filters, p, s, dy = block((35, 3, 84, 84, 32))
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        of, a, b = points(filters, p)
        y, after = stem.stem(a, b, s, x, Mode(norm="batch"))
        given, _ = stem.stem(filters, p, s, x, Mode(norm="given"))
        grads = torch.autograd.grad(y, of, dy)
        results.append((y, given, *tree.leaves(after), *grads))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_weights_laid_out_otherwise_give_the_same_bits() -> None:
    x, filters, p, s, _ = block((4, 3, 8, 8, 32))
    turned = filters["weight"].contiguous(memory_format=torch.channels_last)
    assert turned.stride() != filters["weight"].stride()
    for norm in ("batch", "given"):
        mode = Mode(norm=norm)  # type: ignore[arg-type]
        y, _ = stem.stem(filters, p, s, x, mode)
        assert torch.equal(y, stem.stem({**filters, "weight": turned}, p, s, x, mode)[0])


def test_what_the_kernels_cannot_take_goes_the_plain_way() -> None:
    x, filters, *_ = block((2, 3, 6, 6, 32))
    weight = filters["weight"]
    assert stem.fits(x, weight)
    assert not stem.fits(x.double(), weight)
    assert not stem.fits(x, weight.double())
    assert not stem.fits(x.contiguous(), weight)
    assert not stem.fits(x.clone(memory_format=torch.preserve_format).requires_grad_(), weight)
    assert not stem.fits(x, weight[:31])
    assert not stem.fits(x, torch.randn(32, 3, 5, 5))
    assert not stem.fits(x, weight.to("meta"))
    assert not stem.fits(x[:, :, :1], weight)
    wide = torch.zeros(1, 2, 513, 3).permute(0, 3, 1, 2)
    assert not stem.fits(wide, weight)
    assert stem.fits(wide[..., :512].contiguous(memory_format=torch.channels_last), weight)
    four = torch.zeros(2, 6, 6, 4).permute(0, 3, 1, 2)
    assert not stem.fits(four, torch.randn(32, 4, 3, 3))


def test_third_derivatives_are_refused() -> None:
    x, filters, p, _, dy = block((2, 3, 6, 6, 32))
    of, a, b = points(filters, p)
    y = stem.stem(a, b, {}, x, Mode(norm="batch"))[0]
    first = torch.autograd.grad((y**2 * dy).sum(), of, create_graph=True)
    with pytest.raises(RuntimeError, match="no third derivatives"):
        torch.autograd.grad(sum((g**2).sum() for g in first), of, create_graph=True)


@pytest.mark.parametrize("again", [False, True])
def test_autocast_leaves_it_in_float32(again: bool) -> None:
    """Few of the products are here, and what takes time elsewhere, the map, is not written."""
    x, filters, p, _, dy = block((3, 3, 8, 6, 32))
    found = []
    for cast in (False, True):
        of, a, b = points(filters, p)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            assert stem.fits(x, a["weight"])
            y, _ = stem.stem(a, b, {}, x, Mode(norm="batch"))
            found.append([y, *torch.autograd.grad(y, of, dy, create_graph=again)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_vectors_that_c_would_misread_are_refused() -> None:
    x, filters, p, s, _ = block((2, 3, 6, 6, 32))
    for name in p:
        for norm in ("batch", "given"):
            mode = Mode(norm=norm)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=r"given torch\.float64 on cpu"):
                stem.stem(filters, {**p, name: p[name].double()}, s, x, mode)
        for bad in ([3], [1, 1, 1, 1]):
            with pytest.raises(ValueError, match=r"shape .* float32 \[32\]"):
                stem.stem(filters, {**p, name: torch.zeros(bad)}, s, x, Mode(norm="batch"))
    with pytest.raises(ConfigError, match="batch norm needs statistics"):
        stem.stem(filters, p, {}, x, Mode(norm="given"))


@pytest.mark.parametrize("shape", [(28, 28, 1), (32, 32, 3)])
def test_a_lesson_of_a_conv4_is_the_same_with_and_without(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Proto(Model(Conv4(width=32), None, shape))
    # In one draw of a hundred two values lie so near that rounding decides which of them is larger.
    x = torch.randint(0, 256, (12, *shape), dtype=torch.uint8, generator=Key(0).torch())
    y = torch.arange(2).repeat_interleave(2), torch.arange(2).repeat_interleave(4)
    episode = Episode(x[:4], y[0], x[4:], y[1], torch.arange(2))
    params, stats = learner.init(Key(0))

    def gradients(learner: Proto, params: Tree, stats: Tree) -> tuple[Tensor, Tree, Tree]:
        def fn(w: Tree) -> tuple[Tensor, Tree]:
            episode_loss = learner.episode_loss(w, stats, episode, Key(1).tensor())
            return episode_loss.loss, episode_loss.stats

        return value_and_grad(fn, params)

    found = gradients(learner, params, stats)
    embedded = learner.embed(params, stats, x)
    monkeypatch.setattr(stem, "fits", lambda *_: False)
    torch.testing.assert_close(embedded, learner.embed(params, stats, x), rtol=1e-4, atol=1e-4)
    wanted = gradients(learner, params, stats)
    wide = replace(learner, model=replace(learner.model, dtype="float64"))
    exact = gradients(wide, double(params), double(stats))
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    ours, theirs, truth = (tree.leaves(one[2]) for one in (found, wanted, exact))
    scale = max(float(g.norm()) for g in truth)
    for a, b, c in zip(ours, theirs, truth, strict=True):
        error = float((b.double() - c).norm())
        assert float((a.double() - c).norm()) <= 2 * error + 1e-4 * scale
    for a, b in zip(tree.leaves(found[1]), tree.leaves(wanted[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.slow  # compiles
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
@pytest.mark.parametrize("narrow", ["-mno-avx512f", "-mno-avx"])
def test_processors_with_shorter_vectors_compute_the_same(
    narrow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled for them here, which this processor can run."""
    flags = tuple("-O1" if flag == "-O3" else flag for flag in kernel_build._FLAGS)
    monkeypatch.setattr(kernel_build, "_FLAGS", (*flags, narrow))
    monkeypatch.setenv("FEDSHOT_CACHE", str(tmp_path))
    compiler = next(kernel_build._compilers())
    library = kernel_build._built(compiler)
    results = []
    for used in (stem.library(), library):
        monkeypatch.setattr(stem, "library", lambda used=used: used)
        for shape in ((9, 1, 28, 28, 32), (2, 3, 9, 7, 64)):
            x, filters, p, s, dy = block(shape)
            of, a, b = points(filters, p)
            y, after = stem.stem(a, b, s, x, Mode(norm="batch"))
            given, _ = stem.stem(filters, p, s, x, Mode(norm="given"))
            results.append([y, given, *tree.leaves(after), *torch.autograd.grad(y, of, dy)])
    half = len(results) // 2
    for one, other in zip(results[:half], results[half:], strict=True):
        for g, h in zip(one, other, strict=True):
            close(g, h.double(), 1e-5)
