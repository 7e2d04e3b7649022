"""The commands of `fedshot data`: each takes the parsed options and returns an exit code."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from fedshot import reports
from fedshot.api.listing import availability, datasets
from fedshot.cli.train import chosen_config
from fedshot.config.options import summary
from fedshot.core.console import say, tell
from fedshot.core.errors import DataError
from fedshot.core.regular_files import real_path
from fedshot.core.text import count
from fedshot.data.files.places import data_folder
from fedshot.data.sources import fetch, verification
from fedshot.data.sources.publishers import PUBLISHERS
from fedshot.data.sources.registry import SOURCES
from fedshot.runs.prepare import FederatedDataset

PROBLEM = 2
_VECTORS = "Word vectors for sources of texts."


def list_sources(options: argparse.Namespace) -> int:
    """Print each data source: its name, where its data are, and a description."""
    folder = data_folder(options.data_dir)
    rows = [(row["name"], row["available"], row["summary"]) for row in datasets(options.data_dir)]
    rows += [(name, availability(name, folder), _VECTORS) for name in PUBLISHERS.keys() - SOURCES]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    for name, there, text in sorted(rows):
        say(f"{name:<{widths[0]}}  {there:<{widths[1]}}  {text}")
    say(f"folder of datasets: {folder}")
    return 0


def get(options: argparse.Namespace) -> int:
    """Download a dataset from its publisher, and print each file with its size and checksum."""
    if options.name in SOURCES and options.name not in PUBLISHERS:
        raise DataError(f"{options.name} needs no download: {summary(SOURCES[options.name])}")
    with _progress() as progress:
        files = fetch.get(options.name, data_folder(options.data_dir), progress)
    for file in files:
        what = "already there" if file.already else "fetched"
        sure = "checksum as published" if file.verified else "not verified: no checksum is known"
        say(f"{what}, {file.size / 1e6:.1f} MB, {sure}: {file.path}")
    return 0


def check(options: argparse.Namespace) -> int:
    """Compare a dataset with its publisher's checksums and counts; return 2 if they differ."""
    findings = verification.check(options.name, data_folder(options.data_dir))
    for finding in findings:
        say(str(finding))
    problems = sum(finding.level == "problem" for finding in findings)
    say(f"{options.name}: {count(problems, 'problem')}")
    return PROBLEM if problems else 0


def show(options: argparse.Namespace) -> int:
    """Print facts about a dataset and its partition among clients, and save figures of both."""
    words: list[str] = options.settings
    if words and not words[0].startswith("--"):
        options.settings = ["--data.name", *words]
    federated = FederatedDataset(chosen_config(options), options.data_dir)
    for line in reports.facts(federated):
        say(line)
    written = reports.pictures(federated, options.out)
    say(f"wrote into {real_path(options.out)} (--out names another folder):")
    for path, shows in written.items():
        say(f"  {path.name}: {shows}")
    return 0


@contextmanager
def _progress() -> Iterator[fetch.Progress]:
    """Yield a callback that shows downloads: as bars on a terminal, otherwise a line per 10 MB."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        told: dict[str, int] = {}

        def line(name: str, done: int, total: int | None) -> None:
            tens = done // 10_000_000
            if told.setdefault(name, 0) != tens:
                told[name] = tens
                whole = f" of {total / 1e6:.0f}" if total else ""
                tell(f"{name}: {10 * tens}{whole} MB")

        yield line
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        tasks = {}

        def update(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done, total=total)

        yield update
