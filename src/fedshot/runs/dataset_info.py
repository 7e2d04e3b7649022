"""Information about a dataset, stored in `data.json`, so that a run can be used without the data.

For texts, `words.safetensors` stores the vocabulary and its vectors. Both files are written when a
run starts; they hold the names of classes but no examples.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypeAlias

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import TypedDict

from fedshot.core import records, storage
from fedshot.core.errors import CheckpointError, ConfigError
from fedshot.core.records import Whole
from fedshot.core.text import named_client, natural, typed
from fedshot.data.class_split import RowSplit
from fedshot.data.dataset import Dataset, Kind
from fedshot.data.tokens import Tokens

FILE, WORDS = "data.json", "words.safetensors"

Classes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Class numbers of the base, validation and novel classes, in this order."""

_FIX = "Delete data.json and resume the run where its data is available, which rewrites the file"


class DatasetJson(TypedDict):
    """The content of data.json."""

    name: str
    digest: str
    shape: Annotated[list[Annotated[int, Field(ge=1, lt=2**24)]], Field(min_length=1, max_length=3)]
    class_names: list[str]
    base: list[Whole]
    validation: list[Whole]
    novel: list[Whole]
    examples: Whole
    dealt: Annotated[int, Field(ge=1, lt=10**8)]
    clients: NotRequired[Annotated[list[Whole], Field(min_length=1)]]  # all of them if missing
    client_names: NotRequired[list[str]]  # by client
    kind: Kind
    original: NotRequired[
        Annotated[list[Annotated[int, Field(ge=1, lt=2**24)]], Field(max_length=3)] | None
    ]


@dataclass(frozen=True)
class DatasetInfo:
    """Information about the dataset of a run.

    Args:
        name: name of the dataset.
        digest: hash of its content.
        shape: (height, width, channels) of images, (maximum length, d) of texts, or (d,) of
            features.
        class_names: names of all classes, by class number.
        base: class numbers of the training classes.
        validation: class numbers of the validation classes.
        novel: class numbers of the test classes.
        examples: number of training examples.
        dealt: number of clients that the partition assigns examples to.
        clients: ids of the clients that take part in training.
        words: the words of rows 2, 3, ... of `table`; empty for images.
        table: word vectors, float32 [V, d]; None for images.
        original: shape of the images that `model.encoder` takes, () if it takes texts; None without
            an encoder.
        client_names: names of the clients, by number; empty if they have none.
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
    clients: Sequence[int]
    words: tuple[str, ...] = field(default=(), repr=False)
    table: Tensor | None = field(default=None, repr=False, compare=False)
    original: tuple[int, ...] | None = None
    client_names: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, dataset: Dataset, rows: RowSplit, dealt: int, clients: Sequence[int],
        client_names: tuple[str, ...],
    ) -> DatasetInfo:  # fmt: skip
        """Return the information about a dataset.

        `rows` are the dataset's base, validation and novel rows. The other arguments become the
        fields of the same name.
        """
        base, validation, novel = split_classes(dataset, rows)
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
            x.words if isinstance(x, Tokens) else (),
            torch.tensor(x.table) if isinstance(x, Tokens) else None,
            None if dataset.encoding is None else dataset.encoding.shape,
            client_names,
        )

    @property
    def is_text(self) -> bool:
        """Whether the model takes texts."""
        return self.table is not None

    @property
    def kind(self) -> Kind:
        """The kind of the model's inputs: "images", "text" or "features"."""
        if self.is_text:
            return "text"
        return "features" if len(self.shape) == 1 else "images"

    @property
    def example_kind(self) -> Kind:
        """The kind of the examples before an encoder, if any, turns them into features."""
        if self.original is None:
            return self.kind
        return "images" if self.original else "raw text"

    @property
    def reads_text(self) -> bool:
        """Whether the examples are texts before an encoder, if any, turns them into features."""
        return self.example_kind in ("text", "raw text")

    def client_number(self, client: int | str) -> int:
        """Return the number of a client that is given by its number or its name.

        Raises ConfigError if no client that takes part has it.
        """
        number = natural(client) if isinstance(client, str) else client
        if isinstance(client, str) and client in self.client_names:
            named = self.client_names.index(client)
            if number in self.clients and number != named:
                raise ConfigError(
                    f"client is {client!r}, the name of client {named} and the number of another. "
                    f"Name it by its number, {named}, in Python: client={named}."
                )
            number = named
        if number is None or number not in self.clients:
            known = [named_client(c, self.client_names) for c in self.clients[:8]]
            more = ", ..." if len(self.clients) > len(known) else ""
            raise ConfigError(
                f"client is {client!r}; the clients of this run are {', '.join(known)}{more}."
            )
        return number

    def write(self, folder: Path) -> None:
        """Write the information into a run's folder.

        `data.json` is written last: if it exists, `words.safetensors` is complete, too.
        """
        if self.table is not None:
            text = "\n".join(self.words).encode("utf-8", "surrogateescape")
            words = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            storage.write(folder / WORDS, {"table": self.table, "words": words}, sync=False)
        content = {name: getattr(self, name) for name in DatasetJson.__annotations__}
        if list(self.clients) == list(range(self.dealt)):
            del content["clients"]  # of a million clients, the list would take ten megabytes
        if self.original is None:
            del content["original"]
        if not self.client_names:
            del content["client_names"]
        data = json.dumps(content, indent=1, sort_keys=True) + "\n"
        storage.write_bytes(folder / FILE, data.encode(), sync=False)

    @classmethod
    def read(cls, folder: Path) -> DatasetInfo:
        """Read what `write` wrote. Raises CheckpointError if a file is missing or damaged."""
        info = stored(folder)
        if info is None:
            raise CheckpointError(
                f"{folder} has lost its {FILE}. Run `fedshot resume {typed(folder)}` where its "
                "data is available, which rewrites the file."
            )
        known: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in info.items()
            if name in DatasetJson.__annotations__ and name != "kind"
        }
        if "clients" not in known:
            known["clients"] = range(info["dealt"])
        classes = range(len(info["class_names"]))
        if not {*info["base"], *info["validation"], *info["novel"]} <= {*classes}:
            raise CheckpointError(f"{folder / FILE} is damaged: a class has no name. {_FIX}.")
        if info["kind"] == "text":
            flat, _, _ = storage.read(folder / WORDS)
            try:
                text = flat["words"].numpy().tobytes().decode("utf-8", "surrogateescape")
                known |= {"table": flat["table"], "words": tuple(text.split("\n"))}
                if flat["table"].dtype != torch.float32 or flat["table"].ndim != 2:
                    raise ValueError("the vectors are not a float32 matrix")
            except (ValueError, LookupError, TypeError) as error:
                raise CheckpointError(f"{folder / WORDS} is damaged: {error}. {_FIX}.") from None
        return cls(**known)


def split_classes(dataset: Dataset, rows: RowSplit) -> Classes:
    """Return the class numbers of the base, validation and novel classes."""
    base, validation, novel = (
        tuple(np.unique(dataset.y[part]).tolist())
        for part in (rows.base, rows.validation, rows.novel)
    )
    return base, validation, novel


def stored(folder: Path) -> DatasetJson | None:
    """Return the content of a run's `data.json`; None if its folder has none.

    Raises CheckpointError if the file is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return None
    info: DatasetJson = records.read(path, DatasetJson, _FIX)
    if len(info.get("client_names", ())) not in (0, info["dealt"]):
        raise CheckpointError(f"{path} is damaged: a client has no name. {_FIX}.")
    return info
