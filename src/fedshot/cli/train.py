"""The commands `run`, `resume` and `evaluate`.

Each takes the parsed options and returns an exit code.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fedshot.api.progress import shown
from fedshot.api.training import check_here_trained, completed, resumed, tracker_of
from fedshot.cli.printing import say_score
from fedshot.config import load
from fedshot.config.load import Config
from fedshot.config.registry import KINDS, SECTIONS
from fedshot.config.settings import Settings, parse
from fedshot.config.validation import value_of
from fedshot.core.console import say, tell
from fedshot.core.errors import ConfigError
from fedshot.core.text import long_names, typed
from fedshot.protocol.method import TEST_ROUNDS
from fedshot.runs import run_folder
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun
from fedshot.runs.recorder import Record
from fedshot.runs.trackers.tracking import check


def run(options: argparse.Namespace) -> int:
    """Train a method, then test it."""
    if options.tracker:
        check(options.tracker)
    chosen = chosen_config(options)
    folder = options.out / chosen.name
    if run_folder.begun(folder):
        check_here_trained(folder)
        chosen = config_to_resume(options, folder, chosen)
    options.run_folder = folder
    experiment = Experiment(PreparedRun(chosen, options.data_dir), folder)
    if options.resume and not options.quiet:
        rounds = f"continues after round {experiment.round}" if experiment.begun else "is a new run"
        tell(f"{folder} {rounds}")
    return finish(experiment, options)


def config_to_resume(options: argparse.Namespace, folder: Path, chosen: Config) -> Config:
    """Return the configuration with which to resume the run in `folder`: see `resumed`."""
    fix = f"Go on with `fedshot resume {typed(folder)}`, or `--resume`; or choose another --name"
    return resumed(folder, chosen, resume=options.resume, fix=fix)


def resume(options: argparse.Namespace) -> int:
    """Resume a run."""
    if options.tracker:
        check(options.tracker)
    options.run_folder = options.folder
    held = run_folder.configuration(options.folder)
    return finish(Experiment(PreparedRun(held, options.data_dir), options.folder), options)


def finish(
    experiment: Experiment,
    options: argparse.Namespace,
    on_record: Callable[[Record], None] = lambda _: None,
) -> int:
    """Train the remaining rounds, test, and print the result; call `on_record` with each record."""
    score = completed(
        experiment,
        _records(experiment, options, on_record),
        lambda: tracker_of(experiment, options.tracker, tell),
        tell,
    )
    say_score(score, options, experiment, experiment.baselines)
    return 0


def _records(
    experiment: Experiment, options: argparse.Namespace, on_record: Callable[[Record], None]
) -> Iterator[Record]:
    shows = not options.quiet
    records = shown(experiment, rounds=not options.json) if shows else experiment.run()
    for record in records:
        on_record(record)
        if options.json:
            say(json.dumps(record.to_json()))
        yield record


def evaluate(options: argparse.Namespace) -> int:
    """Test the chosen round of a run; options can change the way, shot, etc. of the episodes."""
    held = run_folder.configuration(options.folder)
    given = {name: getattr(options, name) for name in ("way", "shot", "query", "episodes", "seed")}
    words = [f"--test.{name}={value}" for name, value in given.items() if value is not None]
    asked = Config.of(load.override(held.settings, words)[0]).test
    experiment = Experiment(PreparedRun(held, options.data_dir), options.folder)
    if experiment.round < held.run.rounds:
        tell(f"round {experiment.round} of {held.run.rounds}: the run is not finished")
    if options.rounds is not None:
        experiment.method = _for_rounds(experiment.method, options.rounds)
    test = experiment.prepared.episodic_test(asked)
    say_score(experiment.evaluate(test), options, experiment, experiment.raw_baselines(test))
    return 0


def _for_rounds(method: Any, text: str) -> Any:
    """Return the method with `text`, a number, as its training rounds for each test episode.

    Raises ConfigError for a method that does not train during the test.
    """
    if TEST_ROUNDS not in {field.name for field in fields(method)}:
        raise ConfigError(
            f"--rounds is {text}, but {method.name} does not train during the test. Leave it out."
        )
    value = parse(text, lambda _: False, origin="the value of --rounds")
    return replace(method, **{TEST_ROUNDS: value_of("--rounds", int, value)})


def chosen_config(options: argparse.Namespace) -> Config:
    """Return the configuration of the --config file, overridden by the command line."""
    return Config.of(chosen_settings(options))


def chosen_settings(options: argparse.Namespace) -> Settings:
    """Return the settings of `chosen_config` before validation.

    Raises ConfigError for a misspelt option.
    """
    known = long_names(options.parser.format_help())
    for option in (word.partition("=")[0] for word in options.settings):
        place = option.removeprefix("--")
        if place == option or "." in place or place in {"name", "seed", *SECTIONS, *KINDS}:
            continue  # the value of an option, or a setting
        if near := difflib.get_close_matches(option, known, 1, 0.75):
            raise ConfigError(f"there is no option {option}. Did you mean {near[0]}?")
    settings: Any = load.load(options.config) if options.config else {}
    settings, notices = load.override(settings, options.settings)
    for text in notices:
        tell(text)
    return dict(settings)
