"""F2L where clients are tested on images of their own: each question goes to its owner alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covering import covering
from fedshot.core.seeds import Key
from fedshot.protocol.clients import Clients
from methods.classification_oracle import Run
from methods.f2l.oracle import method
from system.runs import finished

OWN: dict[str, Any] = {
    "split": {"base": ["0-9"]},
    "partition": {"name": "pathological", "clients": 4, "way": 3, "shot": 4},
    "episode": {"way": 2, "shot": 1, "query": 1, "queries": "up_to"},
    "model": {"head": {"name": "linear", "way": 10}},
    "run": {"rounds": 1},
}


@pytest.mark.parametrize(("by", "many"), covering(["round_robin", "all"], [False, True]))
def test_questions_as_features_still_go_to_their_owners(
    by: Any, many: bool, tmp_path: Path
) -> None:
    """Whether each example is embedded once or each question by itself."""
    run = Run(method(test_clients=by), tmp_path, (10, 10, 10))
    eval_episodes = run.eval_episodes(many)
    eval_episodes.owners = tuple((1, 2)[u % 2] for u in range(len(eval_episodes)))
    clients = Clients(run.spy, run.ids, round=0, phase="evaluate")
    found = run.method.evaluate(run.server, clients, eval_episodes, Key(7))
    assert sorted((a.eval_episode, a.client) for a in found) == list(
        enumerate(eval_episodes.owners)
    )


@pytest.mark.parametrize("by", ["round_robin", "all"])
def test_a_client_answers_its_own_test_and_no_other(by: str, tmp_path: Path) -> None:
    f2l = {"name": "f2l", "local_steps": 1, "transformer": {"hidden": 8}, "test_clients": by}
    run = finished(tmp_path / "run", OWN, {"method": f2l, "run": {"cohort": 4}})
    episodic_test = run.prepared.test
    clients = run._clients(1, "evaluate")
    found = run.method.evaluate(run.server, clients, episodic_test.eval_episodes, Key(0))
    assert sorted((a.eval_episode, a.client) for a in found) == list(
        enumerate(episodic_test.owners or ())
    )
    assert len(found) == 4
    score = run.result()
    assert (sorted(score.clients), score.unanswered) == (run.prepared.clients, 0)
