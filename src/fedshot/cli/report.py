"""The commands that read runs, `report`, `status` and `compare`: each returns an exit code.

`compare` also reads cells of recipes: a cell is one row of a recipe's table in one column.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from itertools import chain

from rich.console import Console

from fedshot import reports
from fedshot.api.comparing import compared, write_report
from fedshot.core.console import say, tell
from fedshot.core.errors import ConfigError
from fedshot.core.text import joined


def report(options: argparse.Namespace) -> int:
    """Write one HTML page about some runs."""
    path = write_report(
        options.folders, to=options.to, title=options.title, with_data=not options.without_data,
        data_dir=options.data_dir, notify=tell,
    )  # fmt: skip
    say(str(path))
    return 0


def status(options: argparse.Namespace) -> int:
    """Print the progress of runs."""
    below = {folder: list(reports.runs_below(folder)) for folder in options.folders}
    all_of = [reports.Status.of(run) for run in dict.fromkeys(chain(*below.values()))]
    if all_of:
        text = json.dumps([asdict(one) for one in all_of])
        say(text if options.json else reports.as_table(all_of))
    if empty := [str(folder) for folder, runs in below.items() if not runs]:
        raise ConfigError(
            f"there is no run in {joined(empty)}. Name the folder of a run, or one that holds runs."
        )
    return 0


def compare(options: argparse.Namespace) -> int:
    """Print a table of runs or of recipes' cells, and compare the first with each of the others."""
    found = compared(options.folders)
    if found.warning:
        tell(f"warning: {found.warning}")
    if options.json:
        say(json.dumps(found.to_json()))
        return 0
    say(reports.as_text(found.rows, Console().width))
    for sentence in found.sentences:
        say(sentence)
    return 0
