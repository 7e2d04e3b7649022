"""FedFomo, HeurFedAMP and FedProto, written out plainly and in their limits."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from covering import covering
from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.methods.personal.affinity import top_m_by_affinity
from fedshot.methods.personal.fedfomo import FedFomo
from fedshot.methods.personal.fedproto import FedProto
from fedshot.methods.personal.heur_fedamp import HeurFedAMP
from fedshot.nn.optim import Optimizer
from methods.classification_oracle import BASE
from methods.personal.oracle import (
    CONV,
    HELD,
    Group,
    Weights,
    assert_close,
    conv_features,
    cross_entropy,
    descend,
    features,
    half_square,
    options,
    pixels,
    plain,
)

LR = 0.1
SGD = Optimizer("sgd", LR)


def made(kind: Any, **changes: Any) -> Any:
    return kind(**options(optimizer=SGD, local_steps=3, **changes))


def fomo(**changes: Any) -> FedFomo:
    method: FedFomo = made(FedFomo, clients=4, **{"m": 2} | changes)
    return method


def kept(group: Group, k: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (training, validation) examples: the first of each class is for validation."""
    x, y = group.examples(k)
    held = torch.zeros(len(y), dtype=torch.bool)
    for c in set(y.tolist()):
        held[int((y == c).nonzero()[0])] = True
    return (x[~held], y[~held]), (x[held], y[held])


@pytest.mark.parametrize("distance", ["l2", "l1"])
def test_fedfomo_moves_by_the_first_order_weights(distance: Any, tmp_path: Path) -> None:
    group = Group(fomo(distance=distance, epsilon=0.0), tmp_path)
    held = [plain(group.server.start["theta"]) for _ in group.ids]
    before = list(held)
    p = torch.zeros(4, 4, dtype=torch.float64).fill_diagonal_(-math.inf)
    better = 0
    for _ in range(3):
        group.round()
        exchange, trained, mixtures = group.spy.exchanges[-1], [], []
        for i in group.ids:
            (x, y), validation = kept(group, i)
            loss = cross_entropy(*validation)
            received = [plain(one["theta"]) for one in exchange.message(i)["models"]]
            sent = [j for one in received for j in group.ids if j != i and same(one, held[j])]
            was, w, candidates = before[i], [], [held[i], *received]
            for one in candidates:
                gaps = torch.cat([(one[n] - was[n]).flatten() for n in was])
                far = float(gaps.norm() if distance == "l2" else gaps.abs().sum())
                w.append((float(loss(was)) - float(loss(one))) / far if far else 0.0)
            good = [max(0.0, v) for v in w]
            total = sum(good) or 1.0
            better += sum(v > 0 for v in good[1:])
            mixed = {
                n: was[n]
                + sum(
                    g / total * (one[n] - was[n]) for g, one in zip(good, candidates, strict=True)
                )
                for n in was
            }
            mixtures.append(mixed)
            trained.append(descend(cross_entropy(x, y), mixed, LR, 3))
            assert_close(group.banked(i), trained[-1], 1e-8)
            if len(sent) == 2:
                p[i, sent] += torch.tensor(w[1:], dtype=torch.float64)
        held, before = trained, mixtures
        torch.testing.assert_close(group.server.p, p, rtol=1e-7, atol=1e-9)
    assert better > 0  # some models did better than one's own


def same_bits(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def same(a: Weights, b: Weights) -> bool:
    return all(torch.equal(a[n], b[n]) or torch.allclose(a[n], b[n], rtol=1e-8) for n in a)


def test_fedfomo_stays_where_models_are_the_same_or_worse(tmp_path: Path) -> None:
    group = Group(fomo(), tmp_path)
    own = group.server.start
    drawn = group.method.draw(group.host.data(1), Key(0))
    w = group.method.weigh(own, [own, own], drawn)
    assert w.tolist() == [0.0, 0.0]
    assert tree.digest(group.method.move(own, [own, own], w)) == tree.digest(own)
    worse = torch.tensor([-1.0, -0.2], dtype=torch.float64)
    other = tree.map(lambda leaf: leaf + 1, own)
    assert tree.digest(group.method.move(own, [other, other], worse)) == tree.digest(own)
    best = group.method.move(own, [other, own], torch.tensor([0.3, -5.0], dtype=torch.float64))
    assert_close(best["theta"], plain(other["theta"]))


def test_fedfomo_never_trains_on_its_validation_samples(tmp_path: Path) -> None:
    group = Group(fomo(validation_share=0.5), tmp_path)
    for k in group.ids:
        data = group.host.data(k)
        train, held = group.method.split(data)
        assert sorted([*train.indices, *held.indices]) == sorted(data.indices)
        for c in data.classes:
            n = int((data.dataset.y[data.indices] == c).sum())
            n_held = int((data.dataset.y[held.indices] == c).sum())
            assert n_held == min(max(1, round(0.5 * n)), n - 1)
        drawn = group.method.draw(data, Key(3))
        assert torch.equal(drawn.batches.steps[0][0].x, train.all()[0])
        assert torch.equal(drawn.held.x, held.all()[0])


def test_fedfomo_stays_where_no_class_has_a_sample_to_spare(tmp_path: Path) -> None:
    held = (((0, 1), 1), *HELD[1:])
    group = Group(fomo(epsilon=0.0), tmp_path, held)
    (x, y), w = group.examples(0), plain(group.server.start["theta"])
    for _ in range(3):
        group.round()
        w = descend(cross_entropy(x, y), w, LR, 3)
        assert_close(group.banked(0), w, 1e-8)
        assert group.server.p[0].tolist() == [-math.inf, 0.0, 0.0, 0.0]
        assert all(math.isfinite(value) for value in group.metrics.values())


def test_a_probability_above_1_is_none() -> None:
    assert fomo(epsilon=1.0).explore(0) == 1
    with pytest.raises(
        ConfigError, match=r"epsilon is 1\.5; expected a number of at least 0 and at most 1"
    ):
        fomo(epsilon=1.5)


def test_heur_fedamp_sends_weights_alone_as_the_mixture(tmp_path: Path) -> None:
    group = Group(made(HeurFedAMP, model=replace(CONV, norm_policy="running")), tmp_path)
    group.round()
    sent = group.spy.exchanges[-1].message(0)
    assert tree.leaves(sent["own"]["stats"])
    assert set(plain(sent["mixture"])) == set(plain(sent["own"]["theta"]))


def test_fedfomo_weighs_models_as_a_test_asks_them(tmp_path: Path) -> None:
    """Batch norm sees validation samples under the statistics of those trained on."""
    group = Group(fomo(model=CONV), tmp_path)
    drawn, one = group.method.draw(group.host.data(1), Key(0)), group.server.start
    (x, _), (asked, y) = kept(group, 1)
    images = drawn.seen.x, drawn.held.x
    assert torch.equal(pixels(images[0]), x)
    assert torch.equal(pixels(images[1]), asked)
    h = conv_features(plain(one["theta"]), *images)
    w = plain(one["theta"])
    want = F.cross_entropy(h @ w["classifier/weight"].T + w["classifier/bias"], y)
    torch.testing.assert_close(group.method.loss(one, drawn), want, rtol=1e-9, atol=1e-9)


def test_fedproto_means_are_of_features_under_the_statistics_of_all_samples(tmp_path: Path) -> None:
    group = Group(made(FedProto, model=CONV), tmp_path)
    group.round()
    drawn, w = group.drawn(1), plain(group.private(1)["theta"])
    h = conv_features(w, drawn.whole.x, drawn.whole.x)
    sums = group.spy.seen[1].up["sums"]
    for c in drawn.whole.y.unique().tolist():
        mine = drawn.whole.y == c
        torch.testing.assert_close(sums[c], h[mine].sum(0), rtol=1e-7, atol=1e-9)


def test_fedfomo_explores_less_and_less() -> None:
    found = [fomo().explore(t) for t in range(8)]
    assert found[:4] == pytest.approx([0.3, 0.25, 0.2, 0.15])
    assert found[7] == 0


def test_each_of_the_models_that_are_sent_is_one_of_chance_by_itself() -> None:
    q, best = torch.zeros(21, 21, dtype=torch.float64), set(range(1, 6))
    q[0, 1:6] = 1
    draws = [
        top_m_by_affinity(q, 0, range(21), 5, np.random.default_rng(seed), explore=0.4)
        for seed in range(2000)
    ]
    assert all(len(set(sent)) == 5 and 0 not in sent for sent in draws)
    # k of 5 places are of chance, k binomial; each takes one of the 15 + k that are left.
    expected = sum(
        math.comb(5, k) * 0.4**k * 0.6 ** (5 - k) * (5 - k + k * k / (15 + k)) for k in range(6)
    )
    of_the_best = sum(len(best & set(sent)) for sent in draws) / len(draws)
    assert of_the_best == pytest.approx(expected, abs=0.1)
    assert set(top_m_by_affinity(q, 0, range(21), 5, np.random.default_rng(0))) == best


def test_heur_fedamp_holds_a_client_near_its_mixture(tmp_path: Path) -> None:
    sigma, lam, xi_self = 4.0, 2.0, 0.4
    group = Group(made(HeurFedAMP, sigma=sigma, lambda_prox=lam, self_weight=xi_self), tmp_path)
    held = [plain(group.server.start["theta"]) for _ in group.ids]
    for _ in range(3):
        trained = []
        for i in group.ids:
            rows = [torch.cat([v.flatten() for v in w.values()]) for w in held]
            cosines = {j: float(rows[i] @ rows[j] / rows[i].norm() / rows[j].norm())
                       for j in group.ids if j != i}  # fmt: skip
            total = sum(math.exp(sigma * c) for c in cosines.values())
            xi = {j: (1 - xi_self) * math.exp(sigma * c) / total for j, c in cosines.items()}
            assert sum(xi.values()) + xi_self == pytest.approx(1)
            u = {n: xi_self * held[i][n] + sum(xi[j] * held[j][n] for j in xi) for n in held[i]}
            loss = cross_entropy(*group.examples(i))

            def near(w: Weights, loss: Any = loss, u: Weights = u) -> Tensor:
                return loss(w) + lam * half_square(w, u)

            trained.append(descend(near, held[i], LR, 3))
        held = trained
        group.round()
        for i in group.ids:
            assert_close(group.banked(i), held[i], 1e-8)


def test_heur_fedamp_reads_models_from_the_disk_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Group(made(HeurFedAMP), tmp_path / "held")
    monkeypatch.setattr("fedshot.methods.personal.heur_fedamp._HELD", 0)
    read = Group(made(HeurFedAMP), tmp_path / "read")
    monkeypatch.undo()
    for _ in range(2):
        held.round()
        monkeypatch.setattr("fedshot.methods.personal.heur_fedamp._HELD", 0)
        read.round()
        monkeypatch.undo()
    for k in held.ids:
        assert same_bits(held.banked(k), read.banked(k))


def test_heur_fedamp_with_no_pull_is_training_alone(tmp_path: Path) -> None:
    group = Group(made(HeurFedAMP, lambda_prox=0.0), tmp_path)
    start = plain(group.server.start["theta"])
    for _ in range(2):
        group.round()
    for k in group.ids:
        assert_close(
            group.banked(k), descend(cross_entropy(*group.examples(k)), start, LR, 6), 1e-8
        )


@pytest.mark.parametrize(("weighting", "weight"), covering(["examples", "clients"], [0.5, 0.0]))
def test_fedproto_exchanges_class_means(weight: float, weighting: Any, tmp_path: Path) -> None:
    group = Group(made(FedProto, lambda_proto=weight, weighting=weighting), tmp_path)
    own = [plain(group.private(k)["theta"]) for k in group.ids]
    protos: dict[int, Tensor] = {}
    for _ in range(2):
        found: dict[int, list[tuple[float, Tensor]]] = {}
        for k in group.ids:
            x, y = group.examples(k)
            classes = sorted(set(y.tolist()))

            def loss(w: Weights, x: Tensor = x, y: Tensor = y, classes: Any = classes) -> Tensor:
                h = features(w, x)
                far = [(h[y == c].mean(0) - protos[c]).norm() for c in classes if c in protos]
                pull = torch.stack(far).sum() if far else torch.zeros((), dtype=torch.float64)
                return cross_entropy(x, y)(w) + weight * pull

            own[k] = descend(loss, own[k], LR, 3)
            h = features(own[k], x)
            for c in classes:
                n = float((y == c).sum()) if weighting == "examples" else 1.0
                found.setdefault(c, []).append((n, h[y == c].mean(0).detach()))
        group.round()
        for k in group.ids:
            assert_close(group.private(k)["theta"], own[k], 1e-8)
        for c, each in found.items():
            total = sum(n for n, _ in each)
            protos[c] = torch.stack([n * p for n, p in each]).sum(0) / total
            torch.testing.assert_close(group.server.prototypes[c], protos[c], rtol=1e-9, atol=1e-9)
        assert group.server.known.tolist() == [c in protos for c in range(5)]
    for answer in group.answers():
        q = group.episodic_test.eval_episodes[answer.eval_episode]
        asked = features(own[answer.eval_episode], pixels(q.query_x))
        places = [BASE.index(int(c)) for c in q.classes]
        want = -torch.stack([(asked - protos[p]).norm(dim=1) for p in places], 1)
        torch.testing.assert_close(answer.logits.double(), want, rtol=1e-5, atol=1e-5)


def test_fedproto_starts_from_one_encoder_and_own_classifiers(tmp_path: Path) -> None:
    group = Group(made(FedProto), tmp_path)
    own = [group.private(k)["theta"] for k in group.ids]
    assert len({tree.digest(one["body"]) for one in own}) == 1
    assert len({tree.digest(one["classifier"]) for one in own}) == 4


def test_fedproto_keeps_the_prototype_of_a_class_that_nobody_had(tmp_path: Path) -> None:
    group = Group(made(FedProto), tmp_path)
    group.round()
    before = group.server
    group.ids = [0]  # holds classes 0 and 1
    after = group.round()
    assert torch.equal(after.prototypes[2:], before.prototypes[2:])
    assert not torch.equal(after.prototypes[:2], before.prototypes[:2])
    assert torch.equal(after.known, before.known)
