"""The guard: a reply that would poison the model is refused, by name and with the reason.

Each reply is judged by itself, so what is refused does not depend
on the order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import Tensor

from fedshot.fleets.wrapper import Wrapper
from fedshot.protocol import Arrival, Exchange, Fault, Reply


class Guard(Wrapper):
    """A fleet that passes sound replies on and turns the others into faults."""

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the arrivals of the fleet, at most one for each client that was asked."""
        waiting = set(exchange.to)
        for arrival in self.fleet.replies(exchange):
            if arrival.client not in waiting:
                continue  # a stranger, or a second reply: the first one stands
            waiting.remove(arrival.client)
            reason = arrival.reply and fault(exchange, arrival.reply)
            yield Arrival(arrival.client, None, Fault("refused", reason)) if reason else arrival
        for client in sorted(waiting):
            yield Arrival(client, None, Fault("lost", "no reply"))


def fault(exchange: Exchange, reply: Reply) -> str | None:
    """Say why `reply` cannot be taken in; None when it can."""
    try:
        weight = float(reply.weight)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return f"the weight is {reply.weight!r}, expected one number"
    if not (math.isfinite(weight) and weight > 0):
        return f"the weight is {weight}, expected a finite number above 0"
    named = isinstance(reply.up, Mapping)
    sent = sorted(reply.up, key=str) if named else type(reply.up).__name__
    if sent != sorted(exchange.reduce):
        return f"the parts are {sent}, expected {sorted(exchange.reduce)}"
    for name, reducer in exchange.reduce.items():
        reason = reducer.fault(reply.up[name], weight)
        if reason:
            return f"part {name!r}: {reason}"
    for name, value in reply.metrics.items():
        if not isinstance(value, Tensor) or value.numel() != 1 or not bool(value.isfinite()):
            return f"metric {name!r} is {value!r}, expected one finite number"
    return None
