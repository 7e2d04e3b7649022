"""Where the data lie on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from fedshot.core.errors import DataError

OPTION = "--data-dir (in Python `data_dir`)"


def default_data_dir() -> Path:
    """Return where datasets go when nothing says where."""
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "fedshot"


def find_data_dir(option: str | None) -> Path | None:
    """Return the folder of datasets: the option, else $FEDSHOT_DATA, else the usual one.

    None where nothing is named and there is no usual one. Raises DataError for a name that is no
    folder.
    """
    text = option or os.environ.get("FEDSHOT_DATA")
    if not text:
        usual = default_data_dir()
        return usual if usual.is_dir() else None
    folder = Path(text).expanduser()
    if not folder.is_dir():
        origin = OPTION if option else "$FEDSHOT_DATA"
        raise DataError(f"{origin} is {text!r}, which is not a folder. Create it or correct it.")
    return folder


def home(data_dir: Path | None, source: str, folder: str, wanted: str) -> Path:
    """Return the folder of a dataset below the data folder, or say what belongs where."""
    if data_dir is None:
        raise DataError(
            f"{source} needs a data folder and none is given. Set $FEDSHOT_DATA, or {OPTION}, to "
            f"the folder that holds {folder}/ with {wanted}; without either it is "
            f"{default_data_dir()}, which is not there. `fedshot data get` fetches what publishers "
            "hand out, and tells of the rest."
        )
    return data_dir / folder
