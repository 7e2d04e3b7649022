"""The command line. A command's module is imported when it runs, so that `--help` is instant."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from fedshot import __version__
from fedshot.cli.flower_arguments import Commands, add_flower
from fedshot.core import shutdown
from fedshot.core.console import at_level, log_shown, print_in_any_encoding, set_log, tell
from fedshot.core.errors import ConfigError, FedshotError, nearest
from fedshot.core.extras import require, unusable
from fedshot.core.text import long_names, typed

REFUSED, AGAIN, INTERRUPTED = 2, 75, 130
_SIGNALS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}

# Errors that may not recur at the next attempt, such as a full disk.
_RETRYABLE = {
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENOMEM, errno.EMFILE, errno.ENFILE,
    errno.EAGAIN, errno.ETIMEDOUT, errno.ENOTCONN,
}  # fmt: skip
_FIXES = {
    errno.ENOSPC: "Free some space on that disk",
    errno.EDQUOT: "Free some of your quota on that disk",
    errno.EACCES: "Choose a place where you may write, or ask for write permission",
    errno.EPERM: "Choose a place where you may write, or ask for write permission",
    errno.EROFS: "Choose a place where you may write",
    errno.ENOTDIR: "A file is where a folder is expected; move it or choose another folder",
    errno.EEXIST: "A file is where a folder is expected; move it or choose another folder",
    errno.EISDIR: "A folder is where a file is expected; name a file",
    errno.ENOENT: "Correct the path",
    errno.ELOOP: "A symbolic link leads back to itself; remove it, or choose another path",
    errno.ENAMETOOLONG: "Choose a shorter name",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f), or use another disk",
}

_WITHOUT_METHODS = {
    ("data", "list"), ("data", "get"), ("data", "check"), ("flower", "keys"), ("flower", "server"),
    ("status", None), ("compare", None),
}  # fmt: skip
"""Commands for which the files of FEDSHOT_METHODS and the plugins are not loaded."""

_EXTRAS = {
    "completion": "completion", "report": "reports", "reproduce": "reports", "sweep": "reports"
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    The code is 0 for success, 2 for an error, 75 for an error that may not recur, and 130 after an
    interrupt. Without `arguments`, `sys.argv[1:]` is used, and an interrupt ends the process.

    Raises ConfigError if a user's file makes this call while a process loads the file.
    """
    # a file can only be loading if the module that loads it is imported, which takes long
    if own := sys.modules.get("fedshot.methods.user_methods"):
        own.refuse_while_loading("fedshot.cli.main.main")
    shutdown.asked.clear()
    print_in_any_encoding()
    try:
        code = _run(sys.argv[1:] if arguments is None else list(arguments))
        if shutdown.asked.is_set() and arguments is None:
            shutdown.leave(code)
        return code
    finally:
        shutdown.asked.clear()


def _run(words: list[str]) -> int:
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help", "--version"):
        tell(f"fedshot: error: {words[0]} comes before the command; write it after, as in "
             f"`fedshot run {words[0]}`.")  # fmt: skip
        return REFUSED
    options, rest = make_parser().parse_known_args(words)
    set_log(getattr(options, "log_level", "info"), getattr(options, "log_format", "text"))
    options.run_folder = None  # set by the commands that can be resumed, and by `sweep`
    try:
        for number, usual in _SIGNALS.items():
            _replace_handler(number, usual, shutdown.stop)
        if rest and not options.takes_settings:
            raise ConfigError(_not_taken(options, rest))
        options.settings = rest
        _load_code_of_the_user(options)
        if options.command == "resume" and _on_nodes(options.folder):
            options.module = "flower"
        _require_extra(options)
        module = importlib.import_module(f"fedshot.cli.{options.module}")
        command: Callable[[argparse.Namespace], int] = getattr(module, options.function)
        with log_shown(quiet=getattr(options, "quiet", False)):
            return command(options)
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) or shutdown.asked.is_set():
            advice = _how_to_continue(options)
            tell(f"\nstopped{'; ' if advice else ''}{advice}")
            return INTERRUPTED
        said = _words(error, options)
        if said is None:
            raise
        tell(at_level("error", f"fedshot: error: {said}"))
        return AGAIN if _is_retryable(error) else REFUSED
    finally:
        for number, usual in _SIGNALS.items():
            _replace_handler(number, shutdown.stop, usual)


def _load_code_of_the_user(options: argparse.Namespace) -> None:
    """Load the methods and plugins that the environment names, if the command may need them."""
    if (options.command, getattr(options, "action", None)) in _WITHOUT_METHODS:
        return
    for name, verb in (("FEDSHOT_METHODS", "loading"), ("FEDSHOT_PLUGINS", "importing")):
        if (named := os.environ.get(name)) and not getattr(options, "quiet", False):
            tell(f"{name}: {verb} {named}, whose code runs in this process")
    if os.environ.get("FEDSHOT_METHODS") or "fedshot.methods.registry" in sys.modules:
        importlib.import_module("fedshot.methods.user_methods").load()
    if os.environ.get("FEDSHOT_PLUGINS"):
        importlib.import_module("fedshot.config.registry").load_plugins()


def _require_extra(options: argparse.Namespace) -> None:
    """Raise ConfigError if the command needs an extra that is not installed."""
    if options.module == "flower":
        importlib.import_module("fedshot.deploy.flower").require_flower()
    elif extra := _EXTRAS.get(options.command):
        require(extra, f"`fedshot {options.command}`")


def _on_nodes(folder: Path) -> bool:
    from fedshot.runs.run_folder import NODES

    return (folder / NODES).exists()


def _not_taken(options: argparse.Namespace, rest: Sequence[str]) -> str:
    """Return an error message for the unknown words `rest`, with a suggested option."""
    known = long_names(options.parser.format_help())
    hint = nearest(_first_option(rest), known)
    return f"{options.command} does not take {' '.join(rest)!r}. {_on_dashes(rest) or hint}"


def _on_dashes(words: Sequence[str]) -> str:
    """Return how to write the first word that begins with one dash, as a path may; "" if none."""
    dashed = next((word for word in words if re.match("-[^-0-9].", word)), None)
    return (
        f"A path that begins with a dash needs ./ in front: {typed(Path(dashed))}" if dashed else ""
    )


def _first_option(words: Iterable[str], known: Sequence[str] = ()) -> str:
    """Return the first word that is an `--option` and not in `known`; "" if there is none."""
    names = (word.partition("=")[0] for word in takewhile(lambda word: word != "--", words))
    return next((name for name in names if name.startswith("--") and name not in known), "")


def _words(error: BaseException, options: argparse.Namespace) -> str | None:
    """Return an error's message and how to continue the command; None for an unexpected error."""
    if isinstance(error, FedshotError):
        return str(error)
    if isinstance(error, ImportError) and (package := unusable(error)):
        return (
            f"{package} is installed, but fails: {error}. Reinstall it, or install what it lacks."
        )
    if isinstance(error, OSError):
        message = f"{_os_words(error)}."
    elif isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    ):
        message = (
            "this machine has too little memory. Choose a smaller model, or smaller or fewer "
            "episodes."
        )
    else:
        return None
    advice = _how_to_continue(options)
    return f"{message} {advice[0].upper()}{advice[1:]}." if advice else message


def _is_retryable(error: BaseException) -> bool:
    """Whether the command may succeed if repeated later."""
    if isinstance(error, FedshotError):
        return error.retryable
    if isinstance(error, OSError):
        return error.errno in _RETRYABLE
    return not isinstance(error, ImportError)


def _replace_handler(number: signal.Signals, old: object, new: Any) -> None:
    on_main_thread = threading.current_thread() is threading.main_thread()
    if on_main_thread and signal.getsignal(number) == old:
        signal.signal(number, new)


def _how_to_continue(options: argparse.Namespace) -> str:
    """Return advice on how to continue the interrupted command; "" if nothing has been written."""
    if options.command == "reproduce" and options.name not in ("list", "results"):
        return "the same command continues with the unfinished cells"
    folder: Path | None = options.run_folder
    try:
        if folder is None or not _is_begun(folder, options.command):
            return ""
    except OSError:
        return ""
    if options.command == "sweep":
        return "the same command continues with the unfinished points"
    data = getattr(options, "data_dir", None)  # not recorded in the run's folder
    also = f" --data-dir {typed(Path(data))}" if data else ""
    return f"go on with `fedshot resume {typed(folder)}{also}`"


def _is_begun(folder: Path, command: str) -> bool:
    """Whether a command has begun a sweep or a run in its folder."""
    if command == "sweep":
        return bool(importlib.import_module("fedshot.recipes.sweep_runner").begun(folder))
    return bool((folder / importlib.import_module("fedshot.runs.run_folder").CONFIG).exists())


def _os_words(error: OSError) -> str:
    places = [str(name) for name in (error.filename, error.filename2) if name is not None]
    fix = _FIXES.get(error.errno or 0, "Try again, or use another disk")
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno in (errno.EACCES, errno.EPERM) and places and _is_unreadable(places[0]):
        fix = "Ask for read permission"
    return f"{' and '.join(places)}{': ' if places else ''}{reason}. {fix}"


def _is_unreadable(place: str) -> bool:
    """Whether a path exists but cannot be read."""
    try:
        return Path(place).exists() and not os.access(place, os.R_OK)
    except OSError:  # even its folder cannot be read
        return True


class _Parser(argparse.ArgumentParser):
    """An argument parser that also names a misspelt option when a required one is missing."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._asked = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if "arguments are required" in message and not self.get_default("takes_settings"):
            known = long_names(self.format_help())
            slip = _first_option(self._asked, known)
            message += f". There is no {slip}. {nearest(slip, known)}" if slip else ""
        hint = _on_dashes(self._asked)
        super().error(f"{message}. {hint}" if hint else message)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser: argparse.ArgumentParser = _Parser(
        "fedshot",
        description="Federated few-shot learning: train across clients, recognise new classes "
        "from a few examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fedshot {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    usual = ("data-dir", "quiet", "json")
    _add(commands, "run", "train a method, then test it on the novel classes", "train",
         "config", "out", "resume", "tracker", *usual, settings=True)  # fmt: skip
    resume = _add(commands, "resume", "resume a run that was interrupted", "train",
                  "tracker", *usual)  # fmt: skip
    resume.add_argument("folder", type=Path, help="folder of the run, such as runs/digits")
    text = "test the chosen round of a run, with any way, shot and number of queries"
    evaluate = _add(commands, "evaluate", text, "train", *usual)
    evaluate.add_argument("folder", type=Path, help="folder of the run")
    for name in ("way", "shot", "query", "episodes", "seed"):
        evaluate.add_argument(f"--{name}", help="as test." + name + " (default: that of the run)")
    evaluate.add_argument(
        "--rounds", help="rounds of training for each test episode (default: the method's)"
    )
    _add_report(commands)
    _add_descriptions(commands)
    text = "check that a method of your own behaves as every method must"
    check = _add(commands, "check", text, "check", settings=True)
    check.add_argument("file", type=Path, help="Python file that registers the method")
    _add_use(commands)
    _add_data(commands)
    _add_reproduce(commands)
    _add_sweep(commands)
    add_flower(commands, _add)
    return parser


def _add_descriptions(commands: Commands) -> None:
    text = "list all options of a configuration, by section"
    options = _add(commands, "options", text, "describe")
    options.add_argument("place", nargs="?", help="a section, such as run or model.head")
    options.add_argument("kind", nargs="?", metavar="name", help="a choice there, such as linear")
    text = "write the pages of all options into this folder"
    options.add_argument("--markdown", type=Path, metavar="FOLDER", help=text)
    methods = _add(commands, "methods", "list the methods, or the options of one", "describe")
    methods.add_argument("method", nargs="?", help="a method's name")
    text = "describe configurations for other programs"
    config = commands.add_parser("config", help=text, description=f"{text.capitalize()}.")
    actions = config.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "print the JSON Schema with which editors complete and check configuration files"
    _add(actions, "schema", text, "describe")
    text = "print a script that completes commands and options in a shell"
    completion = _add(commands, "completion", text, "describe")
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell")


def _add_report(commands: Commands) -> None:
    status = _add(commands, "status", "show the progress of runs", "report", "json")
    status.add_argument(
        "folders", nargs="*", type=Path, default=[Path("runs")], metavar="FOLDER",
        help="folder of a run, or of several runs (runs)",
    )  # fmt: skip
    text = "compare runs, or cells of recipes, episode by episode"
    compare = _add(commands, "compare", text, "report", "json")
    report = _add(commands, "report", "write one HTML page about runs", "report", "data-dir")
    report.add_argument("--to", type=Path, help="the file (report.html, in the folder of one run)")
    report.add_argument("--title", help="title of the page")
    report.add_argument(
        "--without-data", action="store_true",
        help="do not load data and models, and leave out the figures that need them",
    )  # fmt: skip
    seeds = "runs that differ only in the seed share a row"
    files = "; or files of cells below results/"
    for command, more in ((compare, files), (report, "")):
        command.add_argument(
            "folders", nargs="+", type=Path, metavar="RUN", help=f"folders of runs; {seeds}{more}"
        )


def _add_use(commands: Commands) -> None:
    text = "classify files from a few labelled examples, with the chosen round of a run"
    predict = _add(commands, "predict", text, "use", "data-dir", "quiet")
    predict.add_argument(
        "--support", type=Path, required=True,
        help="folder with one folder per class; for texts also a table or JSON lines with labels",
    )  # fmt: skip
    predict.add_argument(
        "--query", type=Path, required=True, help="folder of files, or table of texts, to classify"
    )
    predict.add_argument("--to", type=Path, help="file to write; without it, stdout")
    predict.add_argument("--json", action="store_true", help="JSON lines instead of CSV")
    predict.add_argument("--page", type=Path, help="HTML page to write, with every picture")
    predict.add_argument(
        "--none-of-these", type=float, metavar="SHARE",
        help="reject files of other classes, except for this share accepted by mistake: 0.05",
    )  # fmt: skip
    text = "calibrate the confidence of a run's predictions, on its validation classes"
    calibrate = _add(commands, "calibrate", text, "use", "data-dir", "quiet", "json")
    for name in ("way", "shot"):
        calibrate.add_argument(f"--{name}", type=int, help="default: that of the run's test")
    calibrate.add_argument(
        "--episodes", type=int, default=400,
        help="number of episodes, half to fit and half to measure (400)",
    )  # fmt: skip
    text = "write the encoder of a run for other programs, with a model card"
    export = _add(commands, "export", text, "use", "data-dir")
    export.add_argument(
        "--to", required=True, choices=("safetensors", "torch-export", "onnx"), help="format"
    )
    export.add_argument("--out", type=Path, help="folder to write (RUN/export)")
    export.add_argument("--licence", help="licence of the training data, for the model card")
    for command in (predict, calibrate, export):
        command.add_argument("folder", type=Path, help="folder of the run")
        command.add_argument(
            "--client",
            help="number or name of the client whose model is used, if each has its own",
        )  # fmt: skip


def _add_reproduce(commands: Commands) -> None:
    text = (
        "train the cells of a published table or figure; `list` lists the recipes, `results` "
        "writes pages of the finished cells"
    )
    made = _add(commands, "reproduce", text, "reproduce", "out", "data-dir", "quiet", "json")
    made.add_argument("name", help="a recipe's name, `list` or `results`")
    made.add_argument(
        "--cells", nargs="+", default=[], metavar="ROW/COLUMN",
        help="train only these cells; * matches anything",
    )  # fmt: skip
    made.add_argument(
        "--budget", metavar="BUDGET", help="small, paper, or another budget of the recipe"
    )
    made.add_argument("--seeds", type=int, default=3, help="number of trainings per cell (3)")
    made.add_argument(
        "--tune", type=int, default=0, metavar="N", help="tune each method with N trials (0)"
    )
    made.add_argument("--device", default="cpu", help="device to train on, as run.device (cpu)")
    made.add_argument(
        "--jobs", type=int, help="number of processes (as many as cores and memory allow)"
    )
    made.add_argument(
        "--results", type=Path, default=Path("results"), help="folder of finished cells (results)"
    )
    made.add_argument("--to", type=Path, help="with `results`: the front page to write")
    made.add_argument(
        "--cell-pages", action="store_true", help="with `results`: also write a page for each cell"
    )
    made.add_argument("--plan", action="store_true", help="show the table without training")
    made.add_argument(
        "--measure", action="store_true",
        help="with `list`: measure the cells whose time is unknown",
    )  # fmt: skip


def _add_sweep(commands: Commands) -> None:
    text = "train with several values of some options, and test the best by validation"
    sweep = _add(commands, "sweep", text, "sweep", "config", "data-dir", "quiet", "json",
                 settings=True)  # fmt: skip
    sweep.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUES",
        help="values of an option, such as method.optimizer.lr=1e-3,3e-3; for --random and "
        "--optuna also a range: KEY=log:1e-4,1e-2, uniform:0,1 or int:1,8; can be repeated",
    )  # fmt: skip
    sweep.add_argument("--seeds", type=int, default=3, help="number of trainings per point (3)")
    sweep.add_argument(
        "--random", type=int, default=0, metavar="N", help="N random points instead of the grid"
    )
    sweep.add_argument(
        "--optuna", type=int, default=0, metavar="N",
        help="N points that Optuna proposes (pip install 'fedshot[optuna]')",
    )  # fmt: skip
    sweep.add_argument(
        "--jobs", type=int, help="number of processes (as many as cores and memory allow)"
    )
    sweep.add_argument("--out", type=Path, help="folder of the sweep (sweeps/NAME)")


def _add_data(commands: Commands) -> None:
    text = "list, download, check or show datasets"
    data = commands.add_parser("data", help=text, description=f"{text.capitalize()}.")
    actions = data.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "list the data sources, and where their data are"
    _add(actions, "list", text, "data", "data-dir")
    get = _add(actions, "get", "download a dataset from its publisher", "data", "data-dir")
    text = "compare a dataset with its publisher's checksums and counts"
    check = _add(actions, "check", text, "data", "data-dir")
    for command in (get, check):
        command.add_argument("name", help="a dataset's name, from `fedshot data list`")
    text = "plot a dataset and its partition among clients; `NAME` is short for `--data.name NAME`"
    show = _add(actions, "show", text, "data", "config", "data-dir", settings=True)
    show.add_argument("--out", type=Path, default=Path(), help="folder for the pictures (.)")


def _add(
    commands: Commands, name: str, text: str, module: str, *shared: str, settings: bool = False
) -> argparse.ArgumentParser:
    """Add a command, a function of `fedshot.cli.<module>`; `shared` names options of `_SHARED`."""
    made = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=_SETTINGS if settings else None,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.set_defaults(
        module=module,
        function=_FUNCTIONS.get(name, name),
        takes_settings=settings,
        parser=made,
    )
    for option in shared:
        made.add_argument(f"--{option}", **_SHARED[option])
    return made


# Options that several commands take.
_SHARED: dict[str, dict[str, Any]] = {
    "config": {"type": Path, "help": "YAML file of settings"},
    "out": {"type": Path, "default": Path("runs"), "help": "folder of runs (runs)"},
    "resume": {"action": "store_true", "help": "resume the run of this name if it has begun"},
    "tracker": {
        "choices": ("tensorboard", "wandb", "mlflow"),
        "help": "also send the results of each round there (pip install 'fedshot[tracking]')",
    },
    "data-dir": {"help": "folder of datasets ($FEDSHOT_DATA, else ~/.local/share/fedshot)"},
    "quiet": {"action": "store_true", "help": "print only the result"},
    "json": {"action": "store_true", "help": "print JSON; a run prints a line for each round"},
}
# Functions whose name differs from the command: `list` is a builtin, and `export` is imported.
_FUNCTIONS = {"list": "list_sources", "export": "export_run"}
_SETTINGS = """\
Any setting can be given as --section.key VALUE, and then overrides the file:
  fedshot run --data.name digits --method.name fl_proto --method.local_steps 5
Sections: name, seed, data, split, partition, episode, model, method, run, test, privacy, attack,
aggregate, compress.
`fedshot options` lists all settings, and `fedshot methods NAME` those of a method.
"""


if __name__ == "__main__":
    sys.exit(main())
