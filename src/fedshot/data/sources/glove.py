"""Frozen word vectors in GloVe's text format.

Source: Pennington et al. 2014. A line is `word v1 ... vd`, and there is no header. A few words
of glove.840B contain spaces, such as `. . .`: the last d fields of a line are the vector.
"""

from __future__ import annotations

import zipfile
from array import array
from collections.abc import Container, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from fedshot.core.errors import DataError
from fedshot.data.files.bounded import (
    Stream,
    check_member,
    max_unpacked,
    naming_damage,
    opened_zip,
    unzipped,
)
from fedshot.data.files.fingerprints import hash_stream
from fedshot.data.files.places import OPTION
from fedshot.data.tokens import FIRST_WORD, UNKNOWN, Table

Unknown: TypeAlias = Literal["zeros", "unk"]

_MAX_LINE = 1 << 16  # bytes; 300 numbers have about 3,000
_MAX_FILE = 1 << 34  # bytes, decompressed; the largest GloVe file has 5.6e9
_RATIO = 10  # decompressed bytes for each compressed one; real vectors have about 3
_UNK = "unk"


def find_vectors(vectors: str | None, dim: int, data_dir: Path | None) -> Path:
    """Return the file of word vectors that the options `vectors` and `dim` select.

    `vectors` is a file, relative to the working directory or to `<data_dir>/glove`. If it is None,
    `<data_dir>/glove` is searched for GloVe 6B with `dim` columns; the shortest file name wins.
    """
    folder = None if data_dir is None else data_dir / "glove"
    if vectors is not None:
        places = [Path(vectors).expanduser(), *([folder / vectors] if folder else [])]
    elif folder is None:
        raise DataError(
            f"texts need word vectors, and there is no data folder to search. Set $FEDSHOT_DATA, "
            f"or {OPTION}, to the folder that holds glove/glove.6B.{dim}d.txt; or set `vectors` to "
            "a file, for data in memory in fedshot.as_dataset(data, vectors=file)."
        )
    else:
        found = chain.from_iterable(
            folder.glob(f"glove.6B.{dim}d*.txt{end}") for end in ("", ".gz", ".zip")
        )
        places = [*sorted(found, key=lambda p: (len(p.name), p.name)), folder / "glove.6B.zip"]
    for place in places:
        if place.is_file():
            return place
    raise DataError(
        f"there is no file of word vectors at {' or '.join(map(str, places))}. Put "
        f"glove.6B.{dim}d.txt (or .txt.gz, or glove.6B.zip) there, or set `vectors` or `dim`."
    )


def digest(path: Path, dim: int | None = None) -> str:
    """Return the SHA-256 of a file of word vectors, after decompression."""
    with naming_damage(path, "word vector"), _opened(path, dim) as file:
        return hash_stream(file)


def load_vectors(
    path: Path, words: Container[str], dim: int | None = None, unknown: Unknown = "zeros"
) -> tuple[dict[str, int], Table]:
    """Return (row of each word found, table float32 [V, d]) from a .txt file, plain, .gz or .zip.

    Only the vectors of `words` are kept. Row 0 (padding) is zero; row 1 (unknown words) is zero, or
    the vector of "unk". `dim` selects a file of a .zip. Raises DataError, which names the line, for
    malformed vectors.
    """
    found: dict[str, int] = {}
    numbers = array("f")
    lines: list[int] = []
    d = 0
    for n, line in _lines(path, dim):
        d = d or _columns(line)
        word, _, rest = line.partition(b" ")
        columns = rest.count(b" ") + 1 if rest else 0
        if columns > d >= 2:  # a word with spaces, or too many numbers
            longer = line.rsplit(b" ", d)[0]
            if not _is_number(longer.rpartition(b" ")[2]):
                word, rest, columns = longer, line[len(longer) + 1 :], d
        if columns != d or d < 2:
            hint = " That is the header of word2vec's format; remove it." if d == 1 == n else ""
            raise DataError(
                f"{path}, line {n}: {columns} numbers after the word; expected "
                f"{max(d, 2) if n > 1 else '2 or more'}, as in `the 0.1 -0.2 ...`.{hint} Fetch the "
                "file again."
            )
        name = word.decode("utf-8", "surrogateescape")
        if name in found or (name not in words and not (name == _UNK and unknown == "unk")):
            continue
        try:
            numbers.extend(map(float, rest.split(b" ")))
        except ValueError:
            raise DataError(
                f"{path}, line {n}: the vector is not all numbers. Fetch the file again."
            ) from None
        found[name] = FIRST_WORD + len(found)
        lines.append(n)
    if d == 0:
        raise DataError(f"{path} holds no word vectors; expected lines such as `the 0.1 -0.2 ...`")
    table = np.zeros((FIRST_WORD + len(found), d), dtype=np.float32)
    table[FIRST_WORD:] = np.frombuffer(numbers, dtype=np.float32).reshape(-1, d)
    bad = ~np.isfinite(table[FIRST_WORD:]).all(axis=1)
    if bad.any():
        raise DataError(
            f"{path}, line {lines[int(bad.argmax())]}: the vector holds NaN or infinity; expected "
            "finite numbers. Fetch the file again."
        )
    if unknown == "unk":
        if _UNK not in found:
            raise DataError(f"{path} has no word {_UNK!r}. Set `unknown` to 'zeros'.")
        table[UNKNOWN] = table[found[_UNK]]
    return found, table


def _lines(path: Path, dim: int | None) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line) for each line of the file that is not empty."""
    with naming_damage(path, "word vector"), _opened(path, dim) as file:
        n = read = 0
        while line := file.readline(_MAX_LINE):
            n, read = n + 1, read + len(line)
            if len(line) == _MAX_LINE or read > _MAX_FILE:
                raise DataError(
                    f"{path}, line {n}: longer than in any known file of word vectors. Fetch it "
                    "again."
                )
            line = line.strip(b" \r\n")
            if line:
                yield n, line


def _columns(line: bytes) -> int:
    """Return how many numbers a line ends with, leaving at least one field for the word."""
    d, parts = 0, line.split(b" ")
    while d < len(parts) - 1 and _is_number(parts[-d - 1]):
        d += 1
    return d


def _is_number(part: bytes) -> bool:
    try:
        float(part)
    except ValueError:
        return False
    return True


@contextmanager
def _opened(path: Path, dim: int | None) -> Iterator[Stream]:
    """Open a file of word vectors, decompressed as its first bytes require (gzip, zip or none)."""
    with unzipped(path, _RATIO) as file:
        is_zip = file.read(2) == b"PK"
        file.seek(0)
        if not is_zip:
            yield file
            return
    with opened_zip(path) as archive:
        member = archive.getinfo(_member(path, archive, dim))
        check_member(path, member, max_unpacked(path, _RATIO))
        with archive.open(member) as text:
            yield text


def _member(path: Path, archive: zipfile.ZipFile, dim: int | None) -> str:
    names = [name for name in archive.namelist() if name.endswith(".txt")]
    fit = [name for name in names if f".{dim}d." in name] if len(names) > 1 else names
    if len(fit) != 1:
        raise DataError(
            f"{path} holds {names[:8]}; expected one .txt file, or one with '.{dim}d.' in its "
            "name. Set `dim`, or unpack it and set `vectors`."
        )
    return fit[0]
