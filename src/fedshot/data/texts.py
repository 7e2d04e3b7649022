"""Labelled texts from one file of your own: a csv with a header, or JSON lines."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset, Pixels
from fedshot.data.embedding import embedded
from fedshot.data.glove import Keep, Unknown
from fedshot.data.tokenizer import tokenize
from fedshot.data.tokens import Numbers, Tokens
from fedshot.errors import DataError

_LONGEST = 1 << 24  # bytes of a line of JSON
_JSON = (".json", ".jsonl", ".ndjson")


@dataclass(frozen=True)
class Texts:
    """Texts from a .csv with a header, or from JSON lines (.jsonl, .json), in UTF-8.

    Args:
        path: the file, relative to the working folder.
        text: the column, or key, of the text.
        label: that of the class, a word or a number.
        user: that of who wrote it, if known; only a number from 0 on is kept.
        vectors: file of word vectors; without it GloVe 6B from the data folder.
        dim: length of those vectors; a file in `vectors` has its own.
        cut: words kept of a text.
        keep: "known" drops words without a vector.
        unknown: vector of words without one: "zeros", or that of the word "unk".
    """

    path: str
    text: str = "text"
    label: str = "label"
    user: str | None = None
    vectors: str | None = None
    dim: int = 100
    cut: int = 100
    keep: Keep = "all"
    unknown: Unknown = "zeros"

    def load(self, data_dir: Path | None) -> Dataset:
        """Read, tokenise and number the texts; rows stay in the order of the file."""
        path = Path(self.path).expanduser()
        labels: list[str] = []
        users, names = [], Numbers()

        def texts() -> Iterator[list[str]]:
            for n, row in _rows(path):
                labels.append(_value(path, n, row, self.label))
                if self.user is not None:
                    users.append(names[_value(path, n, row, self.user)])
                text = row.get(self.text)
                if not isinstance(text, str):
                    raise DataError(f"{path}, line {n}: {_missing(self.text, row)}")
                yield tokenize(text)

        tokens = embedded(texts(), self, data_dir, path)
        return labelled(path.stem, tokens, labels, users if self.user is not None else None)

    def split(self, dataset: Dataset) -> ClassSplit | None:
        """Return None: such a file tells no split."""
        return dataset.standard


def labelled(
    name: str, x: Pixels | Tokens, labels: Sequence[str], users: Sequence[int] | None
) -> Dataset:
    """Return a dataset whose classes are the different labels, sorted."""
    classes, y = np.unique(np.array(labels, dtype=object), return_inverse=True)
    return Dataset(
        name,
        x,
        y.reshape(-1).astype(np.int64, copy=False),
        tuple(classes.tolist()),
        None if users is None else np.array(users, dtype=np.int64),
    )


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object); blank lines are passed over."""
    n = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(_LONGEST):
                n += 1
                if len(line) == _LONGEST:
                    raise DataError(f"{path}, line {n}: longer than {_LONGEST} bytes. Cut it.")
                if not line.strip(b"\xef\xbb\xbf \r\n"):
                    continue
                row = json.loads(line.decode("utf-8-sig"))
                if not isinstance(row, dict):
                    raise DataError(
                        f"{path}, line {n}: {type(row).__name__}; expected an object such as "
                        '{"text": "...", "label": "..."} on every line'
                    )
                yield n, row
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}). Check the path.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}, line {n}: not JSON in UTF-8. Write one object on every line."
        ) from error


def csv_rows(path: Path, encoding: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, cells); blank lines are passed over."""
    n = 0
    try:
        with path.open(encoding=encoding, newline="") as file:
            reader = csv.reader(file)
            for cells in reader:
                n = reader.line_num
                if cells:
                    yield n, cells
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}). Check the path.") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not text in UTF-8: {error.reason} at byte {error.start}. Save it as UTF-8."
        ) from error
    except (ValueError, csv.Error) as error:
        raise DataError(
            f"{path}, after line {n}: not a csv in {encoding} ({type(error).__name__}). Write it "
            "again, cells with commas or quotes in double quotes."
        ) from error


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if path.suffix.lower() in _JSON:
        yield from json_lines(path)
        return
    rows = csv_rows(path, "utf-8-sig")
    _, header = next(rows, (0, []))
    for n, cells in rows:
        if len(cells) != len(header):
            raise DataError(
                f"{path}, line {n}: {len(cells)} cells; expected {len(header)}, as in the header. "
                "Put cells with commas or line breaks in double quotes."
            )
        yield n, dict(zip(header, cells, strict=True))


def _value(path: Path, n: int, row: dict[str, Any], key: str) -> str:
    """Return a label or a user; its text is not shown in messages, since it may be a name."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"{path}, line {n}: {_missing(key, row)}")
    try:
        name = str(value)
        name.encode()
    except ValueError:  # more digits than Python turns into text, or half a character
        raise DataError(f"{path}, line {n}: {key!r} cannot be written as text") from None
    return name


def _missing(key: str, row: dict[str, Any]) -> str:
    if key in row:
        return f"{key!r} is empty or {type(row[key]).__name__}; expected a text"
    # What stands in the first line may be a row of a file without a header, names and all.
    return (
        f"there is no {key!r} among its {len(row)} fields. Set `text`, `label` or `user`; a csv "
        "needs a first line that names its columns."
    )
