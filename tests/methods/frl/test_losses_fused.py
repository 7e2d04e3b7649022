"""The compiled losses of few-round learning: values and derivatives, against float64 by torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshot.core import kernel_build, tree
from fedshot.core.seeds import Key
from fedshot.methods.frl import losses_fused as module
from fedshot.methods.frl.frl_personal import FRLPersonal
from fedshot.methods.frl.local_steps import FewRoundLearner, Prototypes
from fedshot.nn.gradients import value_and_grad
from fedshot.nn.models.backbones import Conv4
from fedshot.nn.models.model import Model
from methods.frl.oracle import CLASSES, CONV, SGD, SPEC, Run, method
from rounding import close

pytestmark = pytest.mark.skipif(
    kernel_build.library() is None, reason="there are no compiled kernels: torch computes it"
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


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which kernels were called."""
    seen: list[str] = []

    class Library:
        def __getattr__(self, name: str) -> Any:
            seen.append(name)
            return getattr(kernel_build.library(), name)

    monkeypatch.setattr(module, "library", Library)
    return seen


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("positions", ["mean", "pooled", None])
def test_the_loss_of_supports_is_that_of_float64(
    shape: tuple[int, int, int, int], positions: Any, calls: list[str]
) -> None:
    g, y, told = case(*shape)
    near = told if positions else None
    local = FewRoundLearner(MODEL, "gpal", 0.7, positions=positions or "mean")

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
    local = FewRoundLearner(MODEL, "proto")

    def loss(at: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        value, hits = local.query_loss(at[0], y, told._replace(means=at[1]))
        return 3 * value, hits

    value, hits, by = value_and_grad(loss, (g, told.means))
    assert calls == ["fedshot_few_round_answers"]
    wanted, right, by64 = value_and_grad(loss, (g.double(), told.means.double()))
    close(value, wanted)
    assert float(hits) == pytest.approx(float(right))
    assert not hits.requires_grad
    for one, other in zip(by, by64, strict=True):
        close(one, other)
    none = told._replace(held=torch.zeros_like(told.held))
    assert float(local.query_loss(g, y, none)[0]) == 0.0


def test_what_has_no_kernel_is_torchs(calls: list[str]) -> None:
    g, y, told = case(*SHAPES[0])
    local = FewRoundLearner(MODEL, "gpal", loss="literal")
    local.support_loss(g, y, 5, told)
    local.query_loss(g, y, told)

    def by_told(means: Tensor) -> tuple[Tensor, None]:
        return FewRoundLearner(MODEL, "gpal").support_loss(g, y, 5, Prototypes(means, told.held))[
            0
        ], None

    assert float(value_and_grad(by_told, told.means)[2].abs().sum()) > 0
    assert calls == []


@pytest.mark.parametrize("mode", ["strict", "official", "personal"])
def test_an_episode_is_that_of_float64(mode: Any, calls: list[str], tmp_path: Path) -> None:
    """The wiring: what is held, weighed and told by the methods, with and without the kernels."""
    changes = []
    start = None
    for dtype in ("float32", "float64"):
        model = replace(CONV, head=None, dtype=dtype)
        run = Run(few_round(model, mode), tmp_path / dtype)
        start = start or run.server
        run.server = tree.map(lambda a, b: b.to(a.dtype), run.server, start)
        before = run.server.phi
        changes.append(tree.sub(run.play().phi, before))
        if dtype == "float32":
            assert "fedshot_few_round" in calls
            assert "fedshot_few_round_answers" in calls
            calls.clear()
    assert calls == []
    for found, wanted in zip(*map(tree.leaves, changes), strict=True):
        scale = float(wanted.abs().max()) + 1e-4  # a bias before a norm has no gradient
        assert float((found.double() - wanted).abs().max()) < 1e-3 * scale


def few_round(model: Model, mode: Any) -> Any:
    if mode != "personal":
        return method(model, mode=mode)
    rest = {"inner_lr": 0.02, "optimizer": SGD, "resampled": True}
    return FRLPersonal(model, SPEC, tuple(range(CLASSES)), **rest)  # type: ignore[arg-type]


def test_what_is_differentiated_twice_is_torchs(calls: list[str]) -> None:
    g, y, told = case(*SHAPES[1])
    local, numbers = FewRoundLearner(MODEL, "gpal"), SHAPES[1][3]

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
    local = FewRoundLearner(MODEL, "gpal")
    for i in (0, int((y != y[0]).nonzero()[0])):  # of a class without a prototype, and of another
        bad = g.clone()
        bad[i, 2, 1] = float("nan")
        assert local.support_loss(bad, y, 5, told)[0].isnan()
        assert local.query_loss(bad, y, told)[0].isnan()


def test_an_exporter_follows_torchs_own_operations(calls: list[str]) -> None:
    class Net(torch.nn.Module):
        def forward(self, g: Tensor, y: Tensor) -> Tensor:
            return local.support_loss(g, y, 5, told)[0] + local.query_loss(g, y, told)[0]

    g, y, told = case(*SHAPES[0])
    local = FewRoundLearner(MODEL, "gpal")
    made = torch.export.export(Net(), (g, y)).module()
    assert calls == []
    torch.testing.assert_close(made(g, y), Net()(g, y))
    assert len(calls) == 2


def test_memory_may_lie_in_any_order() -> None:
    g, y, told = case(*SHAPES[0])
    apart = torch.stack([y, y + 7], 1)[:, 0]
    turned = Prototypes(told.means.T.contiguous().T, torch.stack([told.held, ~told.held], 1)[:, 0])
    local = FewRoundLearner(MODEL, "gpal")

    def both(g: Tensor, y: Tensor, told: Prototypes) -> tuple[Tensor, None]:
        return local.support_loss(g, y, 5, told)[0] + local.query_loss(g, y, told)[0], None

    value, _, dg = value_and_grad(lambda g: both(g, y, told), g)
    strided = g.transpose(1, 2).contiguous().transpose(1, 2)
    found, _, by_strided = value_and_grad(lambda g: both(g, apart, turned), strided)
    assert torch.equal(found, value)
    assert torch.equal(by_strided, dg)


def test_what_c_would_misread_is_refused() -> None:
    g, y, told = case(*SHAPES[0])
    local = FewRoundLearner(MODEL, "gpal")
    for label in (-1, 5):
        wrong = y.clone()
        wrong[4] = label
        with pytest.raises(ValueError, match="expected 0 to 4"):
            local.support_loss(g, wrong, 5, told)
        with pytest.raises(ValueError, match="expected 0 to 4"):
            local.query_loss(g, wrong, told)
    for maps, labels in ((g, y.int()), (g, y[1:]), (g, y.to("meta")), (g[:0], y[:0])):
        with pytest.raises(ValueError, match="an int64 label for each"):
            local.support_loss(maps, labels, 5, told)
    for bad in (
        told._replace(means=told.means[1:]),
        told._replace(means=told.means.double()),
        told._replace(held=told.held[1:]),
        told._replace(held=told.held.float()),
        told._replace(held=told.held.to("meta")),
    ):
        with pytest.raises(ValueError, match="and bool"):
            local.support_loss(g, y, 5, bad)
