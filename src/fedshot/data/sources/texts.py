"""Labelled texts from one file: a table with a header, JSON lines or a JSON array."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedshot.core.errors import DataError
from fedshot.core.regular_files import open_regular, read_regular
from fedshot.core.text import count, spelling
from fedshot.data.dataset import Dataset, Pixels, first_twice
from fedshot.data.sources.embedding import TextSource
from fedshot.data.tokens import Numbers, RawTexts, Tokens

_MAX_LINE = 1 << 24  # bytes, or characters
_MAX_DOCUMENT = 1 << 26  # bytes of a JSON document that is read as a whole
_JSON = (".json", ".jsonl", ".ndjson")
TABLES = frozenset({".csv", ".tsv", *_JSON})
_SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons"}


@dataclass(frozen=True)
class Texts(TextSource):
    """Texts from a table with a header (.csv, .tsv), or from JSON (.jsonl, .json), in UTF-8.

    Columns of a table are separated by commas, tabs or semicolons, as in its header. JSON has a row
    (an object or an array) on every line, or is one array of rows. The values of a row that is an
    array have the keys "0", "1" and so on.

    Args:
        path: the file, relative to the working directory.
        text: the column, or key, of the text; "0" for the first value of an array.
        label: the column, or key, of the class, which is a word or a number.
        user: the column, or key, of the user, if known; users are stored as numbers that start at
            0.
    """

    path: str
    text: str = "text"
    label: str = "label"
    user: str | None = None

    def _load(self, data_dir: Path | None, *, raw: bool) -> Dataset:
        """Read the texts, in the order of the file."""
        path = Path(self.path).expanduser()
        x, pairs = self.read(self._rows(path), data_dir, path, raw=raw)
        users = None if self.user is None else [user for _, user in pairs]
        return labelled(path.stem, x, [label for label, _ in pairs], users)

    def _rows(self, path: Path) -> Iterator[tuple[tuple[str, int], str]]:
        """Yield ((class, user), text) of each row."""
        names = Numbers()
        columns = [self.text, self.label, *([] if self.user is None else [self.user])]
        for where, row in table_rows(path, columns):
            label, user = label_of(where, row, self.label), 0
            if self.user is not None:
                user = names[spelling(label_of(where, row, self.user))]
            yield (label, user), text_of(where, row, self.text)


def labelled(
    name: str, x: Pixels | Tokens | RawTexts, labels: Sequence[str], users: Sequence[int] | None
) -> Dataset:
    """Return a dataset whose classes are the distinct labels, sorted.

    Raises DataError if most texts, or most of their words, have no vector.
    """
    if isinstance(x, Tokens):
        x.check_known(name)
    classes, y = np.unique(np.array(labels, dtype=object), return_inverse=True)
    return Dataset(
        name,
        x,
        y.reshape(-1).astype(np.int64, copy=False),
        tuple(classes.tolist()),
        None if users is None else np.array(users, dtype=np.int64),
    )


def table_rows(path: Path, columns: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (position, row) of each row of a table or a JSON file; errors name the position.

    Args:
        path: the file; its suffix tells JSON from a table.
        columns: names expected in a table's header. The separator (comma, tab or semicolon) that
            yields most of these columns is used.
    """
    if path.suffix.lower() in _JSON:
        yield from json_rows(path)
        return
    headers: dict[str, list[str]] = {}
    for separator in _SEPARATORS:
        headers[separator] = next(csv_rows(path, "utf-8-sig", separator), (1, []))[1]
        if set(columns) <= set(headers[separator]):
            break
    separator = max(
        headers, key=lambda one: (len(set(columns) & set(headers[one])), len(headers[one]))
    )
    header, between = headers[separator], _SEPARATORS[separator]
    for name in columns:
        if header.count(name) > 1:
            raise DataError(
                f"{path}: the header has {header.count(name)} columns {name!r}; expected one. "
                "Rename the others."
            )
    rows = csv_rows(path, "utf-8-sig", separator)
    next(rows, None)
    for n, cells in rows:
        if len(cells) != len(header):
            raise DataError(
                f"{path}, line {n}: {len(cells)} cells; expected {len(header)}, as in the header, "
                f"which separates them by {between}. Put cells with {between} or line breaks in "
                "double quotes."
            )
        yield f"{path}, line {n}", dict(zip(header, cells, strict=True))


def json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (position, row) of JSON lines, or of one JSON array of rows; errors name the position.

    The keys of a row that is an array are "0", "1" and so on. Blank lines are skipped.
    """
    with readable(path), open_regular(path) as file:
        lines = _lines(path, file)
        start, first = next(lines, (0, b""))
        if not start:
            return
        try:
            value = _parsed(first)
            whole = isinstance(value, list) and all(isinstance(row, dict | list) for row in value)
        except (ValueError, RecursionError):  # it may continue on the next line
            whole = True
        if whole:
            for i, value in enumerate(_document(path, start), start=1):
                yield _row(f"{path}, row {i}", value)
            return
        for n, line in chain([(start, first)], lines):
            try:
                value = _parsed(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}, line {n}: {_not_json(error)}") from error
            yield _row(f"{path}, line {n}", value)


def csv_rows(path: Path, encoding: str, separator: str = ",") -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the row's first line, cells) of each row; blank lines are skipped."""
    n, ended = 1, False

    def lines(file: io.TextIOWrapper) -> Iterator[str]:
        nonlocal ended
        while line := file.readline(_MAX_LINE):
            if len(line) == _MAX_LINE:
                raise DataError(f"{path}: a line has more than {_MAX_LINE} characters. Cut it.")
            yield line
        ended = True

    try:
        with (
            readable(path),
            open_regular(path) as file,
            io.TextIOWrapper(file, encoding=encoding, newline="") as text,
        ):
            reader = csv.reader(lines(text), delimiter=separator)
            for cells in reader:
                first, n = n, reader.line_num + 1
                if ended:  # the file ends within a cell
                    before = "".join(cells[:-1]).replace("\r\n", "\n")
                    opened = first + before.count("\n") + before.count("\r")
                    raise DataError(
                        f"{path}, line {opened}: a double quote opens a cell here and is never "
                        "closed. Close it, or write a quote within a text as two."
                    )
                if cells:
                    yield first, cells
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not text in UTF-8: {error.reason} at byte {error.start}. Save it as UTF-8."
        ) from error
    except (ValueError, csv.Error) as error:
        if "field limit" in str(error):
            raise DataError(
                f"{path}, line {n}: a cell of the row that begins here has more than "
                f"{csv.field_size_limit():,} characters. Close a double quote that is open, or "
                "cut the text."
            ) from error
        reason = error if isinstance(error, csv.Error) else type(error).__name__
        raise DataError(
            f"{path}, line {n}: not a csv in {encoding} ({reason}). Write it again, cells with "
            "commas or quotes in double quotes."
        ) from error


def label_of(where: str, row: dict[str, Any], key: str) -> str:
    """Return a row's label or user as text. Raises DataError if it is missing.

    Errors do not quote the value, because it may be a person's name.
    """
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"{where}: {_missing(key, row)}")
    try:
        name = str(value)
        name.encode()
    except ValueError:  # too many digits for str, or a lone surrogate
        raise DataError(f"{where}: {key!r} cannot be written as text") from None
    return name


def text_of(where: str, row: dict[str, Any], key: str) -> str:
    """Return the text of a row. Raises DataError if it is missing."""
    text = row.get(key)
    if not isinstance(text, str):
        raise DataError(f"{where}: {_missing(key, row)}")
    return text


def _missing(key: str, row: dict[str, Any]) -> str:
    if key in row:
        held = "empty" if row[key] == "" else f"of type {type(row[key]).__name__}"
        return f"{key!r} is {held}; expected a text. Fill it in, or remove the row."
    if "0" in row:
        return (
            f"there is no {key!r} in an array of {len(row)} values. Set `text` and `label` to "
            "their positions, such as '0' and '1'."
        )
    # Do not quote the fields: without a header, they are a row of data.
    return (
        f"there is no {key!r} among its {count(len(row), 'field')}. Set data.text, data.label or "
        "data.user, in the file's own spelling; a csv needs a first line that names its columns, "
        "with commas, semicolons or tabs between them."
    )


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn an OSError into a DataError that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}). Check the path.") from error


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line) for each line that is not blank."""
    n = 0
    while line := file.readline(_MAX_LINE):
        n += 1
        if len(line) == _MAX_LINE:
            raise DataError(f"{path}, line {n}: longer than {_MAX_LINE} bytes. Cut it.")
        if line.strip(b"\xef\xbb\xbf \r\n"):
            yield n, line


def _parsed(data: bytes) -> Any:
    return json.loads(data.decode("utf-8-sig"), object_pairs_hook=unique_keys)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the JSON object with these pairs. Raises ValueError for a duplicate key."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise _DuplicateKeyError(f"the key {first_twice(key for key, _ in pairs)!r} occurs twice")
    return made


class _DuplicateKeyError(ValueError):
    pass


def _not_json(error: Exception) -> str:
    reason = f" ({error})" if isinstance(error, _DuplicateKeyError) else ""
    return f"not JSON in UTF-8{reason}. Write one object on every line."


def _document(path: Path, n: int) -> list[Any]:
    """Return the rows of a file that is one JSON array; `n` is the first line not blank."""
    if path.stat().st_size > _MAX_DOCUMENT:
        raise DataError(
            f"{path}, line {n}: not a JSON object, and the file is larger than {_MAX_DOCUMENT} "
            "bytes, the limit of a single array. Write one object on every line."
        )
    try:
        data = read_regular(path, _MAX_DOCUMENT)
        value = _parsed(data)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError):
            n = error.lineno
        elif isinstance(error, UnicodeDecodeError):
            n = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {n}: {_not_json(error)}") from error
    if not isinstance(value, list):
        raise DataError(
            f"{path} holds one {type(value).__name__} of {len(value)} values over many lines; "
            "expected an array of rows, or a row on every line. Write its rows to a file."
        )
    return value


def _row(where: str, value: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(value, list):
        return where, {str(i): one for i, one in enumerate(value)}
    if not isinstance(value, dict):
        raise DataError(
            f"{where}: {type(value).__name__}; expected an object such as "
            '{"text": "...", "label": "..."} on every line'
        )
    return where, value
