"""Fit a classifier to folders of files, one folder per class, and predict a folder of files.

Texts may also be the rows of a table or JSON lines. Files and rows that cannot be read are reported
and skipped. Links to places outside the folder are not followed.
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
from fedshot.core.regular_files import real_path
from fedshot.data.files.images import SUFFIXES
from fedshot.data.sources.hf import HF
from fedshot.data.sources.texts import TABLES, Texts, label_of, table_rows, text_of
from fedshot.use.classifier import FewShotClassifier
from fedshot.use.inputs import padded

TEXTS = frozenset({".txt", ".text", ".md"})
_BLOCK = 512  # number of files predicted at once, which bounds the memory
WHOLE = 2048  # maximum number of files that a transductive method predicts together


@dataclass(frozen=True)
class Skipped:
    """A file that was not used, and the reason.

    `passed` says why a file was not even opened. "other kind": its suffix is not that of an image
    or text. "beside": it is beside the class folders. "linked folder": it is in a linked folder.
    "": it was opened, but is unreadable.
    """

    path: Path
    reason: str
    passed: Literal["", "other kind", "beside", "linked folder"] = ""
    label: str = ""  # the class of a row


@dataclass(frozen=True)
class FilePrediction:
    """The prediction for a file, or for a row of a table."""

    path: Path
    name: str  # path relative to the folder, with "/"; for a row, the file's name and the line
    label: str  # the predicted class, or the label for unknown examples
    confidence: float  # probability of `nearest`
    nearest: str  # the most probable class
    turned_away: bool  # whether the example was rejected as unknown
    probabilities: tuple[float, ...]  # one for each class, in the order of `classes_`
    text: str = ""  # the text of a row


@dataclass(frozen=True)
class Support:
    """The labelled examples that were read: files, or rows of a table with their texts."""

    paths: tuple[Path, ...]
    labels: tuple[str, ...]
    texts: tuple[str, ...]


class _Example(NamedTuple):
    path: Path
    name: str
    x: Tensor | str
    text: str = ""
    label: str = ""


def fit_folder(classifier: FewShotClassifier, folder: Path) -> tuple[Support, list[Skipped]]:
    """Fit a classifier to `folder/<class>/<file>`, or to the rows of a table of texts.

    Returns the examples and the files that were skipped. Raises DataError if the folder does not
    exist, or if no example can be read for some class.
    """
    skipped: list[Skipped] = []
    if _takes_texts(classifier) and folder.is_file():
        found = list(_table(classifier, folder, skipped, labelled=True))
        if not found:
            raise DataError(f"{folder} holds no text that can be read.{_last(skipped)}")
        read = {"", *(one.label for one in found)}
        if lost := [one for one in skipped if one.label not in read]:
            raise DataError(
                f"{folder} holds no text of class {lost[0].label!r} that can be read. Add some, or "
                f"remove the class. {lost[0].reason}"
            )
    else:
        found = _by_class(classifier, folder, skipped)
    paths, _, rows, texts, labels = zip(*found, strict=True)
    classifier.fit(_examples(rows), list(labels))
    return Support(paths, labels, texts), skipped


def _takes_texts(classifier: FewShotClassifier) -> bool:
    return classifier.opened.dataset_info.reads_text


def _examples(rows: Sequence[Tensor | str]) -> Tensor | list[str]:
    """Combine examples into an input of `FewShotClassifier`: a tensor, or a list of raw texts."""
    tensors = [row for row in rows if isinstance(row, Tensor)]
    return padded(tensors) if tensors else [row for row in rows if isinstance(row, str)]


def _by_class(
    classifier: FewShotClassifier, folder: Path, skipped: list[Skipped]
) -> list[_Example]:
    is_text = _takes_texts(classifier)
    root, suffix = _root(folder, is_text), ".txt" if is_text else ".png"
    every: list[_Example] = []
    classes = [p for p in sorted(root.iterdir()) if p.is_dir() and not p.name.startswith(".")]
    if not classes:
        raise DataError(
            f"{folder} holds no folders; expected one folder for each class, such as "
            f"{folder}/cat/1{suffix} and {folder}/dog/1{suffix}."
        )
    for path in sorted(root.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            skipped.append(Skipped(path, f"{path} is beside the class folders.", "beside"))
    for path in classes:
        if not _is_inside(path, root):
            raise DataError(
                f"{path} is a link to {real_path(path)}, outside {root}. Copy the folder instead."
            )
        examples = list(_read(classifier, path, root, skipped))
        if not examples:
            noun = f"text ({', '.join(sorted(TEXTS))})" if is_text else "picture"
            raise DataError(
                f"class folder {path} holds no {noun} that can be read. Add some, or remove the "
                f"folder.{_last(skipped)}"
            )
        every += [one._replace(label=path.name) for one in examples]
    return every


def predict_files(
    classifier: FewShotClassifier, folder: Path, skipped: list[Skipped]
) -> Iterator[FilePrediction]:
    """Yield a prediction for each file below a folder, or each row of a table of texts, in order.

    Files that are not used are appended to `skipped`. Transductive methods predict all files
    together.

    Raises DataError if the folder does not exist, or holds more than `WHOLE` files for a
    transductive method.
    """
    if _takes_texts(classifier) and folder.is_file():
        examples = _table(classifier, folder, skipped, labelled=False)
    else:
        root = _root(folder, _takes_texts(classifier))
        examples = _read(classifier, root, root, skipped)
    method = classifier.opened.method
    block: list[_Example] = []
    for example in examples:
        block.append(example)
        if method.traits.transductive:
            if len(block) > WHOLE:
                raise DataError(
                    f"{folder} holds more than {WHOLE} files, and {method.name} predicts all of "
                    "them together. Predict fewer files at once."
                )
        elif len(block) == _BLOCK:
            yield from _predicted(classifier, block)
            block.clear()
    if block:
        yield from _predicted(classifier, block)


def _predicted(
    classifier: FewShotClassifier, block: Sequence[_Example]
) -> Iterator[FilePrediction]:
    logits = classifier.logits(_examples([one.x for one in block]))
    p, accepted = classifier.probabilities(logits), classifier.accepted(logits)
    names = [str(name) for name in classifier.classes_.tolist()]
    for one, row, known in zip(block, p.tolist(), accepted.tolist(), strict=True):
        confidence, best = max(row), int(np.argmax(row))
        yield FilePrediction(
            one.path,
            one.name,
            names[best] if known else str(classifier.unknown_label),
            confidence,
            names[best],
            not known,
            tuple(row),
            one.text,
        )


def as_csv(found: Sequence[FilePrediction], classes: Sequence[str]) -> str:
    """Return a csv with a header: file, label, confidence, and a probability for each class."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["file", "label", "confidence", *(f"p({name})" for name in classes)])
    for one in found:
        numbers = (f"{value:.6f}" for value in (one.confidence, *one.probabilities))
        writer.writerow([_escaped(one.name), _escaped(one.label), *numbers])
    return out.getvalue()


def _escaped(cell: str) -> str:
    """Prefix a cell with an apostrophe if a spreadsheet would run it as a formula."""
    formula = cell.startswith(("\t", "\r", "\n")) or cell.lstrip().startswith(("=", "+", "-", "@"))
    return f"'{cell}" if formula else cell


def as_json_lines(found: Sequence[FilePrediction], classes: Sequence[str]) -> str:
    """Return JSON Lines, with one object for each prediction."""
    rows = (
        {
            "file": one.name,
            "label": one.label,
            "confidence": one.confidence,
            "probabilities": dict(zip(classes, one.probabilities, strict=True)),
        }
        for one in found
    )
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def _read(
    classifier: FewShotClassifier, folder: Path, root: Path, skipped: list[Skipped]
) -> Iterator[_Example]:
    """Yield the examples in the files below a folder, in order of file names.

    Unreadable files, and links out of `root`, are appended to `skipped`.
    """
    for path in _files(folder, _takes_texts(classifier), skipped):
        try:
            if not _is_inside(path, root):
                raise DataError(f"{path} is a link out of its folder. Copy the file instead.")
            example = classifier.inputs.one(path)
        except DataError as error:
            skipped.append(Skipped(path, str(error)))
        else:
            yield _Example(path, path.relative_to(root).as_posix(), example)


def _table(
    classifier: FewShotClassifier, path: Path, skipped: list[Skipped], *, labelled: bool
) -> Iterator[_Example]:
    """Yield the examples in the rows of a table; its columns are named as in the run's data.

    Rows that cannot be read are appended to `skipped`.
    """
    if path.suffix.lower() not in TABLES:
        raise DataError(
            f"{path} is neither a folder nor a table of texts; expected a file that ends in "
            f"{', '.join(sorted(TABLES))}."
        )
    path, data = real_path(path), classifier.opened.config.data
    source = data if isinstance(data, Texts | HF) else Texts("")
    text = source.text or "text"
    for where, row in table_rows(path, [text, source.label] if labelled else [text]):
        label = ""
        try:
            label = label_of(where, row, source.label) if labelled else ""
            content = text_of(where, row, text)
            example = classifier.inputs.text(content, where)
        except DataError as error:
            skipped.append(Skipped(path, str(error), label=label))
        else:
            yield _Example(path, where.replace(str(path), path.name, 1), example, content, label)


def _files(folder: Path, is_text: bool, skipped: list[Skipped]) -> Iterator[Path]:
    """Yield the files below a folder that have a suffix of images or texts and are not hidden."""
    wanted = TEXTS if is_text else SUFFIXES

    def failed(error: OSError) -> None:
        skipped.append(Skipped(Path(str(error.filename)), f"{error.filename}: {error.strerror}"))

    for parent, folders, names in os.walk(folder, onerror=failed):  # does not follow links
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            if (path := Path(parent) / name).is_symlink():
                reason = f"{path} is a link to a folder, which is not followed."
                skipped.append(Skipped(path, reason, "linked folder"))
        for name in sorted(names):
            path = Path(parent) / name
            if name.startswith("."):
                continue
            if path.suffix.lower() in wanted:
                yield path
            else:
                reason = f"{path} is of another kind; expected {', '.join(sorted(wanted))}."
                skipped.append(Skipped(path, reason, "other kind"))


def _root(folder: Path, is_text: bool) -> Path:
    if not folder.is_dir():
        table = ", nor a table of texts (.csv, .tsv, .jsonl, .json)" if is_text else ""
        raise DataError(f"{folder} is not a folder{table}. Correct the path.")
    return real_path(folder)


def _is_inside(path: Path, root: Path) -> bool:
    try:
        return path.resolve(strict=True).is_relative_to(root)
    except (OSError, RuntimeError) as error:  # a loop is a RuntimeError in Python 3.11 and 3.12
        raise DataError(f"{path} is a broken link. Remove it.") from error


def _last(skipped: Sequence[Skipped]) -> str:
    return f" {skipped[-1].reason}" if skipped else ""


Writer = Callable[[Sequence[FilePrediction], Sequence[str]], str]
WRITERS: dict[str, Writer] = {"csv": as_csv, "json": as_json_lines}
