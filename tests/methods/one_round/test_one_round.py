"""One-round methods against scikit-learn on the pooled data, however clients hold the examples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.covariance import oas
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from torch import Tensor

from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset, Ints
from fedshot.data.episodes.augment import Augment
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import Partition
from fedshot.data.partitions.registry import PARTITIONS
from fedshot.fleets.host import Host
from fedshot.fleets.private import PrivateStore
from fedshot.fleets.sequential import Sequential
from fedshot.learners.learner import EvalEpisode
from fedshot.methods.one_round.feature_sums import (
    OneRoundMethod,
    OneRoundState,
    without_negative,
)
from fedshot.methods.one_round.fed3r import FED3R
from fedshot.methods.one_round.fedcgs import FedCGS
from fedshot.methods.one_round.fedncm import FedNCM
from fedshot.nn.models.backbones import MLP
from fedshot.nn.models.model import Model
from fedshot.protocol.clients import Clients

CLASSES, CLIENTS, D = 10, 10, 8
BASE = tuple(range(CLASSES - 2))  # the last two classes are new
EPISODE = EpisodeSpec(way=2, shot=1, query=1)
MODEL = Model(MLP(hidden=()), None, (D,), dtype="float64")


def dataset() -> Dataset:
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(CLASSES), rng.integers(20, 60, CLASSES))
    spread = rng.normal(size=(D, D))
    x = rng.normal(size=(CLASSES, D))[y] + rng.normal(size=(len(y), D)) @ spread
    return Dataset("gauss", x.astype(np.float32), y, tuple("abcdefghij"))


DATA = dataset()
TRAINED = DATA.images_of(BASE)
X, Y = DATA.x[TRAINED].astype(np.float64), DATA.y[TRAINED]  # type: ignore[index, union-attr]


def iid() -> list[Ints]:
    return list(np.array_split(np.random.default_rng(1).permutation(TRAINED), CLIENTS))


def dirichlet() -> list[Ints]:
    split = PARTITIONS["dirichlet"](clients=CLIENTS, alpha=0.3)
    found = split.assign(DATA, TRAINED, Key(3), EpisodeSpec(way=1, shot=1, query=1)).train
    return [found[k] for k in range(CLIENTS)]


def one_class_each() -> list[Ints]:
    return [DATA.images_of([c]) for c in BASE]


class Federation:
    """One method at the clients of a partition."""

    def __init__(self, method: OneRoundMethod, rows: list[Ints], folder: Path) -> None:
        self.method, self.n = method, len(rows)
        self.fleet = Sequential(
            Host(method, DATA, Partition.of(rows), PrivateStore(folder), Key(0))
        )
        self.server = method.init(Key(0))

    def clients(self, round: int, cohort: int | None = None) -> Clients:
        return Clients(self.fleet, range(self.n), cohort=cohort, round=round)

    def round(self, round: int = 1, cohort: int | None = None) -> OneRoundState:
        clients = self.clients(round, cohort)
        self.server, _ = self.method.round(self.server, clients, Key(0).at("round", round))
        return self.server

    def logits(self, episode: EvalEpisode) -> Tensor:
        (found,) = self.method.evaluate(self.server, self.clients(1), [episode], Key(0))
        return found.logits


def of_base_classes() -> EvalEpisode:
    """Return an episode of all base classes, predicted without a support set."""
    none = torch.zeros(0, D), torch.zeros(0, dtype=torch.int64)
    return EvalEpisode(*none, torch.from_numpy(X), torch.tensor(BASE))


def of_new_classes(shot: int) -> EvalEpisode:
    rows = [DATA.images_of([c]) for c in (CLASSES - 2, CLASSES - 1)]
    support = np.concatenate([one[:shot] for one in rows])
    query = np.concatenate([one[shot:] for one in rows])
    y = torch.arange(2).repeat_interleave(shot)
    x = torch.from_numpy(DATA.x[support]), y, torch.from_numpy(DATA.x[query])  # type: ignore[index]
    return EvalEpisode(*x, torch.tensor([CLASSES - 2, CLASSES - 1]))


each_partition = pytest.mark.parametrize("split", [iid, dirichlet, one_class_each])


@each_partition
def test_fedcgs_is_scikit_learns_linear_discriminant_of_the_pooled_data(
    split: Any, tmp_path: Path
) -> None:
    run = Federation(
        FedCGS(MODEL, EPISODE, BASE, normalize=False, shrinkage=0.1), split(), tmp_path
    )
    run.round()
    pooled = LinearDiscriminantAnalysis("lsqr", shrinkage=0.1, store_covariance=True).fit(X, Y)
    # scikit-learn weighs classes by their examples; all are equally likely here.
    wanted = pooled.decision_function(X) - np.log(pooled.priors_)
    covariance = run.method.covariance(run.server.total).numpy()  # type: ignore[attr-defined]
    assert abs(covariance - pooled.covariance_).max() < 1e-10 * abs(covariance).max()
    found = run.logits(of_base_classes()).numpy()
    wanted -= wanted.max(axis=1, keepdims=True)
    assert abs(found - wanted).max() < 1e-10 * abs(wanted).max()


@each_partition
def test_fed3r_is_scikit_learns_ridge_regression_of_the_pooled_data(
    split: Any, tmp_path: Path
) -> None:
    method = FED3R(MODEL, EPISODE, BASE, normalize=False, ridge_lambda=0.7)
    run = Federation(method, split(), tmp_path)
    run.round()
    one_hot = (Y[:, None] == np.array(BASE)).astype(np.float64)
    pooled = Ridge(alpha=0.7, fit_intercept=False, solver="cholesky").fit(X, one_hot)
    found = run.logits(of_base_classes()).numpy()
    assert abs(found - pooled.predict(X)).max() < 1e-10


@pytest.mark.parametrize("shot", [1, 5])
def test_fed3r_with_new_classes_is_ridge_regression_of_all_examples_together(
    shot: int, tmp_path: Path
) -> None:
    run = Federation(FED3R(MODEL, EPISODE, BASE, normalize=False), iid(), tmp_path)
    run.round()
    episode = of_new_classes(shot)
    x = np.concatenate([X, episode.support_x.double().numpy()])
    y = np.concatenate([Y, episode.classes[episode.support_y].numpy()])
    one_hot = (y[:, None] == np.arange(CLASSES)).astype(np.float64)
    pooled = Ridge(alpha=1.0, fit_intercept=False, solver="cholesky").fit(x, one_hot)
    wanted = pooled.predict(episode.query_x.double().numpy())[:, -2:]
    assert abs(run.logits(episode).numpy() - wanted).max() < 1e-10


def test_fedcgs_predicts_new_classes_by_the_mahalanobis_distance(tmp_path: Path) -> None:
    run = Federation(FedCGS(MODEL, EPISODE, BASE, shrinkage=0.2), iid(), tmp_path)
    run.round()
    episode = of_new_classes(3)
    support, query = (
        x.double() / x.double().norm(dim=1, keepdim=True)
        for x in (episode.support_x, episode.query_x)
    )
    inverse = run.method.covariance(run.server.total).inverse()  # type: ignore[attr-defined]
    gaps = query[:, None] - support.view(2, 3, D).mean(1)
    wanted = -(gaps @ inverse * gaps).sum(-1) / 2
    found = run.logits(episode)  # equal up to a term that all classes share
    torch.testing.assert_close(found - found[:, :1], wanted - wanted[:, :1], rtol=0, atol=1e-9)


def test_the_estimated_shrinkage_is_scikit_learns(tmp_path: Path) -> None:
    run = Federation(FedCGS(MODEL, EPISODE, BASE, normalize=False), iid(), tmp_path)
    run.round()
    means = np.stack([X[c == Y].mean(0) for c in BASE])
    wanted, _ = oas(X - means[Y], assume_centered=True)
    found = run.method.covariance(run.server.total).numpy()  # type: ignore[attr-defined]
    np.testing.assert_allclose(found, wanted, rtol=1e-9)


def test_one_example_of_each_class_has_no_covariance(tmp_path: Path) -> None:
    rows = [DATA.images_of([c])[:1] for c in BASE]
    for shrinkage in (None, 0.1):
        method = FedCGS(MODEL, EPISODE, BASE, shrinkage=shrinkage)
        run = Federation(method, rows, tmp_path / str(shrinkage))
        run.round()
        torch.testing.assert_close(method.covariance(run.server.total), torch.eye(D).double())


def test_a_run_warns_of_a_backbone_with_random_weights(tmp_path: Path) -> None:
    (warning,) = FedNCM(replace(MODEL, backbone=MLP((4,))), EPISODE, BASE).traits.warnings
    assert "random initial weights" in warning
    assert not FedNCM(MODEL, EPISODE, BASE).traits.warnings


@pytest.mark.parametrize("center", [True, False])
def test_fedncm_is_the_cosine_with_class_means(center: bool, tmp_path: Path) -> None:
    run = Federation(FedNCM(MODEL, EPISODE, BASE, center=center), one_class_each(), tmp_path)
    run.round()
    unit = X / np.linalg.norm(X, axis=1, keepdims=True)
    middle = unit.mean(0) if center else 0.0
    means = np.stack([unit[c == Y].mean(0) for c in BASE]) - middle
    moved = unit - middle
    lengths = np.linalg.norm(moved, axis=1)[:, None] * np.linalg.norm(means, axis=1)
    np.testing.assert_allclose(
        run.logits(of_base_classes()).numpy(), moved @ means.T / lengths, atol=1e-10
    )


def test_noise_leaves_no_negative_eigenvalue_and_rounding_is_left_alone() -> None:
    h = torch.randn(3, 8, dtype=torch.float64)
    of_rank_3, noise = h.T @ h, torch.randn(8, 8, dtype=torch.float64)
    assert without_negative(of_rank_3) is of_rank_3
    noisy = of_rank_3 + noise + noise.T
    values, vectors = torch.linalg.eigh(noisy)
    assert values[0] < -1
    nearest = without_negative(noisy)
    torch.testing.assert_close(nearest, vectors @ values.clamp_min(0).diag() @ vectors.T)
    assert without_negative(torch.zeros(2, 2)).abs().max() == 0


def test_a_client_is_counted_once_in_whichever_rounds_it_is_sampled(tmp_path: Path) -> None:
    whole = Federation(FED3R(MODEL, EPISODE, BASE), iid(), tmp_path / "whole")
    expected = whole.round().total
    sampled = Federation(FED3R(MODEL, EPISODE, BASE), iid(), tmp_path / "sampled")
    counted = []
    for r in range(1, 13):
        counted.append(int(sampled.round(r, cohort=4).total.counts.sum()))
    assert counted[0] < counted[-1] == len(TRAINED)
    for one, other in zip(expected, sampled.server.total, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-8)


def test_without_examples_new_classes_are_predicted_from_their_support_alone(
    tmp_path: Path,
) -> None:
    for method in (FedNCM(MODEL, EPISODE, BASE), FedCGS(MODEL, EPISODE, BASE)):
        logits = Federation(method, iid(), tmp_path / method.name).logits(of_new_classes(2))
        assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("cls", "options", "word"),
    [
        (FedCGS, {"shrinkage": 0.0}, "shrinkage"),
        (FED3R, {"ridge_lambda": -1.0}, "ridge_lambda"),
        (FedNCM, {"episode": replace(EPISODE, augment=Augment(flip=True))}, "does not augment"),
    ],
)
def test_an_option_that_cannot_act_is_refused(cls: Any, options: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        cls(**{"model": MODEL, "episode": EPISODE, "classes": BASE, **options})
