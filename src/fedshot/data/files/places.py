"""The folder of datasets on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from fedshot.core.errors import DataError

OPTION = "--data-dir (in Python `data_dir`)"


def default_data_dir() -> Path:
    """Return the default folder of datasets, used if no other is configured."""
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "fedshot"


def data_folder(option: str | None) -> Path:
    """Return the folder of datasets, which need not exist.

    It is `option` if given, otherwise $FEDSHOT_DATA if set, otherwise the default.
    """
    return Path(option or os.environ.get("FEDSHOT_DATA") or default_data_dir()).expanduser()


def find_data_dir(option: str | None) -> Path | None:
    """Return the `data_folder`; None if it is the default and does not exist.

    Raises DataError if the configured path is not a folder.
    """
    folder = data_folder(option)
    if folder.is_dir():
        return folder
    for origin, text in ((OPTION, option), ("$FEDSHOT_DATA", os.environ.get("FEDSHOT_DATA"))):
        if text:
            raise DataError(
                f"{origin} is {text!r}, which is not a folder. Create it or correct it."
            )
    return None
