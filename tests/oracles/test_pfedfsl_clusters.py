"""Planted clusters: clients whose classes differ in the same pixels find each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import adjusted_rand_score

from fedshot.data import Dataset, EpisodeSpec, Partition
from fedshot.fleets import Guard, Host, PrivateStore, Sequential
from fedshot.keys import Key
from fedshot.methods import PFedFSL
from fedshot.nn import MLP, Batch, Model, Optimizer
from fedshot.protocol import Clients
from fedshot.reports import affinity_groups, affinity_picture

GROUPS, EACH, CLASSES, SHOT = 3, 4, 3, 10
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
        options = {"m": 3, "delay": 2, "iota": 1e-4, "optimizer": Optimizer("sgd", 0.2)}
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

    def losses(self) -> NDArray[np.float64]:
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


def chosen(play: Play, rounds: int) -> NDArray[np.float64]:
    """Play on; return [i, j], how often client i was sent client j's model."""
    counts = np.zeros((CLIENTS, CLIENTS))
    for _ in range(rounds):
        key = Key(2).at(play.t + 1)
        for i in range(CLIENTS):
            counts[i, play.method.neighbours(play.server, range(CLIENTS), i, key)] += 1
        play.play(1)
    return counts


SAME = np.equal.outer(TRUTH, TRUTH) & ~np.eye(CLIENTS, dtype=bool)
OTHER = ~np.equal.outer(TRUTH, TRUTH)


@pytest.mark.slow
def test_a_model_of_the_same_cluster_has_the_lower_loss(tmp_path: Path) -> None:
    """The premise: without it affinities would have nothing to find."""
    losses = Play(tmp_path, m=0).play(20).losses()
    for i in range(CLIENTS):
        assert losses[i][SAME[i]].max() < losses[i][OTHER[i]].min()


@pytest.mark.slow
def test_the_affinities_recover_the_clusters_and_are_drawn(tmp_path: Path) -> None:
    """Eq. (8) under an even choice, so that every pair has been tried about as often."""
    q = Play(tmp_path, choose="random").play(20).server.q.numpy()
    assert adjusted_rand_score(TRUTH, affinity_groups(q, GROUPS)) >= 0.9
    shuffled = np.array([0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11])
    again = affinity_groups(q[np.ix_(shuffled, shuffled)], GROUPS)
    assert adjusted_rand_score([TRUTH[i] for i in shuffled], again) >= 0.9
    assert "client that is sent it" in affinity_picture(q, again)


@pytest.mark.slow
def test_choice_by_affinity_sends_clients_their_own_clusters_models(tmp_path: Path) -> None:
    """Who is sent whom recovers the clusters; the entries of Q themselves level out.

    One's own model, trained on the same samples, nearly always weighs most, so eq. (8) takes away
    from all that are sent, least from the best. The highest is sent next and lowered in its turn:
    what differs in the end is how often each was sent, not where its entry stands.
    """
    play = Play(tmp_path)
    play.play(15)
    counts = chosen(play, 15)
    assert counts[SAME].sum() / counts.sum() > 2 * 3 / 11  # twice what chance would send
    assert adjusted_rand_score(TRUTH, affinity_groups(counts, GROUPS)) >= 0.9
    q, losses = play.server.q.numpy(), play.losses()
    assert q[SAME].max() < 0
    assert losses[SAME].mean() < 0.5 * losses[OTHER].mean()  # mixtures have become the clusters'


@pytest.mark.slow
def test_where_gains_alone_are_noted_hardly_any_is(tmp_path: Path) -> None:
    """One's own model nearly always weighs most, so the choice stays one of chance."""
    play = Play(tmp_path, affinity="positive").play(30)
    q = play.server.q.numpy()
    assert (q[~np.eye(CLIENTS, dtype=bool)] > 0).sum() <= 2
    counts = chosen(play, 10)
    assert counts[SAME].sum() / counts.sum() < 0.35  # 3 / 11 by chance


def test_affinities_are_drawn_with_groups_side_by_side() -> None:
    q = np.where(np.equal.outer(TRUTH, TRUTH), 0.1, -0.2)
    np.fill_diagonal(q, -np.inf)
    shuffled = np.array([0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11])
    mixed = q[np.ix_(shuffled, shuffled)]
    groups = affinity_groups(mixed, GROUPS)
    assert adjusted_rand_score([TRUTH[i] for i in shuffled], groups) == 1
    assert groups[0] == 0
    found = affinity_picture(mixed, groups)
    assert "client that is sent it" in found
    assert "Affinities of 12 clients" in found
    assert affinity_picture(mixed, format="png").startswith(b"\x89PNG")
    nothing = np.zeros((3, 3))
    np.fill_diagonal(nothing, -np.inf)
    assert "<svg" in affinity_picture(nothing)
