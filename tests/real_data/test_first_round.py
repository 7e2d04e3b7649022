"""One round of FL-Proto on every published set with its paper's backbone, and then its test.

Two clients with one local step each, 5-way 1-shot (2-way for Sent140) with five queries a class.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshot.config.load import Config
from fedshot.core import tree
from fedshot.data.sources.publishers import PUBLISHERS
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun

pytestmark = pytest.mark.data

WIDE = {"name": "resnet12", "widths": [64, 160, 320, 640]}
WORDS = {"name": "bilstm", "hidden": 50, "pooling": "attention"}
ROUND: dict[str, Any] = {
    "partition": {"name": "dirichlet", "clients": 2, "alpha": 1.0},
    "episode": {"query": 5},
    "method": {"name": "fl_proto", "local_steps": 1},
    "run": {"rounds": 1, "threads": 1, "infeasible_clients": "leave_out", "validate_every": 100},
    "test": {"query": 5, "episodes": 2, "validation_episodes": 2},
}
# mini_imagenet is without its other backbone: ResNet-12 on pictures of 84 pixels needs a minute of
# a core and 3.8 GB, Conv4-32 1.5 s.
SETS: dict[str, dict[str, Any]] = {
    "omniglot": {
        "data": "omniglot",
        "model": {"backbone": {"name": "conv4", "width": 64}},
        "partition": {"name": "classes", "clients": 2},
    },
    "fc100": {"data": {"name": "cifar100", "variant": "fc100"}, "model": {"backbone": WIDE}},
    "cifar_fs": {"data": {"name": "cifar100", "variant": "cifar_fs"}, "model": {"backbone": WIDE}},
    "mini_imagenet": {
        "data": "mini_imagenet",
        "model": {"backbone": {"name": "conv4", "width": 32}},
    },
    "mnist": {"data": "mnist", "model": {"backbone": {"name": "conv4", "width": 64}}},
    "news20": {"data": "news20", "model": {"backbone": WORDS}},
    "huffpost": {"data": "huffpost", "model": {"backbone": WORDS}},
    "sent140": {
        "data": "sent140",
        "split": {"users": [0.6, 0.2, 0.2]},
        "partition": {"name": "users", "clients": 2},
        "episode": ROUND["episode"] | {"way": 2},
        "test": ROUND["test"] | {"way": 2},
        "model": {"backbone": {"name": "gru", "hidden": 128}},
    },
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSHOT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.parametrize("name", SETS)
def test_a_round_changes_the_server_and_the_test_is_answered(name, tmp_path):
    settings = ROUND | SETS[name]
    settings["model"] = settings["model"] | {"head": "none"}
    source = settings["data"] if isinstance(settings["data"], str) else settings["data"]["name"]
    data_dir = Path(os.environ.get("FEDSHOT_DATA", "nowhere"))
    for folder in (PUBLISHERS[source].folder, "glove"):
        if not (data_dir / folder).is_dir():
            pytest.skip(f"needs {folder} below $FEDSHOT_DATA")
    experiment = Experiment(PreparedRun(Config.of(settings), str(data_dir)), tmp_path / "run")
    assert len(experiment.prepared.clients) == 2
    before = experiment.server
    _, record = list(experiment.run())
    leaves = list(zip(tree.leaves(before), tree.leaves(experiment.server), strict=True))
    assert all(torch.isfinite(after).all() for _, after in leaves)
    assert any(not torch.equal(was, after) for was, after in leaves)
    assert record.faults == ()
    score = experiment.result()
    assert (score.episodes, score.unanswered, score.diverged) == (2, 0, 0)
    assert 0 <= score.accuracy <= 1
