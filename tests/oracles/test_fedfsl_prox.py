"""FedFSL-prox against its objective written out, and its limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedshot import tree
from fedshot.errors import ConfigError
from fedshot.keys import Key
from fedshot.methods import FedFSLNaive, FedFSLProx
from fedshot.nn import Optimizer, proximal, value_and_grad
from oracles.fedfsl import (
    ADAM,
    SGD,
    Run,
    average,
    close,
    direction,
    dot,
    flat,
    local_training,
    options,
    slope,
    task_loss,
)


def method(**changes: Any) -> FedFSLProx:
    return FedFSLProx(**options(**changes))


@pytest.mark.parametrize("opt", [SGD, ADAM], ids=["sgd", "adam"])
def test_two_rounds_equal_the_objective_written_out(opt: Optimizer, tmp_path: Path) -> None:
    m = method(mu=0.7, optimizer=opt, episodes_per_step=2, local_steps=3)
    run = Run(m, tmp_path, 3)
    w = flat(run.server.w)
    for _ in range(2):
        run.round()
        start = w

        def loss(v: Any, e: Any, start: Any = start) -> Any:
            pull = sum((v[name] - start[name]).square().sum() for name in v)
            return task_loss(v, e) + 0.7 / 2 * pull

        w = average([local_training(w, run.drawn(k).steps, opt, loss) for k in range(3)])
    close(run.server.w, w)
    assert run.metrics["proximal"] > 0


@pytest.mark.parametrize("opt", [SGD, ADAM], ids=["sgd", "adam"])
def test_without_pull_it_is_fedfsl_naive_to_the_bit(opt: Optimizer, tmp_path: Path) -> None:
    runs = [
        Run(kind(**options(optimizer=opt) | more), tmp_path / kind.name, 3)
        for kind, more in ((FedFSLNaive, {}), (FedFSLProx, {"mu": 0.0}))
    ]
    for run in runs:
        run.round()
        run.round()
    naive, prox = runs
    assert tree.digest(prox.server) == tree.digest(naive.server)
    assert prox.metrics == naive.metrics


def test_the_gradient_of_the_term_is_the_distance_times_mu() -> None:
    w, anchor = ({"a": torch.randn(3, 2, generator=Key(s).torch())} for s in (0, 1))
    _, _, grad = value_and_grad(lambda v: (0.3 * proximal(v, anchor), {}), w)
    torch.testing.assert_close(grad["a"], 0.3 * (w["a"] - anchor["a"]))


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
    m = method(mu=0.7)
    run = Run(m, tmp_path, 1)
    run.t = 1
    ((e,), _), seed = run.drawn(0)
    anchor = run.server.w
    w = tree.map(lambda leaf, d: leaf + 0.1 * d, anchor, direction(anchor, 1))
    _, _, grad = value_and_grad(lambda v: (m.objective(anchor, v, {}, e, seed).loss, {}), w)
    for s in (2, 3):
        along = direction(w, s)
        want = slope(lambda v: m.objective(anchor, v, {}, e, seed).loss, w, along)
        torch.testing.assert_close(dot(grad, along), want, rtol=1e-6, atol=1e-8)


def test_a_pull_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mu is -1; expected a finite number from 0\."):
        method(mu=-1)
