"""The files that a run writes for people and programs: records, ledger, environment, result."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypeAlias

import numpy as np
import torch
from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from fedshot import __version__
from fedshot.core import kernel_build, records, storage
from fedshot.core.errors import CheckpointError
from fedshot.core.records import Whole
from fedshot.evaluation.episodic_test import Score, ScoreJson

RECORDS = "metrics.jsonl"
ENVIRONMENT = "environment.json"
_NO_EFFECT = {"cores", "python", "system"}  # recorded, but results do not depend on them


def _checked_instant(text: str) -> str:
    """Return the text. Raises ValueError unless it is empty or a date and time."""
    if text:
        try:
            datetime.fromisoformat(text).timestamp()
        except OverflowError as error:  # such as in the year 1
            raise ValueError(str(error)) from None
    return text


Round: TypeAlias = Annotated[int, Field(ge=0, lt=10**9)]
Seconds: TypeAlias = Annotated[float, Field(gt=-1e9, lt=1e9)]


class FaultJson(TypedDict):
    """A fault in metrics.jsonl: a client's reply that was lost or rejected."""

    client: NotRequired[Whole]
    kind: NotRequired[str]
    reason: NotRequired[str]


class RecordJson(TypedDict):
    """The keys of a line of metrics.jsonl that are read."""

    round: Round
    metrics: dict[str, float]
    validation: ScoreJson | None
    best_round: Round
    bytes_down: NotRequired[Whole]
    bytes_up: NotRequired[Whole]
    seconds: Seconds
    faults: list[FaultJson]
    skipped: str | None
    ended: NotRequired[Annotated[str, AfterValidator(_checked_instant)]]
    epsilon: NotRequired[float]
    simulated: NotRequired[Annotated[float, Field(ge=0)]]
    late: NotRequired[list[Whole]]


class Stop(TypedDict):
    """The content of stopped.json: the round that could not be completed, and why."""

    round: Round
    reason: str


class Change(TypedDict):
    """A change of the environment or the settings when a run was resumed."""

    after_round: Annotated[int, Field(ge=-1, lt=10**9)]
    environment: dict[str, Any]
    settings: NotRequired[str]


class Environment(TypedDict):
    """The keys of environment.json that are read."""

    resumed: NotRequired[list[Change]]
    method_file: NotRequired[str]


@dataclass(frozen=True)
class Record:
    """The record of one round.

    Args:
        round: number of the round, from 1; 0 is before training.
        metrics: means over the cohort as reported by the method, such as the loss in nats.
        validation: score on the validation classes, in validated rounds.
        best_round: the round chosen so far for the test.
        bytes_down: bytes sent to clients for training since the start.
        bytes_up: bytes received from clients for training since the start.
        seconds: duration of the round without evaluation.
        faults: replies that were lost or rejected ("refused"), with client, kind and reason.
        skipped: reason why the round was skipped; None if it was not.
        exchanges: number of exchanges between server and clients.
        elapsed: seconds since the previous record, including evaluation, by a monotonic clock; None
            for the first record that a process writes.
        ended: end of the round in UTC by the system clock, which may be set back.
        extreme: client -> text on what in its reply was extreme; not in metrics.jsonl.
        epsilon: privacy loss so far, at the run's privacy.delta; None without privacy.
        simulated: simulated seconds since the start; None without run.clock.
        late: clients whose replies came too late to count, in simulated time.
    """

    round: int
    metrics: dict[str, float] = field(default_factory=dict)
    validation: Score | None = None
    best_round: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    faults: tuple[dict[str, Any], ...] = ()
    skipped: str | None = None
    exchanges: int = 0
    elapsed: float | None = None
    ended: str = ""
    extreme: dict[int, str] = field(default_factory=dict)
    epsilon: float | None = None
    simulated: float | None = None
    late: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        values = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name != "extreme"
        }
        if self.epsilon is None:
            del values["epsilon"]
        if self.simulated is None:
            del values["simulated"], values["late"]
        return values | {
            "validation": self.validation and self.validation.to_json(),
            "faults": list(self.faults),
        }


class Recorder:
    """Writes a run's metrics.jsonl, ledger.json, environment.json and result.json."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def flush(self) -> None:
        """Flush the records to the disk."""
        storage.flush(self.folder / RECORDS)

    def note_environment(
        self, round: int, more: Mapping[str, Any], settings: str | None = None
    ) -> None:
        """Write the environment of a new run, or add what has changed when a run is resumed.

        Changes recorded for rounds that will be trained again are removed.

        Args:
            round: last complete round; -1 before the first.
            more: further facts about the run: threads, fleet, file of a user-defined method.
            settings: description of the settings that changed after `round`; None if none did.
        """
        now, first = {**environment(), **more}, read_environment(self.folder)
        is_new, written = not first, first.pop("resumed", [])
        if is_new and round < 0:
            first = now
        resumed = _until(round, written)
        if now != _last(first, resumed) or settings:
            change = {"after_round": round, "environment": now}
            resumed.append(change | ({"settings": settings} if settings else {}))
        if is_new or resumed != written:
            content = first | ({"resumed": resumed} if resumed else {})
            self.write(ENVIRONMENT, content, sync=True)

    def changes(self, round: int, more: Mapping[str, Any]) -> list[str]:
        """Describe changes of the environment since `round` that may change results bitwise.

        `more` is as for `note_environment`.
        """
        first, now = read_environment(self.folder), {**environment(), **more}
        before = _last(first, _until(round, first.pop("resumed", []))) if first else now
        return changed(before, now, ignore=_NO_EFFECT)

    def append(self, record: Record) -> None:
        """Add a line to metrics.jsonl."""
        with (self.folder / RECORDS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record.to_json()) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """Return the records in metrics.jsonl, without an incomplete last line."""
        path = self.folder / RECORDS
        if not path.exists():
            return []
        return records.read_lines(path, RecordJson, f"{records.COPY}, or start a new run")

    def rewind(self, round: int) -> None:
        """Delete the records of rounds after `round`.

        Raises CheckpointError if a record is missing up to that round.
        """
        kept = [r for r in self.records() if r["round"] <= round]
        held = {r["round"] for r in kept}
        missing = next((r for r in range(round + 1) if r not in held), None)
        if missing is not None:
            raise CheckpointError(
                f"{self.folder / 'metrics.jsonl'} has no record of round {missing}. Restore "
                "the file from a copy, or start a new run."
            )
        text = "".join(json.dumps(r) + "\n" for r in kept)
        for partial in self.folder.glob(f"{RECORDS}.*{storage.PARTIAL}"):  # left by a killed run
            partial.unlink(missing_ok=True)
        storage.write_bytes(self.folder / RECORDS, text.encode(), sync=True)

    def write(self, name: str, content: Any, *, sync: bool) -> None:
        """Replace a JSON file atomically; `sync` flushes it to the disk."""
        text = json.dumps(content, indent=1, sort_keys=True) + "\n"
        storage.write_bytes(self.folder / name, text.encode(), sync=sync)


def read_environment(folder: Path) -> dict[str, Any]:
    """Return the environment of a run, with later changes in a list under "resumed".

    Returns {} if the file does not exist. Raises CheckpointError if it is damaged.
    """
    path = folder / ENVIRONMENT
    if not path.exists():
        return {}
    found: dict[str, Any] = records.read(path, Environment, f"{records.COPY}, or delete it")
    return found


def _until(round: int, resumed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the environment's changes that were recorded before round `round` was trained."""
    return [one for one in resumed if one["after_round"] < round]


def _last(first: dict[str, Any], resumed: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the latest environment: the environment at the start, updated by the last change."""
    return {**first, **resumed[-1]["environment"]} if resumed else first


def changed(
    before: Mapping[str, Any], now: Mapping[str, Any], *, ignore: Collection[str] = ()
) -> list[str]:
    """Describe the differences between two environments."""
    names = sorted((before.keys() | now.keys()) - set(ignore))
    return [
        f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def environment() -> dict[str, Any]:
    """Return versions of software and facts about the machine, without host name, paths or user."""
    return {
        "fedshot": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "byte_order": sys.byteorder,
        "kernels": kernel_build.kind(),
    }
