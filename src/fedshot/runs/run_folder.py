"""A run's folder, for whoever comes by: whether a run is there, by what settings, and its lock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedshot.config.load import Config, load
from fedshot.config.settings import Settings
from fedshot.core.errors import CheckpointError, ConfigError
from fedshot.core.locks import Lock, only_one, taken
from fedshot.core.records import COPY
from fedshot.runs.checkpoint import Checkpoints

CONFIG = "config.yaml"
RESULT = "result.json"
NODES = "flower.json"
"""Where the clients live, if not here: only a run whose clients live on nodes has this file."""
_LOCK = ".lock"


def checkpoints(folder: Path) -> Checkpoints:
    """Return the checkpoints of the run in a folder."""
    return Checkpoints(folder / "checkpoints")


def begun(folder: Path) -> bool:
    """Whether a folder holds a run, be it what is left of one that lost its configuration."""
    return (folder / CONFIG).exists() or bool(checkpoints(folder).rounds())


def check(folder: Path) -> None:
    """Raise CheckpointError unless a folder holds a run and its configuration."""
    if (folder / CONFIG).exists():
        return
    if begun(folder):
        raise CheckpointError(
            f"{folder} has lost its {CONFIG}. Put it back from a copy; or give `--resume` and the "
            "settings that the run had to the command that began it."
        )
    raise CheckpointError(
        f"{folder} holds no run: there is no {CONFIG} in it. Name the folder that `fedshot run` "
        "wrote."
    )


def written(folder: Path) -> Settings:
    """Return the settings of a run as they are written.

    Raises CheckpointError as `check` does, and where they cannot be read.
    """
    check(folder)
    try:
        return load(folder / CONFIG)
    except ConfigError as error:
        raise CheckpointError(f"{error} {COPY}.") from None


def configuration(folder: Path) -> Config:
    """Return the configuration of a run. Raises as `written` does, and ConfigError."""
    return Config.of(written(folder))


def in_training(folder: Path) -> bool | None:
    """Return whether a process trains in a folder; None where folders have no locks."""
    return taken(folder / _LOCK)


@contextmanager
def alone(folder: Path) -> Iterator[Lock]:
    """Be the one process that writes to a folder, which is made if need be.

    Yields the lock, by which another is refused. Raises BusyError where this one is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with only_one(folder / _LOCK) as lock:
        yield lock
