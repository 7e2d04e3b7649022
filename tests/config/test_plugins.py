"""Backbones, data sources and partitions from outside: by entry points and by FEDSHOT_PLUGINS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import yaml

from fedshot.config.load import Config
from fedshot.config.registry import KINDS
from fedshot.core import plugins
from fedshot.core.errors import ConfigError, DataError
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset, Ints
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions import registry as partitions
from fedshot.data.partitions.partition import ClientSplit
from fedshot.data.partitions.pooled import Iid
from fedshot.data.sources.digits import Digits
from fedshot.data.sources.registry import register
from fedshot.runs.prepare import PreparedRun

MODULE = '''
from dataclasses import dataclass
from typing import ClassVar
import numpy as np
import torch
from fedshot.data.partitions import registry as partitions
from fedshot.data.partitions.partition import ClientSplit, Partition, Partitioner
from fedshot.data.partitions.pooled import Iid
from fedshot.data.sources import registry as sources
from fedshot.data.sources.digits import Digits
from fedshot.nn.models import backbones

@sources.register("dim_digits")
@dataclass(frozen=True)
class DimDigits(Digits):
    """Digits, darker."""
    by: int = 2
    def load(self, data_dir):
        from dataclasses import replace
        found = super().load(data_dir)
        return replace(found, x=found.x // self.by)

@partitions.register("halves")
@dataclass(frozen=True)
class Halves(Partitioner):
    """Two clients."""
    def assign(self, dataset, indices, key, spec):
        return Iid(clients=2).assign(dataset, indices, key, spec)

@backbones.register("narrow")
@dataclass(frozen=True)
class Narrow(backbones.MLP):
    """An MLP."""
    hidden: tuple[int, ...] = (6,)
'''
SETTINGS: dict[str, Any] = {
    "name": "own",
    "data": {"name": "dim_digits", "by": 3},
    "split": {"base": ["0-4"], "validation": ["5", "6"], "novel": ["7-9"]},
    "partition": {"name": "halves"},
    "episode": {"way": 2, "query": 5},
    "model": {"backbone": {"name": "narrow", "hidden": [5]}},
    "method": {"name": "fl_proto", "local_steps": 1},
    "run": {"rounds": 1},
    "test": {"way": 2, "episodes": 10, "validation_episodes": 5},
}


@pytest.fixture
def tables() -> Iterator[None]:
    """Leave the tables of components as they were."""
    before = {path: dict(kinds) for path, (kinds, _) in KINDS.items()}
    yield
    for path, (kinds, _) in KINDS.items():
        assert isinstance(kinds, dict)
        kinds.clear()
        kinds.update(before[path])


@dataclass(frozen=True)
class Small(Digits):
    """A data source of the user."""


class NoDataclass:
    """Not a data source."""


def test_a_registered_class_can_be_chosen_and_a_taken_name_tells_both_places(tables: None) -> None:
    assert register("small")(Small) is Small
    assert register("small")(Small) is Small, "again, as after a second import"
    assert type(Config.of({"data": "small"}).data) is Small
    with pytest.raises(ConfigError, match=r"'digits': Digits \(.*digits.py, line .* and Small \("):
        register("digits")(Small)
    with pytest.raises(ConfigError, match="expected a dataclass with load, load_raw"):
        register("none")(NoDataclass)
    with pytest.raises(ConfigError, match="the name 'a-b' cannot be chosen"):
        register("a-b")
    with pytest.raises(ConfigError, match=r"data.name is 'gone'.*FEDSHOT_PLUGINS=my_module"):
        Config.of({"data": "gone"})


def test_a_partition_of_the_user_cannot_train_on_test_classes(tables: None) -> None:
    @partitions.register("everything")
    @dataclass(frozen=True)
    class Everything(Iid):
        """The rows of all classes."""

        def assign(
            self, dataset: Dataset, indices: Ints, key: Key, spec: EpisodeSpec
        ) -> ClientSplit:
            return super().assign(dataset, np.arange(len(dataset)), key, spec)

    config = Config.of({**SETTINGS, "data": "digits", "partition": "everything", "model": {}})
    with pytest.raises(DataError, match="partition 'everything' assigned row"):
        PreparedRun(config)


def test_entry_points_and_modules_are_registered_and_faults_name_them(
    tables: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = EntryPoint("small", f"{__name__}:Small", "fedshot.sources")
    found = EntryPoints([here])
    monkeypatch.setattr(plugins, "entry_points", lambda *, group: found.select(group=group))
    plugins.load({"fedshot.sources": register, "fedshot.partitions": register})
    assert KINDS["data"][0]["small"] is Small
    found = EntryPoints([EntryPoint("lost", "no_such_module:X", "fedshot.sources")])
    with pytest.raises(ConfigError, match=r"entry point 'lost' of .*No module named"):
        plugins.load({"fedshot.sources": register})
    monkeypatch.setenv("FEDSHOT_PLUGINS", "no_such_module")
    with pytest.raises(ConfigError, match="FEDSHOT_PLUGINS names 'no_such_module', which cannot"):
        plugins.load({})
    monkeypatch.setenv("FEDSHOT_PLUGINS", " a, b ,")
    assert plugins.modules() == ["a", "b"]


class Run(Protocol):
    def __call__(self, *words: str, plugin: bool = True) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def fedshot(tmp_path: Path) -> Run:
    (tmp_path / "my_parts.py").write_text(MODULE, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])

    def run(*words: str, plugin: bool = True) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PYTHONPATH": path} | ({plugins.VARIABLE: "my_parts"} if plugin else {})
        command = [sys.executable, "-m", "fedshot", *words]
        return subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    return run


@pytest.mark.slow
def test_a_run_of_plugins_is_evaluated_and_resumed_and_recipes_train_it(
    fedshot: Run, tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(SETTINGS), encoding="utf-8")
    done = fedshot("run", "--config", "own.yaml", "--out", "runs")
    assert done.returncode == 0, done.stderr
    assert "FEDSHOT_PLUGINS: importing my_parts, whose code runs" in done.stderr
    environment = json.loads((tmp_path / "runs" / "own" / "environment.json").read_text())
    assert environment["plugins"] == {
        "data": "my_parts:DimDigits",
        "partition": "my_parts:Halves",
        "model.backbone": "my_parts:Narrow",
    }
    assert fedshot("evaluate", "runs/own").returncode == 0
    assert fedshot("resume", "runs/own").returncode == 0
    lost = fedshot("evaluate", "runs/own", plugin=False)
    assert lost.returncode == 2
    assert "'dim_digits'" in lost.stderr
    assert "FEDSHOT_PLUGINS=" in lost.stderr
    kept = {k: v for k, v in SETTINGS.items() if k not in ("name", "method", "run")}
    recipe = {
        "title": "Own",
        "settings": kept,
        "columns": {"one": {}},
        "rows": {"proto": {"settings": {"method": "fl_proto"}}},
        "budgets": {"small": {"exchanges": 1}},
    }
    (tmp_path / "results" / "own").mkdir(parents=True)
    (tmp_path / "results" / "own" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    made = fedshot("reproduce", "own", "--seeds", "1")
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "results" / "own" / "small" / "proto.one.json").exists()


@pytest.mark.flower
def test_nodes_of_flower_find_plugins(fedshot: Run, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(SETTINGS), encoding="utf-8")
    done = fedshot("flower", "up", "--nodes", "1", "--config", "own.yaml", "--out", "runs")
    assert done.returncode == 0, done.stderr
