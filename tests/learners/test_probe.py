"""Probes on features against brute force, scikit-learn called directly, and torch.optim."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.linear_model import LogisticRegression, Ridge
from torch import Tensor, nn

from covering import diagonal
from fedshot.core.seeds import Key
from fedshot.learners.probe import FeatureProbe

DIM = 6


def features(way: int, shot: int, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (support, labels, queries), nothing of length 1, the labels in no order."""
    rng = Key(way).at(shot).torch()
    y = torch.arange(way).repeat(shot)[torch.randperm(way * shot, generator=rng)]
    support = torch.randn(way * shot, DIM, generator=rng, dtype=torch.float64) + y[:, None]
    return support, y, torch.randn(queries, DIM, generator=rng, dtype=torch.float64) * 3


SIZES = [(2, 1), (2, 4), (5, 1), (5, 3)]
SHAPES = pytest.mark.parametrize(("way", "shot"), SIZES)


@SHAPES
def test_the_mean_probe_is_the_cosine_with_each_class_mean(way: int, shot: int) -> None:
    h, y, q = features(way, shot, 7)
    found = FeatureProbe("mean")(h, y, q, way)
    for i in range(7):
        for c in range(way):
            rows = [h[j] / h[j].norm() for j in range(len(h)) if y[j] == c]
            mean = sum(rows) / shot  # type: ignore[operator]
            want = q[i] @ mean / (q[i].norm() * mean.norm())
            torch.testing.assert_close(found[i, c], want, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(("size", "weight"), diagonal(SIZES, [0.01, 1.0, 30.0]))
def test_the_ridge_is_that_of_scikit_learn(size: tuple[int, int], weight: float) -> None:
    way, shot = size
    h, y, q = features(way, shot, 7)
    unit = (h / h.norm(dim=1, keepdim=True), q / q.norm(dim=1, keepdim=True))
    ridge = Ridge(alpha=weight, fit_intercept=False).fit(unit[0], F.one_hot(y, way).double())
    found = FeatureProbe("ridge", ridge_lambda=weight)(h, y, q, way)
    want = np.reshape(ridge.predict(unit[1]), found.shape)
    np.testing.assert_allclose(found, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("size", "c"), diagonal(SIZES, [0.1, 1.0, 10.0]))
def test_the_logistic_probe_is_scikit_learns(size: tuple[int, int], c: float) -> None:
    way, shot = size
    h, y, q = features(way, shot, 7)
    unit = (h / h.norm(dim=1, keepdim=True), q / q.norm(dim=1, keepdim=True))
    model = LogisticRegression(C=c, max_iter=1000).fit(unit[0].numpy(), y.numpy())
    found = FeatureProbe("logistic", logistic_c=c)(h, y, q, way)
    want = model.predict_proba(unit[1].numpy())
    np.testing.assert_allclose(found.softmax(1), want, rtol=1e-9, atol=1e-11)


@SHAPES
def test_finetuning_is_gradient_descent_on_a_new_linear_head(way: int, shot: int) -> None:
    h, y, q = features(way, shot, 7)
    head = nn.Linear(DIM, way).double()
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    sgd = torch.optim.SGD(head.parameters(), 0.5)
    for _ in range(9):
        sgd.zero_grad()
        F.cross_entropy(head(h / h.norm(dim=1, keepdim=True)), y).backward()
        sgd.step()
    with torch.no_grad():  # as where each example is embedded once
        found = FeatureProbe("finetune", finetune_lr=0.5, finetune_steps=9)(h, y, q, way)
    want = head(q / q.norm(dim=1, keepdim=True)).detach()
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("probe", ["mean", "logistic", "ridge", "finetune"])
def test_a_probe_finds_classes_that_lie_apart_and_keeps_the_dtype(probe: str) -> None:
    rng = Key(3).torch()
    centres = torch.eye(4, DIM)
    y, truth = torch.arange(4).repeat(2), torch.arange(4).repeat(5)
    h, q = (centres[c] + 0.05 * torch.randn(len(c), DIM, generator=rng) for c in (y, truth))
    found = FeatureProbe(probe)(h, y, q, 4)  # type: ignore[arg-type]
    assert found.dtype == torch.float32
    assert torch.equal(found.argmax(1), truth)


@pytest.mark.parametrize("probe", ["mean", "logistic", "ridge", "finetune"])
def test_a_class_without_support_is_never_answered(probe: Any) -> None:
    """The others are told apart as if it were not there."""
    for held in ((0, 2, 3), (1, 3), (2,)):
        h, y, q = features(len(held), 3, 40)
        alone = FeatureProbe(probe)(h, y, q, len(held))
        found = FeatureProbe(probe)(h, torch.tensor(held)[y], q, 4)
        torch.testing.assert_close(found[:, list(held)], alone)
        assert torch.equal(found.argmax(1), torch.tensor(held)[alone.argmax(1)])
        assert found.float().isfinite().all()


@pytest.mark.parametrize("probe", ["mean", "logistic", "ridge", "finetune"])
def test_an_episode_of_one_class_has_an_answer(probe: str) -> None:
    h, y, q = features(1, 3, 2)
    assert FeatureProbe(probe)(h, y, q, 1).shape == (2, 1)  # type: ignore[arg-type]
