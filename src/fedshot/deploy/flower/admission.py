"""Who lives where: what the operator writes of each node, a file beside its key.

    nodes/hospital-a.pub    the key, which gives the node its name
    nodes/hospital-a.json   {"clients": "0-3, 7", "examples": 120}

A node has these clients and no others, whatever it says. "examples" is the most that any of them
holds, so that none weighs more in a mean of examples; it may be left out.
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

_MOST = 1 << 20  # clients, and examples of one


@dataclass(frozen=True)
class Entry:
    """What the operator says of a node.

    Args:
        clients: that live there.
        examples: the most that one of them holds; None where that is not known.
    """

    clients: frozenset[int]
    examples: int | None = None


def parse_clients(text: str) -> list[int]:
    """Return the clients of a text such as `0-3,7`. Raises ConfigError."""
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


def admit(nodes: Path, name: str, public: bytes, clients: str, examples: int | None) -> Entry:
    """Write a node's key and its clients into a server's folder of nodes.

    Raises ConfigError for clients that are none, or that live at another node, and for a name that
    another key has.
    """
    entry = Entry(frozenset(parse_clients(clients)), examples)
    if examples is not None and not 1 <= examples <= _MOST:
        raise ConfigError(f"--examples is {examples}; expected 1 to {_MOST}.")
    if not nodes.parent.is_dir():
        raise ConfigError(
            f"{nodes.parent} does not exist. Name the --folder of the server, or make it with "
            "`fedshot flower keys --server`."
        )
    held = nodes / f"{name}.pub"
    if held.exists() and held.read_bytes().split() != public.split():  # line ends may differ
        raise ConfigError(
            f"{held} holds another key, and the file's name is the node's. Rename the file that "
            f"you admit; or remove {held} first, if node {name} has a new key."
        )
    known = {other: its for other, its in read_entries(nodes).items() if other != name}
    _check_apart(known | {name: entry}, nodes)
    nodes.mkdir(exist_ok=True)
    told = {"clients": clients} | ({} if examples is None else {"examples": examples})
    storage.write_bytes(nodes / f"{name}.json", json.dumps(told).encode(), sync=True)
    storage.write_bytes(held, public, sync=True)  # which the server looks for
    return entry


def read_entries(nodes: Path) -> dict[str, Entry]:
    """Return what is written of the nodes, by name.

    Raises ConfigError for a file that is damaged, or a client of two nodes.
    """
    found = {path.stem: _entry(path) for path in sorted(nodes.glob("*.json"))}
    _check_apart(found, nodes)
    return found


class _EntryNote(TypedDict):
    """What a file of the operator says of a node."""

    __pydantic_config__ = {"extra": "forbid"}  # type: ignore[misc]  # noqa: RUF012

    clients: str
    examples: NotRequired[Annotated[int, Field(ge=1, le=_MOST)] | None]


def _entry(path: Path) -> Entry:
    fix = "Write it again, by `fedshot flower keys --admit`"
    try:
        told = records.read(path, _EntryNote, fix)
        return Entry(frozenset(parse_clients(told["clients"])), told.get("examples"))
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    except ConfigError as error:
        raise ConfigError(f"{path} is damaged ({error}). {fix}.") from None


def _check_apart(entries: Mapping[str, Entry], nodes: Path) -> None:
    owners: dict[int, str] = {}
    for name, entry in entries.items():
        for client in sorted(entry.clients):
            if client in owners:
                raise ConfigError(
                    f"{nodes} gives client {client} to {owners[client]} and to {name}. Leave it "
                    "to one of them."
                )
            owners[client] = name
