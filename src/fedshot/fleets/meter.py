"""The meter, which counts the bytes sent to clients and received from them.

It keeps a ledger, i.e. a log of the bytes of each part of a message, such as "theta". Only the
bytes of tensors count, without the framing of any transport.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from typing_extensions import TypedDict

from fedshot.core import tree
from fedshot.core.records import Whole
from fedshot.core.tree import Tree
from fedshot.fleets.wrapper import Wrapper
from fedshot.protocol.exchange import Arrival, Exchange, Fleet, PerClient

Line = tuple[str, str, str, str]


class LedgerLine(TypedDict):
    """A row of the ledger, the log of the bytes sent and received, as it is stored in files."""

    phase: str
    work: str
    direction: str
    part: str
    bytes: Whole
    messages: Whole


class Meter(Wrapper):
    """A fleet that counts bytes and messages.

    `bytes` and `messages` are keyed by (phase, work, direction, part), with phase "train" or
    "evaluate", the name of the client function as work, and direction "down" or "up". Messages that
    get no reply and replies that the guard rejects count as well. Parts that a client was not asked
    to upload count as "unknown". The ranges of compressed uploads in secure sums count as the part
    "ranges". `sizes` has the bytes (down, up) of each client whose reply has arrived in the
    exchange in progress.
    """

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.bytes: Counter[Line] = Counter()
        self.messages: Counter[Line] = Counter()
        self.sizes: dict[int, tuple[int, int]] = {}
        self._lock = Lock()

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the fleet's arrivals unchanged, and count their bytes."""

        ranges = _ranges(exchange)

        def count(message: Tree) -> None:
            self._count(exchange, "down", message)
            self._count(exchange, "down", ranges)
            if exchange.on_send is not None:
                exchange.on_send(message)

        self.sizes, sent = {}, {}
        down = exchange.down
        if isinstance(down, PerClient):
            make = down.fn

            def fn(client: int) -> Tree:
                message = make(client)
                sent[client] = _nbytes(message) + _nbytes(ranges)
                return message

            down, same = PerClient(fn), 0
        else:
            same = _nbytes(down) + _nbytes(ranges)
        for arrival in self.fleet.replies(replace(exchange, down=down, on_send=count)):
            up = 0
            if arrival.reply is not None:
                self._count(exchange, "up", arrival.reply.up)
                up = _nbytes(arrival.reply.up)
            self.sizes[arrival.client] = sent.get(arrival.client, same), up
            yield arrival

    def total(self, phase: str, direction: str) -> int:
        """Return the bytes of a phase in one direction."""
        return sum(n for line, n in self.bytes.items() if line[0] == phase and line[2] == direction)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the ledger (the log of bytes) as a list of rows with the keys of `LedgerLine`."""
        names = ("phase", "work", "direction", "part")
        return [
            dict(zip(names, line, strict=True)) | {"bytes": n, "messages": self.messages[line]}
            for line, n in sorted(self.bytes.items())
        ]

    def load_json(self, rows: list[dict[str, Any]]) -> None:
        """Replace all counts with the counts in `rows`, which `to_json` returned."""
        self.bytes.clear()
        self.messages.clear()
        for row in rows:
            line = (row["phase"], row["work"], row["direction"], row["part"])
            self.bytes[line], self.messages[line] = row["bytes"], row["messages"]

    def _count(self, exchange: Exchange, direction: str, message: Tree) -> None:
        parts = message if isinstance(message, Mapping) else {"message": message}
        with self._lock:  # several threads may send messages
            for part, content in parts.items():
                known = direction == "down" or part in exchange.reduce
                name = str(part) if known else "unknown"
                line = (exchange.phase, exchange.work.name, direction, name)
                self.bytes[line] += _nbytes(content)
                self.messages[line] += 1


def _ranges(exchange: Exchange) -> dict[str, Tensor]:
    """Return the ranges in a request to mask compressed replies, as a part; {} for none."""
    reduce = {} if exchange.masking is None else exchange.masking.reduce
    grids = (r.grid for r in reduce.values() if r.grid)
    found = [one for grid in grids for one in grid.ranges.values()]
    return {"ranges": torch.tensor(found, dtype=torch.float64)} if found else {}


def _nbytes(content: Tree) -> int:
    """Return the bytes of a tree; 0 for any other object, which the guard rejects later."""
    try:
        return tree.nbytes(content)
    except TypeError:
        return 0
