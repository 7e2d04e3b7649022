"""The publishers of datasets: addresses, checksums, and instructions for manual downloads.

They are read from `publishers.json`. A file has a checksum if several independent sources document
it; otherwise it is None, and `fedshot data get` says so. MNIST has a mirror's address, since its
author's page no longer serves the files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Remote:
    """A file to download from a publisher; `urls` are tried in order."""

    name: str
    urls: tuple[str, ...]
    at_most: int  # bytes; a larger download is stopped
    checksum: str | None = None  # "md5:..." or "sha256:..."; None means not verified
    repacked: bool = False  # intact copies with another checksum exist
    unpacked: str | None = None  # checksum of a .gz file's content, equal if repacked


@dataclass(frozen=True)
class Publisher:
    """How to get one dataset: `files` to download, or `manual`, instructions for the user."""

    folder: str
    files: tuple[Remote, ...] = ()
    manual: str = ""


def _load() -> dict[str, Publisher]:
    text = resources.files(__package__).joinpath("publishers.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = json.loads(text)
    return {
        name: Publisher(
            entry["folder"],
            tuple(
                Remote(**{**file, "urls": tuple(file["urls"])}) for file in entry.get("files", ())
            ),
            entry.get("manual", ""),
        )
        for name, entry in table.items()
    }


PUBLISHERS = _load()
