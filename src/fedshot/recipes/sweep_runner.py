"""A sweep: one configuration, trained with several values of some options and several seeds.

A point of a sweep is one value for each of these options. Points are ranked by validation accuracy,
averaged over seeds. Once every point has finished, only the first point of the ranking is tested.
`sweep.json` in the folder of the sweep holds the finished points; their runs are in its subfolder
`runs`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NotRequired

from pydantic import AfterValidator
from typing_extensions import TypedDict

from fedshot.config import settings as trees
from fedshot.config.load import Config, merge_over
from fedshot.config.registry import KINDS, difference, expand_name, expand_names, is_text
from fedshot.config.settings import Settings
from fedshot.core import records, storage
from fedshot.core.errors import CheckpointError, ConfigError
from fedshot.core.locks import only_one
from fedshot.core.records import Whole
from fedshot.methods import user_methods
from fedshot.recipes.jobs import Event, Job, Jobs
from fedshot.recipes.optuna_search import require_optuna, search
from fedshot.recipes.plan import facts_of
from fedshot.recipes.results import Validated, validation_curve
from fedshot.recipes.trials import Facts, Space, accuracy, check_honest, draws, is_space, train
from fedshot.reports import ComparisonRow, Run
from fedshot.runs.prepare import PreparedRun
from fedshot.runs.run_folder import RESULT

_FILE = "sweep.json"
_FIX = "Move the folder away, or choose another"
_DRAWN = {"log": "log", "uniform": "linear", "int": "int"}  # prefix of --set -> kind of space
_FIXED = ("name", "seed", "data", "split", "partition", "test", "run.choose")


class _SeedTrial(TypedDict):
    validation: list[Validated]
    round: Whole
    diverged: NotRequired[str]


def _checked_trial(one: _SeedTrial) -> _SeedTrial:
    if not one.get("diverged") and one["round"] not in validation_curve(one):
        raise ValueError(f"round {one['round']} has no validation")
    return one


class _Point(TypedDict):
    options: dict[str, Any]
    trials: list[Annotated[_SeedTrial, AfterValidator(_checked_trial)]]
    method_file: NotRequired[str]


class _Sweep(TypedDict):
    settings: dict[str, Any]
    data: str
    points: list[_Point]


def _check_space(path: str, space: Space, drawn: int) -> None:
    """Raise ConfigError for an invalid space, or for an option that all points must share."""
    if any(f"{path}.".startswith(f"{fixed}.") for fixed in _FIXED):
        raise ConfigError(
            f"a sweep cannot be over {path}: its points are compared on the same data, clients, "
            "seeds and validation episodes. Set it for all points, and make a sweep for each value."
        )
    if not is_space(space):
        raise ConfigError(
            f"{path} has the values {dict(space)!r:.80}; expected at least one, such as 1,2,4, or "
            "LOW,HIGH after log:, uniform: or int:, with LOW up to HIGH, above 0 for log: and "
            "whole for int:."
        )
    if not drawn and "choice" not in space:
        raise ConfigError(
            f"{path} has a range, from which a grid cannot take all values. List the values, or "
            "add --random N (in Python, random=N)."
        )


def space_of(word: str) -> tuple[str, Space]:
    """Read `KEY=VALUES`: return the dotted key path and the search space, as `named_space` does.

    Raises ConfigError for a text without `=`.
    """
    path, equals, text = word.partition("=")
    if not (path and equals and text):
        raise ConfigError(
            f"--set is {word!r}; expected KEY=VALUES, such as method.optimizer.lr=1e-3,3e-3."
        )
    return named_space(path, text)


def named_space(path: str, values: str | list[Any]) -> tuple[str, Space]:
    """Return the dotted key path of an option and its search space.

    Args:
        path: the key path; that of a component, such as "method", stands for its name.
        values: a list, or "1,2,4", "log:1e-4,1e-2", "uniform:0,1" or "int:1,8".
    """
    path = f"{path}.name" if path in KINDS else path
    if isinstance(values, list):
        return path, {"choice": values}
    prefix, _, rest = values.partition(":")
    kind = _DRAWN.get(prefix)
    listed = f"[{rest if kind else values}]"
    found = trees.parse(listed, is_text, origin=f"the values of {path}", path=path)
    return path, {kind or "choice": found}


def begun(folder: Path) -> bool:
    """Whether a folder holds a sweep, even one without a finished point."""
    return (folder / _FILE).exists() or any(folder.glob("runs/*.s*"))


def all_spaces(found: Iterable[tuple[str, Space]]) -> dict[str, Space]:
    """Return search spaces by key path. Raises ConfigError if an option has two."""
    spaces: dict[str, Space] = {}
    for path, space in found:
        if path in spaces:
            raise ConfigError(f"{path} is given values twice. Give all of them at once.")
        spaces[path] = space
    return spaces


@dataclass
class Point:
    """A point of a sweep and its progress.

    Args:
        options: values of the swept options, by dotted key path.
        trials: what the worker reports about the training run of each seed; empty until all finish.
        running: seed -> (round, rounds) of the training runs in progress.
        failed: why a training failed; "" if none did.
    """

    options: dict[str, Any]
    trials: list[Facts] = field(default_factory=list)
    running: dict[int, tuple[int, int]] = field(default_factory=dict)
    failed: str = ""

    @property
    def key(self) -> str:
        """The point's name in file names, a hash of its options."""
        return hashlib.sha256(self.order.encode()).hexdigest()[:8]

    @property
    def order(self) -> str:
        """The options as text, which orders points with equal accuracy."""
        return json.dumps(self.options, sort_keys=True)

    @property
    def diverged(self) -> str:
        """Why the training of the point diverged with a seed; "" if it diverged with none."""
        return next((str(one["diverged"]) for one in self.trials if one.get("diverged")), "")

    @property
    def accuracies(self) -> list[float]:
        """The validation accuracy of each seed.

        It is empty until the runs of all seeds have finished, and if one of them diverged.
        """
        found = [accuracy(one) for one in self.trials]
        return [one for one in found if one is not None] if None not in found else []


@dataclass
class Sweep:
    """The points of a sweep: those in its folder, and those taken from its search spaces.

    Args:
        folder: folder of the sweep.
        base: the base configuration, for all options that a point does not set.
        spaces: the search space of each swept option, by dotted key path.
        seeds: number of training runs of each point, with seeds 0, 1, ...; raised to the number
            that finished points in the folder have.
        random: number of random points; 0 for all combinations of the values, or `optuna`.
        optuna: number of points that Optuna proposes; 0 for none.
        jobs: processes at once; None for as many as cores and memory allow.
        data_dir: folder of downloaded datasets.

    Raises:
        ConfigError: a number or space is invalid, or the folder holds a sweep of another base
            configuration.
        CheckpointError: the file of the sweep is damaged.
    """

    folder: Path
    base: Settings
    spaces: Mapping[str, Space]
    seeds: int = 3
    random: int = 0
    optuna: int = 0
    jobs: int | None = None
    data_dir: str | None = None
    points: dict[str, Point] = field(init=False, default_factory=dict)
    _data: str = field(init=False, default="")

    def __post_init__(self) -> None:
        for name, least in (("seeds", 1), ("random", 0), ("optuna", 0), ("jobs", 1)):
            value = getattr(self, name)
            if value is None and name == "jobs":
                continue
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} is {value!r}; expected {least} or more.")
        if self.random and self.optuna:
            raise ConfigError("random and optuna exclude each other. Leave one of them out.")
        if not self.spaces:
            raise ConfigError(
                "a sweep needs an option with several values, such as "
                "--set method.optimizer.lr=1e-3,3e-3 (in Python, "
                "over={'method.optimizer.lr': [1e-3, 3e-3]})."
            )
        for path, space in self.spaces.items():
            _check_space(path, space, self.random or self.optuna)
        base = expand_names(self.base)
        self.base = {key: value for key, value in base.items() if key not in ("name", "seed")}
        if trees.at(self.base, "run.threads") is None:
            trees.put(self.base, "run.threads", 1)  # several points train at once
        self._read()
        if self.random:
            self.add(draws(self.spaces, self.random))
        elif not self.optuna:
            values = (space["choice"] for space in self.spaces.values())
            self.add(dict(zip(self.spaces, one, strict=True)) for one in product(*values))

    def add(self, points: Iterable[dict[str, Any]]) -> list[Point]:
        """Add points, given by their options, and return them; known points are not repeated."""
        made = [Point(options) for options in points]
        return [self.points.setdefault(point.key, point) for point in made]

    def check(self) -> None:
        """Check every point's configuration, and the data, with the first point's options.

        Raises:
            ConfigError: a point is invalid, validation is not a fair estimate, there are no
                validation classes, the finished points were trained on other data, or Optuna is
                missing.
            DataError: the data is missing or too small.
        """
        if self.optuna:
            require_optuna()
        points = list(self.points.values()) or [Point(one) for one in draws(self.spaces, 1)]
        config, *_ = [Config.of(self.settings(point)) for point in points]
        check_honest("this sweep", config.settings)
        facts = facts_of(PreparedRun(config, self.data_dir))
        if not facts["validated"]:
            raise ConfigError(
                "there are no validation classes to rank the points of the sweep by, and the test "
                "must not rank them. Name some in split.validation, or, where clients are tested "
                "on their own classes, set partition.validation."
            )
        here = facts["data"]["digest"]
        if self._data not in ("", here):
            raise ConfigError(
                f"the points in {self.folder} were trained on other data "
                f"({self._data[:12]}) than those here ({here[:12]}). Restore the data, or choose "
                "another folder."
            )
        self._data = here

    def run(self) -> Iterator[Event]:
        """Train the points, test the chosen one, and yield the events of the workers.

        Raises BusyError if another process is training the sweep, and CheckpointError if an Optuna
        study is complete and its points are lost.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with only_one(self.folder / ".lock"):
            self._read()
            yield from self.train(list(self.points.values()))
            if self.optuna:
                yield from search(self)
            if not self.points:
                raise CheckpointError(
                    f"{self.folder} has an Optuna study that is complete, but its points are "
                    f"lost: {_FILE} is missing. Restore it from a copy, or choose another folder."
                )
            yield from self._test()

    def train(self, points: Iterable[Point]) -> Iterator[Event]:
        """Train the points that lack seeds, and yield the events of the workers."""
        groups = {
            point.key: [self._job(point, seed, "tune") for seed in range(self.seeds)]
            for point in points
            if len(point.trials) < self.seeds
        }
        for event in train(groups, self.jobs, self._done, self._failed):
            yield self._noted(event)

    @property
    def short(self) -> dict[str, str]:
        """The shortest unambiguous name, such as `lr`, of each swept key path."""
        every = list(dict.fromkeys(path for one in self.points.values() for path in one.options))
        last = [path.removesuffix(".name").rpartition(".")[2] for path in every]
        return {path: name if last.count(name) == 1 else path
                for path, name in zip(every, last, strict=True)}  # fmt: skip

    def label(self, point: Point) -> str:
        """Return a point's options in short, such as "lr 0.001, local_steps 5"."""
        names = self.short
        return ", ".join(f"{names[path]} {value}" for path, value in point.options.items())

    def named(self, job: Job) -> str:
        """Return what a job does, such as "lr 0.001, seed 0"."""
        do, key, seed = job.key.split(" ")
        return f"{'test ' if do == 'train' else ''}{self.label(self.points[key])}, seed {seed}"

    def settings(self, point: Point, seed: int = 0) -> Settings:
        """Return the configuration of a point's training run with this seed."""
        given: Settings = {}
        for path, value in point.options.items():
            trees.put(given, path, expand_name(path, value))
        settings, _ = merge_over(self.base, given)
        if trees.at(settings, "method.name") is None:
            trees.put(settings, "method.name", KINDS["method"][1])
        return {**settings, "name": f"point-{point.key}", "seed": seed}

    def run_folder(self, point: Point, seed: int) -> Path:
        """Return the folder of a point's training run with this seed."""
        return self.folder / "runs" / f"{point.key}.s{seed}"

    @property
    def ranking(self) -> list[Point]:
        """The finished points that did not diverge with any seed, by validation accuracy."""
        held = [one for one in self.points.values() if len(one.accuracies) == self.seeds]
        return sorted(held, key=lambda one: (-fmean(one.accuracies), one.order))

    @property
    def chosen(self) -> Point | None:
        """The first point of the ranking; None until every point has finished."""
        waiting = any(len(one.trials) < self.seeds for one in self.points.values())
        return None if waiting or not self.ranking else self.ranking[0]

    def is_tested(self, point: Point) -> bool:
        """Whether the test of each seed of a point has been evaluated."""
        folders = (self.run_folder(point, seed) for seed in range(self.seeds))
        return all((folder / RESULT).exists() for folder in folders)

    def test(self) -> ComparisonRow | None:
        """Return the chosen point's test result, the mean over seeds; None if it is not tested."""
        point = self.chosen
        if point is None or not self.is_tested(point):
            return None
        runs = [Run.read(self.run_folder(point, seed)) for seed in range(self.seeds)]
        return ComparisonRow.of_runs(self.label(point), runs)

    def _test(self) -> Iterator[Event]:
        point = self.chosen
        if point is None or self.is_tested(point):
            return
        jobs = [self._job(point, seed, "train") for seed in range(self.seeds)]
        for event in Jobs(jobs, self.jobs):
            if event.kind in ("refused", "failed"):
                point.failed = f"test: {event.facts['reason']}"
            yield self._noted(event)

    def _job(self, point: Point, seed: int, do: str) -> Job:
        folder = self.run_folder(point, seed)
        key = f"{do} {point.key} {seed}"
        return Job(key, do, self.settings(point, seed), folder, self.data_dir)

    def _noted(self, event: Event) -> Event:
        """Keep the progress that an event reports, and return the event."""
        _, key, seed = event.job.key.split(" ")
        point = self.points[key]
        if event.kind in ("begun", "round"):
            point.running[int(seed)] = (event.facts["round"], event.facts["rounds"])
        else:
            point.running.pop(int(seed), None)
        return event

    def _done(self, key: str, facts: list[Facts]) -> None:
        self.points[key].trials = facts
        self._write()

    def _failed(self, key: str, seed: int, reason: str) -> None:
        self.points[key].failed = f"seed {seed}: {reason}"

    def _write(self) -> None:
        content = {
            "settings": self.base,
            "data": self._data,
            "points": [
                {"options": one.options, "trials": one.trials} | self._method_file(one)
                for one in sorted(self.points.values(), key=lambda one: one.order)
                if one.trials
            ],
        }
        text = f"{json.dumps(content, indent=1)}\n"
        storage.write_bytes(self.folder / _FILE, text.encode(), sync=True)

    def _read(self) -> None:
        """Load the finished points from the sweep's file, if it exists."""
        path = self.folder / _FILE
        if not path.exists():
            return
        tree = records.read(path, _Sweep, _FIX)
        if changed := difference(tree["settings"], self.base):
            raise ConfigError(
                f"{self.folder} holds a sweep of another base configuration: {changed}. "
                "Use the same one, or choose another folder."
            )
        self._data = tree["data"]
        for held in tree["points"]:
            (point,) = self.add([held["options"]])
            point.trials = held["trials"]
            self.seeds = max(self.seeds, len(point.trials))
            if held.get("method_file") != self._method_file(point).get("method_file"):
                raise ConfigError(
                    f"the file of the method of {self.label(point)} has changed since {path} was "
                    f"written: a changed file is another method. {_FIX}."
                )

    def _method_file(self, point: Point) -> dict[str, str]:
        return user_methods.noted(str(trees.at(self.settings(point), "method.name")))
