"""Planted clusters: clients whose classes differ in the same pixels, and who finds whom.

    PYTHONPATH=tests python -m methods.personal.planted_clusters docs/methods/pfedfsl-affinity.svg

prints what the method's page says of them, and draws the affinities.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import adjusted_rand_score

from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import Partition
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.private import PrivateStore
from fedshot.fleets.sequential import Sequential
from fedshot.learners.classification import Batch
from fedshot.methods.personal.pfedfsl import PFedFSL
from fedshot.nn.models.backbones import MLP
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.clients import Clients
from fedshot.reports.affinity_plots import affinity_picture

GROUPS, EACH, CLASSES, SHOT = 3, 4, 3, 10
CLIENTS = GROUPS * EACH
TRUTH = [k // EACH for k in range(CLIENTS)]


def affinity_groups(q: NDArray[np.float64], groups: int) -> list[int]:
    """Return each client's group, found by average linkage on the mean of Q_ij and Q_ji.

    The diagonal of `q` [clients, clients], minus infinity, is ignored. Groups are numbered from 0
    in the order of their first clients.
    """
    own = np.eye(len(q), dtype=bool)
    both = np.where(own, 0.0, q)
    both = (both + both.T) / 2
    away = np.where(own, 0.0, both.max() - both)
    found = AgglomerativeClustering(groups, metric="precomputed", linkage="average").fit(away)
    number: dict[int, int] = {}
    return [number.setdefault(int(label), len(number)) for label in found.labels_]


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

    def __init__(self, folder: Path, seed: int = 2, **changes: object) -> None:
        options = {"m": 3, "delay": 2, "iota": 1e-4, "optimizer": Optimizer("sgd", 0.2)}
        self.method = PFedFSL(
            Model(MLP((32, 16)), None, (6, 6, 1)),
            EpisodeSpec(2, 1, 1),
            tuple(range(GROUPS * CLASSES)),
            clients=CLIENTS,
            **(options | changes),  # type: ignore[arg-type]
        )
        data, partition = planted()
        self.host = Host(self.method, data, partition, PrivateStore(folder / "c"), Key(0))
        self.fleet = Guard(Sequential(self.host))
        self.key = Key(seed)
        self.server = self.method.init(self.key)
        self.t = 0

    def play(self, rounds: int) -> Play:
        for _ in range(rounds):
            self.t += 1
            self.server, self.metrics = self.method.round(
                self.server, self.clients("train"), self.key.at(self.t)
            )
        return self

    def clients(self, phase: str) -> Clients:
        return Clients(self.fleet, range(CLIENTS), round=self.t, phase=phase)  # type: ignore[arg-type]

    def losses(self) -> NDArray[np.float64]:
        """Return [i, j], the loss of client j's model on client i's samples."""
        now = self.clients("evaluate")
        models = [self.method.stored_model(self.server, now, j) for j in range(CLIENTS)]
        batches: list[Batch] = [
            self.method.draw(self.host.data(i), Key(0)).whole for i in range(CLIENTS)
        ]
        return np.array(
            [
                [
                    float(self.method.weighting_learner.loss(m["theta"], m["stats"], b))
                    for m in models
                ]
                for b in batches
            ]
        )


def chosen(play: Play, rounds: int) -> NDArray[np.float64]:
    """Play on; return [i, j], how often client i was sent client j's model."""
    counts = np.zeros((CLIENTS, CLIENTS))
    for _ in range(rounds):
        key = play.key.at(play.t + 1)
        for i in range(CLIENTS):
            counts[i, play.method.neighbours(play.server, range(CLIENTS), i, key)] += 1
        play.play(1)
    return counts


SAME = np.equal.outer(TRUTH, TRUTH) & ~np.eye(CLIENTS, dtype=bool)
OTHER = ~np.equal.outer(TRUTH, TRUTH)


def main(picture: Path) -> None:
    """Print the figures, and draw the affinities after 20 rounds of an even choice."""
    with tempfile.TemporaryDirectory() as folder:
        even = Play(Path(folder) / "even", choose="random").play(20)
        q = even.server.q.numpy()
        groups = affinity_groups(q, GROUPS)
        score = adjusted_rand_score(TRUTH, groups)
        print(f"chosen by chance, 20 rounds: adjusted Rand index {score:.2f}")
        picture.write_text(affinity_picture(q, groups), encoding="utf-8")
        shares = {"by chance": chosen(even, 10)}
        shares["by affinity, rounds 31 to 40"] = chosen(Play(Path(folder) / "own").play(30), 10)
        for seed in range(3):
            play = Play(Path(folder) / f"{seed}", seed=seed, affinity="positive").play(30)
            found = play.server.q.numpy()[~np.eye(CLIENTS, dtype=bool)]
            name = f"affinity=positive, seed {seed}: {(found > 0).sum()} of {found.size} entries"
            shares[f"{name}; by them"] = chosen(play, 10)
    for name, counts in shares.items():
        print(f"{name}: {counts[SAME].sum() / counts.sum():.0%} of one's own cluster")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
