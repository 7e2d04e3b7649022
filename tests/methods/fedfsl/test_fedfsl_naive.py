"""FedFSL-naive against algorithm 1 of the paper, and against plain SGD where nothing adapts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from covering import slow
from fedshot.data.episodes.episode import Episode
from fedshot.learners.maml import InnerLoop
from fedshot.methods.fedfsl.fedfsl_naive import FedFSLNaive
from fedshot.nn.optim import Optimizer
from methods.fedfsl.oracle import (
    Run,
    Weights,
    assert_rounds,
    both_optimizers,
    close,
    flat,
    local_training,
    logits,
    options,
    task_loss,
)


def run_of(folder: Path, clients: int, **changes: Any) -> Run:
    return Run(FedFSLNaive(**options(**changes)), folder, clients)


def query_loss(w: Weights, e: Episode) -> Tensor:
    return F.cross_entropy(logits(w, e.query_x), e.query_y)


@both_optimizers
@pytest.mark.parametrize("inner_steps", [*slow(1), 3])
def test_two_rounds_equal_algorithm_1(opt: Optimizer, inner_steps: int, tmp_path: Path) -> None:
    inner = InnerLoop(0.1, inner_steps)
    run = run_of(tmp_path, 3, inner=inner, episodes_per_step=2, optimizer=opt)
    assert_rounds(2, run, lambda w, k: local_training(
        w, run.drawn(k).steps, opt, lambda v, e: task_loss(v, e, inner)))  # fmt: skip


def test_without_inner_steps_one_client_is_plain_sgd_on_the_queries(tmp_path: Path) -> None:
    sgd = Optimizer("sgd", 0.1, weight_decay=0.01)
    run = run_of(tmp_path, 1, inner=InnerLoop(steps=0), local_steps=4, optimizer=sgd)
    assert_rounds(2, run, lambda w, k: local_training(w, run.drawn(k).steps, sgd, query_loss))


def test_without_inner_steps_many_clients_of_one_step_are_one_big_batch(tmp_path: Path) -> None:
    # One SGD step each, averaged, is one SGD step on the mean of the clients' losses.
    sgd = Optimizer("sgd", 0.1)
    run = run_of(tmp_path, 3, inner=InnerLoop(steps=0), local_steps=1, optimizer=sgd)
    start = flat(run.server.w)
    run.round()
    every = [run.drawn(k).steps[0][0] for k in run.ids]
    x, y = torch.cat([e.query_x for e in every]), torch.cat([e.query_y for e in every])
    want = local_training(start, [every[:1]], sgd, lambda w, _: F.cross_entropy(logits(w, x), y))
    close(run.server.w, want, tol=1e-11)
