"""The compiled losses of few-round learning: values and derivatives, against float64 by torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedshot import compiled
from fedshot.keys import Key
from fedshot.nn import Conv4, Local, Model, Prototypes, value_and_grad
from fedshot.nn import few_round_loss as module

pytestmark = pytest.mark.skipif(
    compiled.library() is None, reason="there are no compiled kernels: torch computes it"
)
MODEL = Model(Conv4(8), None, (32, 32, 3), "support")
SHAPES = [(30, 32, 4, 5), (12, 7, 25, 3), (5, 1, 1, 2), (40, 33, 9, 64)]


def case(n: int, d: int, positions: int, numbers: int) -> tuple[Tensor, Tensor, Prototypes]:
    """Maps, labels, and prototypes of which one is missing."""
    draw = Key(0).torch()
    y = torch.randint(numbers, (n,), generator=draw)
    g = torch.randn(n, d, positions, generator=draw) / d**0.5 + y[:, None, None] / numbers
    held = torch.arange(numbers) != int(y[0])
    return g, y, Prototypes(torch.randn(numbers, d, generator=draw) / d**0.5, held)


def doubled(told: Prototypes | None) -> Prototypes | None:
    return told and told._replace(means=told.means.double())


def close(found: Tensor, wanted: Tensor) -> None:
    """Of float64, to what float32 can do."""
    assert found.shape == wanted.shape
    scale = float(wanted.abs().max()) + 1e-6
    assert float((found.double() - wanted).abs().max()) < 1e-5 * scale


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which kernels were called."""
    seen: list[str] = []

    class Library:
        def __getattr__(self, name: str) -> Any:
            seen.append(name)
            return getattr(compiled.library(), name)

    monkeypatch.setattr(module, "library", Library)
    return seen


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("positions", ["mean", "sum", "pooled", None])
def test_the_loss_of_supports_is_that_of_float64(
    shape: tuple[int, int, int, int], positions: Any, calls: list[str]
) -> None:
    g, y, told = case(*shape)
    near = told if positions else None
    local = Local(MODEL, "gpal", 0.7, positions=positions or "mean")

    def loss(g: Tensor, near: Prototypes | None) -> tuple[Tensor, Any]:
        value, *rest = local.support_loss(g, y, shape[3], near)
        return 3 * value, rest

    value, (hits, own, counts), dg = value_and_grad(lambda g: loss(g, near), g)
    assert calls == ["fedshot_few_round"]
    found = value_and_grad(lambda g: loss(g, doubled(near)), g.double())
    assert calls == ["fedshot_few_round"]  # float64 is torch's
    wanted, (right, by_class, numbers), dg64 = found
    close(value, wanted)
    close(dg, dg64)
    close(own.means, by_class.means.detach())
    assert float(hits) == pytest.approx(float(right))
    assert torch.equal(own.held, by_class.held)
    assert torch.equal(counts.double(), numbers)
    assert not any(part.requires_grad for part in (hits, own.means, counts))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_loss_of_queries_is_that_of_float64(
    shape: tuple[int, int, int, int], calls: list[str]
) -> None:
    g, y, told = case(*shape)
    local = Local(MODEL, "proto")

    def loss(at: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        value, hits = local.query_loss(at[0], y, told._replace(means=at[1]))
        return 3 * value, hits

    value, hits, by = value_and_grad(loss, (g, told.means))
    assert calls == ["fedshot_few_round_answers"]
    wanted, right, by64 = value_and_grad(loss, (g.double(), told.means.double()))
    close(value, wanted)
    assert float(hits) == pytest.approx(float(right))
    for one, other in zip(by, by64, strict=True):
        close(one, other)
    none = told._replace(held=torch.zeros_like(told.held))
    assert float(local.query_loss(g, y, none)[0]) == 0.0


def test_options_that_have_no_kernel_are_torchs(calls: list[str]) -> None:
    g, y, told = case(*SHAPES[0])
    options: list[dict[str, Any]] = [
        {"loss": "literal"}, {"distance": "mean"}, {"distance": "unit"}, {"own_sample": "left_out"}
    ]  # fmt: skip
    for option in options:
        local = Local(MODEL, "gpal", **option)
        local.support_loss(g, y, 5, told)
        local.query_loss(g, y, told)
    Local(MODEL, "gpal", through_prototypes=False).support_loss(g, y, 5, told)
    assert calls == []


def test_what_is_differentiated_twice_is_torchs(calls: list[str]) -> None:
    g, y, told = case(*SHAPES[1])
    local, numbers = Local(MODEL, "gpal"), SHAPES[1][3]

    def loss(g: Tensor) -> tuple[Tensor, None]:
        near = told._replace(means=told.means.to(g.dtype))
        return local.support_loss(g, y, numbers, near)[0], None

    def length(g: Tensor) -> tuple[Tensor, None]:
        return value_and_grad(loss, g, differentiable=True)[2].square().sum(), None

    close(value_and_grad(length, g)[2], value_and_grad(length, g.double())[2])
    by_rows = torch.func.grad(lambda g: loss(g)[0])(g)
    assert calls == []
    close(by_rows, value_and_grad(loss, g.double())[2])
    value = loss(g.requires_grad_())[0]
    with pytest.raises(RuntimeError, match="differentiable=True"):
        torch.autograd.grad(value, g, create_graph=True)


def test_what_is_not_finite_is_not_hidden() -> None:
    g, y, told = case(*SHAPES[0])
    local = Local(MODEL, "gpal")
    g[3, 2, 1] = float("nan")
    assert local.support_loss(g, y, 5, told)[0].isnan()
    assert local.query_loss(g, y, told._replace(held=told.held | True))[0].isnan()


def test_what_c_would_misread_is_refused() -> None:
    g, y, told = case(*SHAPES[0])
    local = Local(MODEL, "gpal")
    for label in (-1, 5):
        wrong = y.clone()
        wrong[4] = label
        for call in (
            lambda wrong=wrong: local.support_loss(g, wrong, 5, told),
            lambda wrong=wrong: local.query_loss(g, wrong, told),
        ):
            with pytest.raises(ValueError, match="expected 0 to 4"):
                call()
    for labels in (y.int(), y[1:]):
        with pytest.raises(ValueError, match="an int64 label for each"):
            local.support_loss(g, labels, 5, told)
    for bad in (
        told._replace(means=told.means[1:]),
        told._replace(means=told.means.double()),
        told._replace(held=told.held[1:]),
        told._replace(held=told.held.float()),
    ):
        with pytest.raises(ValueError, match="bool"):
            local.support_loss(g, y, 5, bad)
    turned = g.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(
        local.support_loss(turned, y, 5, told)[0], local.support_loss(g, y, 5, told)[0]
    )
