"""Checks of the client replies in a message of a node, which the server does not trust.

An invalid reply becomes a fault of its client, with a short reason. It does not end the run, and it
cannot bloat the run's records.
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

_MAX_METRICS, _METRIC = 64, re.compile(r"\w[\w .:@%+-]{0,63}")
_MAX_UNKNOWN = 200  # characters of all names of unknown parts together


def arrivals(
    exchange: Exchange,
    incoming: Incoming,
    name: str,
    asked: Sequence[int],
    limits: Limits,
    tell: Callable[[str], None],
    holds: Mapping[int, int | None] = {},
) -> Iterator[Arrival]:
    """Yield one arrival for each client in `asked`, from a node's message.

    `name` is the node's name. `holds` gives the number of examples of each client, if known, to
    check weights that are numbers of examples.
    """
    if incoming.wire_message is None or incoming.reason:
        for client in asked:
            yield Arrival(client, None, Fault("lost", f"node {name}: {incoming.reason}"))
        return
    results = incoming.wire_message.head.get("results")
    results = results if isinstance(results, dict) else {}
    if unasked := sorted(set(results) - set(map(str, asked))):
        others = f" and {len(unasked) - 1} others" if unasked[1:] else ""
        tell(
            f"node {name} replies for {short(unasked[0], 20)!r}{others}, which it was not "
            "asked for; dropped"
        )
    for client in asked:
        if str(client) not in results:
            yield Arrival(client, None, Fault("lost", f"node {name} sends no result of it"))
            continue
        try:
            yield _arrival(
                client, results[str(client)], incoming.wire_message, limits, exchange, holds
            )
        except CodecError as error:
            yield Arrival(client, None, Fault("refused", short(f"node {name}: {error}")))


def _arrival(
    client: int,
    result: Any,
    wire_message: WireMessage,
    limits: Limits,
    exchange: Exchange,
    holds: Mapping[int, int | None],
) -> Arrival:
    if not isinstance(result, dict):
        raise CodecError("its result is not a JSON object")
    if "fault" in result:
        fault = result["fault"]
        if not isinstance(fault, list) or [type(part) for part in fault] != [str, str]:
            raise CodecError("its fault is not a kind and a reason")
        kind, reason = fault
        return Arrival(
            client, None, Fault("refused" if kind == "refused" else "lost", short(reason))
        )
    content = wire_message.get(f"c{client}", limits)
    if not isinstance(content, dict) or not {"up", "metrics"} <= set(content):
        raise CodecError("its reply lacks `up` or `metrics`")
    up, metrics = content["up"], content["metrics"]
    weight: Any = content["weight"] if "weight" in content else result.get("weight")
    if isinstance(weight, Tensor):
        valid = weight.numel() == 1
    else:  # bounded, since an error message would quote a number of a thousand digits
        valid = type(weight) in (int, float) and not abs(weight) > 2**63
    if not valid:
        raise CodecError("its weight is not one number")
    _check_names(up, metrics, exchange)
    most = holds.get(client)
    weighted = any(isinstance(r, Mean) and r.of_examples for r in exchange.reduce.values())
    if weighted and most is not None and float(weight) > most:
        raise CodecError(f"the weight is {float(weight):.6g}; it holds {most} examples")
    if exchange.phase == "evaluate" and not all(
        bool(torch.isfinite(leaf).all()) for leaf in tree.leaves(up) if leaf.is_floating_point()
    ):
        raise CodecError(f"a prediction {NOT_FINITE}")
    return Arrival(client, Reply(up, {}, weight, metrics))


def _check_names(up: Any, metrics: Any, exchange: Exchange) -> None:
    """Raise CodecError for too many unknown parts, or for invalid metrics.

    Names made up by a node would otherwise bloat the communication log and the run's records.
    """
    unknown = set(up) - set(exchange.reduce) if isinstance(up, dict) else set()
    if sum(map(len, unknown)) > _MAX_UNKNOWN:
        raise CodecError(f"its reply has {len(unknown)} unknown parts")
    if not isinstance(metrics, dict) or len(metrics) > _MAX_METRICS:
        raise CodecError(f"its reply does not have at most {_MAX_METRICS} metrics")
    for name, value in metrics.items():
        if not _METRIC.fullmatch(name):
            raise CodecError(f"it has a metric named {short(name, 64)!r}")
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise CodecError(f"metric {name!r} is not one number")
