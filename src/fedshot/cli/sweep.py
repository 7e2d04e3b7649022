"""The command `sweep`: takes the parsed options and returns an exit code."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedshot.cli.job_progress import show_jobs
from fedshot.cli.train import chosen_settings
from fedshot.core.console import say, tell
from fedshot.core.errors import ConfigError
from fedshot.recipes import sweep_tables
from fedshot.recipes.jobs import Job
from fedshot.recipes.sweep_runner import Sweep, space_of
from fedshot.reports.table import plain_text

_FAILED = 1
_WIDTH = 110


def sweep(options: argparse.Namespace) -> int:
    """Train the points of a sweep, and test the one with the best validation accuracy."""
    settings = chosen_settings(options)
    spaces = dict(map(space_of, options.set))
    if len(spaces) < len(options.set):
        raise ConfigError("an option is in two of the --set. Give all its values to one.")
    options.run_folder = options.out or Path("sweeps") / str(settings.get("name", "sweep"))
    found = Sweep(
        options.run_folder,
        settings,
        spaces,
        options.seeds,
        options.random,
        options.optuna,
        options.jobs,
        options.data_dir,
    )
    found.check()

    def named(job: Job) -> str:
        do, key, seed = job.key.split(" ")
        return f"{'test ' if do == 'train' else ''}{found.points[key].label}, seed {seed}"

    show_jobs(found.run(), options, lambda: sweep_tables.table(found), named)
    for path in sweep_tables.write(found):
        if not options.quiet:
            tell(f"wrote {path}")
    if options.json:
        say(sweep_tables.as_json(found).rstrip("\n"))
    else:
        say(plain_text(sweep_tables.table(found), _WIDTH))
    return _FAILED if any(point.failed for point in found.points.values()) else 0
