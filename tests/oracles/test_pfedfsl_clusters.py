"""Planted clusters: clients whose classes differ in the same pixels find each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from fedshot.data import Dataset, EpisodeSpec, Partition
from fedshot.fleets import Guard, Host, PrivateStore, Sequential
from fedshot.keys import Key
from fedshot.methods import PFedFSL
from fedshot.nn import MLP, Batch, Model, Optimizer
from fedshot.protocol import Clients
from fedshot.reports import affinity_groups, affinity_picture

GROUPS, EACH, CLASSES, SHOT = 3, 4, 3, 5
CLIENTS = GROUPS * EACH
TRUTH = [k // EACH for k in range(CLIENTS)]


def planted() -> tuple[Dataset, Partition]:
    """Three clusters of four clients, each cluster with three classes that nobody else has.

    The classes of a cluster differ in their own third of the pixels; the rest is loud noise. So a
    model that has learned which pixels matter in one cluster is of no use in another.
    """
    rng = Key(0).at("planted").numpy()
    x, y, rows = [], [], []
    for client in range(CLIENTS):
        g, mine = TRUTH[client], []
        for c in range(CLASSES):
            number = g * CLASSES + c
            signal = Key(1).at("class", number).numpy().integers(40, 216, 12)
            images = rng.integers(0, 256, (SHOT, 36))
            images[:, g * 12 : g * 12 + 12] = signal + rng.integers(-30, 31, (SHOT, 12))
            mine += range(len(y) * SHOT, (len(y) + 1) * SHOT)
            x.append(images.clip(0, 255))
            y.append(number)
        rows.append(np.array(mine))
    labels = np.repeat(np.array(y, dtype=np.int64), SHOT)
    pictures = np.concatenate(x).astype(np.uint8).reshape(-1, 6, 6, 1)
    return Dataset("planted", pictures, labels, tuple("abcdefghi")), Partition.of(rows)


class Play:
    """A federation on the planted clusters."""

    def __init__(self, folder: Path, **changes: object) -> None:
        options = {"m": 3, "delay": 2, "iota": 1e-4, "optimizer": Optimizer("sgd", 0.05)}
        self.method = PFedFSL(
            Model(MLP((32, 16)), None, (6, 6, 1)),
            EpisodeSpec(2, 1, 1),
            tuple(range(GROUPS * CLASSES)),
            CLIENTS,
            **(options | changes),  # type: ignore[arg-type]
        )
        data, partition = planted()
        self.host = Host(self.method, data, partition, PrivateStore(folder / "c"), Key(0))
        self.fleet = Guard(Sequential(self.host))
        self.server = self.method.init(Key(2))
        self.t = 0

    def play(self, rounds: int) -> Play:
        for _ in range(rounds):
            self.t += 1
            self.server, self.metrics = self.method.round(
                self.server, self.clients("train"), Key(2).at(self.t)
            )
        return self

    def clients(self, phase: str) -> Clients:
        return Clients(self.fleet, range(CLIENTS), round=self.t, phase=phase)  # type: ignore[arg-type]

    def losses(self) -> np.ndarray:
        """Return [i, j], the loss of client j's model on client i's samples."""
        now = self.clients("evaluate")
        models = [self.method.own_model(self.server, now, j) for j in range(CLIENTS)]
        batches: list[Batch] = [
            self.method.draw(self.host.data(i), Key(0)).whole for i in range(CLIENTS)
        ]
        return np.array(
            [
                [float(self.method.judge.loss(m["theta"], m["stats"], b)) for m in models]
                for b in batches
            ]
        )


@pytest.fixture(scope="module")
def federated(tmp_path_factory: pytest.TempPathFactory) -> Play:
    return Play(tmp_path_factory.mktemp("planted")).play(40)


def test_a_model_of_the_same_cluster_has_the_lower_loss(tmp_path: Path) -> None:
    """The premise: without it affinities would have nothing to find."""
    losses = Play(tmp_path, m=0).play(30).losses()
    same = np.equal.outer(TRUTH, TRUTH) & ~np.eye(CLIENTS, dtype=bool)
    other = ~np.equal.outer(TRUTH, TRUTH)
    for i in range(CLIENTS):
        assert losses[i][same[i]].mean() < losses[i][other[i]].mean() - 0.1


def test_the_affinities_recover_the_clusters(federated: Play) -> None:
    q = federated.server.q.numpy()
    assert adjusted_rand_score(TRUTH, affinity_groups(q, GROUPS)) >= 0.9
    top = [q[i].argsort()[-3:] for i in range(CLIENTS)]
    right = [TRUTH[j] == TRUTH[i] for i in range(CLIENTS) for j in top[i]]
    assert np.mean(right) > 0.9


def test_random_choice_learns_affinities_and_does_not_act_on_them(tmp_path: Path) -> None:
    """The control: what the choice by affinity changes is who is sent, and with that the loss."""
    alike = Play(tmp_path, choose="random").play(40)
    same = np.equal.outer(TRUTH, TRUTH)
    q = alike.server.q.numpy()
    tried = (q != 0) & ~np.eye(CLIENTS, dtype=bool)
    assert (tried & ~same).sum() == (~same).sum()  # everybody was sent everybody


def test_the_affinities_are_drawn_with_clusters_side_by_side(federated: Play) -> None:
    q = federated.server.q.numpy()
    shuffled = np.array([0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11])
    found = affinity_picture(q[np.ix_(shuffled, shuffled)], [TRUTH[i] for i in shuffled])
    assert found.startswith("<?xml")
    assert "client that is sent it" in found
    assert "Affinities of 12 clients" in found
    assert affinity_picture(q, format="png").startswith(b"\x89PNG")
    nothing = np.zeros((3, 3))
    np.fill_diagonal(nothing, -np.inf)
    assert "<svg" in affinity_picture(nothing)
