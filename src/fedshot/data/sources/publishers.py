"""The published datasets: addresses, checksums, sizes, licences, and how to download by hand.

They are read from `publishers.json`. A file has a checksum if several independent sources document
it; otherwise it is None, and `fedshot data get` says so. MNIST has a mirror's address, since its
author's page no longer serves the files. A licence is given as far as the publisher states it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

from pydantic import ConfigDict, TypeAdapter, with_config

_STRICT = ConfigDict(extra="forbid")  # a key of the file that is no field is an error


@with_config(_STRICT)
@dataclass(frozen=True)
class Remote:
    """A file to download from a publisher; `urls` are tried in order."""

    name: str
    urls: tuple[str, ...]
    at_most: int  # bytes; a larger download is stopped
    checksum: str | None = None  # "md5:..." or "sha256:..."; None means not verified
    repacked: bool = False  # intact copies with another checksum exist
    unpacked: str | None = None  # checksum of a .gz file's content, equal if repacked


@with_config(_STRICT)
@dataclass(frozen=True)
class Complete:
    """Counts of the publisher's complete dataset."""

    examples: int
    classes: int
    split: tuple[int, int, int] | None = None


@with_config(_STRICT)
@dataclass(frozen=True)
class Publisher:
    """How to get one dataset: `files` to download, or `manual`, instructions for the user."""

    folder: str
    files: tuple[Remote, ...] = ()
    manual: str = ""
    licence: str = ""
    complete: Complete | None = None


_TABLE = resources.files(__package__).joinpath("publishers.json")
PUBLISHERS = TypeAdapter(dict[str, Publisher]).validate_json(_TABLE.read_bytes())
_WITHOUT_FILES = {
    "digits": Publisher(
        "",
        licence="CC BY 4.0 (UCI, Optical Recognition of Handwritten Digits)",
        complete=Complete(1797, 10),
    ),
    "glyphs": Publisher(
        "", licence="Apache-2.0 (drawn by fedshot itself)", complete=Complete(4000, 200)
    ),
}
_KNOWN = PUBLISHERS | _WITHOUT_FILES

LICENCES = {name: known.licence for name, known in _KNOWN.items() if known.licence}
NO_LICENCE = (
    "not known to fedshot: the data belongs to you or to others; state its licence when you export"
)
VECTORS = "word vectors: GloVe, PDDL 1.0, unless others were given"


def published_size(name: str) -> int | None:
    """Return the number of examples of the publisher's complete dataset, or None if unknown."""
    complete = _KNOWN[name].complete if name in _KNOWN else None
    return complete.examples if complete else None


def published_split(name: str) -> tuple[int, int, int]:
    """Return the numbers of base, validation and novel classes of a published split."""
    complete = PUBLISHERS[name].complete
    assert complete is not None
    assert complete.split is not None
    return complete.split
