"""Train from Python, and the steps that the commands `run` and `resume` share with it."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedshot.api.memory_data import as_dataset
from fedshot.api.progress import shown
from fedshot.api.training_run import TrainingRun
from fedshot.config import settings as trees
from fedshot.config.load import Config, load, merge_over
from fedshot.config.registry import KINDS, NONE, expand_name, expand_names
from fedshot.config.settings import Settings
from fedshot.core import shutdown
from fedshot.core.console import log_shown, tell
from fedshot.core.errors import ConfigError, as_folder, as_path
from fedshot.core.text import typed
from fedshot.data.class_split import random_shares
from fedshot.data.dataset import Dataset
from fedshot.evaluation.episodic_test import Score
from fedshot.methods.user_methods import refuse_while_loading
from fedshot.runs import run_folder
from fedshot.runs.experiment import MAY_CHANGE, Experiment
from fedshot.runs.prepare import PreparedRun, with_modules
from fedshot.runs.recorder import Record
from fedshot.runs.trackers.tracking import Tracker, check

_EVERY = 10.0  # seconds between two lines of progress where there is no terminal
# Options that can be given without their section: their key paths.
_WITHOUT_SECTION = {
    "rounds": ("run.rounds",),
    "clients": ("partition.clients",),
    "way": ("episode.way", "test.way"),
    "shot": ("episode.shot", "test.shot"),
    "query": ("episode.query", "test.query"),
}


def train(
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    data: Any = None,
    encoder: Any = None,
    backbone: Any = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    data_dir: str | None = None,
    tracker: str | None = None,
    progress: bool = True,
    **settings: Any,
) -> TrainingRun:
    """Train a method on clients' data, test it, and return the run.

    Settings are those of a configuration file, and override those of `config`. A section is a
    mapping (`run={"rounds": 10}`). A method or dataset can also be given by name
    (`method="fl_proto"`), and a single option by its key path (`**{"run.rounds": 10}`). `rounds`,
    `clients`, `way`, `shot` and `query` need no section; the last three then apply to training and
    to the test. Two arguments may not set an option to different values. `fedshot.options` lists
    all settings.

    Data in memory may be anything that `fedshot.as_dataset` takes. If neither the data nor the
    settings (`split`) assign classes to training, validation and test, the classes are assigned at
    random with `test.seed`: a fifth of them (at least one) to validation, as many to the test, and
    the rest to training. If the data name a client for each example, these are the clients of the
    run by default.

    An interrupt (Ctrl-C) raises KeyboardInterrupt. Repeat the same call with `resume=True` to
    continue from the last checkpoint; by default, every round has one.

    Args:
        config: a YAML file, or a mapping with its content.
        data: data in memory, the name of a source such as "digits", or the settings of `data`.
        encoder: a frozen `torch.nn.Module` that computes features before training, or a function
            that returns one. It takes images as float [n, C, H, W] in [0, 1], or a list of n texts,
            and returns features [n, d]. To use one of fedshot's encoders, set `model.encoder`.
        backbone: a `torch.nn.Module` to train or fine-tune, or a function that returns one. The
            settings `model.backbone` say which of its parameters are trained. For its input see
            `ModuleBackbone`.
        out: folder of the run; `runs/<name>` by default. A configuration without a name takes the
            folder's name.
        resume: whether to continue the run in `out`, if there is one; the result is then bitwise
            equal to that of an uninterrupted run. Without `config`, settings that are not given
            are the run's; of those given, only some may differ from them, such as `rounds`.
        data_dir: folder of downloaded datasets; by default $FEDSHOT_DATA.
        tracker: "tensorboard", "wandb" or "mlflow", with the extra `tracking`.
        progress: whether to show progress and notices on stderr; otherwise nothing is printed, and
            notices go to the logger "fedshot" at level INFO.
        settings: sections and options of the configuration.

    Raises:
        ConfigError: a setting is unknown or has a wrong value, or `out` holds a run that has
            trained a round, and `resume` is False, or a method's file calls `train` while it is
            loaded.
        DataError: the data are missing or too small.
        CheckpointError: the run in `out` has other settings or other data.
        BusyError: another process trains in `out`.
        QuorumError: too few clients gave a usable reply in a round.

    Example:
        ```python
        run = fs.train(data="digits", method="fl_proto", rounds=10, way=3, out="runs/digits")
        print(run.result.accuracy)
        ```
    """
    refuse_while_loading("fedshot.train")
    if tracker:
        check(tracker)
    given, memory = given_settings(data, settings)
    may_change = {path for path, _ in trees.flat(given)} <= {*MAY_CHANGE}
    if resume and config is None and (out is not None or may_change):
        earlier = as_path("out", out)
        if run_folder.begun(earlier) or (data is None and may_change):
            config = run_folder.written(earlier)
    tree, notices = merged_settings(config, given)
    if out is not None:
        tree.setdefault("name", as_path("out", out).name)
    chosen = _config(tree, memory, encoder, backbone, data_dir)
    folder = as_folder("out", Path("runs", chosen.name) if out is None else out)
    for text in notices:
        note(text, progress)
    anew = not resume and run_folder.untrained(folder)
    if run_folder.begun(folder) and not anew:
        check_here_trained(folder)
        fix = "Continue it with resume=True, or choose another `out`"
        chosen = resumed(folder, chosen, resume=resume, fix=fix)

    def notify(text: str) -> None:
        note(text, progress)

    with shutdown.interruptible():
        with log_shown() if progress else nullcontext():
            prepared = PreparedRun(chosen, data_dir)
        if anew:
            notify(f"{folder} had trained no round, and starts over")
        experiment = Experiment(prepared, folder, anew=anew)
        completed(
            experiment,
            shown(experiment, every=_EVERY) if progress else experiment.run(),
            tracker,
            notify,
        )
    return TrainingRun(folder, encoder, backbone)


def prepared_again(
    folder: Path, data: Any, data_dir: str | None, *, encoder: Any, backbone: Any,
    any_device: bool = False,
) -> PreparedRun:  # fmt: skip
    """Return the prepared run of a folder, with the data and modules that `train` was given.

    With `any_device`, the CPU is used if this machine lacks the device of the run.
    """
    given, memory = given_settings(data, {})
    held = run_folder.configuration(folder, any_device=any_device).settings
    tree = trees.merged(held, given)
    return PreparedRun(_config(tree, memory, encoder, backbone, data_dir), data_dir)


def resumed(folder: Path, chosen: Config, *, resume: bool, fix: str) -> Config:
    """Return the configuration with which to resume the run in `folder`.

    It is `chosen`, but if `chosen` sets no number of threads, the run's number is kept. Raises
    ConfigError, with the sentence `fix` at the end, if `resume` is False. `Experiment` later checks
    that the run began with this configuration.
    """
    if not resume:
        raise ConfigError(f"{folder} holds a run already. {fix}.")
    checkpoints = run_folder.checkpoints(folder)
    rounds = checkpoints.rounds()
    if chosen.run.threads is not None or not rounds:
        return chosen
    held = checkpoints.notes(rounds[-1])["config"]["run"]["threads"]
    return chosen.with_threads(held)  # another number might change results


def check_here_trained(folder: Path) -> None:
    """Raise ConfigError if the clients of a run are on the nodes of a Flower deployment."""
    if (folder / run_folder.NODES).exists():
        raise ConfigError(
            f"the clients of the run {folder} are on Flower nodes. Continue it with `fedshot "
            f"resume {typed(folder)}`, or choose another name."
        )


def completed(
    experiment: Experiment,
    records: Iterable[Record],
    tracker: str | None,
    notify: Callable[[str], None],
) -> Score:
    """Train the remaining rounds, test, and return the score.

    Args:
        experiment: the run.
        records: yields the record of each round; reading it trains the round.
        tracker: "tensorboard", "wandb" or "mlflow"; None for none. It is opened after the check
            that no other process trains in the run's folder.
        notify: called with messages for the user.
    """
    with experiment.alone() as lock:  # checked first: trackers need not hear of it
        experiment.discard()
        if not lock.held:
            notify(
                f"the file system of {experiment.folder} has no locks: make sure that no other "
                "process trains there"
            )
    for text in experiment.notices():
        notify(text)
    sent = Tracker(tracker, experiment.folder, experiment.config.settings, notify)
    try:
        for record in records:
            sent.record(record)
        score = experiment.result()
        sent.result(score, experiment.best_round)
    finally:
        sent.close()
    return score


def note(text: str, progress: bool) -> None:
    """Show a notice on stderr if `progress`, otherwise log it."""
    if progress:
        tell(text)
    else:
        logging.getLogger("fedshot").info("%s", text)


def merged_settings(
    config: str | os.PathLike[str] | Mapping[str, Any] | None, given: Settings
) -> tuple[Settings, list[str]]:
    """Merge settings over those of a YAML file or a mapping; return them and notices to show."""
    if isinstance(config, str) and config in KINDS["method"][0] and not _exists(config):
        raise ConfigError(f"config is {config!r}, a method. Write method={config!r}.")
    if not isinstance(config, Mapping):
        config = {} if config is None else load(as_path("config", config))
    return merge_over(plain(config), given)


def given_settings(data: Any, settings: Mapping[str, Any]) -> tuple[Settings, Any]:
    """Return the settings from keyword arguments, and `data` if it is in memory, else None.

    Raises ConfigError if an argument looks like a misspelt option, or if two arguments set one
    option to different values.
    """
    given: Settings = {}
    set_by: dict[str, tuple[str, Any]] = {}
    for key, value in settings.items():
        close = difflib.get_close_matches(key, _WITHOUT_SECTION, 1, 0.75)
        if close and key not in _WITHOUT_SECTION and "." not in key:
            raise ConfigError(f"there is no option {key!r}. Did you mean {close[0]!r}?")
        for path in _WITHOUT_SECTION.get(key, (key,)):
            _put(given, set_by, key, path, value)
    if isinstance(data, Mapping) and not data:
        raise ConfigError("data is empty; expected a data set, or no `data` for the default.")
    is_name = isinstance(data, str) and data in KINDS["data"][0]
    if isinstance(data, str | os.PathLike) and not is_name and _exists(data):
        raise ConfigError(
            f"data is {os.fspath(data)!r}, a file or folder. Say what it holds, for images in a "
            f"folder for each class: data={{'name': 'folder', 'path': {os.fspath(data)!r}}}."
        )
    if data is None or isinstance(data, str) or is_settings(data):
        if data is not None:
            _put(given, set_by, "data", "data", data)
        return expand_names(given), None
    if "data" in given:
        raise ConfigError(
            f"{next(trees.flat(given['data']))[0]!r} is an option of a source, and the data are in "
            "memory. Pass fedshot.as_dataset(data, ...), which has options of its own."
        )
    return expand_names(given), data


def _put(
    given: Settings, set_by: dict[str, tuple[str, Any]], argument: str, path: str, value: Any
) -> None:
    """Set an argument's value at a key path of `given`, unless another argument contradicts it.

    `set_by` has the argument and the value of each option that is set, and is updated.
    """
    value = expand_name(path, plain(value))
    own: Settings = {}
    trees.put(own, path, value)
    for at, new in trees.flat(expand_names(own)):
        other, old = set_by.setdefault(at, (argument, new))
        if old is not new and old != new:  # NaN does not equal itself
            raise ConfigError(
                f"{at} is {old!r} by the argument {other!r}, and {new!r} by {argument!r}. Give one "
                "value."
            )
    trees.put(given, path, value)


def is_settings(data: Any) -> bool:
    """Whether `data` is a section of a configuration, not a mapping from clients to data."""
    single = (str, int, float, os.PathLike, type(None))
    return isinstance(data, Mapping) and all(isinstance(value, single) for value in data.values())


def _exists(path: str | os.PathLike[str]) -> bool:
    try:
        return bool(os.fspath(path)) and Path(path).expanduser().exists()
    except (OSError, RuntimeError):  # too long, or a home that does not exist
        return False


def plain(value: Any) -> Any:
    """Return a value in a configuration's types: paths become text, arrays lists, mappings dicts.

    Values of other types are returned as they are.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, np.ndarray | np.generic | Tensor):
        return value.tolist()
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _config(
    tree: Settings, data: Any, encoder: Any, backbone: Any, data_dir: str | None
) -> Config:  # fmt: skip
    """Return the configuration, with the data and modules passed in memory, if any."""
    if backbone is not None and trees.at(tree, "model.backbone.name") is None:
        trees.put(tree, "model.backbone.name", "module")
    if data is not None:
        raw = encoder is not None or trees.at(tree, "model.encoder.name") not in (None, NONE)
        chosen = _with_data(tree, as_dataset(data, raw=raw, data_dir=data_dir))
    else:
        chosen = Config.of(tree)
    return with_modules(chosen, encoder, backbone)


def _with_data(tree: Settings, dataset: Dataset) -> Config:
    """Return the configuration for data in memory, with a default partition and class split."""
    tree = {key: value for key, value in tree.items() if key != "data"}
    if dataset.users is not None:
        tree["partition"] = {"name": "users", **(tree.get("partition") or {})}
    if dataset.standard is None and not any((tree.get("split") or {}).values()):
        tree["split"] = {"random": random_shares(dataset)}
    return Config.of(tree).with_data(dataset)
