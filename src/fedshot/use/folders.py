"""Folders of files in, answers out: a folder for each class to learn from, a folder to answer.

Texts may also stand in the rows of a table or of JSON lines, one of each. A file or row that cannot
be read is reported and skipped. No link leads out of its folder.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from fedshot.core.errors import DataError
from fedshot.data.files.images import SUFFIXES
from fedshot.data.sources.hf import HF
from fedshot.data.sources.texts import TABLES, Texts, label_of, table_rows, text_of
from fedshot.use.classifier import FewShotClassifier
from fedshot.use.inputs import Inputs, padded

TEXTS = frozenset({".txt", ".text", ".md"})
_BLOCK = 512  # files read before they are answered, so that memory does not grow with their number
WHOLE = 2048  # files of one question, where answers depend on all files of it


@dataclass(frozen=True)
class Skipped:
    """A file that could not be used, and why.

    `passed` tells that it was not tried: a file of another kind, one beside the class folders, or
    a linked folder.
    """

    path: Path
    reason: str
    passed: Literal["", "other kind", "beside", "linked folder"] = ""


@dataclass(frozen=True)
class FileAnswer:
    """What a classifier says about a file.

    Args:
        path: the file.
        name: where it lies below its folder, with "/"; of a row, the name of its file and its line.
        label: the answer; that for unknown examples where the threshold turned it away.
        confidence: probability of the most probable class, accepted or not.
        nearest: the most probable class.
        turned_away: whether the label is that for unknown examples.
        probabilities: of all classes, in their order.
        text: what the row of a table says; "" for a file.
    """

    path: Path
    name: str
    label: str
    confidence: float
    nearest: str
    turned_away: bool
    probabilities: tuple[float, ...]
    text: str = ""


@dataclass(frozen=True)
class Support:
    """Labelled files, or rows of a table with their texts, that could be read."""

    paths: tuple[Path, ...]
    labels: tuple[str, ...]
    x: Tensor
    texts: tuple[str, ...]


class _Found(NamedTuple):
    path: Path
    name: str
    x: Tensor
    text: str = ""  # of a row of a table
    label: str = ""


def learn(
    classifier: FewShotClassifier, folder: Path, inputs: Inputs, is_text: bool
) -> tuple[Support, list[Skipped]]:
    """Fit a classifier to `folder/<class>/<file>`, or to the rows of a table of texts.

    Raises DataError when there is no folder, or a class of which nothing can be read.
    """
    skipped: list[Skipped] = []
    if is_text and folder.is_file():
        found = list(_table(classifier, folder, inputs, skipped, labelled=True))
        if not found:
            raise DataError(f"{folder} holds no text that can be read.{_first(skipped)}")
    else:
        found = _by_class(folder, inputs, is_text, skipped)
    paths, _, rows, texts, labels = zip(*found, strict=True)
    x = padded(rows)
    classifier.fit(x, list(labels))
    return Support(paths, labels, x, texts), skipped


def _by_class(folder: Path, inputs: Inputs, is_text: bool, skipped: list[Skipped]) -> list[_Found]:
    root = _root(folder, is_text)
    every: list[_Found] = []
    classes = [p for p in sorted(root.iterdir()) if p.is_dir() and not p.name.startswith(".")]
    if not classes:
        raise DataError(
            f"{folder} holds no folders; expected one for each class, with its examples, such as "
            f"{folder}/cat/1{_suffix(is_text)} and {folder}/dog/1{_suffix(is_text)}."
        )
    for path in sorted(root.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            skipped.append(Skipped(path, f"{path} lies beside the class folders.", "beside"))
    for place in classes:
        if not _stays(place, root):
            raise DataError(
                f"{place} is a link to {place.resolve()}, outside {root}. Copy the folder instead."
            )
        files = list(_read(place, root, inputs, is_text, skipped))
        if not files:
            raise DataError(
                f"class folder {place} holds no {_noun(is_text)} that can be read. Add some, or "
                f"remove the folder.{_first(skipped)}"
            )
        every += [one._replace(label=place.name) for one in files]
    return every


def replies(
    classifier: FewShotClassifier,
    folder: Path,
    inputs: Inputs,
    is_text: bool,
    skipped: list[Skipped],
) -> Iterator[FileAnswer]:
    """Yield the answer to every file below a folder, or every row of a table of texts, in order.

    What was skipped goes to a list.

    Answers of transductive methods depend on the other files, so these are asked all together.

    Raises DataError when the folder does not exist, or holds more than `WHOLE` files for such a
    method.
    """
    if is_text and folder.is_file():
        examples = _table(classifier, folder, inputs, skipped, labelled=False)
    else:
        root = _root(folder, is_text)
        examples = _read(root, root, inputs, is_text, skipped)
    method = classifier.opened.method
    block: list[_Found] = []
    for found in examples:
        block.append(found)
        if method.traits.transductive:
            if len(block) > WHOLE:
                raise DataError(
                    f"{folder} holds more than {WHOLE} files, and {method.name} answers each "
                    "by all of them together. Ask for fewer files at once, of one kind."
                )
        elif len(block) == _BLOCK:
            yield from _answered(classifier, block)
            block.clear()
    if block:
        yield from _answered(classifier, block)


def _answered(classifier: FewShotClassifier, block: Sequence[_Found]) -> Iterator[FileAnswer]:
    logits = classifier.logits(padded([one.x for one in block]))
    p, known = classifier.probabilities(logits), classifier.accepted(logits)
    names = [str(name) for name in classifier.classes_.tolist()]
    for one, row, fits in zip(block, p, known.tolist(), strict=True):
        best = int(np.argmax(row))
        label = names[best] if fits else str(classifier.unknown_label)
        sure = tuple(row.tolist())
        yield FileAnswer(
            one.path, one.name, label, sure[best], names[best], not fits, sure, one.text
        )


def as_csv(found: Sequence[FileAnswer], classes: Sequence[str]) -> str:
    """Return a table with a header: file, label, confidence, and a probability for each class."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    # Spreadsheets run cells that begin like a formula.
    writer.writerow(["file", "label", "confidence", *(f"p({name})" for name in classes)])
    for one in found:
        numbers = (f"{value:.6f}" for value in (one.confidence, *one.probabilities))
        writer.writerow([_plain(one.name), _plain(one.label), *numbers])
    return out.getvalue()


def _plain(cell: str) -> str:
    """Return a cell after an apostrophe where a spreadsheet would take it for a formula."""
    formula = cell.startswith(("\t", "\r", "\n")) or cell.lstrip().startswith(("=", "+", "-", "@"))
    return f"'{cell}" if formula else cell


def as_json_lines(found: Sequence[FileAnswer], classes: Sequence[str]) -> str:
    """Return one object a line."""
    return "".join(
        json.dumps(
            {
                "file": one.name,
                "label": one.label,
                "confidence": one.confidence,
                "probabilities": dict(zip(classes, one.probabilities, strict=True)),
            }
        )
        + "\n"
        for one in found
    )


def _read(
    folder: Path, root: Path, inputs: Inputs, is_text: bool, skipped: list[Skipped]
) -> Iterator[_Found]:
    """Yield the examples in all files that can be read below a folder, in order of their names."""
    for path in _files(folder, is_text, skipped):
        try:
            if not _stays(path, root):
                raise DataError(f"{path} is a link out of its folder. Copy the file instead.")
            example = inputs.one(path)
        except DataError as error:
            skipped.append(Skipped(path, str(error)))
        else:
            yield _Found(path, path.relative_to(root).as_posix(), example)


def _table(
    classifier: FewShotClassifier,
    path: Path,
    inputs: Inputs,
    skipped: list[Skipped],
    *,
    labelled: bool,
) -> Iterator[_Found]:
    """Yield the examples in the rows of a table; its columns are named as in the run's own data."""
    if path.suffix.lower() not in TABLES:
        raise DataError(
            f"{path} is no folder and no table of texts; expected a file that ends in "
            f"{', '.join(sorted(TABLES))}."
        )
    path, source = path.resolve(), classifier.opened.config.data
    told = source if isinstance(source, Texts | HF) else Texts("")
    text, columns = told.text or "text", [told.text or "text"]
    columns += [told.label] if labelled else []
    for where, row in table_rows(path, columns):
        try:
            content = text_of(where, row, text)
            label = label_of(where, row, told.label) if labelled else ""
            example = inputs.text(content, where)
        except DataError as error:
            skipped.append(Skipped(path, str(error)))
        else:
            yield _Found(path, where.replace(str(path), path.name, 1), example, content, label)


def _files(folder: Path, is_text: bool, skipped: list[Skipped]) -> Iterator[Path]:
    """Yield pictures or texts below a folder by their suffix; hidden ones are passed over."""
    wanted = TEXTS if is_text else SUFFIXES

    def noted(error: OSError) -> None:
        skipped.append(Skipped(Path(str(error.filename)), f"{error.filename}: {error.strerror}"))

    for place, folders, names in os.walk(
        folder, onerror=noted
    ):  # links to folders are not followed
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            if (path := Path(place) / name).is_symlink():
                reason = f"{path} is a link to a folder, which is not followed."
                skipped.append(Skipped(path, reason, "linked folder"))
        for name in sorted(names):
            path, kind = Path(place) / name, Path(name).suffix.lower()
            if name.startswith("."):
                continue
            if kind in wanted:
                yield path
            else:
                reason = f"{path} is of another kind; expected {', '.join(sorted(wanted))}."
                skipped.append(Skipped(path, reason, "other kind"))


def _root(folder: Path, is_text: bool) -> Path:
    if not folder.is_dir():
        table = ", nor a table of texts (.csv, .tsv, .jsonl, .json)" if is_text else ""
        raise DataError(f"{folder} is not a folder{table}. Correct the path.")
    return folder.resolve()


def _stays(path: Path, root: Path) -> bool:
    try:
        return path.resolve(strict=True).is_relative_to(root)
    except (OSError, RuntimeError) as error:  # Python 3.11 and 3.12 call a loop a RuntimeError
        raise DataError(f"{path} is a link that leads nowhere. Remove it.") from error


def _noun(is_text: bool) -> str:
    return f"text ({', '.join(sorted(TEXTS))})" if is_text else "picture"


def _suffix(is_text: bool) -> str:
    return ".txt" if is_text else ".png"


def _first(skipped: Sequence[Skipped]) -> str:
    return f" {skipped[-1].reason}" if skipped else ""


Writer = Callable[[Sequence[FileAnswer], Sequence[str]], str]
WRITERS: dict[str, Writer] = {"csv": as_csv, "json": as_json_lines}
