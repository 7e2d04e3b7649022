"""FedFSL-prox against its objective written out, and its limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fedshot.methods.fedfsl.fedfsl_naive import FedFSLNaive
from fedshot.methods.fedfsl.fedfsl_prox import FedFSLProx
from fedshot.nn.losses import proximal
from fedshot.nn.optim import Optimizer
from methods.fedfsl.oracle import (
    Run,
    Weights,
    assert_objective,
    assert_rounds,
    assert_same_bits,
    both_optimizers,
    local_training,
    options,
    task_loss,
)


def method(**changes: Any) -> FedFSLProx:
    return FedFSLProx(**options(**changes))


@both_optimizers
def test_two_rounds_equal_the_objective_written_out(opt: Optimizer, tmp_path: Path) -> None:
    m = method(mu=0.7, optimizer=opt, episodes_per_step=2, local_steps=3)
    run = Run(m, tmp_path, 3)

    def update(w: Weights, k: int) -> Weights:
        def loss(v: Any, e: Any) -> Any:
            pull = sum((v[name] - w[name]).square().sum() for name in v)
            return task_loss(v, e) + 0.7 / 2 * pull

        return local_training(w, run.drawn(k).steps, opt, loss)

    assert_rounds(2, run, update)
    assert run.metrics["proximal"] > 0


@both_optimizers
def test_without_pull_it_is_fedfsl_naive_to_the_bit(opt: Optimizer, tmp_path: Path) -> None:
    runs = [
        Run(kind(**options(optimizer=opt) | more), tmp_path / kind.name, 3)
        for kind, more in ((FedFSLNaive, {}), (FedFSLProx, {"mu": 0.0}))
    ]
    assert_same_bits(*runs)


def test_the_term_has_no_part_in_the_first_local_step(tmp_path: Path) -> None:
    """There w is w^t; the inner steps never know of it."""
    near, naive = (
        Run(kind(**options(local_steps=1) | more), tmp_path / kind.name, 2).round()
        for kind, more in ((FedFSLProx, {"mu": 50.0}), (FedFSLNaive, {}))
    )
    torch.testing.assert_close(near.w, naive.w, rtol=1e-13, atol=1e-14)


def test_a_strong_pull_keeps_clients_near(tmp_path: Path) -> None:
    far, near = (
        Run(method(mu=mu, local_steps=5, optimizer=Optimizer("sgd", 0.05)), tmp_path / str(mu), 2)
        for mu in (0.0, 15.0)
    )
    moved = []
    for run in (far, near):
        start = run.server.w
        moved.append(float(proximal(run.round().w, start)))
    assert moved[1] < 0.5 * moved[0]


def test_the_gradient_of_the_objective_equals_finite_differences(tmp_path: Path) -> None:
    assert_objective(method(mu=0.7), tmp_path, 0.1)
