"""What a run must know of its data to be used where the data are not: `data.json` in its folder.

For texts also `words.safetensors`, the words that have a vector and the vectors. Both are written
when a run starts, and tell classes by name but hold no example.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import TypedDict

from fedshot.core import records, storage
from fedshot.core.errors import CheckpointError
from fedshot.core.records import Whole
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.row_split import Rows
from fedshot.data.tokens import Tokens

FILE, WORDS = "data.json", "words.safetensors"

Classes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Numbers of the classes that train, choose the round, and test."""

_ANEW = "Delete data.json and resume the run with its data at hand, which writes it anew"


class _InfoNote(TypedDict):
    """What data.json holds."""

    name: str
    digest: str
    shape: Annotated[list[Annotated[int, Field(ge=1, lt=2**16)]], Field(min_length=2, max_length=3)]
    class_names: list[str]
    base: list[Whole]
    validation: list[Whole]
    novel: list[Whole]
    examples: Whole
    dealt: Annotated[int, Field(ge=1, lt=10**8)]
    clients: Annotated[list[Whole], Field(min_length=1)]
    kind: Literal["text", "images"]


@dataclass(frozen=True)
class Facts:
    """Of the data that a run was trained on.

    Args:
        name: of the dataset.
        digest: of its content.
        shape: (height, width, channels) of its images, or (longest length, d) of its texts.
        class_names: of all its classes; the next three are numbers of them.
        base: classes that trained.
        validation: classes that chose the round.
        novel: classes that tested.
        examples: how many there are in training.
        dealt: how many clients the examples were dealt to.
        clients: those of them that took part.
        words: with a vector, from row 2 on; empty for images.
        table: the vectors, float32 [V, d]; None for images.
    """

    name: str
    digest: str
    shape: tuple[int, ...]
    class_names: tuple[str, ...]
    base: tuple[int, ...]
    validation: tuple[int, ...]
    novel: tuple[int, ...]
    examples: int
    dealt: int
    clients: tuple[int, ...]
    words: tuple[str, ...] = field(default=(), repr=False)
    table: Tensor | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, dataset: Dataset, rows: Rows, dealt: int, clients: Sequence[int]) -> Facts:
        """Return the facts of a dataset, its rows to train, choose and test on, and the clients."""
        base, validation, novel = classes_of(dataset, rows)
        x = dataset.x
        return cls(
            dataset.name,
            dataset.digest,
            tuple(dataset.shape),
            dataset.class_names,
            base,
            validation,
            novel,
            len(rows.base),
            dealt,
            tuple(clients),
            *((x.words, torch.tensor(x.table)) if isinstance(x, Tokens) else ()),
        )

    @property
    def is_text(self) -> bool:
        """Whether the examples are texts; else they are images."""
        return self.table is not None

    def write(self, folder: Path) -> None:
        """Write the facts into a run's folder; `data.json` last, so that it stands for both."""
        if self.table is not None:
            text = "\n".join(self.words).encode("utf-8", "surrogateescape")
            words = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            storage.write(folder / WORDS, {"table": self.table, "words": words}, sync=False)
        told = {name: getattr(self, name) for name in _TOLD} | {"kind": _kind(self.is_text)}
        data = json.dumps(told, indent=1, sort_keys=True) + "\n"
        storage.write_bytes(folder / FILE, data.encode(), sync=False)

    @classmethod
    def read(cls, folder: Path) -> Facts | None:
        """Read what `write` wrote; None where a run does not have it.

        Raises CheckpointError when it is damaged.
        """
        told = read_info(folder)
        if told is None:
            return None
        path = folder / FILE
        known: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in told.items()
            if name in _TOLD
        }
        classes = range(len(told["class_names"]))
        if not {*told["base"], *told["validation"], *told["novel"]} <= {*classes}:
            raise CheckpointError(f"{path} is damaged: a class without a name. {_ANEW}.")
        if told["kind"] == "text":
            flat, _, _ = storage.read(folder / WORDS)
            try:
                text = flat["words"].numpy().tobytes().decode("utf-8", "surrogateescape")
                known |= {"table": flat["table"], "words": tuple(text.split("\n"))}
                if flat["table"].dtype != torch.float32 or flat["table"].ndim != 2:
                    raise ValueError("the vectors are no table of float32")
            except (ValueError, LookupError, TypeError) as error:
                raise CheckpointError(f"{folder / WORDS} is damaged: {error}. {_ANEW}.") from None
        return cls(**known)


def classes_of(dataset: Dataset, rows: Rows) -> Classes:
    """Return the class numbers of the rows to train, choose and test on."""
    base, validation, novel = (
        tuple(np.unique(dataset.y[part]).tolist())
        for part in (rows.base, rows.validation, rows.novel)
    )
    return base, validation, novel


def held_classes(folder: Path) -> Classes | None:
    """Return what `classes_of` was when a run started; None where its folder does not tell.

    Raises CheckpointError when `data.json` is damaged.
    """
    told = read_info(folder)
    if told is None:
        return None
    return tuple(told["base"]), tuple(told["validation"]), tuple(told["novel"])


def read_info(folder: Path) -> _InfoNote | None:
    path = folder / FILE
    if not path.exists():
        return None
    told: _InfoNote = records.read(path, _InfoNote, _ANEW)
    return told


def _kind(is_text: bool) -> str:
    return "text" if is_text else "images"


_TOLD = (
    "name", "digest", "shape", "class_names", "base", "validation", "novel", "examples", "dealt",
    "clients",
)  # fmt: skip
