"""Checkpoints of a run: the server's state and notes (JSON values), one file per round."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import AfterValidator
from torch import Tensor
from typing_extensions import TypedDict

from fedshot.core import records, storage, tree
from fedshot.core.errors import CheckpointError
from fedshot.core.records import Whole
from fedshot.core.tree import Tree
from fedshot.fleets.meter import LedgerLine

_NAME = re.compile(r"round-(\d{6,})\.safetensors")


def _checked_best(best: list[Any]) -> list[Any]:
    """Return `best`. Raises ValueError unless it is [round, accuracy] of the chosen round."""
    kinds = [type(value) for value in best]
    if kinds not in ([int, float], [int, int]) or best[0] < 0:
        raise ValueError("expected a round and its accuracy")
    return best


class Notes(TypedDict):
    """The notes, JSON values, that every checkpoint must have."""

    round: Whole
    config: dict[str, Any]
    fedshot: str  # version that wrote it
    dataset: str
    deal: str  # hash of the partition
    best: Annotated[list[Any], AfterValidator(_checked_best)]
    ledger: list[LedgerLine]
    private: str
    clock: NotRequired[float]  # simulated seconds since the start
    in_flight: NotRequired[str]  # hash of the replies in flight, in asynchronous rounds
    ranges: NotRequired[dict[str, float]]  # of compressed uploads in secure sums
    times: NotRequired[str]  # hash of the files of clients' speeds and availability


class Checkpoints:
    """The checkpoints of one run, such as `round-000010.safetensors`; writes are atomic."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint, in order."""
        try:
            names = [path.name for path in self.folder.iterdir()]  # glob would hide access errors
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = map(_NAME.fullmatch, names)
        return sorted(int(name[1]) for name in found if name)

    def path(self, round: int) -> Path:
        """Return the path of a round's checkpoint."""
        return self.folder / f"round-{round:06d}.safetensors"

    def write(self, round: int, server: Tree, notes: Mapping[str, Any]) -> str:
        """Write a round's checkpoint; return its hash."""
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            storage.flush(self.folder.parent)
        return storage.write(self.path(round), server, notes, sync=True)

    def read(self, round: int, like: Tree) -> tuple[Tree, dict[str, Any]]:
        """Return the server's state, with the structure of `like`, and the notes.

        Raises CheckpointError if the file is missing, damaged, or written by another method.
        """
        flat, notes, _ = self._read(round)
        try:
            return tree.rebuild(like, flat), notes
        except ValueError as error:
            raise CheckpointError(
                f"{self.path(round)} does not fit the method of this run: {error}. Another version "
                "of fedshot may have written it; start the run again under another name."
            ) from None

    def notes(self, round: int) -> dict[str, Any]:
        """Return only the notes of a checkpoint. Raises CheckpointError as `read` does."""
        return self._read(round)[1]

    def hash(self, round: int) -> str:
        """Return the hash of a checkpoint's content and notes. Raises as `read` does."""
        return self._read(round)[2]

    def prune(self, keep: Collection[int]) -> None:
        """Delete partial files, and all checkpoints except those of the rounds `keep`."""
        for round in set(self.rounds()) - set(keep):
            self.path(round).unlink()
        for path in self.folder.glob(f"*{storage.PARTIAL}"):
            path.unlink()

    def _read(self, round: int) -> tuple[dict[str, Tensor], dict[str, Any], str]:
        try:
            found = storage.read(self.path(round))
        except CheckpointError as error:
            raise CheckpointError(f"{error}. {self._remedy(round)}") from None
        records.check(found[1], Notes, self.path(round), self._remedy(round).rstrip("."))
        return found

    def _remedy(self, round: int) -> str:
        rounds = self.rounds()
        earlier = [r for r in rounds if r < round]
        if not rounds:
            return "The run was stopped before its first checkpoint; resume it first."
        if rounds[-1] > round:
            return (
                "It belongs to the round that validation chose. Restore the file from a copy, or "
                "start the run again under another name."
            )
        if earlier and rounds[-1] == round:
            return f"Delete it to resume the run from round {earlier[-1]}."
        return "There is no earlier checkpoint; start the run again under another name."
