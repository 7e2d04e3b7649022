"""Common questions: made up, and how far clients' answers to them are apart."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshot.config.options import options_of
from fedshot.config.registry import difference
from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.learners.maml import InnerLoop
from fedshot.learners.prediction_drift import common_form, common_questions, divergence
from fedshot.methods.fedfsl.fedfsl_mi import FedFSLMI
from fedshot.methods.fedfsl.fedfsl_mi_adv import FedFSLMIAdv
from fedshot.methods.fedfsl.fedfsl_naive import FedFSLNaive
from fedshot.methods.fedfsl.fedfsl_prox import FedFSLProx
from fedshot.nn.heads import LinearHead
from fedshot.nn.losses import kl
from fedshot.nn.models.model import Model
from fedshot.nn.models.recurrent import GRU
from fedshot.nn.optim import Optimizer
from fedshot.protocol.method import diagnostic
from methods.fedfsl.oracle import Run, options

KINDS = (FedFSLNaive, FedFSLProx, FedFSLMI, FedFSLMIAdv)


def answers(n: int, seed: int = 0) -> dict[int, torch.Tensor]:
    rng = Key(seed).torch()
    return {c: torch.randn(6, 3, generator=rng) for c in range(n)}


def apart(found: dict[int, torch.Tensor]) -> dict[str, float]:
    return divergence({"common_questions": found})


def test_it_is_the_mean_over_pairs_of_the_symmetric_divergence() -> None:
    found = {c: told.log_softmax(-1) for c, told in answers(5).items()}
    pairs = [
        (kl(found[i].double(), found[j].double()) + kl(found[j].double(), found[i].double())) / 2
        for i, j in combinations(found, 2)
    ]
    want = float(torch.stack(pairs).mean())
    assert apart(found)["divergence"] == pytest.approx(want, rel=1e-12)


def test_the_order_of_arrival_does_not_matter() -> None:
    found = {c: told.log_softmax(-1) for c, told in answers(5).items()}
    back = dict(reversed(found.items()))
    assert apart(back) == apart(found)


def test_clients_that_agree_have_none_and_one_client_has_no_pair() -> None:
    same = answers(1)[0].log_softmax(-1)
    assert apart(dict.fromkeys(range(3), same))["divergence"] == pytest.approx(0, abs=1e-15)
    assert apart(answers(1)) == {}
    assert divergence({}) == {}


def test_the_questions_depend_on_the_shape_of_the_data_alone() -> None:
    model = options()["model"]
    first, second = common_questions(model, 2)
    assert tree.digest(common_questions(model, 1)[0]) == tree.digest(first)
    assert tree.digest(first) != tree.digest(second)
    assert first.support_x.dtype == torch.uint8
    assert (len(first.support_x), len(first.query_x)) == (3, 15)
    wide = replace(model, head=LinearHead(40))
    assert len(common_questions(wide, 1)[0].classes) == 5


def test_they_are_the_same_on_every_machine() -> None:
    (eval_episode,) = common_questions(options()["model"], 1)
    assert tree.digest(eval_episode)[:16] == "7bdfec32aaf811ae"


def test_an_example_keeps_about_half_of_its_class_pattern() -> None:
    (eval_episode,) = common_questions(options()["model"], 1)
    support, query = (
        eval_episode.support_x,
        eval_episode.query_x.reshape(3, 5, *eval_episode.query_x.shape[1:]),
    )
    near = (query == support[:, None]).float().mean()
    far = (query == support.roll(1, 0)[:, None]).float().mean()
    assert 0.2 < float(near) < 0.3  # each keeps half of the bytes
    assert float(far) < 0.05


def test_texts_have_words_and_no_padding() -> None:
    model = Model(GRU(4), LinearHead(2), (7, 5), table=torch.randn(11, 5))
    (eval_episode,) = common_questions(model, 1)
    x = eval_episode.query_x
    assert (x.dtype, tuple(x.shape)) == (torch.int32, (10, 7))
    assert int(x.min()) >= 1
    assert int(x.max()) <= 10


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_round_that_is_asked_to_reports_the_divergence_and_nothing_else_changes(
    kind: Any, tmp_path: Path
) -> None:
    silent = Run(kind(**options()), tmp_path / "a", 3)
    asked = Run(kind(**options(common_questions=1)), tmp_path / "b", 3)
    for run in (silent, asked):
        run.round()
    assert tree.digest(silent.server) == tree.digest(asked.server)
    assert "divergence" not in silent.metrics
    assert asked.metrics["divergence"] > 0
    assert {k: v for k, v in asked.metrics.items() if k != "divergence"} == silent.metrics
    assert asked.meter.total("train", "down") == silent.meter.total("train", "down")
    bytes_up = asked.meter.total("train", "up") - silent.meter.total("train", "up")
    assert bytes_up == 3 * tree.nbytes(common_form(asked.method.model, 1)) == 3 * 15 * 3 * 4


@pytest.mark.parametrize("lr", [5.0, 100.0])
def test_an_answer_that_blows_up_costs_nobody_the_round(lr: float, tmp_path: Path) -> None:
    wild = InnerLoop(lr=lr, steps=1, test_steps=10)  # a visit takes one step, an answer ten
    few = {"inner": wild, "local_steps": 1}
    silent = Run(FedFSLNaive(**options(**few)), tmp_path / "a", 3)
    asked = Run(FedFSLNaive(**options(common_questions=1, **few)), tmp_path / "b", 3)
    for run in (silent, asked):
        run.round()
    assert tree.digest(silent.server) == tree.digest(asked.server)
    assert math.isfinite(asked.metrics.get("divergence", 0.0))


def test_who_answers_with_no_number_is_left_out() -> None:
    found = {c: told.log_softmax(-1) for c, told in answers(4).items()}
    lost = {**found, 2: torch.ones(6, 3)}
    del found[2]
    assert apart(lost) == apart(found)


def test_who_asks_goes_on_with_a_run_that_did_not() -> None:
    old = {"method": {"name": "fedfsl_mi", "common_questions": 0, "gamma": 0.2}}
    new = {"method": {"name": "fedfsl_mi", "common_questions": 4, "gamma": 0.2}}
    assert difference(old, new) is None
    assert difference(old, {"method": {**new["method"], "gamma": 0.3}}) is not None


def test_an_option_of_that_name_is_no_such_one_in_another_method() -> None:
    old, new = ({"method": {"name": "mine", "common_questions": n}} for n in (0, 4))
    assert difference(old, new) == "method.common_questions was 0, is 4"


@pytest.mark.parametrize("odd", [{"method": [1]}, {"data": 5}, {"method": {"name": ["a"]}}])
def test_settings_that_are_none_differ_too(odd: dict[str, Any]) -> None:
    assert difference(odd, {"method": "fl_proto"}) is not None
    assert difference({"method": "fl_proto"}, odd) is not None


@dataclass(frozen=True)
class Telling:
    """Options of which one, and what lies in another, only watch."""

    optimizer: Optimizer = diagnostic(Optimizer())
    more: int = diagnostic(1)
    steps: int = 2


def test_what_lies_in_an_option_that_watches_watches_too() -> None:
    found = {one.path: one.is_diagnostic for one in options_of(Telling, "method")}
    assert found.pop("method.steps") is False
    assert len(found) > 2
    assert all(found.values())
