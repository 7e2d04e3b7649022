"""The guard: a fleet wrapper that rejects invalid replies, which would corrupt the model.

Each reply is checked independently, so the result does not depend on the order of arrival. If a
client sends two replies, the first counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TypeGuard

from torch import Tensor

from fedshot.fleets.wrapper import Wrapper
from fedshot.protocol.exchange import Arrival, Exchange, Fault, Reply
from fedshot.protocol.reducers import MAX_WEIGHT, NOT_FINITE, TOO_LARGE, is_plain

_LONGEST = 500  # maximum length of a reason, which may quote a client's data
MAX_METRICS, METRIC_NAME = 64, re.compile(r"\w[\w .:@%+-]{0,63}")
"""The most metrics of a reply, and the form of their names; others could bloat the records."""

_METRIC = 2.0**128  # above any float32, yet no weighted mean of such metrics overflows


class Guard(Wrapper):
    """A fleet that passes on valid replies and turns invalid or missing replies into faults."""

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield exactly one arrival for each client of the exchange."""
        waiting = set(exchange.to)
        for arrival in self.fleet.replies(exchange):
            if arrival.client not in waiting:
                continue  # an unknown client, or a second reply
            waiting.remove(arrival.client)
            reason = arrival.reply and fault(exchange, arrival.client, arrival.reply)
            refused = Fault("refused", reason[:_LONGEST]) if reason else None
            yield Arrival(arrival.client, None, refused) if refused else arrival
        for client in sorted(waiting):
            yield Arrival(client, None, Fault("lost", "no reply"))


def fault(exchange: Exchange, client: int, reply: Reply) -> str | None:
    """Return why a reply is invalid; None for a valid reply."""
    weight = reply.weight.item() if _is_scalar(reply.weight) else reply.weight
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        return f"the weight is {reply.weight!r}, expected one number"
    if isinstance(weight, float) and not math.isfinite(weight):
        return f"the weight {NOT_FINITE}: {weight}"
    if not 0 < weight < 2.0**1000:  # excludes integers too large for a float
        return f"the weight is {weight}, expected a finite number above 0"
    if weight > MAX_WEIGHT:
        return f"the weight is {weight:.3g}, expected at most {MAX_WEIGHT:.3g}"
    named = isinstance(reply.up, Mapping)
    sent = sorted(reply.up, key=str) if named else type(reply.up).__name__
    if sent != sorted(exchange.reduce):
        return f"the parts are {sent}, expected {sorted(exchange.reduce)}"
    for name, reducer in exchange.reduce.items():
        reason = reducer.fault(client, reply.up[name], float(weight))
        if reason:
            return f"part {name!r}: {reason}"
    if not isinstance(reply.metrics, Mapping):
        return f"the metrics are {type(reply.metrics).__name__}, expected names and numbers"
    for name, value in reply.metrics.items():
        if not _is_scalar(value):
            return f"metric {name!r} is {value!r}, expected one finite number"
        if not math.isfinite(value.item()):
            return f"metric {name!r} {NOT_FINITE}: {value.item()}"
        if abs(value.item()) > _METRIC:
            return f"metric {name!r} holds {value.item():.3g}, {TOO_LARGE} {_METRIC:.3g}"
    return None


def _is_scalar(value: object) -> TypeGuard[Tensor]:
    return (
        isinstance(value, Tensor)
        and value.numel() == 1
        and not value.is_complex()
        and is_plain(value)
    )
