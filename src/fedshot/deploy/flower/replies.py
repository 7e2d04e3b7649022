"""What a node's reply says of its clients, checked.

A node may send anything. What is no reply is a fault of its clients, in few words: it neither ends
the run nor fills the records.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.deploy.flower.codec import CodecError, Limits, short
from fedshot.deploy.flower.messages import Incoming, WireMessage
from fedshot.protocol.exchange import Arrival, Exchange, Fault, Reply
from fedshot.protocol.reducers import NOT_FINITE, Mean

_METRICS, _METRIC = 64, re.compile(r"\w[\w .:@%+-]{0,63}")
_STRANGE = 200  # characters of the names of parts that nobody asked for


def arrivals(
    exchange: Exchange,
    mail: Incoming,
    name: str,
    asked: Sequence[int],
    limits: Limits,
    tell: Callable[[str], None],
    holds: Mapping[int, int | None] = {},
) -> Iterator[Arrival]:
    """Yield what a node says of each client that it was asked for, and of nobody else.

    `holds` tells how many examples a client has, where that is known.
    """
    if mail.wire_message is None or mail.reason:
        for client in asked:
            yield Arrival(client, None, Fault("lost", f"node {name}: {mail.reason}"))
        return
    results = mail.wire_message.head.get("results")
    results = results if isinstance(results, dict) else {}
    strangers = sorted(set(results) - set(map(str, asked)))
    if strangers:
        others = f" and {len(strangers) - 1} others" if strangers[1:] else ""
        tell(
            f"node {name} answers for {short(strangers[0], 20)!r}{others}, which it was not "
            "asked for; dropped"
        )
    for client in asked:
        if str(client) not in results:
            yield Arrival(client, None, Fault("lost", f"node {name} says nothing of it"))
            continue
        try:
            found = _arrival(client, results[str(client)], mail.wire_message, limits)
            _check_names(found, exchange)
            if found.reply is not None:
                _check_weight(found.reply, exchange, holds.get(client))
                _check_answers(found.reply, exchange)
            yield found
        except CodecError as error:
            yield Arrival(client, None, Fault("refused", short(f"node {name}: {error}")))


def _arrival(client: int, result: Any, wire_message: WireMessage, limits: Limits) -> Arrival:
    if not isinstance(result, dict):
        raise CodecError("its result has no names")
    if "fault" in result:
        told = result["fault"]
        if not isinstance(told, list) or [type(word) for word in told] != [str, str]:
            raise CodecError("its fault is not told in two words")
        return Arrival(
            client, None, Fault("refused" if told[0] == "refused" else "lost", short(told[1]))
        )
    content = wire_message.get(f"c{client}", limits)
    if not isinstance(content, dict) or not {"up", "metrics"} <= set(content):
        raise CodecError("its reply has no parts")
    weight: Any = content["weight"] if "weight" in content else result.get("weight")
    if isinstance(weight, Tensor):
        plain = weight.numel() == 1
    else:  # not one of a thousand digits, which an error would repeat
        plain = type(weight) in (int, float) and not abs(weight) > 2**63
    if not plain:
        raise CodecError("its weight is not one number")
    return Arrival(client, Reply(content["up"], {}, weight, content["metrics"]))


def _check_weight(reply: Reply, exchange: Exchange, most: int | None) -> None:
    """Raise CodecError for a client that counts for more examples than it has."""
    weighed = any(isinstance(r, Mean) and r.of_examples for r in exchange.reduce.values())
    if weighed and most is not None and float(reply.weight) > most:
        raise CodecError(f"the weight is {float(reply.weight):.6g}; it holds {most} examples")


def _check_answers(reply: Reply, exchange: Exchange) -> None:
    """Raise CodecError for answers in a test that no model gives."""
    if exchange.phase == "evaluate" and not all(
        bool(torch.isfinite(leaf).all())
        for leaf in tree.leaves(reply.up)
        if leaf.is_floating_point()
    ):
        raise CodecError(f"an answer {NOT_FINITE}")


def _check_names(arrival: Arrival, exchange: Exchange) -> None:
    """Raise CodecError for names that would fill the ledger and the records."""
    if arrival.reply is None:
        return
    up, metrics = arrival.reply.up, arrival.reply.metrics
    strange = set(up) - set(exchange.reduce) if isinstance(up, dict) else set()
    if sum(map(len, strange)) > _STRANGE:
        raise CodecError(f"its reply has {len(strange)} parts that nobody asked for")
    if not isinstance(metrics, dict) or len(metrics) > _METRICS:
        raise CodecError(f"its reply does not have at most {_METRICS} metrics")
    for name, value in metrics.items():
        if not _METRIC.fullmatch(name):
            raise CodecError(f"it has a metric named {short(name, 64)!r}")
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise CodecError(f"metric {name!r} is not one number")
