"""Proposition 1 of the FedFSL paper: on a strongly convex loss the error falls as O(1/T).

Source: Fan & Huang, first version, proposition 1, which rests on Li et al. 2020, On the Convergence
of FedAvg on Non-IID Data, theorems 1 and 3: step sizes eta_t = 2 / (mu (gamma + t)), with
gamma = max(8 L / mu, E), T the gradient steps of a client and E those of a visit.
The loss is the paper's own example, logistic regression with an L2 penalty, both as it is
(no inner step) and as MAML's f_Q(w - a grad f_S(w)).

The theorem bounds a mean over the draws, so many runs go side by side, stacked along the first axis
of the weights; the loss of a stack is the sum of its runs, which do not touch each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.episode import ClientData
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import Partition
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.private import PrivateStore
from fedshot.fleets.sequential import Sequential
from fedshot.learners.learner import EpisodeLoss
from fedshot.learners.local_training import LocalEpisodes, local_sgd, sample_episodes
from fedshot.nn.gradients import descend
from fedshot.nn.optim import Optimizer
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.reducers import Mean

SPEC = EpisodeSpec(way=3, shot=2, query=4)
CLIENTS, VISIT, ROUNDS = 3, 5, 128
PENALTY, INNER_LR = 0.3, 0.05
MU, SMOOTH = 0.25, 1.0  # strong convexity and smoothness of the objective, checked below
GAMMA = max(8 * SMOOTH / MU, VISIT)


@cache
def dataset() -> Dataset:
    """Image i belongs to client i mod 3, and every client has its classes in another place."""
    rng = np.random.Generator(np.random.Philox(0))
    y = np.repeat(np.arange(3), 60)
    owner = np.arange(len(y)) % CLIENTS
    places = rng.uniform(40, 215, (CLIENTS, 3, 2, 2, 1))
    x = places[owner, y] + rng.normal(0, 40, (len(y), 2, 2, 1))
    return Dataset("places", x.clip(0, 255).astype(np.uint8), y, ("a", "b", "c"))


def client_data(k: int) -> ClientData:
    return ClientData(dataset(), np.arange(k, len(dataset()), CLIENTS))


class Tasks(NamedTuple):
    """Tasks stacked: inputs [tasks, n, 5] with a column of ones, labels one-hot [tasks, n, 3]."""

    support_x: Tensor
    support_y: Tensor
    query_x: Tensor
    query_y: Tensor

    def of(self, rows: Tensor | slice) -> Tasks:
        return Tasks(*[part[rows] for part in self])


@cache
def batch(k: int, equal: bool) -> Tasks:
    """Return B_k, the same at every visit; labels are the dataset's, not the episode's."""
    (drawn,) = sample_episodes(client_data(k), SPEC, 1, 6 if equal else 4 + 2 * k, Key(1)).steps

    def inputs(x: Tensor) -> Tensor:
        rows = x.double().flatten(1) / 127.5 - 1
        return torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.float64)], 1)

    def labels(y: Tensor) -> Tensor:
        return (y[:, None] == torch.arange(3)).double()

    return Tasks(
        torch.stack([inputs(e.support_x) for e in drawn]),
        torch.stack([labels(e.classes[e.support_y]) for e in drawn]),
        torch.stack([inputs(e.query_x) for e in drawn]),
        torch.stack([labels(e.classes[e.query_y]) for e in drawn]),
    )


def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the penalised cross-entropy of w [runs, 3, 5], summed over the runs."""
    log_p = (x @ w.mT).log_softmax(-1)
    return -(y * log_p).sum(-1).mean(-1).sum() + PENALTY / 2 * w.square().sum()


@dataclass(frozen=True)
class LocalSGD:
    """FedAvg of local SGD on the penalised loss, with the step sizes of the theorem."""

    inner_steps: int = 0
    runs: int = 64  # 0: one run with full gradients
    equal: bool = False  # the same |B_k| for every client
    constant: bool = False  # step size

    def init_client(self, client: int, key: Key) -> Tree:
        return {}

    def draw(self, data: ClientData, key: Key) -> tuple[tuple[Tasks, ...], Tensor]:
        """Return a task for each step and run, and |B_k|."""
        mine = batch(int(data.indices[0]), self.equal)
        n = torch.tensor(len(mine.query_x))
        if self.runs:
            chosen = torch.from_numpy(key.numpy().integers(int(n), size=(VISIT, self.runs)))
            return tuple(mine.of(rows) for rows in chosen), n
        # Without inner steps only the queries count, so all tasks together are one large one.
        return (Tasks(*[part.flatten(0, 1)[None] for part in mine]),) * VISIT, n

    def episode_loss(self, w: Tree, stats: Tree, task: Tasks, seed: Tensor) -> EpisodeLoss:
        def support(v: Tree, step: int) -> Tensor:
            return loss(v["w"], task.support_x, task.support_y)

        adapted = descend(support, w, lr=INNER_LR, steps=self.inner_steps, second_order=True)
        return EpisodeLoss(loss(adapted["w"], task.query_x, task.query_y), stats, torch.tensor(0.0))

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: tuple[tuple[Tasks, ...], Tensor]) -> Reply:
        tasks, n = drawn
        w = {"w": down["w"]}
        for t, task in enumerate(tasks, start=int(down["t"])):
            sgd = Optimizer("sgd", 2 / (MU * (GAMMA + (0 if self.constant else t))))
            steps = LocalEpisodes(((task,),), Key(0).tensor(), n)  # type: ignore[arg-type]
            w = local_sgd(self.episode_loss, sgd, w, {}, steps).params  # type: ignore[arg-type]
        return Reply({"delta": {"w": w["w"] - down["w"]}}, private, float(n))


class Objective:
    """f(w) = sum_k |B_k|/|B| L_k(w), that is the mean over all tasks; w is [..., 15]."""

    def __init__(self, m: LocalSGD, clients: tuple[int, ...] = (0, 1, 2)) -> None:
        every = [batch(k, m.equal) for k in clients]
        self.tasks = Tasks(*[torch.cat(parts) for parts in zip(*every, strict=True)])
        self.steps = m.inner_steps

    def __call__(self, w: Tensor) -> Tensor:
        sx, sy, qx, qy = self.tasks
        w = w.unflatten(-1, (1, 3, 5)).expand(*w.shape[:-1], len(sx), 3, 5)
        for _ in range(self.steps):  # the gradient of the softmax regression, in closed form
            p = (sx @ w.mT).softmax(-1)
            w = w - INNER_LR * ((p - sy).mT @ sx / sx.shape[1] + PENALTY * w)
        log_p = (qx @ w.mT).log_softmax(-1)
        each = -(qy * log_p).sum(-1).mean(-1) + PENALTY / 2 * w.square().sum((-2, -1))
        return each.mean(-1)

    def minimum(self) -> tuple[Tensor, float]:
        """Return (w*, f*) by Newton's method, with a gradient of at most 1e-12."""
        w = torch.zeros(15, dtype=torch.float64)
        for _ in range(8):
            w = w - torch.linalg.solve(self.hessian(w), torch.func.grad(self)(w))
        assert torch.func.grad(self)(w).norm() < 1e-12
        return w, float(self(w))

    def hessian(self, w: Tensor) -> Tensor:
        got: Tensor = torch.func.hessian(self)(w)
        return got


def errors(m: LocalSGD, folder: Path, *, cohort: int | None = None, seed: int = 7) -> np.ndarray:
    """Return the mean over the runs of f(w_T) - f* after every round, by the real exchange."""
    parts = [client_data(k).indices for k in range(CLIENTS)]
    host = Host(m, dataset(), Partition.of(parts), PrivateStore(folder), Key(0))  # type: ignore[arg-type]
    fleet = Guard(Sequential(host))
    f = Objective(m)
    best = f.minimum()[1]
    w, path = {"w": torch.zeros(max(1, m.runs), 3, 5, dtype=torch.float64)}, []
    for r in range(ROUNDS):
        clients = Clients(fleet, list(range(CLIENTS)), cohort=cohort, round=r + 1)
        key = Key(seed).at("round", r + 1)
        got = clients.exchange(
            m.train,
            w | {"t": torch.tensor(r * VISIT)},
            to=clients.sample(key),
            reduce={"delta": Mean(w)},
            key=key,
        )
        w = tree.add(w, got["delta"])
        path.append(w["w"].flatten(1))
    found: np.ndarray = (torch.stack([f(w) for w in path]) - best).mean(1).numpy()
    return found


def slope(found: np.ndarray, first: int) -> float:
    """Return d log(error) / d log(T) from round `first` on, of the means between doublings."""
    edges = [first * 2**i for i in range(int(np.log2(len(found) / first)) + 1)]
    means = [found[a - 1 : b - 1].mean() for a, b in pairwise(edges)]
    return float(np.polyfit(np.log(edges[:-1]), np.log(means), 1)[0])


@pytest.mark.slow  # of the example alone
@pytest.mark.parametrize("inner_steps", [0, 1])
def test_the_constants_of_the_theorem_hold(inner_steps: int) -> None:
    f = Objective(LocalSGD(inner_steps))
    best, _ = f.minimum()
    g = Key(3).torch()
    for scale in (0.0, 0.3, 1.0):
        near = best + scale * torch.randn(15, generator=g, dtype=torch.float64)
        curvatures = torch.linalg.eigvalsh(f.hessian(near))
        assert curvatures[0] > MU
        assert curvatures[-1] < SMOOTH


def test_the_clients_have_minima_of_their_own() -> None:
    best = Objective(LocalSGD()).minimum()[0]
    for k in range(CLIENTS):
        assert (Objective(LocalSGD(), (k,)).minimum()[0] - best).norm() > 0.1


@pytest.mark.parametrize("inner_steps", [0, 1])
def test_the_loss_of_the_clients_is_the_objective(inner_steps: int) -> None:
    m, n = LocalSGD(inner_steps), [len(batch(k, False).query_x) for k in range(CLIENTS)]
    assert n == [4, 6, 8]
    w = torch.randn(3, 5, generator=Key(2).torch(), dtype=torch.float64)
    losses = [  # each task as a run of its own
        m.episode_loss(
            {"w": w.expand(n[k], 3, 5)}, {}, batch(k, False), Key(0).tensor()
        ).loss.detach()
        for k in range(CLIENTS)
    ]
    want = Objective(m)(w.flatten())
    torch.testing.assert_close(torch.stack(losses).sum() / sum(n), want, rtol=1e-13, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("inner_steps", [0, 1])
def test_with_falling_step_sizes_the_error_falls_as_one_over_t(
    inner_steps: int, tmp_path: Path
) -> None:
    found = errors(LocalSGD(inner_steps), tmp_path)
    assert -1.3 < slope(found, 16) <= -0.9
    times_t = found * np.arange(1, ROUNDS + 1)
    assert times_t[16:].max() < times_t[:16].max() / 10


@pytest.mark.slow
def test_with_full_gradients_the_error_of_the_drift_falls_as_one_over_t_squared(
    tmp_path: Path,
) -> None:
    # Without noise only the clients' drift is left, which moves the end by O(eta_t).
    found = errors(LocalSGD(runs=0), tmp_path)
    assert -2.4 < slope(found, 32) < -1.9


@pytest.mark.slow
def test_with_a_sampled_cohort_the_error_times_t_stays_bounded(tmp_path: Path) -> None:
    m = LocalSGD(runs=0, equal=True)
    found = np.mean([errors(m, tmp_path, cohort=2, seed=seed) for seed in range(2)], axis=0)
    times_t = found * np.arange(1, ROUNDS + 1)
    assert times_t[16:].max() < 1.5 * times_t[:16].max()
    assert slope(found, 2) <= -0.9


@pytest.mark.slow
@pytest.mark.parametrize("runs", [0, 64])
def test_with_a_constant_step_size_the_error_stays(runs: int, tmp_path: Path) -> None:
    # Theorem 4 of Li et al.: several local steps need a falling step size, even without noise.
    found = errors(LocalSGD(runs=runs, constant=True), tmp_path)
    assert abs(slope(found, 16)) < 0.1
