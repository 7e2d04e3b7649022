"""What a run leaves for people and programs to read: one record a round, the bytes, the machine."""

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
_NO_BITS = {"cores", "python", "system"}  # told, but figures do not depend on them


def _checked_instant(text: str) -> str:
    """Return a text. Raises ValueError unless it is empty or a date and time."""
    if text:
        try:
            datetime.fromisoformat(text).timestamp()
        except OverflowError as error:  # of the year 1
            raise ValueError(str(error)) from None
    return text


Round: TypeAlias = Annotated[int, Field(ge=0, lt=10**9)]
Seconds: TypeAlias = Annotated[float, Field(gt=-1e9, lt=1e9)]


class FaultJson(TypedDict):
    """A reply that did not count."""

    client: NotRequired[Whole]
    kind: NotRequired[str]
    reason: NotRequired[str]


class RecordJson(TypedDict):
    """What is relied on in a line of metrics.jsonl; one of an older version has fewer."""

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


class Change(TypedDict):
    """How a run went on otherwise than it had begun."""

    after_round: Annotated[int, Field(ge=-1, lt=10**9)]
    environment: dict[str, Any]
    settings: NotRequired[str]


class Environment(TypedDict):
    """What is relied on in environment.json."""

    resumed: NotRequired[list[Change]]
    method_file: NotRequired[str]


@dataclass(frozen=True)
class Record:
    """One round.

    Args:
        round: from 1; 0 is before training.
        metrics: means over the cohort as the method reports them, such as loss in nats.
        validation: score on the validation classes, in rounds that have one.
        best_round: the round chosen so far.
        bytes_down: sent to clients for training since the start.
        bytes_up: received from clients for training since the start.
        seconds: spent on this round, evaluation not counted.
        faults: replies that did not count: client, kind, reason.
        skipped: why the round did not count, or None.
        exchanges: how often the server talked to its clients.
        elapsed: seconds since the record before it, evaluation included, by a monotonic clock; None
            for the first record that a process writes.
        ended: when, in UTC, by the clock of the machine, which may be set back.
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

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON-able values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return values | {
            "validation": self.validation and self.validation.to_json(),
            "faults": list(self.faults),
        }


class Recorder:
    """Files of one run: metrics.jsonl, ledger.json, environment.json, result.json."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def flush(self) -> None:
        """Make sure that the records are on the disk."""
        storage.flush(self.folder / RECORDS)

    def note_environment(
        self, round: int, more: Mapping[str, Any], settings: str | None = None
    ) -> None:
        """Write what the figures are made with; a run that goes on otherwise notes that beside it.

        What was noted of attempts whose rounds are trained again is dropped.

        Args:
            round: the last complete round, -1 before the first.
            more: what is the run's own: its threads, its fleet, the file of a method of one's own.
            settings: which settings are others than in that round; None for none.
        """
        now, held = {**environment(), **more}, self._environments()
        first, noted = held or ({} if round >= 0 else now, [])
        resumed = _until(round, noted)
        told = {"settings": settings} if settings else {}
        if now != _last(first, resumed) or settings:
            resumed.append({"after_round": round, "environment": now, **told})
        if held is None or resumed != noted:
            content = first | ({"resumed": resumed} if resumed else {})
            self.write(ENVIRONMENT, content, sync=True)

    def changes(self, round: int, more: Mapping[str, Any]) -> list[str]:
        """Say what decides bits and is other than up to a round; `more` as above."""
        held, now = self._environments(), {**environment(), **more}
        before = _last(held[0], _until(round, held[1])) if held else now
        return changed(before, now, besides=_NO_BITS)

    def _environments(self) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """Return the first environment and the later ones; None where none is noted."""
        first = read_environment(self.folder)
        return (first, first.pop("resumed", [])) if first else None

    def append(self, record: Record) -> None:
        """Add a line to metrics.jsonl."""
        with (self.folder / RECORDS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record.to_json()) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl; a last line cut short by a crash is left out."""
        path = self.folder / RECORDS
        if not path.exists():
            return []
        return records.read_lines(path, RecordJson, f"{records.COPY}, or start a new run")

    def rewind(self, round: int) -> None:
        """Drop the lines after a round."""
        kept = [r for r in self.records() if r["round"] <= round]
        held = {r["round"] for r in kept}
        missing = next((r for r in range(round + 1) if r not in held), None)
        if missing is not None:
            raise CheckpointError(
                f"{self.folder / 'metrics.jsonl'} has no record of round {missing}. Restore "
                "the file from a copy, or start a new run."
            )
        text = "".join(json.dumps(r) + "\n" for r in kept)
        for partial in self.folder.glob(f"{RECORDS}.*{storage.PARTIAL}"):  # of a killed run
            partial.unlink(missing_ok=True)
        storage.write_bytes(self.folder / RECORDS, text.encode(), sync=True)

    def write(self, name: str, content: Any, *, sync: bool) -> None:
        """Replace a JSON file in one step; `sync` makes it last before anything else is done."""
        text = json.dumps(content, indent=1, sort_keys=True) + "\n"
        storage.write_bytes(self.folder / name, text.encode(), sync=sync)


def read_environment(folder: Path) -> dict[str, Any]:
    """Return what a run was made with, and below "resumed" how it went on otherwise.

    {} where nothing is noted. Raises CheckpointError when the file is damaged.
    """
    path = folder / ENVIRONMENT
    if not path.exists():
        return {}
    found: dict[str, Any] = records.read(path, Environment, f"{records.COPY}, or remove it")
    return found


def _until(round: int, resumed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what has come to the last complete round."""
    return [one for one in resumed if one["after_round"] < round]


def _last(first: dict[str, Any], resumed: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a run was last made with."""
    return {**first, **resumed[-1]["environment"]} if resumed else first


def changed(
    before: Mapping[str, Any], now: Mapping[str, Any], *, besides: Collection[str] = ()
) -> list[str]:
    """Say what differs between two environments, besides some names."""
    names = sorted((before.keys() | now.keys()) - set(besides))
    return [
        f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def environment() -> dict[str, Any]:
    """Describe what the figures were made with; no host name, no path, no user."""
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
