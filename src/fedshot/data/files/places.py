"""Where datasets lie on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from fedshot.core.errors import DataError

OPTION = "--data-dir (in Python `data_dir`)"


def default_data_dir() -> Path:
    """Return the folder of datasets used when none is configured."""
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "fedshot"


def find_data_dir(option: str | None) -> Path | None:
    """Return the folder of datasets: the option, else $FEDSHOT_DATA, else the default.

    None if none is configured and the default does not exist. Raises DataError if the configured
    one is not a folder.
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


def home(data_dir: Path | None, source: str, folder: str, wanted: str) -> Path:
    """Return the folder of a dataset below the data folder.

    Raises DataError, which says what to put where, if there is no data folder.
    """
    if data_dir is None:
        raise DataError(
            f"{source} needs a data folder and none is given. Set $FEDSHOT_DATA, or {OPTION}, to "
            f"the folder that holds {folder}/ with {wanted}; the default, {default_data_dir()}, "
            "does not exist. `fedshot data get` downloads the datasets that allow it, and explains "
            "how to get the others."
        )
    return data_dir / folder


def images_in(
    folder: Path, source: str, file: str | None, known: tuple[str, ...] = ()
) -> Path | None:
    """Return the file or folder of images below a dataset's folder, or None.

    That is `file` if it is given, else the first of `known` that exists, else the only .zip.
    Raises DataError if `file` does not exist, or for several .zip files.
    """
    if file is not None:
        if not (folder / file).exists():
            raise DataError(f"{source}: {folder / file} does not exist. Correct `file`.")
        return folder / file
    zips = sorted(folder.glob("*.zip"))
    for path in (folder / name for name in known):
        if path.exists():
            return path
    if len(zips) > 1:
        raise DataError(
            f"{source}: {folder} holds {', '.join(z.name for z in zips)}. Choose one with `file`."
        )
    return zips[0] if zips else None
