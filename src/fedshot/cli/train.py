"""The commands `run`, `resume` and `evaluate`.

Each takes the parsed options and returns an exit code.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fedshot.api.progress import shown
from fedshot.api.training import check_here_trained, completed, resumed
from fedshot.config import load
from fedshot.config import settings as trees
from fedshot.config.load import Config
from fedshot.config.registry import KINDS, SECTIONS
from fedshot.config.schema import not_honest
from fedshot.config.settings import Settings
from fedshot.config.validation import value_of
from fedshot.core.console import say, tell
from fedshot.core.errors import ConfigError
from fedshot.core.ranges import AtLeast0
from fedshot.core.text import long_names, named_client, typed
from fedshot.evaluation.episodic_test import Score, far_below
from fedshot.protocol.method import TEST_ROUNDS
from fedshot.reports.significance import ComparisonRow, compare
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
    anew = not options.resume and run_folder.untrained(folder)
    if run_folder.begun(folder) and not anew:
        check_here_trained(folder)
        chosen = config_to_resume(options, folder, chosen)
    options.run_folder = folder
    prepared = PreparedRun(chosen, options.data_dir)
    if anew:
        tell(f"{folder} had trained no round, and starts over")
    experiment = Experiment(prepared, folder, anew=anew)
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
    records = _records(experiment, options, on_record)
    score = completed(experiment, records, options.tracker, tell)
    say_score(score, options, experiment, experiment.baselines)
    return 0


def _records(
    experiment: Experiment, options: argparse.Namespace, on_record: Callable[[Record], None]
) -> Iterator[Record]:
    shows = not options.quiet
    records = shown(experiment, rounds=not options.json) if shows else experiment.run()
    for record in records:
        on_record(record)
        if options.json and shows:
            say(json.dumps(record.to_json()))
        yield record


def say_score(
    score: Score,
    options: argparse.Namespace,
    experiment: Experiment,
    baselines: Mapping[str, Score],
) -> None:
    """Print a test score and those of the baselines, one line each, or together as JSON."""
    dishonest = not_honest(experiment.config.settings)
    if options.json:
        found = {
            "result": score.to_json(),
            "round": experiment.best_round,
            "baselines": {name: raw.to_json() for name, raw in baselines.items()},
        }
        say(json.dumps(found | ({"not_honest": dishonest} if dishonest else {})))
        return
    marks = "".join(f" ({text})" for text in dishonest)
    marks += " (transductive)" if score.transductive else ""
    own = experiment.prepared.own_tests
    users = trees.at(experiment.config.settings, "split.users") is not None
    novel = "on users who took no part in training" if users else "on novel classes"
    where = "on the clients' own classes" if own else novel
    facts = [f"{experiment.method.name}: {score}{marks} {where}"]
    facts.append(f"{score.episodes} {'clients' if own else 'episodes'}")
    if score.unanswered:
        facts.append(f"{score.unanswered} unanswered")
    if score.diverged:
        facts.append(f"{score.diverged} diverged (counted as wrong)")
    if spent := experiment.spent:
        facts.append(
            f"epsilon {spent['epsilon']:.3g} at delta {spent['delta']:g} ({spent['level']})"
        )
    if score.worst_tenth is not None:
        facts.append(f"worst tenth {100 * score.worst_tenth:.2f} %")
    if far := far_below(score.clients):
        names = experiment.prepared.client_names
        first = list(far.items())[:3]
        shown = [f"client {named_client(c, names)} {100 * a:.1f} %" for c, a in first]
        more = f" and {len(far) - 3} more" if len(far) > 3 else ""
        facts.append(f"far below the others: {'; '.join(shown)}{more}")
    before = "" if experiment.best_round else " (before training)"
    say(f"{', '.join(facts)}, round {experiment.best_round}{before}, tasks {score.tasks[:12]}")
    for name, raw in baselines.items():
        against = compare(ComparisonRow(experiment.method.name, score), ComparisonRow(name, raw))
        said = f"{experiment.method.name} is {against.outcome} it"
        said = "no difference shown" if against.outcome == "unclear" else said
        say(f"{name}: {raw}; {said} ({against})")


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
    value = trees.parse(text, origin="the value of --rounds")
    return replace(method, **{TEST_ROUNDS: value_of("--rounds", AtLeast0, value)})


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
