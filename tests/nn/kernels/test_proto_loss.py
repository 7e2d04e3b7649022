"""The compiled loss of prototypes: its value, both derivatives and stacks, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from fedshot.core.seeds import Key
from fedshot.nn.kernels import proto_loss as module
from fedshot.nn.kernels.proto_loss import prototype_loss
from fedshot.nn.losses import accuracy
from fedshot.nn.prototypes import nearest_prototypes

pytestmark = pytest.mark.usefixtures("kernels")
SHAPES = [(5, 1, 15, 64), (5, 5, 3, 1600), (2, 3, 1, 1), (1, 1, 4, 7), (20, 1, 2, 33)]


def episode(way: int, shot: int, query: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = Key(seed).torch()
    y = torch.cat([torch.arange(way).repeat(shot), torch.arange(way).repeat(query)])
    order = torch.randperm(way * query, generator=draw) + way * shot
    y = torch.cat([y[: way * shot], y[order]])
    spread = torch.randn(way, width, generator=draw)[y]
    return (spread + torch.randn(len(y), width, generator=draw)) / width**0.5, y


def close(found: Tensor, wanted: Tensor) -> None:
    """Of float64, to what float32 can do."""
    assert found.shape == wanted.shape
    scale = float(wanted.abs().max()) + 1e-6
    assert float((found.double() - wanted).abs().max()) < 1e-5 * scale


def loss_of(n: int, way: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda h, y: prototype_loss(h, y, n, way)[0]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many episodes each call of the kernel had."""
    seen: list[int] = []
    real = module.shared

    def shared(n: int, *args: object, **options: object) -> None:
        seen.append(n)
        real(n, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "shared", shared)
    return seen


@pytest.mark.parametrize(("way", "shot", "query", "width"), SHAPES)
def test_loss_accuracy_and_derivative_are_those_of_float64(
    way: int, shot: int, query: int, width: int, calls: list[int]
) -> None:
    h, y = episode(way, shot, query, width)
    h.requires_grad_()
    n = way * shot
    loss, right = prototype_loss(h, y, n, way)
    assert calls == [1]
    h64 = h.detach().double().requires_grad_()
    wanted, _ = prototype_loss(h64, y, n, way)
    assert calls == [1]  # float64 is torch's
    close(loss.detach(), wanted.detach())
    logits = nearest_prototypes(h64[:n], y[:n], h64[n:], way)
    assert float(right) == pytest.approx(float(accuracy(logits, y[n:])))
    assert not right.requires_grad
    (found,) = torch.autograd.grad(3 * loss, h)
    close(found, torch.autograd.grad(3 * wanted, h64)[0])
    assert calls == [1]


@pytest.mark.parametrize(("way", "shot", "query", "width"), SHAPES[:3])
def test_its_second_derivative_is_that_of_float64(
    way: int, shot: int, query: int, width: int
) -> None:
    h, y = episode(way, shot, query, width)
    u, n = torch.randn(h.shape, generator=Key(4).torch()), way * shot

    def second(h: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        h, scale = h.clone().requires_grad_(), torch.tensor(0.7).to(h.dtype).requires_grad_()
        loss = scale * prototype_loss(h, y, n, way)[0]
        (dh,) = torch.autograd.grad(loss, h, create_graph=True)
        return torch.autograd.grad((dh * u).sum() + loss, (h, scale))

    for found, wanted in zip(second(h, u), second(h.double(), u.double()), strict=True):
        close(found, wanted)
    twice = grad(lambda h, u: (grad(loss_of(n, way))(h, y) * u).sum())
    close(twice(h, u), twice(h.double(), u.double()))


def test_a_stack_is_one_call_and_each_as_alone(calls: list[int]) -> None:
    every = [episode(5, 2, 4, 48, seed) for seed in range(6)]
    h, y = (torch.stack(parts) for parts in zip(*every, strict=True))
    alone = [grad(loss_of(10, 5))(*one) for one in every]
    calls.clear()
    assert torch.equal(vmap(grad(loss_of(10, 5)))(h, y), torch.stack(alone))
    assert calls == [6]
    loss, right = vmap(lambda h, y: prototype_loss(h, y, 10, 5))(h, y)
    assert loss.shape == right.shape == (6,)
    together = grad(lambda h: vmap(loss_of(10, 5))(h, y).sum())(h)
    torch.testing.assert_close(together, torch.stack(alone))
    one_y = vmap(loss_of(10, 5), in_dims=(1, None))(h.transpose(0, 1), y[0])
    assert float(one_y[0]) == float(loss[0])


def test_a_second_derivative_of_a_stack_is_that_of_float64() -> None:
    every = [episode(3, 2, 4, 9, seed) for seed in range(4)]
    h, y = (torch.stack(parts) for parts in zip(*every, strict=True))

    def length(h: Tensor, y: Tensor) -> Tensor:
        return grad(loss_of(6, 3))(h, y).square().sum()

    close(vmap(grad(length))(h, y), vmap(grad(length))(h.double(), y))
    outer = h.clone().requires_grad_()
    (found,) = torch.autograd.grad(vmap(length)(outer, y).sum(), outer)
    close(found, vmap(grad(length))(h.double(), y))


def test_labels_of_no_class_are_taken_as_a_mask_or_refused() -> None:
    h, y = episode(3, 2, 2, 8)
    y[0] = -1
    close(prototype_loss(h, y, 6, 3)[0], prototype_loss(h.double(), y, 6, 3)[0])
    for label in (3, -100):
        y[7] = label
        with pytest.raises(ValueError, match="expected 0 to 2"):
            prototype_loss(h, y, 6, 3)
        with pytest.raises(ValueError, match="expected 0 to 2"):
            vmap(grad(loss_of(6, 3)))(torch.stack([h, h]), torch.stack([y % 3, y]))


def test_what_is_not_finite_is_not_hidden() -> None:
    h, y = episode(3, 2, 2, 8)
    for where in (0, 7):
        bad = h.clone()
        bad[where, 0] = float("nan")
        assert prototype_loss(bad, y, 6, 3)[0].isnan()


def test_what_c_would_misread_is_refused() -> None:
    h, y = episode(3, 2, 2, 8)
    for labels, n in ((y.int(), 6), (y[1:], 6), (y, 0), (y, 12), (y.to("meta"), 6)):
        with pytest.raises(ValueError, match="expected one int64 label per row"):
            prototype_loss(h, labels, n, 3)


def test_an_exporter_follows_torchs_own_operations(calls: list[int]) -> None:
    class Net(torch.nn.Module):
        def forward(self, h: Tensor, y: Tensor) -> Tensor:
            return prototype_loss(h, y, 6, 3)[0]

    h, y = episode(3, 2, 2, 8)
    made = torch.export.export(Net(), (h, y)).module()
    assert calls == []
    torch.testing.assert_close(made(h, y), prototype_loss(h, y, 6, 3)[0])
