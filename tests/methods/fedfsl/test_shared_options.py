"""What all FedFSL methods share, asked of each: answers, options, statistics, what is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.data.episodes.episode import Episode
from fedshot.evaluation.episodic_test import EpisodicTest
from fedshot.learners.maml import InnerLoop
from fedshot.methods.base.fsl_local import FSLLocal
from fedshot.methods.fedfsl.fedfsl_mi import FedFSLMI
from fedshot.methods.fedfsl.fedfsl_mi_adv import FedFSLMIAdv
from fedshot.methods.fedfsl.fedfsl_naive import FedFSLNaive
from fedshot.methods.fedfsl.fedfsl_prox import FedFSLProx
from fedshot.nn.heads import LinearHead
from fedshot.nn.models.backbones import Conv4
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.clients import Clients
from methods.fedfsl.oracle import (
    SGD,
    SPEC,
    Run,
    adapt,
    assert_rounds,
    close,
    divergence,
    flat,
    local_training,
    logits,
    options,
    p,
    task_loss,
)

FEDFSL = (FedFSLNaive, FedFSLProx, FedFSLMI, FedFSLMIAdv)
RUNNING = Model(Conv4(width=4), LinearHead(3), (6, 6, 1), "running", dtype="float64")
FAR = Optimizer("sgd", 2.0)
every_method = pytest.mark.parametrize("kind", FEDFSL)


def answered(run: Run) -> list[tuple[Any, Episode]]:
    """Return the answers of a test, each with its question as an episode."""
    episodic_test = EpisodicTest.draw(run.host._dataset, range(5), SPEC, 4, Key(8))
    clients = Clients(run.fleet, run.ids, round=run.t, phase="evaluate")
    found = run.method.evaluate(run.server, clients, episodic_test.eval_episodes, Key(7))
    asked = [episodic_test.eval_episodes[a.eval_episode] for a in found]
    return [
        (
            a,
            Episode(
                q.support_x, q.support_y, q.query_x, episodic_test.labels(a.eval_episode), q.classes
            ),
        )
        for a, q in zip(found, asked, strict=True)
    ]


@every_method
def test_an_answer_is_the_averaged_model_after_its_steps(kind: Any, tmp_path: Path) -> None:
    inner = InnerLoop(0.1, steps=1, test_steps=6)
    run = Run(kind(**options(inner=inner)), tmp_path, 2)
    run.round()
    before, found = tree.digest(run.server), answered(run)
    assert tree.digest(run.server) == before
    assert [(a.eval_episode, a.client) for a, _ in found] == [(u, None) for u in range(4)]
    for answer, e in found:
        want = logits(adapt(flat(run.server.w), e, replace(inner, steps=6)), e.query_x)
        torch.testing.assert_close(answer.logits, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("order", ["first", "second"])
@pytest.mark.parametrize("adapts", ["all", "head"])
def test_inner_steps_are_of_the_order_and_the_part_asked_for(
    order: Any, adapts: Any, tmp_path: Path
) -> None:
    inner = InnerLoop(0.1, steps=2, order=order, adapts=adapts)
    run = Run(FedFSLNaive(**options(inner=inner)), tmp_path, 2)
    assert_rounds(2, run, lambda w, k: local_training(
        w, run.drawn(k).steps, SGD, lambda v, e: task_loss(v, e, inner)))  # fmt: skip


def test_a_client_alone_trains_its_own_model_and_answers_by_it(tmp_path: Path) -> None:
    inner = InnerLoop(0.2, steps=3, test_steps=5)
    run = Run(FSLLocal(**options(inner=inner, episodes_per_step=2)), tmp_path, 2)
    before = [flat(run.private(k)["theta"]) for k in run.ids]
    run.round()
    for k in run.ids:
        steps = run.drawn(k).steps
        assert [len(step) for step in steps] == [2, 2]
        want = local_training(before[k], steps, SGD, lambda v, e: task_loss(v, e, inner))
        close(run.private(k)["theta"], want)
    for answer, e in answered(run):
        own = flat(run.private(answer.client)["theta"])
        want_logits = logits(adapt(own, e, replace(inner, steps=5)), e.query_x)
        torch.testing.assert_close(answer.logits.double(), want_logits, rtol=1e-5, atol=1e-6)


def test_one_step_of_mi_moves_the_statistics_as_one_of_naive(tmp_path: Path) -> None:
    """In the first step the client is at the reference, so the divergence changes nothing."""
    shared = options(model=RUNNING, local_steps=1)
    mi, naive = (
        Run(FedFSLMI(**shared, gamma=2.0), tmp_path / "mi", 2),
        Run(FedFSLNaive(**shared), tmp_path / "naive", 2),
    )
    start = flat(mi.server.stats)
    close(mi.round().stats, flat(naive.round().stats))
    assert all(not torch.equal(leaf, start[n]) for n, leaf in flat(mi.server.stats).items())


@every_method
def test_running_statistics_move(kind: Any, tmp_path: Path) -> None:
    run = Run(kind(**options(model=RUNNING)), tmp_path, 2)
    start = flat(run.server.stats)
    run.round()
    assert all(not torch.equal(leaf, start[n]) for n, leaf in flat(run.server.stats).items())


# ------------------------------------------------------------------------- what is reported
def after_one(run: Run, loss: Any) -> tuple[Any, Any, Any]:
    """Return the weights before and after the first of client 0's steps, and the second's episode.

    Of a run of one client and two steps of one episode each.
    """
    start = flat(run.server.w)
    run.round()
    first, second = run.drawn(0).steps
    return start, local_training(start, (first,), run.method.optimizer, loss), second[0]


@pytest.mark.parametrize("mode", ["v1", "paper", "strict"])
def test_mi_reports_the_plain_divergence(mode: Any, tmp_path: Path) -> None:
    """Of the first step it is 0: the client is where the reference is."""
    run = Run(FedFSLMI(**options(gamma=2.0, mode=mode, epsilon=0.01, optimizer=FAR)), tmp_path, 1)
    start, moved, e = after_one(run, task_loss)
    want = divergence(p(start, e), p(moved, e)).detach()
    assert want > 1e-4
    torch.testing.assert_close(run.metrics["mi"], float(want) / 2, rtol=1e-9, atol=0)


def test_prox_reports_half_the_squared_distance(tmp_path: Path) -> None:
    run = Run(FedFSLProx(**options(mu=0.3)), tmp_path, 1)
    start, moved, _ = after_one(run, task_loss)
    half = sum(float((moved[n] - start[n]).square().sum()) for n in start) / 2
    torch.testing.assert_close(run.metrics["proximal"], half / 2, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("kind", "own"), [(FedFSLNaive, {}), (FedFSLProx, {"mu": 0.0}), (FedFSLMI, {"gamma": 0.0})]
)
def test_loss_and_accuracy_are_those_of_the_queries_after_adapting(
    kind: Any, own: Any, tmp_path: Path
) -> None:
    run = Run(kind(**options(local_steps=1, **own)), tmp_path, 1)
    start = flat(run.server.w)
    run.round()
    (e,) = run.drawn(0).steps[0]
    out = logits(adapt(start, e), e.query_x)
    right = (out.argmax(1) == e.query_y).double().mean()
    loss = F.cross_entropy(out, e.query_y).detach()
    torch.testing.assert_close(run.metrics["accuracy"], float(right), rtol=1e-9, atol=0)
    torch.testing.assert_close(run.metrics["loss"], float(loss), rtol=1e-9, atol=0)
