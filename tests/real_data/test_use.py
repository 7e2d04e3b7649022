"""On real images the classifier scores what the run's own test says, to the last digit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fedshot.config.load import Config
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun
from fedshot.use.classifier import FewShotClassifier
from use.test_classifier import score_of

pytestmark = pytest.mark.data

SETS: dict[str, dict[str, Any]] = {
    "omniglot": {"data": {"name": "omniglot", "size": 28}},
    "fc100": {"data": {"name": "cifar100", "variant": "fc100"}},
}


@pytest.mark.parametrize("method", ["fl_proto", "fedfsl_naive"])
@pytest.mark.parametrize("name", SETS)
def test_score_is_the_runs_own_test_accuracy(name: str, method: str, tmp_path: Path) -> None:
    folder = Path(os.environ.get("FEDSHOT_DATA", "nowhere"))
    if not (folder / SETS[name]["data"]["name"]).is_dir():
        pytest.skip(f"needs {SETS[name]['data']['name']} below $FEDSHOT_DATA")
    config = Config.of({
        **SETS[name],
        "partition": {"name": "classes" if name == "omniglot" else "iid", "clients": 4},
        "episode": {"way": 5, "shot": 1, "query": 5},
        "model": {"backbone": {"name": "conv4", "width": 16}, "head": {"name": "linear", "way": 5}},
        "method": {"name": method, "local_steps": 2},
        "run": {"rounds": 2, "cohort": 2, "validate_every": 1},
        "test": {"way": 5, "shot": 1, "query": 15, "episodes": 40, "validation_episodes": 10},
    })  # fmt: skip
    run = Experiment(PreparedRun(config, str(folder)), tmp_path / "run")
    list(run.run())
    accuracy, episodic_test = run.result().accuracy, run.prepared.test
    assert 0.2 < accuracy < 1
    classifier = FewShotClassifier.from_run(tmp_path / "run")
    assert score_of(classifier, episodic_test, range(len(episodic_test))) == accuracy
