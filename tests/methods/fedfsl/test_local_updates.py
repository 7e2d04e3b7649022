"""What a visit counts for in the mean, and moments that a client keeps, for all of FedFSL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedshot.core import tree
from fedshot.core.tree import Tree
from fedshot.data.partitions.partition import Partition
from fedshot.learners.local_training import local_sgd
from fedshot.methods.fedfsl.fedfsl_mi import FedFSLMI
from fedshot.methods.fedfsl.fedfsl_mi_adv import FedFSLMIAdv
from fedshot.methods.fedfsl.fedfsl_naive import FedFSLNaive
from fedshot.methods.fedfsl.fedfsl_prox import FedFSLProx

from .oracle import ADAM, Run, options

ALL: list[tuple[Any, dict[str, Any]]] = [
    (FedFSLNaive, {}),
    (FedFSLProx, {}),
    (FedFSLMI, {"reference": "exclusive"}),
    (FedFSLMIAdv, {"reference": "exclusive"}),
]
every_method = pytest.mark.parametrize(("kind", "own"), ALL)


def close(a: Tree, b: Tree) -> None:
    for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


@every_method
def test_the_mean_by_examples_weighs_clients_by_what_they_hold(
    kind: Any, own: dict[str, Any], tmp_path: Path
) -> None:
    run = Run(kind(**options(weigh_by="examples", **own)), tmp_path, 2)
    rows = [run.host.data(k).indices for k in range(2)]
    run.host._partition = Partition.of([rows[0], rows[1][::2]])
    before = run.server
    after = run.round()
    held, moved = [], []
    for k in range(2):
        down = {n: part for n, part in before._asdict().items() if n != "pool" or part}
        private = run.method.init_client(k, run.host._key.at("client", k))
        reply = run.method.train(down, private, run.drawn(k))
        held.append(int(reply.weight))
        moved.append(reply.up["w"])
    assert held == [run.host.data(k).n for k in range(2)]
    assert held[0] > held[1]
    mean = tree.map(lambda a, b: (held[0] * a + held[1] * b) / sum(held), *moved)
    close(after.w, tree.add(before.w, mean))


@pytest.mark.parametrize("kind", [FedFSLNaive, FedFSLProx, FedFSLMI])
def test_kept_moments_make_two_visits_of_one_client_one_long_one(kind: Any, tmp_path: Path) -> None:
    terms = {FedFSLProx: {"mu": 0.0}, FedFSLMI: {"gamma": 0.0}}.get(kind, {})
    run = Run(kind(**options(optimizer_state="keep", optimizer=ADAM, **terms)), tmp_path, 1)
    w, stats, state = run.server.w, run.server.stats, None
    for _ in range(2):
        after = run.round()
        w, stats, state, _ = local_sgd(
            run.method.learner.episode_loss, ADAM, w, stats, run.drawn(0), state
        )
        close(after.w, w)
    fresh = Run(kind(**options(optimizer=ADAM, **terms)), tmp_path / "fresh", 1)
    fresh.round()
    assert not all(
        torch.allclose(a, b)
        for a, b in zip(tree.leaves(fresh.round().w), tree.leaves(w), strict=True)
    )


@every_method
def test_moments_are_as_old_as_the_visits_that_made_them(
    kind: Any, own: dict[str, Any], tmp_path: Path
) -> None:
    run = Run(kind(**options(optimizer_state="keep", optimizer=ADAM, **own)), tmp_path, 2)
    run.round()
    run.round([0])
    for client, visits in ((0, 2), (1, 1)):
        steps = [int(leaf) for path, leaf in tree.items(run.private(client)) if "step" in path]
        assert steps == [visits * 2]


def test_the_moments_of_heads_that_are_new_in_each_round_are_not_kept(tmp_path: Path) -> None:
    run = Run(FedFSLMIAdv(**options(optimizer_state="keep", optimizer=ADAM)), tmp_path, 1)
    run.round()
    assert {path.split("/")[0] for path, _ in tree.items(run.private(0))} == {"features"}
