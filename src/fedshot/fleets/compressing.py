"""Compression of messages: the clients' side, and the server's wrapper.

A client adds the error that it remembers to its change, uploads the encoded sum, and remembers what
encoding took away: x = u + e, upload C(x), e' = x - C(x) (Karimireddy et al. 2019, algorithm 2; for
federated clients Fed-EF, Li and Li 2023). The error is part of the client's private state, so an
upload that the server does not accept leaves it as it was. The server decodes each reply before
anything else reads it.

In a secure sum the server cannot decode single replies. A client then rounds its parts to the
integers of a public range (`Grid`), which the sum adds, and reports the size of each tensor, from
whose sum over the cohort the next range follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.tree import Tree
from fedshot.fleets.wrapper import Wrapper
from fedshot.protocol.compressors import Compression, Compressor, decoded, is_large
from fedshot.protocol.exchange import Arrival, Exchange, Fault, Fleet, PerClient, Reply
from fedshot.protocol.reducers import Gather, Mean, Sum

LARGEST = "compress.largest"
"""Part of a reply in a secure sum: of each compressed tensor, what `reported_size` returns.

Its names are those of `tensor_name`.
"""

POWER, RISE = 8, 4.0
"""Power of the sizes that clients report in units of a range, and the largest of these sizes.

A sum in fixed point has 62 bits, less those for the number of clients. So for 256 clients it holds
the eighth powers of sizes from 1 / 27 to 4, that of 1 / 2 to nine digits.
"""


def tensor_name(part: str, path: str) -> str:
    """Return the name of a tensor of a part, which has no slash."""
    return f"{part}:{path}".replace("/", ":")


def reported_size(largest: Tensor, in_use: float | None, limit: float) -> Tensor:
    """Return what a client reports, at most `limit`: its largest |w * x| before rounding.

    If a range is in use, it is this size in units of the range, to the power `POWER`; `RISE` units
    become the limit.
    """
    found = largest if in_use is None else (largest / (RISE * in_use)) ** POWER * limit
    return found.clamp(max=limit)


def mean_size(mean: float, in_use: float | None, limit: float) -> float:
    """Return the power mean of the clients' largest |w * x|, from the mean of `reported_size`."""
    if in_use is None:
        return mean
    share = max(mean, 0.0) / limit
    return RISE * in_use * float(share ** (1 / POWER))


class ClientSide:
    """Decodes what clients receive, and encodes what they upload, on the clients' machine."""

    def __init__(self, options: Compression) -> None:
        self.options = options
        self._last: tuple[Tree, Tree] = ({}, {})  # the last message, encoded and decoded

    def received(self, message: Tree) -> Tree:
        """Return a message decoded; one that goes to all clients is decoded once."""
        if self.options.down is None:
            return message
        last = self._last
        if last[0] is not message:
            self._last = last = (message, decoded(message))
        return last[1]

    def upload(
        self, exchange: Exchange, client: int, reply: Reply, memory: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tree], dict[str, Tensor]]:
        """Return the parts of a client's reply, encoded, and the errors that it then remembers.

        `memory` has the errors remembered so far, by client function, part and path.
        """
        compressor, sent, kept = self.options.up, dict(reply.up), dict(memory)
        if compressor is None:
            return sent, kept
        largest: dict[str, Tensor] = {}
        asked = exchange.reduce.get(LARGEST)
        limit = asked.limit if isinstance(asked, Sum) else 0.0
        for name, part in reply.up.items():
            reducer = exchange.reduce.get(name)
            if not compressor.uploads(name, reducer):
                continue
            grid = reducer.grid if isinstance(reducer, Mean | Sum) else None
            weight = float(reply.weight) if isinstance(reducer, Mean) else 1.0
            averaged = isinstance(reducer, Mean) and not reducer.by_class
            feedback = self.options.error_feedback and averaged
            key = exchange.client_key(client).at("compress", name)
            rng = None if feedback else key.numpy()
            start = f"{exchange.work.name}:"
            held = memory if feedback else {}
            wholes = [_plus(leaf, held.get(start + tensor_name(name, path)))
                      for path, leaf in tree.items(part)]  # fmt: skip
            # What is refused is not rounded: the range would hide why.
            refused = isinstance(reducer, Mean | Sum) and grid is not None and bool(
                reducer.fault(client, tree.unflatten(part, wholes), weight)
            )  # fmt: skip
            leaves: list[Tree] = []
            for (path, leaf), whole in zip(tree.items(part), wholes, strict=True):
                tensor = tensor_name(name, path)
                if refused or not _encodable(leaf):
                    leaves.append(whole)  # the guard refuses what is not finite
                    if grid is not None and is_large(leaf):
                        largest[tensor] = torch.zeros((), dtype=torch.float64)
                    continue
                of = start + tensor
                short: Tree
                if grid is None:
                    short = compressor.encode(whole, rng)
                else:
                    short = grid.rounded(path, whole, weight, rng)
                    most = whole.detach().cpu().double().abs().max() * weight
                    largest[tensor] = reported_size(most, grid.ranges.get(path), limit)
                if feedback:
                    kept[of] = whole.detach() - decoded(short, whole)
                leaves.append(short)
            sent[name] = tree.unflatten(part, leaves)
        if asked is not None:
            sent[LARGEST] = largest
        return sent, kept


class Compressed(Wrapper):
    """A fleet whose clients exchange encoded messages in training.

    Args:
        fleet: the fleet, whose clients encode as `ClientSide` does.
        options: what is compressed, and how.
    """

    def __init__(self, fleet: Fleet, options: Compression) -> None:
        super().__init__(fleet)
        self._options = options
        self._asked = False  # whether there was an exchange
        self._seen: dict[str, set[str]] = {"up": set(), "down": set()}  # compressed parts

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the fleet's arrivals, decoded; a reply that cannot be decoded becomes a fault.

        Raises ConfigError for a part that the compressor does not support.
        """
        up, down = self._options.up, self._options.down
        trains = exchange.phase == "train" and exchange.work.method is not None
        if not trains or (up is None and down is None):
            yield from self.fleet.replies(exchange)
            return
        self._asked = True
        if up is not None:
            masking = exchange.masking
            asked = exchange if masking is None else replace(exchange, reduce=masking.reduce)
            for name in asked.reduce:
                self._check(up, asked, name)
        if down is not None:
            exchange = replace(exchange, down=self._encoded(down, exchange.down))
        for arrival in self.fleet.replies(exchange):
            yield arrival if arrival.reply is None else _decoded(exchange, arrival, arrival.reply)

    def check_used(self) -> None:
        """Raise ConfigError if a compressor had nothing to compress in the exchanges so far."""
        for way, compressor in (("up", self._options.up), ("down", self._options.down)):
            if compressor is None or not self._asked:
                continue
            seen = self._seen[way]
            unknown = sorted(set(compressor.parts or ()) - seen)
            if unknown:
                raise ConfigError(
                    f"compress.{way}.parts has {unknown[0]!r}, which is not a part of the method's "
                    f"messages {way}, or holds no matrices. Remove it."
                )
            if not seen:
                raise ConfigError(
                    f"compress.{way} has no effect: the method has no messages {way} of parts that "
                    f"the server averages. Name parts in compress.{way}.parts, or set "
                    f"compress.{way}.name to none."
                )

    def _encoded(self, compressor: Compressor, down: Tree | PerClient) -> Tree | PerClient:
        if isinstance(down, PerClient):
            return PerClient(lambda client: self._encoded(compressor, down.fn(client)))
        named = down if isinstance(down, Mapping) else {"message": down}
        found = dict(named)
        for name, part in named.items():
            if compressor.sends(name):
                self._see("down", name, part)
                found[name] = compressor.encoded(part)
        return found if isinstance(down, Mapping) else found["message"]

    def _see(self, way: str, name: str, part: Tree) -> None:
        if any(map(is_large, tree.leaves(part))):
            self._seen[way].add(name)

    def _check(self, compressor: Compressor, exchange: Exchange, name: str) -> None:
        reducer = exchange.reduce[name]
        if not compressor.uploads(name, reducer):
            return
        like = like_of(exchange, name, exchange.to[0]) if exchange.to else {}
        if like is None:
            raise ConfigError(
                f"compress.up.parts has {name!r}, whose size differs by client. Remove it."
            )
        if compressor.changes_only and not isinstance(reducer, Mean):
            raise ConfigError(
                f"compress.up.parts has {name!r}, which is not averaged: topk leaves most entries "
                "of a tensor out, and only changes that add up over rounds make up for that. "
                "Remove it, or set compress.up.name to int8."
            )
        self._see("up", name, like)


def _encodable(leaf: Tensor) -> bool:
    return is_large(leaf) and bool(leaf.isfinite().all())


def _plus(leaf: Tensor, error: Tensor | None) -> Tensor:
    """Return a tensor plus the error that is remembered of it; a tensor not encoded, as it is."""
    return leaf if error is None or not _encodable(leaf) else leaf.detach() + error


def like_of(exchange: Exchange, name: str, client: int) -> Tree | None:
    """Return a tree with the form of a client's part; None if the server does not know it."""
    reducer = exchange.reduce.get(name)
    if isinstance(reducer, Gather):
        return reducer.like(client) if callable(reducer.like) else reducer.like
    return reducer.like if isinstance(reducer, Mean | Sum) else None


def _decoded(exchange: Exchange, arrival: Arrival, reply: Reply) -> Arrival:
    if not isinstance(reply.up, Mapping):
        return arrival  # the guard rejects it
    up = {}
    for name, part in reply.up.items():
        try:
            up[name] = decoded(part, like_of(exchange, name, arrival.client))
        except (ValueError, RuntimeError, TypeError, AttributeError) as error:
            return Arrival(arrival.client, None, Fault("refused", f"part {name!r}: {error}"))
    return arrival._replace(reply=reply._replace(up=up))
