"""What a run must know of its data to be used where the data are not: `data.json` in its folder.

For texts also `words.safetensors`, the words that have a vector and the vectors. Both are written
when a run starts, and tell classes by name but hold no example.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedshot import storage
from fedshot.data import Dataset, Rows, Tokens
from fedshot.errors import CheckpointError

FILE, WORDS = "data.json", "words.safetensors"


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
        base, validation, novel = (
            tuple(np.unique(dataset.y[part]).tolist())
            for part in (rows.base, rows.validation, rows.novel)
        )
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
        path = folder / FILE
        if not path.exists():
            return None
        try:
            told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            known: dict[str, Any] = {
                name: tuple(told[name]) if isinstance(told[name], list) else told[name]
                for name in _TOLD
            }
            if told["kind"] == "text":
                flat, _, _ = storage.read(folder / WORDS)
                text = flat["words"].numpy().tobytes().decode("utf-8", "surrogateescape")
                known |= {"table": flat["table"], "words": tuple(text.split("\n"))}
        except (ValueError, LookupError, TypeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({type(error).__name__}). Delete it and resume the run with "
                "its data at hand, which writes it anew."
            ) from None
        return cls(**known)


def _kind(is_text: bool) -> str:
    return "text" if is_text else "images"


_TOLD = (
    "name", "digest", "shape", "class_names", "base", "validation", "novel", "examples", "dealt",
    "clients",
)  # fmt: skip
