"""Prototypes, losses and heads against their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from differences import noise
from fedshot.core.seeds import Key
from fedshot.learners.average_distance import average_distance_logits
from fedshot.nn.heads import HEADS, CosineHead
from fedshot.nn.losses import accuracy, cross_entropy, kl, proximal
from fedshot.nn.masking import mask_logits
from fedshot.nn.prototypes import (
    class_means,
    cosine_logits,
    nearest_prototypes,
    prototype_logits,
    squared_distances,
)


def test_class_means_are_means_and_an_empty_class_is_zero() -> None:
    h, y = noise(9, 4), torch.tensor([0, 1, 1, 3, 0, 3, 3, 1, 0])
    means = class_means(h, y, 4)
    for k in (0, 1, 3):
        torch.testing.assert_close(means[k], h[y == k].mean(0))
    assert not means[2].any()


def test_a_label_outside_the_classes_is_left_out() -> None:
    h, y = noise(4, 3), torch.tensor([0, 1, -1, 0])
    torch.testing.assert_close(class_means(h, y, 2), class_means(h[[0, 1, 3]], y[[0, 1, 3]], 2))


def test_prototype_logits_choose_the_nearest_mean() -> None:
    h, means = noise(20, 6), noise(4, 6, seed=1)
    logits = prototype_logits(h, means)
    nearest = [min(range(4), key=lambda k, i=i: float((h[i] - means[k]).norm())) for i in range(20)]
    assert logits.argmax(1).tolist() == nearest
    torch.testing.assert_close(logits, -torch.cdist(h, means).square())


def test_squared_distances_keep_their_digits_far_from_the_origin() -> None:
    a = (noise(5, 8) * 0.1 + 1000).float()
    got = squared_distances(a, a)
    want = torch.cdist(a.double(), a.double(), compute_mode="donot_use_mm_for_euclid_dist") ** 2
    assert not got.diagonal().any()
    assert (got >= 0).all()
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)


def test_cosine_logits_are_the_scaled_cosine_and_survive_a_zero_row() -> None:
    h, means = noise(5, 4), noise(3, 4, seed=1)
    want = 7.0 * F.cosine_similarity(h[:, None], means[None], dim=-1)
    torch.testing.assert_close(cosine_logits(h, means, 7.0), want)
    head = CosineHead(3, scale=7.0)
    torch.testing.assert_close(head.logits({"weight": means * 5}, h), want)

    zero = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(cosine_logits(zero, means, 7.0).sum(), zero, create_graph=True)
    (gg,) = torch.autograd.grad(g.sum(), zero)
    assert torch.isfinite(g).all()
    assert torch.isfinite(gg).all()


@pytest.mark.parametrize("name", HEADS)
def test_heads_have_right_second_derivatives(name: str) -> None:
    head = HEADS[name](way=3)
    params = head.init(Key(0), 4, torch.float64)
    h = noise(2, 4).requires_grad_()
    assert head.logits(params, h).shape == (2, 3)
    assert torch.autograd.gradgradcheck(lambda h: head.logits(params, h), h)


def test_losses_equal_their_definitions() -> None:
    p, q, y = noise(6, 4), noise(6, 4, seed=1), torch.tensor([0, 1, 2, 3, 0, 1])
    each = [-p.softmax(1)[i, y[i]].log() for i in range(6)]
    torch.testing.assert_close(cross_entropy(p, y), torch.stack(each).mean())
    want = F.kl_div(q.log_softmax(1), p.log_softmax(1), reduction="batchmean", log_target=True)
    torch.testing.assert_close(kl(p, q), want)
    assert kl(p, p) == 0
    assert accuracy(F.one_hot(y, 4).double(), y) == 1
    assert accuracy(torch.eye(4)[[0, 0, 0, 0]], torch.tensor([0, 1, 2, 0])) == 0.5


def test_the_gradient_of_the_proximal_term_is_the_change() -> None:
    w = {"a": noise(3), "b": (noise(2, 2, seed=1),)}
    w0 = {"a": noise(3, seed=2), "b": (noise(2, 2, seed=3),)}
    grad, value = torch.func.grad_and_value(proximal)(w, w0)
    torch.testing.assert_close(grad["a"], w["a"] - w0["a"])
    torch.testing.assert_close(grad["b"][0], w["b"][0] - w0["b"][0])
    norm2 = (w["a"] - w0["a"]).square().sum() + (w["b"][0] - w0["b"][0]).square().sum()
    torch.testing.assert_close(value, norm2 / 2)


@pytest.mark.parametrize("by", ["prototype", "average distance"])
def test_a_class_without_support_is_never_answered_and_nothing_diverges(by: str) -> None:
    """A prototype of zeros would be the nearest to these queries; minus infinity is no answer."""
    support, y, query = (
        noise(6, 4) + 9,
        torch.tensor([0, 2, 2, 0, 3, 3]),
        0.1 * noise(20, 4, seed=1),
    )
    answer = nearest_prototypes if by == "prototype" else average_distance_logits
    found = answer(query, support, y, 4) if by != "prototype" else answer(support, y, query, 4)
    alone = torch.tensor([0, 2, 3])
    assert (found.argmax(1) != 1).all()
    assert found.float().isfinite().all()
    if by == "prototype":
        want = prototype_logits(query, class_means(support, y, 4))[:, alone]
        assert torch.equal(found[:, alone], want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_shut_out_stays_a_number(dtype: torch.dtype) -> None:
    found = mask_logits(torch.zeros(2, 3, dtype=dtype), torch.tensor([True, False, True]))
    assert found.float().isfinite().all()
    assert torch.equal(found.softmax(-1)[0], torch.tensor([0.5, 0, 0.5], dtype=dtype))
