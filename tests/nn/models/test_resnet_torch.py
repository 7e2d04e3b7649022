"""ResNet-12 against torch.nn modules, in float64 with copied weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from differences import noise
from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.resnet import ResNet12

EXACT = {"rtol": 1e-10, "atol": 1e-10}
TRAIN = Mode(train=True, norm="batch")


class Block(nn.Module):
    """A block as it is usually written, activation before the pool."""

    def __init__(self, c_in: int, c: int) -> None:
        super().__init__()
        for i, inputs in enumerate((c_in, c, c), start=1):
            setattr(self, f"conv{i}", nn.Conv2d(inputs, c, 3, padding=1, bias=False))
            setattr(self, f"norm{i}", nn.BatchNorm2d(c))
        self.conv, self.norm = nn.Conv2d(c_in, c, 1, bias=False), nn.BatchNorm2d(c)

    def forward(self, x: Tensor) -> Tensor:
        z = F.leaky_relu(self.norm1(self.conv1(x)), 0.1)
        z = F.leaky_relu(self.norm2(self.conv2(z)), 0.1)
        z = F.leaky_relu(self.norm3(self.conv3(z)) + self.norm(self.conv(x)), 0.1)
        return F.max_pool2d(z, 2) if min(z.shape[-2:]) >= 2 else z


class Twin(nn.Sequential):
    def __init__(self, widths: tuple[int, ...], params: tree.Tree) -> None:
        ends = zip((3, *widths), widths, strict=False)
        super().__init__(*[Block(c_in, c) for c_in, c in ends])
        self.double()
        for i, block in enumerate(self, start=1):
            values = {k.replace("/", "."): v for k, v in tree.items(params[f"block{i}"])}
            found = block.load_state_dict(values, strict=False)
            assert not found.unexpected_keys
            assert all(("running" in k) or ("tracked" in k) for k in found.missing_keys)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean((2, 3))


def shaken(params: tree.Tree) -> tree.Tree:
    """Move the norms' weights away from the identity, or a mix-up of them would not show."""
    flat = {k: v + 0.2 * noise(*v.shape, seed=i) for i, (k, v) in enumerate(tree.items(params))}
    return tree.rebuild(params, flat)


@pytest.mark.parametrize(("side", "widths"), [(32, (4, 5, 6, 7)), (19, (5, 4, 3, 6))])
def test_resnet12_equals_the_usual_modules_and_moves_statistics_alike(
    side: int, widths: tuple[int, int, int, int]
) -> None:
    net = ResNet12(widths, dropblock=0.0)
    params, stats = net.init(Key(1), (side, side, 3), torch.float64)
    params = shaken(params)
    twin = Twin(widths, params)
    for step in range(2):
        x = noise(6, 3, side, side, seed=step)
        w = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
        got, stats = net.apply(w, stats, x, TRAIN)
        want = twin(x)
        torch.testing.assert_close(got, want, **EXACT)
    direction = noise(*want.shape, seed=5)
    grads = torch.autograd.grad((got * direction).sum(), tree.leaves(w))
    (want * direction).sum().backward()
    for (name, _), g in zip(tree.items(w), grads, strict=True):
        block, layer, part = name.split("/")
        twins = getattr(getattr(twin[int(block[-1]) - 1], layer), part).grad
        torch.testing.assert_close(g, twins, rtol=1e-8, atol=1e-9)
    for name, value in tree.items(stats):
        block, layer, part = name.split("/")
        twins = getattr(getattr(twin[int(block[-1]) - 1], layer), f"running_{part}")
        torch.testing.assert_close(value, twins, **EXACT)
    got, _ = net.apply(params, stats, x, Mode(norm="given"))
    torch.testing.assert_close(got, twin.eval()(x), **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["batch", "capture", "given"])
def test_resnet12_has_right_first_and_second_derivatives(norm: str) -> None:
    net = ResNet12((2, 2, 2, 2), dropblock=0.3)
    params, stats = net.init(Key(3), (4, 4, 1), torch.float64)
    params = shaken(params)
    x = noise(4, 1, 4, 4)
    mode = Mode(train=True, norm=norm, seed=Key(4).tensor())  # type: ignore[arg-type]
    names = [name for name, _ in tree.items(params)]

    def loss(*flat: Tensor) -> Tensor:
        w = tree.rebuild(params, dict(zip(names, flat, strict=True)))
        return net.apply(w, stats, x, mode)[0].sin().sum()

    at = [t.clone().requires_grad_() for t in tree.leaves(params)]
    grads = torch.autograd.grad(loss(*at), at)
    assert all(g.any() for g in grads), "the check would pass on zeros"
    assert torch.autograd.gradcheck(loss, at, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, at, fast_mode=True)
