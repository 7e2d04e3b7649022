"""The folder of datasets on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from fedshot.core.errors import DataError

OPTION = "--data-dir (in Python `data_dir`)"


def default_data_dir() -> Path:
    """Return the default folder of datasets, used if no other is configured."""
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "fedshot"


def find_data_dir(option: str | None) -> Path | None:
    """Return the folder of datasets: the option, else $FEDSHOT_DATA, else the default.

    Returns None if no folder is configured and the default does not exist. Raises DataError if the
    configured path is not a folder.
    """
    text = option or os.environ.get("FEDSHOT_DATA")
    if not text:
        default = default_data_dir()
        return default if default.is_dir() else None
    folder = Path(text).expanduser()
    if not folder.is_dir():
        origin = OPTION if option else "$FEDSHOT_DATA"
        raise DataError(f"{origin} is {text!r}, which is not a folder. Create it or correct it.")
    return folder
