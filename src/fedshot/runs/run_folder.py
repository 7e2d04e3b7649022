"""A run's folder: its settings, whether it holds a run, and its lock."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedshot.config.load import Config, load
from fedshot.config.registry import expand_names
from fedshot.config.settings import Settings, at, merged
from fedshot.core.devices import devices_of
from fedshot.core.errors import BusyError, CheckpointError, ConfigError
from fedshot.core.locks import Lock, only_one, taken
from fedshot.core.records import COPY
from fedshot.runs.checkpoint import Checkpoints
from fedshot.runs.recorder import ENVIRONMENT, RECORDS, Recorder

CONFIG = "config.yaml"
RESULT = "result.json"
STOPPED = "stopped.json"
"""The file that says why training stopped."""
NODES = "flower.json"
"""The file about a run's nodes, if its clients are on the nodes of a Flower deployment."""
_LOCK, _DATA = ".lock", "data.json"
_OF_OTHERS = ("calibration.json", "wandb.json", "mlflow.json")  # refer to the run's models


def checkpoints(folder: Path) -> Checkpoints:
    """Return the checkpoints of the run in a folder."""
    return Checkpoints(folder / "checkpoints")


def begun(folder: Path) -> bool:
    """Return whether a folder holds a run, even if its configuration file is lost."""
    return (folder / CONFIG).exists() or bool(checkpoints(folder).rounds())


def untrained(folder: Path) -> bool:
    """Return whether a folder holds a run that stopped before the end of round 1.

    False if a process trains in it, if the file system has no locks to tell, if the run has a
    result, or if its clients are on Flower nodes.
    """
    return in_training(folder) is False and _is_untrained(folder)


def _is_untrained(folder: Path) -> bool:
    rounds = checkpoints(folder).rounds()
    has_begun = bool(rounds) or (folder / _DATA).exists()  # not just a configuration by hand
    if any(rounds) or not has_begun or any((folder / name).exists() for name in (RESULT, NODES)):
        return False
    return not any(record["round"] for record in Recorder(folder).records())


def clear(folder: Path) -> None:
    """Delete what a run that trained no round leaves and a new run does not replace.

    The caller holds the lock of the folder. Raises BusyError if a round was trained there since
    `untrained` returned True.
    """
    if not _is_untrained(folder):
        raise BusyError(f"another process has trained in {folder} meanwhile. Choose another name.")
    checkpoints(folder).prune(())
    for name in (RECORDS, ENVIRONMENT, *_OF_OTHERS):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)


def check(folder: Path) -> None:
    """Raise CheckpointError unless a folder holds a run and its configuration."""
    if (folder / CONFIG).exists():
        return
    if begun(folder):
        raise CheckpointError(
            f"{folder} has lost its {CONFIG}. Restore it from a copy, or resume the run with the "
            "command or call that started it."
        )
    raise CheckpointError(
        f"{folder} holds no run: it has no {CONFIG}. Name a folder that `fedshot run` wrote."
    )


def written(folder: Path) -> Settings:
    """Return the settings in a run's folder.

    Raises CheckpointError as `check` does, and if the settings cannot be read.
    """
    check(folder)
    try:
        return expand_names(load(folder / CONFIG))
    except ConfigError as error:
        raise CheckpointError(f"{error} {COPY}.") from None


def configuration(folder: Path, *, any_device: bool = False) -> Config:
    """Return the configuration of a run. Raises ConfigError, and CheckpointError as `written` does.

    With `any_device`, `run.device` becomes "cpu" if this machine lacks the device of the run.
    """
    settings = written(folder)
    device = at(settings, "run.device")
    if any_device and isinstance(device, str):
        try:
            devices_of(device)
        except ConfigError:
            settings = merged(settings, {"run": {"device": "cpu"}})
    return Config.of(settings)


def in_training(folder: Path) -> bool | None:
    """Return whether a process trains in a folder; None if the file system has no locks."""
    return taken(folder / _LOCK)


@contextmanager
def alone(folder: Path) -> Iterator[Lock]:
    """Lock a run's folder, so that only this process trains in it, and yield the lock.

    The folder is created if needed. Raises BusyError if another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with only_one(folder / _LOCK) as lock:
        yield lock
