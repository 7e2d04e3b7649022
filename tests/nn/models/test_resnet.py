"""ResNet-12 and DropBlock: sizes, chance, memory layout, stacking, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from covering import covering, diagonal
from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.nn.heads import LinearHead
from fedshot.nn.models.backbones import BACKBONES, Backbone
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.models.resnet import ResNet12, drop_block

TRAIN = Mode(train=True, norm="batch", seed=Key(0).tensor())
SMALL = ResNet12((4, 6, 8, 10), dropblock=0.2, dropout=0.2)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=Key(0).torch(), dtype=torch.float64).to(dtype)


def same(shape: tuple[int, ...], rate: float, size: int, seed: int = 0) -> Tensor:
    """Return what became of ones: 0 where a block fell."""
    return drop_block(torch.ones(shape), rate, size, Mode(True, seed=torch.tensor(seed)), 3)


# The published sizes are 8.0 M, 12.42 M and 5.6 M; the digits beyond come from this count:
# a block of c channels on b has 9bc + 18c^2 + bc weights and 8c of the norms.
@pytest.mark.parametrize(
    ("widths", "millions"),
    [((64, 128, 256, 512), 8.0), ((64, 160, 320, 640), 12.42), ((64, 128, 256, 384), 5.6)],
)
def test_resnet12_has_the_published_number_of_parameters(
    widths: tuple[int, int, int, int], millions: float
) -> None:
    params, _ = ResNet12(widths).init(Key(0), (32, 32, 3), torch.float32)
    count = sum(map(Tensor.numel, tree.leaves(params)))
    ends = zip((3, *widths), widths, strict=False)
    assert count == sum(10 * b * c + 18 * c * c + 8 * c for b, c in ends)
    digits = 2 if millions == 12.42 else 1
    assert round(count / 1e6, digits) == millions


def test_resnet12_makes_as_many_features_as_are_asked_for() -> None:
    x = noise(4, 3, 16, 16, dtype=torch.float64)
    net = ResNet12((4, 6, 8, 10), features=2)
    params, stats = net.init(Key(0), (16, 16, 3), torch.float64)
    narrow, after = net.apply(params, stats, x, TRAIN)
    wide, same_after = ResNet12((4, 6, 8, 10)).apply(params, stats, x, TRAIN)
    assert net.out_features((16, 16, 3)) == narrow.shape[1] == 2
    p = params["linear"]
    torch.testing.assert_close(narrow, wide @ p["weight"].T + p["bias"])
    assert tree.difference(after, same_after) is None
    with pytest.raises(ConfigError, match="features is -1"):
        ResNet12(features=-1)


def test_resnet12_is_registered_and_says_what_it_is() -> None:
    assert BACKBONES["resnet12"] is ResNet12
    net = ResNet12()
    assert isinstance(net, Backbone)
    assert (net.takes, net.vmappable) == (("images",), True)
    assert net.norm_policies == ("running", "support", "transductive")
    assert net.out_features((84, 84, 3)) == 512


@pytest.mark.parametrize(
    ("shape", "norm"),
    diagonal([(8, 8, 1), (28, 28, 1), (32, 20, 3), (84, 84, 3)], ["batch", "capture", "given"]),
)
def test_resnet12_takes_images_from_digits_to_84_pixels(shape: Any, norm: Any) -> None:
    model = Model(SMALL, LinearHead(5), shape)
    params, stats = model.init(Key(0))
    x = torch.randint(0, 256, (2, *shape), dtype=torch.uint8, generator=Key(0).torch())
    before = tree.digest((params, stats, x))
    mode = Mode(train=True, norm=norm, seed=Key(0).tensor())
    h, after = model.features(params, stats, x, mode)
    assert h.shape == (2, 10)
    assert h.any()
    assert tree.difference(stats, after) is None
    assert tree.digest((params, stats, x)) == before
    again, _ = model.features(params, stats, x, mode)
    assert torch.equal(h, again)


def test_without_running_statistics_it_keeps_none_but_captures_all() -> None:
    params, stats = SMALL.init(Key(0), (16, 16, 3), torch.float64)
    x = noise(6, 3, 16, 16, dtype=torch.float64)
    h, after = SMALL.apply(params, {}, x, Mode(norm="batch"))
    assert after == {}
    _, captured = SMALL.apply(params, {}, x, Mode(norm="capture"))
    assert tree.difference(stats, captured) is None
    again, _ = SMALL.apply(params, captured, x, Mode(norm="given"))
    torch.testing.assert_close(again, h, rtol=1e-10, atol=1e-10)
    with pytest.raises(ConfigError, match="batch norm needs statistics"):
        SMALL.apply(params, {}, x, Mode(norm="given"))


def test_the_result_ignores_how_pixels_lie_in_memory_and_the_maps_stay_channels_last() -> None:
    params, stats = SMALL.init(Key(0), (16, 16, 3), torch.float32)
    x = noise(4, 3, 16, 16)
    last = x.contiguous(memory_format=torch.channels_last)
    a, b = (SMALL.apply(params, stats, t, TRAIN)[0] for t in (x, last))
    assert torch.equal(a, b)
    z, _ = SMALL._block(params["block1"], stats["block1"], last, TRAIN)
    z = drop_block(z, 0.3, 2, TRAIN, 1)
    assert z.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("norm", "train"), covering(["batch", "capture", "given"], [True, False]))
def test_stacked_clients_equal_the_loop(norm: Any, train: bool) -> None:
    nets = [SMALL.init(Key(i), (12, 12, 3), torch.float64) for i in range(3)]
    x, seeds = noise(3, 4, 3, 12, 12, dtype=torch.float64), torch.arange(3)

    def f(w: tree.Tree, s: tree.Tree, x: Tensor, seed: Tensor) -> tuple[Tensor, tree.Tree]:
        return SMALL.apply(w, s, x, Mode(train=train, norm=norm, seed=seed))

    loop = [f(*net, a, b) for net, a, b in zip(nets, x, seeds, strict=True)]
    params, stats = (tree.stack([net[i] for net in nets]) for i in (0, 1))
    h, after = torch.func.vmap(f)(params, stats, x, seeds)
    exact = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(h, torch.stack([one[0] for one in loop]), **exact)
    want = tree.stack([one[1] for one in loop])
    tree.map(lambda a, b: torch.testing.assert_close(a, b, **exact), after, want)


# Rates over 5 sigma would be a fault; the expected one follows from how many squares reach a pixel.
@pytest.mark.parametrize(
    ("square", "rate"), diagonal([(10, 5), (5, 5), (4, 2), (2, 2), (21, 3), (4, 9)], [0.1, 0.3])
)
def test_dropblock_drops_what_its_equation_says(square: tuple[int, int], rate: float) -> None:
    (side, size), n, c = square, 64, 200
    y = same((n, c, side, side), rate, size)
    size = min(size, side)
    fit = side - size + 1
    gamma = rate / size**2 * side**2 / fit**2
    reach = [min(i + 1, fit) - max(0, i - size + 1) for i in range(side)]
    want = sum(1 - (1 - gamma) ** (a * b) for a in reach for b in reach) / side**2
    dropped = (y == 0).double().mean((2, 3)).flatten()  # of a map; maps are independent
    sigma = dropped.std().item() / math.sqrt(n * c)
    assert abs(dropped.mean().item() - want) < 5 * sigma
    assert rate * (1 - rate) < want < rate * (1 + 1e-12)  # eq. (1) counts overlaps twice


def test_what_is_left_is_scaled_so_that_the_mean_stays() -> None:
    y = same((8, 50, 6, 6), 0.3, 3)
    assert len(y.unique()) == 2
    assert y.mean().item() == pytest.approx(1.0, abs=1e-6)
    assert same((2, 3, 4, 4), 0.999, 4, seed=2).isfinite().all()


def test_blocks_are_whole_squares() -> None:
    zero = (same((40, 20, 9, 9), 0.1, 3) == 0).double()
    # Every dropped pixel lies in a dropped square: opening the mask by the square changes nothing.
    eroded = -torch.nn.functional.max_pool2d(-zero, 3, stride=1)
    opened = torch.nn.functional.max_pool2d(torch.nn.functional.pad(eroded, (2,) * 4), 3, stride=1)
    assert zero.any()
    assert torch.equal(opened, zero)


def test_maps_channels_seeds_and_sites_have_blocks_of_their_own() -> None:
    y = same((50, 40, 5, 5), 0.5, 5)[:, :, 0, 0] == 0
    assert (torch.corrcoef(y.T.double()) - torch.eye(40)).abs().max() < 0.75
    assert not torch.equal(y[0], y[1])
    assert not torch.equal(same((50, 40, 5, 5), 0.5, 5, seed=1)[:, :, 0, 0] == 0, y)
    mode = Mode(True, seed=torch.tensor(0))
    other = drop_block(torch.ones(50, 40, 5, 5), 0.5, 5, mode, 4)
    assert not torch.equal(other[:, :, 0, 0] == 0, y)


def test_dropblock_is_off_in_tests_and_at_rate_zero() -> None:
    x = torch.ones(1, 1, 2, 2)
    assert drop_block(x, 0.5, 2, Mode(), 0) is x
    assert drop_block(x, 0.0, 2, Mode(train=True), 0) is x
    with pytest.raises(ConfigError, match="needs a seed"):
        drop_block(x, 0.5, 2, Mode(train=True), 0)


@pytest.mark.parametrize(("side", "size"), [(84, 5), (64, 4), (32, 2), (28, 1), (8, 1)])
def test_the_block_is_as_wide_as_the_last_map_unless_told(side: int, size: int) -> None:
    auto, told = ResNet12((2, 2, 2, 2), 0.4), ResNet12((2, 2, 2, 2), 0.4, block_size=size)
    params, stats = auto.init(Key(0), (side, side, 1), torch.float32)
    x = noise(6, 1, side, side)
    a, b = (net.apply(params, stats, x, TRAIN)[0] for net in (auto, told))
    assert torch.equal(a, b)
    if side >= 64:
        other = ResNet12((2, 2, 2, 2), 0.4, block_size=2).apply(params, stats, x, TRAIN)[0]
        assert not torch.equal(a, other)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ResNet12((1, 2, 3)), "widths is"),  # type: ignore[arg-type]
        (lambda: ResNet12((1, 2, 3, 0)), "widths is"),
        (lambda: ResNet12(dropblock=1.0), "dropblock is 1.0"),
        (lambda: ResNet12(dropout=-1.0), "dropout is -1.0"),
        (lambda: ResNet12(block_size=0), "block_size is 0"),
        (lambda: ResNet12(slope=-0.1), "slope is -0.1"),
    ],
)
def test_values_that_make_no_sense_are_refused(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()
