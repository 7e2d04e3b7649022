"""The ledger: every part and byte that goes down to clients and up from them.

Counted, not declared. Bytes are those of the tensors, before any transport's own framing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from threading import Lock
from typing import Any

from typing_extensions import TypedDict

from fedshot.core import tree
from fedshot.core.records import Whole
from fedshot.core.tree import Tree
from fedshot.fleets.wrapper import Wrapper
from fedshot.protocol.exchange import Arrival, Exchange, Fleet

Line = tuple[str, str, str, str]


class LedgerLine(TypedDict):
    """A row of a ledger, as files hold it."""

    phase: str
    work: str
    direction: str
    part: str
    bytes: Whole
    messages: Whole


class Meter(Wrapper):
    """A fleet that counts.

    `bytes` and `messages` are keyed by (phase, work, direction, part): phase "train" or
    "evaluate", direction "down" or "up". A message counts when it is sent, answered or not; a reply
    that the guard refuses later was sent all the same and counts. What a client sends beside the
    parts that it was asked for is one part, "unknown", whatever names it gives.
    """

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.bytes: Counter[Line] = Counter()
        self.messages: Counter[Line] = Counter()
        self._lock = Lock()

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the arrivals of the fleet unchanged."""

        def count(message: Tree) -> None:
            self._count(exchange, "down", message)
            if exchange.on_send is not None:
                exchange.on_send(message)

        for arrival in self.fleet.replies(replace(exchange, on_send=count)):
            if arrival.reply is not None:
                self._count(exchange, "up", arrival.reply.up)
            yield arrival

    def total(self, phase: str, direction: str) -> int:
        """Return the bytes of one phase in one direction."""
        return sum(n for line, n in self.bytes.items() if line[0] == phase and line[2] == direction)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the ledger as rows."""
        names = ("phase", "work", "direction", "part")
        return [
            dict(zip(names, line, strict=True)) | {"bytes": n, "messages": self.messages[line]}
            for line, n in sorted(self.bytes.items())
        ]

    def load_json(self, rows: list[dict[str, Any]]) -> None:
        """Go on from rows that `to_json` gave."""
        self.bytes.clear()
        self.messages.clear()
        for row in rows:
            line = (row["phase"], row["work"], row["direction"], row["part"])
            self.bytes[line], self.messages[line] = row["bytes"], row["messages"]

    def _count(self, exchange: Exchange, direction: str, message: Tree) -> None:
        parts = message if isinstance(message, Mapping) else {"message": message}
        with self._lock:  # messages may be sent by several threads
            for part, content in parts.items():
                known = direction == "down" or part in exchange.reduce
                name = str(part) if known else "unknown"
                line = (exchange.phase, exchange.work.name, direction, name)
                self.bytes[line] += _nbytes(content)
                self.messages[line] += 1


def _nbytes(content: Tree) -> int:
    """Return the bytes of a tree; none of what is no tree, which the guard refuses after this."""
    try:
        return tree.nbytes(content)
    except TypeError:
        return 0
