"""Read a run from its folder: settings, records of the rounds, and result."""

from __future__ import annotations

import os.path
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypeAlias

from pydantic import Field
from typing_extensions import TypedDict

from fedshot.config.registry import difference
from fedshot.config.settings import Settings, at, flat
from fedshot.core import records
from fedshot.core.errors import CheckpointError, as_path
from fedshot.core.records import Whole
from fedshot.core.text import distinct, joined, printable, typed
from fedshot.fleets.meter import LedgerLine
from fedshot.methods.registry import METHODS
from fedshot.runs import dataset_info, run_folder
from fedshot.runs.recorder import ENVIRONMENT, Recorder, Round, Stop, changed, read_environment
from fedshot.runs.test_protocol import ResultJson, TestProtocol

_CONDITIONS = (
    "split",
    "partition",
    "episode",
    "model",
    "attack",
    "aggregate",
    "privacy",
    "compress",
)
_RUN = ("rounds", "cohort", "unreliable", "clock")  # of the section `run`
_LEDGER = ("phase", "work", "direction", "part", "bytes", "messages")


_Several: TypeAlias = Annotated[list[Any], Field(min_length=1)]


class _Split(TypedDict):
    random: NotRequired[_Several | None]
    users: NotRequired[_Several | None]


class _Method(TypedDict):
    name: NotRequired[str]


class _RunOptions(TypedDict):
    rounds: NotRequired[Round]


class _Test(TypedDict):
    way: NotRequired[Whole | _Several | None]
    shot: NotRequired[Whole | None]


class _Settings(TypedDict):
    """The settings that reports read; runs of other versions of fedshot may lack some."""

    name: NotRequired[str]
    seed: NotRequired[int]
    split: NotRequired[_Split | None]
    method: NotRequired[_Method]
    run: NotRequired[_RunOptions]
    test: NotRequired[_Test | None]


@dataclass(frozen=True)
class Run:
    """The files of one run, read-only.

    Args:
        label: display name in tables and figures.
        folder: folder of the run.
        settings: the whole configuration, including defaults.
        records: one record for each round, as in metrics.jsonl.
        result: content of result.json; None while the run is unfinished.
        environment: versions and machine, with changes on resuming under "resumed".
        ledger: log of communication: bytes and messages by phase, client function ("work"),
            direction and part, from ledger.json; the lines of the test, with phase "test", are from
            result.json.
        stopped: the round that could not be completed, and why, if an error stopped training.
    """

    label: str
    folder: Path
    settings: dict[str, Any]
    records: list[dict[str, Any]]
    result: dict[str, Any] | None
    environment: dict[str, Any]
    ledger: list[dict[str, Any]] = field(default_factory=list)
    stopped: Stop | None = None

    @classmethod
    def read(cls, folder: Path | str, label: str | None = None) -> Run:
        """Read a run's folder.

        Raises:
            CheckpointError: the folder contains no run, or one of its files is damaged.
        """
        folder = as_path("folder", folder)
        run_folder.check(folder)
        settings = run_folder.written(folder)
        records.check(settings, _Settings, folder / run_folder.CONFIG)
        result = _result(folder / run_folder.RESULT, settings)
        return cls(
            label=label or str(settings.get("name", folder.name)),
            folder=folder,
            settings=settings,
            records=Recorder(folder).records(),
            result=result,
            environment=read_environment(folder),
            ledger=_ledger(folder / "ledger.json", result),
            stopped=None if result else _stopped(folder / run_folder.STOPPED),
        )

    @property
    def seed(self) -> int:
        """The training seed."""
        return int(self.settings.get("seed", 0))

    @property
    def rounds(self) -> int:
        """The last complete round; 0 if none."""
        return int(self.records[-1]["round"]) if self.records else 0

    @property
    def planned(self) -> int:
        """The number of rounds in the configuration."""
        return int(self.settings.get("run", {}).get("rounds", 0))

    @property
    def seconds(self) -> float:
        """Seconds of training, without evaluation."""
        return sum(float(record["seconds"]) for record in self.records)

    @property
    def test(self) -> dict[str, Any]:
        """The test score. Raises CheckpointError if the run is unfinished."""
        if self.result is None:
            raise CheckpointError(
                f"{self.folder} has no result: {self.rounds} of {self.planned} rounds are trained. "
                "Resume it, or leave it out of the comparison."
            )
        return dict(self.result["test"])

    def bytes(self, direction: str) -> int:
        """Bytes sent ("down") or received ("up") in training, all clients together."""
        last = self.result or (self.records[-1] if self.records else {})
        return int(last.get(f"bytes_{direction}", 0))

    @property
    def data(self) -> tuple[str, str]:
        """The name of the dataset and the hash of its content; the hash is "" if not stored."""
        info = dataset_info.stored(self.folder)
        if info is None:
            return str(self.settings.get("data", {}).get("name", "")), ""
        return info["name"], info["digest"]

    @cached_property
    def client_names(self) -> list[str]:
        """The names of the clients by number; empty if the data do not name them."""
        info = dataset_info.stored(self.folder)
        return [] if info is None else info.get("client_names", [])

    @cached_property
    def tested(self) -> TestProtocol:
        """The protocol of the run's test, according to its settings, result and `data.json`."""
        found = TestProtocol.of(self.settings, self.result)
        try:
            info = dataset_info.stored(self.folder)
            novel = () if info is None else tuple(info["class_names"][c] for c in info["novel"])
        except (CheckpointError, IndexError):  # damaged; the result is not
            novel = ()
        return replace(found, classes=novel)

    def differs(self, other: Run) -> str | None:
        """Return the first difference between two runs besides name and seed; None if none.

        The settings and the file of a user-defined method are compared.
        """
        found = difference(_shared(self.settings), _shared(other.settings))
        if found is None and self._method_files != other._method_files:
            files = (printable(joined(run._method_files) or "no file") for run in (self, other))
            found = f"the file of their method was {' in one and '.join(files)} in the other"
        return found

    @property
    def _method_files(self) -> list[str]:
        """Name and hash of each version of a user-defined method's file that trained the run."""
        later = [one["environment"] for one in self._resumed]
        every = [one.get("method_file", "") for one in (self.begun_with, *later)]
        return list(dict.fromkeys(filter(None, every)))

    @property
    def conditions(self) -> dict[str, Any]:
        """Settings besides the method's that a fair comparison keeps alike, by key path."""
        kept = {name: self.settings[name] for name in _CONDITIONS if self.settings.get(name)}
        method = METHODS.get(at(self.settings, "method.name"))
        if method is not None and not method.trains_on_episodes:
            kept.pop("episode", None)
        run = {name: at(self.settings, f"run.{name}") for name in _RUN}
        if run["cohort"] == at(self.settings, "partition.clients"):
            run["cohort"] = None  # all of them
        found = dict(flat({**kept, "run": run}))
        found.pop("model.encoder.cache", None)
        return found

    @property
    def begun_with(self) -> dict[str, Any]:
        """Versions and machine with which the run began."""
        return {key: value for key, value in self.environment.items() if key != "resumed"}

    @property
    def _resumed(self) -> list[dict[str, Any]]:
        return list(self.environment.get("resumed", []))

    def changes_on_resume(self) -> list[tuple[int, str]]:
        """Return (round after which the run was resumed, what changed) for every change."""
        found, before = [], self.begun_with
        for one in self._resumed:
            now = {**before, **one["environment"]}
            settings = [one["settings"]] if "settings" in one else []
            others = changed(before, now) if before else [f"{ENVIRONMENT} was lost"]
            if settings or others:
                found.append((one["after_round"], "; ".join([*settings, *others])))
            before = now
        return found


Groups: TypeAlias = Mapping[str, Sequence[Run]]
"""Label of a method -> its runs, which differ only in the seed."""


def grouped(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Group runs that differ only in name and seed.

    A single run keeps its label; a group is labelled with the common prefix of its runs' labels.
    """
    found: list[list[Run]] = []
    for run in runs:
        mine = next((group for group in found if _seed_of(run, group)), None)
        if mine is None:
            found.append([run])
        else:
            mine.append(run)
    return _labelled(found)


def ungrouped(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Return each run in a separate group; equal labels get numbers."""
    return _labelled([[run] for run in runs])


def _labelled(groups: Sequence[list[Run]]) -> dict[str, list[Run]]:
    return dict(zip(distinct(map(_label, groups)), groups, strict=True))


def _seed_of(run: Run, group: Sequence[Run]) -> bool:
    first = group[0]
    tested = [(one.result or {}).get("test", {}).get("tasks") for one in (run, first)]
    return (
        first.differs(run) is None
        and tested[0] == tested[1]
        and run.seed not in [other.seed for other in group]
    )


def _label(group: Sequence[Run]) -> str:
    first = group[0]
    if len(group) == 1:
        return first.label
    start = os.path.commonprefix([run.label for run in group])  # noqa: RUF071  (letters)
    return start.rstrip("-_ ,.") or str(first.settings.get("method", {}).get("name", first.label))


def _shared(settings: Settings) -> Settings:
    return {key: value for key, value in settings.items() if key not in ("name", "seed")}


def _result(path: Path, settings: Settings) -> dict[str, Any] | None:
    """Return the content of result.json; None if missing, or if run.rounds was raised since."""
    if not path.exists():
        return None
    fix = f"Resume the run with `fedshot resume {typed(path.parent)}`, which rewrites the file"
    found: dict[str, Any] = records.read(path, ResultJson, fix)
    planned = settings.get("run", {}).get("rounds", 0)
    return found if found.get("rounds", planned) >= planned else None


def _stopped(path: Path) -> Stop | None:
    if not path.exists():
        return None
    found: Stop = records.read(path, Stop, "Delete the file, and the report leaves it out")
    return found


def _ledger(path: Path, result: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the lines of the communication log and of the test; [] if there is no log."""
    if not path.exists():
        return []
    again = f"`fedshot resume {typed(path.parent)}` rewrites it"
    fix = f"{again}; without the file, the report leaves it out"
    lines: list[dict[str, Any]] = records.read(path, list[LedgerLine], fix)
    asked = [line | {"phase": "test"} for line in (result or {}).get("ledger", [])]
    return [{key: line[key] for key in _LEDGER} for line in [*lines, *asked]]
