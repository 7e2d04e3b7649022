"""The commands `predict`, `calibrate` and `export`, which use a trained run.

Each takes the parsed options and returns an exit code.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from fedshot.core import storage
from fedshot.core.console import say, tell
from fedshot.core.errors import ConfigError, DataError
from fedshot.core.extras import require
from fedshot.core.regular_files import real_path
from fedshot.core.text import count, other_kinds, typed
from fedshot.use.calibration import store
from fedshot.use.card import card_facts
from fedshot.use.classifier import FewShotClassifier
from fedshot.use.exporting import export
from fedshot.use.folders import WRITERS, FilePrediction, Skipped, Support, fit_folder, predict_files
from fedshot.use.measuring import measure
from fedshot.use.trained import TrainedRun

_TOLD = 20  # maximum number of skipped files named on the terminal


def predict(options: argparse.Namespace) -> int:
    """Classify the files in a folder, given a folder of labelled examples."""
    asked: float | None = options.none_of_these
    if asked is not None and not 0 < asked < 1:
        raise ConfigError(
            f"--none-of-these is {asked}; expected a share between 0 and 1, such as 0.05."
        )
    if options.page:
        require("reports", "--page")
    classifier = FewShotClassifier.from_run(
        options.folder,
        client=options.client,
        accept_unknown=asked,
        data_dir=options.data_dir,
    )
    _check_writable("to", options.to)
    _check_writable("page", options.page, makes_folder=True)
    run = classifier.opened
    with warnings.catch_warnings(record=True) as noted, _in_words_of_the_shell():
        warnings.simplefilter("always")
        support, skipped = fit_folder(classifier, options.support)
    for one in noted:
        tell(f"warning: {one.message}")
    unread = sum(not one.passed for one in skipped)
    if classifier.calibration_ is None and not options.quiet:
        tell(
            f"{options.folder} is not calibrated: the model's own probabilities are usually too "
            f"high or too low. `fedshot calibrate {typed(options.folder)}` calibrates them."
        )
    elif not options.quiet:
        tell(_trust(classifier))
    found = list(predict_files(classifier, options.query, skipped))
    _tell_skipped(skipped, quiet=options.quiet)
    if not found:
        raise DataError(
            f"{options.query} holds no {'text' if run.dataset_info.reads_text else 'picture'} that "
            "can be read"
            f"{_passed(skipped)}. Add some, or correct the path."
        )
    classes = [str(name) for name in classifier.classes_.tolist()]
    text = WRITERS["json" if options.json else "csv"](found, classes)
    text = text.encode("utf-8", "replace").decode()  # a file's name may not be valid text
    if options.to:
        storage.deliver(options.to, text.encode())
    else:
        say(text.rstrip("\n"))
    if options.page:
        _write_page(options, run, classifier, support, found, skipped)
    if not options.quiet:
        made = [str(place) for place in (options.to, options.page) if place]
        unused = sum(not one.passed for one in skipped)
        left = (f", {unused} skipped" if unused else "") + _passed(skipped)
        tell(
            f"{count(len(found), _noun(options.query))} classified{left}; learnt from "
            f"{count(len(support.paths), _noun(options.support))} of {len(classes)} classes"
            + (f" ({unread} of the examples skipped)" if unread else "")
            + (f"; wrote {' and '.join(made)}" if made else "")
        )
    return 0


def calibrate(options: argparse.Namespace) -> int:
    """Calibrate a run's confidence on its validation classes; save the result in its folder."""
    run = TrainedRun(options.folder, options.data_dir)
    found = measure(
        run,
        way=options.way,
        shot=options.shot,
        episodes=options.episodes,
        client=options.client,
    )
    path = store(run.folder, found)
    if options.json:
        say(json.dumps(asdict(found)))
        return 0
    for line in str(found).splitlines():
        say(line)
    if not options.quiet:
        tell(f"wrote {path}")
    return 0


def export_run(options: argparse.Namespace) -> int:
    """Write the encoder of a run for other programs, with a model card."""
    run = TrainedRun(options.folder, options.data_dir)
    folder = options.out or Path(options.folder) / "export"
    if options.to != "safetensors":
        tell(f"{options.folder}: tracing the encoder for {options.to} and comparing its outputs")
    for path in export(run, options.to, folder, client=options.client, licence=options.licence):
        say(str(path))
    return 0


@contextmanager
def _in_words_of_the_shell() -> Iterator[None]:
    """Replace `accept_unknown` in errors by the name of the option, `--none-of-these`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace("accept_unknown is", "--none-of-these is")) from None


def _check_writable(option: str, path: Path | None, *, makes_folder: bool = False) -> None:
    """Raise ConfigError if an output file cannot be written, before anything is classified."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--{option} is {path}, which is a folder. Name a file in it.")
    if not makes_folder and not path.parent.is_dir():
        raise ConfigError(
            f"--{option} is {path}, but {path.parent} is not a folder. Create it, or correct the "
            "path."
        )


def _passed(skipped: Sequence[Skipped]) -> str:
    """Return text with the number of files left out and of linked folders not followed, or "".

    A file is left out if its type is not supported or if it lies beside the class folders.
    """
    kinds = other_kinds((s.path for s in skipped if s.passed == "other kind"), "left out")
    beside = sum(one.passed == "beside" for one in skipped)
    links = sum(one.passed == "linked folder" for one in skipped)
    said = f", {kinds}" if kinds else ""
    said += f", {count(beside, 'file')} beside the class folders left out" if beside else ""
    return said + (f", {count(links, 'linked folder')} not followed" if links else "")


def _tell_skipped(skipped: Sequence[Skipped], *, quiet: bool) -> None:
    skipped = [one for one in skipped if not one.passed]
    if quiet and skipped:
        tell(f"{count(len(skipped), 'file')} skipped")
        return
    for one in skipped[:_TOLD]:
        tell(f"skipped: {one.reason}")
    if len(skipped) > _TOLD:
        tell(f"and {len(skipped) - _TOLD} more skipped")


def _write_page(
    options: argparse.Namespace,
    run: TrainedRun,
    classifier: FewShotClassifier,
    support: Support,
    found: Sequence[FilePrediction],
    skipped: Sequence[Skipped],
) -> None:
    from fedshot.reports.answers import AnswersPage, Card, write_answers

    by_class: dict[str, list[Path | str]] = {}
    for path, label, text in zip(support.paths, support.labels, support.texts, strict=True):
        by_class.setdefault(label, []).append(text or _shown(path, run.dataset_info.reads_text))
    cards = [
        Card(
            one.name,
            one.label,
            one.confidence,
            one.nearest,
            one.turned_away,
            one.text or _shown(one.path, run.dataset_info.reads_text),
        )
        for one in found
    ]
    facts = card_facts(run) | {"confidence": _trust(classifier)}
    places = (real_path(options.query), real_path(options.support))
    roots = [place.parent if place.is_file() else place for place in places]
    unread = [(_below(str(s.path), roots), _below(s.reason, roots)) for s in skipped]
    title = f"{real_path(options.query).name}, classified by {facts['run']}"
    page = AnswersPage(title, facts, by_class, cards, unread)
    write_answers(options.page, page)


def _noun(place: Path) -> str:
    return "text" if place.is_file() else "file"


def _below(text: str, roots: Sequence[Path]) -> str:
    """Return a text with paths relative to `roots`, so that shared pages show no absolute paths."""
    for root in roots:
        text = text.replace(f"{root}{os.sep}", "")
    return text


def _shown(path: Path, is_text: bool) -> Path | str:
    return path.read_text(encoding="utf-8-sig")[:1000] if is_text else path


def _trust(classifier: FewShotClassifier) -> str:
    found = classifier.calibration_
    if found is None:
        return "not calibrated: the model's own probabilities"
    text = (
        f"temperature {found.temperature:.3g}, from {found.way}-way {found.shot}-shot episodes of "
        f"the validation classes; expected calibration error there {100 * found.ece_after:.1f} % "
        f"(before: {100 * found.ece_before:.1f} %)"
    )
    if classifier.accept_unknown is not None:
        line = found.at(classifier.accept_unknown)
        text += (
            f". Predictions whose largest {found.signal} is below {line.threshold:.4g} are "
            f"rejected. On the validation classes, this accepted {100 * line.false_accept:.1f} % "
            "of examples of other classes and rejected "
            f"{100 * line.false_reject:.1f} % of examples of the episode's own classes"
        )
    return text
