"""The command `sweep`: takes the parsed options and returns an exit code."""

from __future__ import annotations

import argparse

from fedshot.api.sweeping import completed_sweep, default_folder
from fedshot.cli.train import chosen_settings
from fedshot.core.console import say, tell
from fedshot.recipes import sweep_tables
from fedshot.recipes.sweep_runner import Sweep, all_spaces, space_of
from fedshot.reports.table import plain_text

_FAILED = 1
_WIDTH = 110


def sweep(options: argparse.Namespace) -> int:
    """Train the points of a sweep, and test the one with the best validation accuracy.

    Returns 1 if a training failed, or if no point can be tested because all diverged.
    """
    settings = chosen_settings(options)
    spaces = all_spaces(map(space_of, options.set))
    options.run_folder = options.out or default_folder(settings)
    made = Sweep(
        options.run_folder,
        settings,
        spaces,
        options.seeds,
        options.random,
        options.optuna,
        options.jobs,
        options.data_dir,
    )
    rows, written = completed_sweep(made, show=not (options.quiet or options.json))
    for path in written if not options.quiet else ():
        tell(f"wrote {path}")
    if options.json:
        say(sweep_tables.as_json(rows).rstrip("\n"))
    else:
        say(plain_text(sweep_tables.table(made, rows), _WIDTH))
    failed = any(point.failed for point in made.points.values())
    return _FAILED if failed or made.chosen is None else 0
