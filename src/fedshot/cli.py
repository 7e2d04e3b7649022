"""The command line. Heavy imports wait until a command needs them, so `--help` is instant."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshot import __version__
from fedshot.errors import CheckpointError, ConfigError, FedshotError

if TYPE_CHECKING:
    from fedshot.evaluation import Score
    from fedshot.experiment import Experiment
    from fedshot.recorder import Record

REFUSED, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code: 0, 2 for a refused request, 130 for Ctrl-C."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    try:
        if rest and not options.takes_settings:
            raise ConfigError(f"{options.command} does not take {' '.join(rest)!r}.")
        options.settings = rest
        command: Callable[[argparse.Namespace], int] = options.run
        return command(options)
    except FedshotError as error:
        print(f"fedshot: error: {error}", file=sys.stderr)
        return REFUSED
    except BrokenPipeError:
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "fedshot",
        description="Federated few-shot learning: train across clients, recognise new classes "
        "from a few examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fedshot {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable[[argparse.Namespace], int], text: str, *, settings: bool = False
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=_SETTINGS if settings else None,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(run=run, takes_settings=settings)
        return made

    run = add("run", _run, "train a method, then test it on the novel classes", settings=True)
    run.add_argument("--config", type=Path, help="YAML file of settings")
    run.add_argument("--out", type=Path, default=Path("runs"), help="folder of runs (runs)")
    resume = add("resume", _resume, "go on with a run that was stopped, at any instant")
    resume.add_argument("folder", type=Path, help="folder of the run, such as runs/digits")
    evaluate = add("evaluate", _evaluate, "test the chosen round of a run, in any shape of episode")
    evaluate.add_argument("folder", type=Path, help="folder of the run")
    for name in ("way", "shot", "query", "episodes", "seed"):
        evaluate.add_argument(f"--{name}", type=int, help="as in the run's test, if not given")
    for command in (run, resume, evaluate):
        command.add_argument("--data-dir", help="folder of datasets ($FEDSHOT_DATA)")
        command.add_argument("--quiet", action="store_true", help="print the result alone")
        command.add_argument("--json", action="store_true", help="print JSON, one record a line")
    methods = add("methods", _methods, "list the methods, or the options of one")
    methods.add_argument("method", nargs="?", help="a method's name")
    data = add("data", _data, "list the sources of data, or show one and its partition",
               settings=True)  # fmt: skip
    data.add_argument("action", choices=("list", "show"))
    data.add_argument("--config", type=Path, help="YAML file of settings")
    data.add_argument("--out", type=Path, default=Path(), help="folder for the pictures (.)")
    data.add_argument("--data-dir", help="folder of datasets ($FEDSHOT_DATA)")
    return parser


_SETTINGS = """\
Any setting can be given as --section.key VALUE, and wins over the file:
  fedshot run --data.name digits --method.name fl_proto --method.local_steps 5
Sections: name, seed, data, split, partition, episode, model, method, run, test.
`fedshot methods NAME` lists a method's options; a run's config.yaml holds every setting.
"""


def _settings(options: argparse.Namespace) -> Any:
    from fedshot.config import Config, load, override

    for word in options.settings:
        option = word.removeprefix("--").partition("=")[0]
        near = difflib.get_close_matches(option, ("config", "out", "data-dir", "quiet", "json"), 1)
        if word.startswith("--") and near and option not in ("data", "run"):
            raise ConfigError(f"there is no option --{option}. Did you mean --{near[0]}?")
    return Config.of(override(load(options.config) if options.config else {}, options.settings))


def _run(options: argparse.Namespace) -> int:
    from fedshot.experiment import Experiment, Setting, exists

    config = _settings(options)
    folder = options.out / config.name
    if exists(folder):
        raise ConfigError(
            f"{folder} holds a run already. Go on with `fedshot resume {folder}`, or choose "
            "another --name."
        )
    return _train(Experiment(Setting(config, options.data_dir), folder), options)


def _resume(options: argparse.Namespace) -> int:
    return _train(_experiment(options), options)


def _experiment(options: argparse.Namespace) -> Experiment:
    from fedshot.config import Config, load
    from fedshot.experiment import Experiment, Setting, exists

    if not exists(options.folder):
        raise CheckpointError(f"{options.folder} holds no run: it has no config.yaml.")
    config = Config.of(load(options.folder / "config.yaml"))
    return Experiment(Setting(config, options.data_dir), options.folder)


def _train(experiment: Experiment, options: argparse.Namespace) -> int:
    for text in _notices(experiment):
        print(text, file=sys.stderr)
    try:
        for record in _shown(experiment, options):
            if options.json:
                print(json.dumps(record.to_json()), flush=True)
    except KeyboardInterrupt:
        print(f"\nstopped; go on with `fedshot resume {experiment.folder}`", file=sys.stderr)
        return INTERRUPTED
    _print_score(experiment.result(), options, experiment)
    return 0


def _notices(experiment: Experiment) -> Iterator[str]:
    left_out = experiment.setting.left_out
    if left_out:
        shown = "; ".join(f"client {c} {why}" for c, why in list(left_out.items())[:3])
        more = f"; and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        yield f"left out: {shown}{more}"
    if experiment.setting.validation is None:
        yield "no validation classes: the last round is tested"


def _shown(experiment: Experiment, options: argparse.Namespace) -> Iterator[Record]:
    """Yield the records, with a bar on a terminal and lines in a pipe."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    console = Console(stderr=True)
    rounds = experiment.config.run.rounds
    if options.quiet or options.json or not console.is_terminal:
        for record in experiment.run():
            if not (options.quiet or options.json):
                print(_line(record, rounds), file=sys.stderr, flush=True)
            yield record
        return
    columns = (
        TextColumn("round"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[text]}"),
        TimeLeft(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=rounds, completed=experiment.round, text="")
        for record in experiment.run():
            progress.update(task, completed=record.round, text=_facts(record))
            yield record


def _line(record: Record, rounds: int) -> str:
    return f"round {record.round}/{rounds}  {_facts(record)}  {record.seconds:.2f} s"


def _facts(record: Record) -> str:
    if record.skipped:
        return f"skipped: {record.skipped}"
    facts = [f"{name} {value:.4f}" for name, value in sorted(record.metrics.items())]
    if record.validation:
        facts.append(f"validation {record.validation}")
    facts.append(f"{record.bytes_down / 1e6:.2f} MB down, {record.bytes_up / 1e6:.2f} MB up")
    if record.faults:
        facts.append(f"{len(record.faults)} replies did not count")
    return "  ".join(facts)


def _evaluate(options: argparse.Namespace) -> int:
    from dataclasses import replace

    experiment = _experiment(options)
    given = {
        name: getattr(options, name)
        for name in ("way", "shot", "query", "episodes", "seed")
        if getattr(options, name) is not None
    }
    exam = experiment.setting.exam(replace(experiment.config.test, **given))
    _print_score(experiment.answer(exam), options, experiment)
    return 0


def _print_score(score: Score, options: argparse.Namespace, experiment: Experiment) -> None:
    if options.json:
        print(json.dumps({"result": score.to_json(), "round": experiment.best_round}))
        return
    extra = "" if score.worst_tenth is None else f", worst tenth {100 * score.worst_tenth:.2f} %"
    marks = " (transductive)" if score.transductive else ""
    lost = f", {score.unanswered} unanswered" if score.unanswered else ""
    if score.diverged:
        lost += f", {score.diverged} of them diverged and count as wrong"
    print(
        f"{experiment.method.name}: {score}{marks} on novel classes, {score.episodes} episodes"
        f"{lost}{extra}, round {experiment.best_round}, tasks {score.tasks[:12]}"
    )


def _methods(options: argparse.Namespace) -> int:
    from fedshot import config
    from fedshot.methods import METHODS

    if options.method:
        print(config.options(options.method))
        return 0
    width = max(len(name) for name in METHODS)
    for name, method in sorted(METHODS.items()):
        print(f"{name:<{width}}  {(method.__doc__ or '').splitlines()[0]}")
    return 0


def _data(options: argparse.Namespace) -> int:
    from fedshot.data import SOURCES

    if options.action == "show":
        return _show(options)
    width = max(len(name) for name in SOURCES)
    for name, source in sorted(SOURCES.items()):
        print(f"{name:<{width}}  {(source.__doc__ or '').splitlines()[0]}")
    return 0


def _show(options: argparse.Namespace) -> int:
    from fedshot import reports
    from fedshot.experiment import Setting

    setting = Setting(_settings(options), options.data_dir)
    print("\n".join(reports.facts(setting)))
    for path in reports.pictures(setting, options.out):
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
