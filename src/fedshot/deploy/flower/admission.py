"""The operator's entries: which clients each node holds, in a file beside its public key.

    nodes/hospital-a.pub    the public key; the file name is the node's name
    nodes/hospital-a.json   {"clients": "0-3, 7", "examples": 120}

The server accepts these clients from the node and no others. "examples" (optional) is the largest
number of examples that one of the clients holds; it bounds a client's weight in an average.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from fedshot.core import records, storage
from fedshot.core.errors import CheckpointError, ConfigError

_MOST = 1 << 20  # bound on client numbers, and on a client's examples
_FIX = "Write it again with `fedshot flower keys --admit`"


@dataclass(frozen=True)
class Entry:
    """The operator's record of a node: its clients, and the most examples that a client has."""

    clients: frozenset[int]
    examples: int | None = None


def parse_clients(text: str) -> list[int]:
    """Parse client numbers from a text such as `0-3,7`. Raises ConfigError."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(last or first) > 9:
            raise ConfigError(
                f"--clients is {text[:60]!r}; expected numbers and ranges such as 0-3,7."
            )
        if int(last or first) >= _MOST:
            raise ConfigError(f"--clients has {last or first}; expected numbers below {_MOST}.")
        if last and int(last) < int(first):
            raise ConfigError(
                f"--clients has {part.strip()}; expected the smaller number first: {last}-{first}."
            )
        found |= set(range(int(first), int(last or first) + 1))
    return sorted(found)


def admit(nodes: Path, name: str, public: bytes, clients: str, examples: int | None) -> None:
    """Write a node's public key and clients into the server's folder of nodes.

    Raises ConfigError if the clients are invalid or belong to another node, or if another key has
    this name.
    """
    entry = Entry(frozenset(parse_clients(clients)), examples)
    if examples is not None and not 1 <= examples <= _MOST:
        raise ConfigError(f"--examples is {examples}; expected 1 to {_MOST}.")
    if not nodes.parent.is_dir():
        raise ConfigError(
            f"{nodes.parent} does not exist. Name the server's --folder, or make it with "
            "`fedshot flower keys --server`."
        )
    key = nodes / f"{name}.pub"
    if key.exists() and key.read_bytes().split() != public.split():  # line ends may differ
        raise ConfigError(
            f"{key} holds another key, and the file name is the node's name. Rename the file that "
            f"you admit; or, if node {name} has a new key, remove {key} first."
        )
    others = {other: its for other, its in read_entries(nodes).items() if other != name}
    _check_disjoint(others | {name: entry}, nodes)
    nodes.mkdir(exist_ok=True)
    record = {"clients": clients} | ({} if examples is None else {"examples": examples})
    storage.write_bytes(nodes / f"{name}.json", json.dumps(record).encode(), sync=True)
    storage.write_bytes(key, public, sync=True)  # last: the server watches for .pub files


def read_entries(nodes: Path) -> dict[str, Entry]:
    """Return the operator's entries in a folder, keyed by node name.

    Raises ConfigError for a damaged file, or if two nodes have the same client.
    """
    found = {path.stem: _read_entry(path) for path in sorted(nodes.glob("*.json"))}
    _check_disjoint(found, nodes)
    return found


class _EntryRecord(TypedDict):
    __pydantic_config__ = {"extra": "forbid"}  # type: ignore[misc]  # noqa: RUF012

    clients: str
    examples: NotRequired[Annotated[int, Field(ge=1, le=_MOST)] | None]


def _read_entry(path: Path) -> Entry:
    try:
        record = records.read(path, _EntryRecord, _FIX)
        return Entry(frozenset(parse_clients(record["clients"])), record.get("examples"))
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    except ConfigError as error:
        raise ConfigError(f"{path} is damaged ({error}). {_FIX}.") from None


def _check_disjoint(entries: Mapping[str, Entry], nodes: Path) -> None:
    owners: dict[int, str] = {}
    for name, entry in entries.items():
        for client in sorted(entry.clients):
            if client in owners:
                raise ConfigError(
                    f"{nodes} gives client {client} to {owners[client]} and to {name}. Leave it "
                    "to one of them."
                )
            owners[client] = name
