"""The layers against torch.nn and finite differences, in float64."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from differences import noise
from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.nn.heads import LinearHead
from fedshot.nn.losses import cross_entropy
from fedshot.nn.models.backbones import MLP, Conv4
from fedshot.nn.models.layers import batch_norm, conv, init_conv, init_linear, init_norm, linear
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def images(n: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=Key(seed).torch())


def test_linear_and_conv_equal_the_torch_modules() -> None:
    p = init_linear(Key(0), 7, 3, torch.float64)
    module = nn.Linear(7, 3, dtype=torch.float64)
    module.load_state_dict(p)
    torch.testing.assert_close(linear(p, noise(5, 7)), module(noise(5, 7)), **EXACT)

    p = init_conv(Key(0), 2, 4, 3, torch.float64)
    module2 = nn.Conv2d(2, 4, 3, padding=1, dtype=torch.float64)
    module2.load_state_dict(p)
    torch.testing.assert_close(conv(p, noise(5, 2, 6, 6)), module2(noise(5, 2, 6, 6)), **EXACT)


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4, 5)])
def test_batch_norm_and_its_running_statistics_equal_the_torch_module(shape: tuple[int]) -> None:
    kind = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
    module = kind(3, dtype=torch.float64)
    p, s = init_norm(3, torch.float64)
    p = {"weight": p["weight"] + noise(3, seed=8), "bias": p["bias"] + noise(3, seed=9)}
    module.load_state_dict(p, strict=False)
    for step in range(3):
        x = noise(*shape, seed=step) * 3 + 1
        y, s = batch_norm(p, s, x, Mode(train=True, norm="batch"))
        torch.testing.assert_close(y, module(x), **EXACT)
    torch.testing.assert_close(s["mean"], module.running_mean, **EXACT)
    torch.testing.assert_close(s["var"], module.running_var, **EXACT)
    y, after = batch_norm(p, s, x, Mode(norm="given"))
    torch.testing.assert_close(y, module.eval()(x), **EXACT)
    assert after is s


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4, 5)])
def test_a_given_pass_with_captured_statistics_repeats_the_output(shape: tuple[int]) -> None:
    p, s = init_norm(3, torch.float64)
    x = noise(*shape) * 2 + 5
    y, captured = batch_norm(p, s, x, Mode(norm="capture"))
    again, _ = batch_norm(p, captured, x, Mode(norm="given"))
    torch.testing.assert_close(again, y, **EXACT)
    axes = [0, *range(2, len(shape))]
    torch.testing.assert_close(captured["mean"], x.mean(axes), **EXACT)
    torch.testing.assert_close(captured["var"], x.var(axes, correction=0), **EXACT)


@pytest.mark.parametrize(
    ("backbone", "norm"),
    [(MLP((3,)), "given"), (Conv4(8), "batch"), (Conv4(8), "capture"), (Conv4(8), "given")],
)
def test_whole_nets_have_right_first_and_second_derivatives(
    backbone: MLP | Conv4, norm: Literal["batch", "capture", "given"]
) -> None:
    model = Model(backbone, LinearHead(2), (4, 4, 1), dtype="float64")
    params, stats = model.init(Key(3))
    x, y = images(4, 4, 4, 1), torch.tensor([0, 1, 1, 0])

    def loss(*flat: Tensor) -> Tensor:
        w = tree.rebuild(params, dict(zip(names, flat, strict=True)))
        h, _ = model.features(w, stats, x, Mode(norm=norm))
        return cross_entropy(model.logits(w, h), y)

    names = [name for name, _ in tree.items(params)]
    at = [t.clone().requires_grad_() for t in tree.leaves(params)]
    first = torch.autograd.grad(loss(*at), at, materialize_grads=True)
    dead = [n for n, g in zip(names, first, strict=True) if n.endswith("weight") and not g.any()]
    assert not dead, "the check would pass on zeros"
    assert torch.autograd.gradcheck(loss, at, eps=1e-6, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, at, eps=1e-6, fast_mode=True)


def usual_conv4(width: int, order: str) -> nn.Sequential:
    blocks: list[nn.Module] = []
    for c_in in (3, width, width, width):
        two = [nn.BatchNorm2d(width), nn.ReLU()]
        two = two if order == "norm_relu" else two[::-1]
        blocks += [nn.Conv2d(c_in, width, 3, padding=1), *two, nn.MaxPool2d(2)]
    return nn.Sequential(*blocks, nn.Flatten()).to(torch.float64)


@pytest.mark.parametrize("order", ["norm_relu", "relu_norm"])
def test_conv4_equals_the_usual_modules_with_the_relu_before_the_pool(order: Any) -> None:
    model = Model(Conv4(4, order=order), None, (20, 20, 3), dtype="float64")
    params, stats = model.init(Key(1))
    module, at = usual_conv4(4, order), 1 if order == "norm_relu" else 2
    for i in range(4):
        module[4 * i].load_state_dict(params["body"][f"conv{i + 1}"])
        module[4 * i + at].load_state_dict(params["body"][f"norm{i + 1}"], strict=False)
    x = images(5, 20, 20, 3)
    want = module(model.prepare(x))
    direction = torch.randn(want.shape, generator=Key(2).torch(), dtype=torch.float64)

    w = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
    got, after = model.features(w, stats, x, Mode(train=True, norm="batch"))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(after["norm4"]["mean"], module[12 + at].running_mean)
    torch.testing.assert_close(after["norm4"]["var"], module[12 + at].running_var)

    grads = torch.autograd.grad((got * direction).sum(), tree.leaves(w))
    (want * direction).sum().backward()
    for (name, _), g in zip(tree.items(w), grads, strict=True):
        _, layer, part = name.split("/")
        index = 4 * (int(layer[-1]) - 1) + at * layer.startswith("norm")
        torch.testing.assert_close(g, getattr(module[index], part).grad, rtol=1e-9, atol=1e-10)


def test_the_bias_before_batch_statistics_has_a_gradient_of_exactly_zero() -> None:
    model = Model(Conv4(16), None, (8, 8, 1))
    params, stats = model.init(Key(1))
    x = images(5, 8, 8, 1)

    def total(w: tree.Tree, mode: Mode) -> Tensor:
        return model.features(w, stats, x, mode)[0].square().sum()

    batch = torch.func.grad(total)(params, Mode(norm="batch"))["body"]
    given = torch.func.grad(total)(params, Mode(norm="given"))["body"]
    for i in range(1, 5):
        assert not batch[f"conv{i}"]["bias"].any()
        assert given[f"conv{i}"]["bias"].any()
