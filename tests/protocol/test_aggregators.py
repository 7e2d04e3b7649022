"""Robust aggregators: against numpy and scipy, and up to their breakdown points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.fleets.attacks import SignFlip
from fedshot.fleets.liars import Liars
from fedshot.methods.frl.local_steps import FewRoundLearner, Prototypes
from fedshot.nn.models.backbones import Conv4
from fedshot.nn.models.model import Model
from fedshot.protocol import client_vectors
from fedshot.protocol.aggregators import (
    AGGREGATORS,
    Aggregator,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    MultiKrum,
    NormClipped,
    PlainMean,
    TrimmedMean,
    most_dishonest,
)
from fedshot.protocol.client_vectors import ClientVectors
from fedshot.protocol.reducers import Gather, Mean, Sum
from fedshot.protocol.robust_reducers import Aggregation

FAR = 1e6


def drawn(n: int, d: int = 7, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=(n, d))


def vectors(rows: Any, weights: Sequence[float] | None = None, **more: Any) -> ClientVectors:
    x = torch.as_tensor(rows)
    found = ClientVectors(len(x), x.shape[1], x.dtype, **more)
    for k, row in enumerate(x):
        found.add(k, row, 1.0 if weights is None else weights[k])
    return found


def combined(rule: Aggregator, rows: Any, weights: Sequence[float] | None = None) -> Any:
    return rule.combine(vectors(rows, weights))[0].numpy()


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_coordinate_rules_are_those_of_numpy_and_scipy(n: int) -> None:
    x = drawn(n)
    np.testing.assert_allclose(combined(CoordinateMedian(), x), np.median(x, axis=0), rtol=1e-14)
    for fraction in (0.0, 0.2, 0.3, 0.49):
        cut = most_dishonest(fraction, n)  # of half a value scipy cuts none
        expected = stats.trim_mean(x, (cut + 0.1) / n, axis=0)
        np.testing.assert_allclose(combined(TrimmedMean(fraction), x), expected, rtol=1e-12)


def test_the_mean_and_the_clipped_mean_use_weights() -> None:
    x, w = drawn(6), [1.0, 2.0, 3.0, 1.0, 5.0, 0.5]
    expected = np.average(x, axis=0, weights=w)
    np.testing.assert_allclose(combined(PlainMean(), x, w), expected, rtol=1e-12)
    np.testing.assert_allclose(combined(NormClipped(1e9), x, w), expected, rtol=1e-12)
    norms = np.linalg.norm(x, axis=1)
    for bound, rule in ((np.median(norms), NormClipped()), (0.5, NormClipped(0.5))):
        clipped = x * np.minimum(1, bound / norms)[:, None]
        expected = np.average(clipped, axis=0, weights=w)
        np.testing.assert_allclose(combined(rule, x, w), expected, rtol=1e-12)


@pytest.mark.parametrize(("n", "fraction"), [(5, 0.2), (9, 0.3), (12, 0.25)])
def test_krum_is_that_of_brute_force(n: int, fraction: float) -> None:
    x, f = drawn(n, seed=n), most_dishonest(fraction, n)
    scores = []
    for i in range(n):
        others = sorted(float(((x[i] - x[j]) ** 2).sum()) for j in range(n) if j != i)
        scores.append(sum(others[: n - f - 2]))
    best = np.argsort(scores)
    np.testing.assert_allclose(combined(Krum(fraction), x), x[best[0]], rtol=1e-12)
    expected = x[best[: n - f]].mean(axis=0)
    np.testing.assert_allclose(combined(MultiKrum(fraction), x), expected, rtol=1e-12)


@pytest.mark.parametrize("n", [3, 6, 11])
def test_the_geometric_median_is_stationary_and_the_least(n: int) -> None:
    """At the minimum outside all points, the unit vectors towards the points add up to 0."""
    x = drawn(n, seed=n)
    found = combined(GeometricMedian(), x)
    away = x - found
    units = away / np.linalg.norm(away, axis=1, keepdims=True)
    assert np.linalg.norm(units.sum(axis=0)) < 1e-5

    def cost(z: Any) -> float:
        return float(np.linalg.norm(x - z, axis=1).sum())

    for step in drawn(20, seed=1) * 0.1:
        assert cost(found) <= cost(found + step)


def test_the_geometric_median_of_a_line_is_the_median() -> None:
    x = np.array([[0.0], [1.0], [5.0], [6.0], [90.0]])
    np.testing.assert_allclose(combined(GeometricMedian(), x), [5.0], atol=1e-6)


# Where the dishonest clients all send one far vector: the most of n = 11 clients that a rule holds
# against. Krum for f = 4 compares n - f - 2 = 5 neighbours, so five liars have but four of them.
HELD = {
    "clipped": (NormClipped(), 5), "median": (CoordinateMedian(), 5),
    "trimmed": (TrimmedMean(0.3), 3), "krum": (Krum(0.37), 5), "multi_krum": (MultiKrum(0.37), 4),
    "geometric_median": (GeometricMedian(), 5),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_a_rule_holds_up_to_its_breakdown_point_and_no_further(name: str) -> None:
    rule, most = HELD[name]
    n, honest = 11, drawn(11, seed=3)
    for liars in range(1, most + 2):
        x = honest.copy()
        x[:liars] = FAR
        found, good = combined(rule, x), x[liars:]
        if liars > most:
            # The clipped mean is bounded by the clients' median norm, which is now a liar's.
            assert np.linalg.norm(found) > 1e3
        elif name in ("median", "trimmed"):  # within the honest values of each coordinate
            assert (found >= good.min(0)).all()
            assert (found <= good.max(0)).all()
        elif name == "krum":  # an honest vector
            assert (good == found).all(1).any()
        elif name == "multi_krum":  # a mean of honest vectors
            assert np.linalg.norm(found) <= np.linalg.norm(good, axis=1).max()
        elif name == "clipped":  # within 2 f b / n of the mean without the liars' vectors
            norms = np.linalg.norm(x, axis=1)
            b = float(np.median(norms))
            clipped = good * np.minimum(1, b / np.linalg.norm(good, axis=1))[:, None]
            assert np.linalg.norm(found - clipped.sum(0) / n) <= liars * b / n * (1 + 1e-9)
        else:  # Lopuhaa and Rousseeuw 1991, theorem 2.2
            bound = 2 * (n - liars) / (n - 2 * liars) * np.linalg.norm(good, axis=1).max()
            assert np.linalg.norm(found) <= bound
    one = honest.copy()
    one[0] = FAR
    assert np.linalg.norm(combined(PlainMean(), one)) > 1e4  # the mean holds against none


@pytest.mark.parametrize("n", [3, 4])
def test_krum_leaves_a_liar_out_of_three_or_four_vectors(n: int) -> None:
    x = np.array([[0.0], [0.1], [0.3], [FAR]])[4 - n :]
    found, kept = MultiKrum(0.3).combine(vectors(x))
    assert kept.tolist() == [1.0] * (n - 1) + [0.0]
    assert float(found) == pytest.approx(x[:-1].mean())


def test_a_far_liar_does_not_blur_the_geometric_median() -> None:
    x = np.array([[0.0], [1.0], [5.0], [6.0], [1e14]])
    np.testing.assert_allclose(combined(GeometricMedian(), x), [5.0], atol=1e-5)
    same = np.array([[2.0], [2.0], [2.0], [9.0]])
    np.testing.assert_allclose(combined(GeometricMedian(), same), [2.0], atol=1e-9)


def test_huge_vectors_take_no_digits_from_the_others() -> None:
    """Distances come from inner products, which cancel unless they are centred."""
    x = drawn(9, 50, seed=4)
    x[:2] = 1e9 * drawn(2, 50, seed=5)
    found = combined(GeometricMedian(), x)
    away = x - found
    units = away / np.linalg.norm(away, axis=1, keepdims=True)
    assert np.linalg.norm(units.sum(axis=0)) < 1e-5
    np.testing.assert_array_equal(combined(Krum(0.25), x), x[_krum_of(x, 2)])


def _krum_of(x: Any, f: int) -> int:
    squares = ((x[:, None] - x[None]) ** 2).sum(-1)
    return int(np.sort(squares, axis=1)[:, 1 : len(x) - f - 1].sum(1).argmin())


@pytest.mark.parametrize("name", AGGREGATORS)
def test_neither_order_nor_blocks_nor_a_file_change_a_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, x = AGGREGATORS[name](), torch.as_tensor(drawn(9, 40)).float()
    expected, kept = rule.combine(vectors(x))
    shuffled = ClientVectors(12, 40, torch.float32)
    for k in (4, 0, 8, 2, 7, 1, 3, 6, 5):
        shuffled.add(k, x[k], 1.0)
    monkeypatch.setattr(client_vectors, "IN_MEMORY", 0)
    on_disk = vectors(x, folder=tmp_path)
    for other in (shuffled, on_disk):
        found = rule.combine(other)
        assert torch.equal(found[0], expected)
        assert torch.equal(found[1], kept)
    assert list(tmp_path.iterdir()) == []  # the file has no name
    if name in ("mean", "clipped", "median", "trimmed", "krum", "multi_krum"):
        monkeypatch.setattr(client_vectors, "BLOCK", 8 * 9 * 7)  # blocks of 7 coordinates
        torch.testing.assert_close(rule.combine(vectors(x))[0], expected, rtol=1e-12, atol=0)


def test_what_counted_of_each_client_is_reported() -> None:
    x = np.ones((5, 4))
    x[0] = FAR
    for name in ("median", "trimmed", "krum", "multi_krum"):
        kept = AGGREGATORS[name]().combine(vectors(x))[1]
        assert kept[0] == 0
        assert kept[1:].max() == 1
    assert NormClipped().combine(vectors(x))[1][0] == pytest.approx(2 / (2 * FAR))


def test_a_disk_without_room_is_an_error_that_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the size of files stands in for the full disk."""
    resource = pytest.importorskip("resource", reason="only Unix can limit the size of files")
    monkeypatch.setattr(client_vectors, "IN_MEMORY", 0)
    found = ClientVectors(2, 200_000, torch.float32, tmp_path)
    found.add(1, torch.ones(200_000), 1.0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"for the 1.60 MB of a cohort's replies") as caught:
            found.add(2, torch.ones(200_000), 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(tmp_path)
    assert found.clients == [1]


@pytest.mark.parametrize("rule", [TrimmedMean(0.2), MultiKrum(0.2)])
def test_lost_replies_of_honest_clients_leave_as_many_liars(rule: Aggregator) -> None:
    """Two of ten lie, five honest replies are lost: a fifth of the five left would be one."""
    x = drawn(5)
    x[:2] = FAR
    left = ClientVectors(10, x.shape[1], torch.float64)
    for client, row in enumerate(torch.as_tensor(x)):
        left.add(client, row, 1.0)
    assert np.abs(rule.combine(left)[0].numpy()).max() < FAR / 100
    assert np.abs(combined(rule, x)).max() > FAR / 100


def test_krum_refuses_a_cohort_that_is_too_small() -> None:
    with pytest.raises(ConfigError, match=r"aggregate.fraction is 0.4 with a cohort of 10; Krum "
                                          r"needs 11 clients for 4"):  # fmt: skip
        Krum(0.4).check(10)
    Krum(0.4).check(13)


def test_a_defender_counts_as_many_liars_as_an_attack_has() -> None:
    for n in range(1, 60):
        for fraction in (0.0, 0.1, 0.2, 0.3):
            expected = most_dishonest(fraction, n)
            if fraction == 0 or fraction * n >= 0.5:  # else such an attack is refused
                liars = Liars(SignFlip(fraction=fraction), Key(0), n).clients
                assert expected == min(len(liars), (n - 1) // 2)
            else:
                assert expected == 0


LIKE = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}


def reduced(aggregation: Aggregation, reduce: Any, replies: Any) -> Any:
    reducers = aggregation.reducers("train", 0, reduce)
    started = {name: one.start(len(replies)) for name, one in reducers.items()}
    for client, (up, weight) in replies.items():
        for name, one in started.items():
            one.add(client, up[name], weight)
    return {name: one.result() for name, one in started.items()}


def test_the_reducer_gives_the_aggregate_the_shape_of_the_part() -> None:
    rng = np.random.default_rng(0)
    trees = {k: {"a": torch.tensor(rng.normal(size=(2, 3))).float(),
                 "b": torch.tensor(rng.normal(size=4)).float()} for k in range(5)}  # fmt: skip
    replies = {k: ({"delta": one}, 2.0) for k, one in trees.items()}
    aggregation = Aggregation(CoordinateMedian())
    found = reduced(aggregation, {"delta": Mean(LIKE)}, replies)["delta"]
    for name in LIKE:
        expected = torch.stack([one[name] for one in trees.values()]).median(0).values
        assert torch.equal(found[name], expected)
    (measured,) = aggregation.measured
    whole = torch.cat([found["a"].reshape(-1), found["b"]]).double()
    for k, one in trees.items():
        mine = torch.cat([one["a"].reshape(-1), one["b"]]).double()
        assert measured.norms[k] == pytest.approx(float(mine.norm()))
        cosine = float(mine @ whole / mine.norm() / whole.norm())
        assert measured.cosines[k] == pytest.approx(cosine)


def test_the_plain_mean_keeps_the_bits_of_the_protocol() -> None:
    replies = {k: ({"delta": torch.as_tensor(row).float()}, k + 1.0)
               for k, row in enumerate(drawn(6))}  # fmt: skip
    reduce = {"delta": Mean(torch.zeros(7))}
    plain = reduce["delta"].start(6)
    for client, (up, weight) in replies.items():
        plain.add(client, up["delta"], weight)
    assert torch.equal(reduced(Aggregation(PlainMean()), reduce, replies)["delta"], plain.result())


def test_prototypes_are_aggregated_by_class_among_the_clients_that_hold_it() -> None:
    """Class 1 is held by three clients, of which one lies; class 2 by nobody."""
    counts = torch.tensor([[2, 1, 0], [3, 2, 0], [1, 4, 0], [5, 0, 0]])
    means = torch.as_tensor(drawn(12, 4).reshape(4, 3, 4))
    means[0] = 1e3  # within the limit of an exact sum
    replies = {k: ({"sums": counts[k, :, None] * means[k], "counts": counts[k]}, 1.0)
               for k in range(4)}  # fmt: skip
    like = {"sums": Sum(torch.zeros(3, 4).double()), "counts": Sum(torch.zeros(3).long())}
    found = reduced(Aggregation(CoordinateMedian()), like, replies)
    assert torch.equal(found["counts"], counts.sum(0))
    means_found = found["sums"] / found["counts"].clamp_min(1)[:, None]
    np.testing.assert_allclose(means_found[0], np.median(means[:, 0], axis=0), rtol=1e-12)
    np.testing.assert_allclose(means_found[1], np.median(means[:3, 1], axis=0), rtol=1e-12)
    assert not means_found[2].any()
    plain = reduced(Aggregation(PlainMean()), like, replies)
    torch.testing.assert_close(plain["sums"], sum(up["sums"] for up, _ in replies.values()))


def test_shrunk_prototypes_of_equal_classes_have_the_aggregate_of_the_means() -> None:
    local = FewRoundLearner(Model(Conv4(8), None, (32, 32, 3)), prototypes="shrunk")
    means, counts = torch.as_tensor(drawn(6, 5)).view(2, 3, 5).float(), torch.full((2,), 4.0)
    replies = {}
    for k in range(3):
        sums, own = local.summands(Prototypes(means[:, k], counts > 0), counts)
        replies[k] = ({"sums": sums, "counts": own}, 1.0)
    like = {"sums": Sum(torch.zeros(2, 5)), "counts": Sum(torch.zeros(2))}
    got = reduced(Aggregation(CoordinateMedian()), like, replies)
    found, _ = local.global_prototypes(got["sums"], got["counts"])
    torch.testing.assert_close(found.means, means.median(1).values)


def test_negative_counts_are_refused() -> None:
    like = {"sums": Sum(torch.zeros(2, 4)), "counts": Sum(torch.zeros(2).long())}
    counts = Aggregation(PlainMean()).reducers("train", 0, like)["counts"]
    assert counts.fault(0, torch.tensor([3, -2]), 1.0) == "counts holds -2, expected 0 or more"
    assert counts.fault(0, torch.tensor([3, 0]), 1.0) is None


@pytest.mark.parametrize(
    ("reduce", "said"),
    [({"model": Gather()}, "part 'model' of 'train' is kept for each client apart"),
     ({"delta": Mean(LIKE), "products": Sum(LIKE)}, "part 'products' of 'train' is summed"),
     ({"counts": Sum(LIKE)}, "part 'counts' of 'train' is summed")],
)  # fmt: skip
def test_a_part_without_a_robust_aggregate_is_refused(reduce: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Aggregation(Krum()).reducers("train", 0, reduce)
    Aggregation(PlainMean()).reducers("train", 0, reduce)
