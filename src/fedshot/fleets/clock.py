"""The clock, which simulates how long clients take, and ends an exchange as a server would.

An exchange ends when the server has the replies that it waits for, at the deadline, or when every
client has replied or is lost. Only the replies that have arrived by then count.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from fedshot.core.errors import ConfigError
from fedshot.fleets.client_times import Availability, ClockOptions, Speed
from fedshot.fleets.meter import Meter
from fedshot.fleets.wrapper import Wrapper
from fedshot.protocol.exchange import Arrival, Exchange, Fault, Fleet


class Clock(Wrapper):
    """A fleet in simulated time; `now` is in seconds since the start of the run.

    Only training takes time. An exchange takes as long as the server waits for it; a round takes as
    long as its exchanges together. A reply that is lost or rejected ends a client's work at the
    time at which it would have arrived. In the other steps of a secure sum, the server waits for
    all clients.

    If the server waits for the first K replies only, K replies are in memory at once.

    Args:
        fleet: a fleet that yields one arrival for each client: see `Guard`.
        meter: counts the bytes of the fleet's messages.
        options: for how many replies, and for how long, the server waits.
        speed: the speed of a client.
        units: the units of work of a client in an exchange.
        availability: when clients are online; None: always.
    """

    def __init__(
        self,
        fleet: Fleet,
        meter: Meter,
        options: ClockOptions,
        speed: Callable[[int], Speed],
        units: Callable[[int], float],
        availability: Availability | None = None,
    ) -> None:
        super().__init__(fleet)
        self.now = 0.0
        self._meter, self._options, self._availability = meter, options, availability
        self._speed, self._units = speed, units

    def online(self, clients: Sequence[int]) -> Sequence[int]:
        """Return the clients that are online, after waiting until there is one.

        Raises ConfigError if none of the clients is ever online.
        """
        if self._availability is None:
            return clients
        known = np.asarray(clients)
        for _ in range(2 * self._availability.windows + 1):
            found = np.intersect1d(known, self._availability.online(self.now))
            if len(found):
                return [int(client) for client in found]
            self.now = self._availability.next_start(self.now)
        raise ConfigError(
            "no client that takes part in training is ever online. Add windows for these clients "
            "to the file of run.clock.availability."
        )

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the arrivals that the server waits for; the other clients are late or lost."""
        if exchange.phase != "train":
            yield from self.fleet.replies(exchange)
            return
        limited = exchange.work.method is not None
        most = self._options.wait_for if limited else None
        deadline = self._options.deadline if limited else None
        until = {client: self._until(client) for client in exchange.to}
        asked = tuple(client for client in exchange.to if until[client] > 0)
        for client in exchange.to:
            if until[client] <= 0:
                yield Arrival(client, None, Fault("lost", "it is offline"))
        ends = [0.0]  # when each client has replied or is lost, in seconds since now
        first: list[tuple[float, int, Arrival]] = []  # the earliest replies; the last one on top
        late: list[tuple[int, float]] = []
        for arrival in self.fleet.replies(replace(exchange, to=asked)) if asked else ():
            client = arrival.client
            took = self._seconds(client, limited)
            ends.append(min(took, until[client]))
            if took > until[client]:
                reason = f"it went offline after {until[client]:.6g} s of {took:.6g} s"
                yield Arrival(client, None, Fault("lost", reason))
            elif arrival.reply is None:
                yield arrival
            elif deadline is not None and took > deadline:
                late.append((client, took))
            elif most is None:
                yield arrival
            else:
                heapq.heappush(first, (-took, -client, arrival))
                if len(first) > most:
                    last = heapq.heappop(first)
                    late.append((-last[1], -last[0]))
        end = min(max(ends), math.inf if deadline is None else deadline)
        if most is not None and len(first) == most:
            end = -first[0][0]
        self.now += end
        yield from (arrival for _, _, arrival in first)
        for client, took in late:
            reason = f"its reply takes {took:.6g} s, the server waited {end:.6g} s"
            yield Arrival(client, None, Fault("late", reason))

    def _until(self, client: int) -> float:
        """Return for how many seconds from now a client stays online."""
        if self._availability is None:
            return math.inf
        return self._availability.until(client, self.now) - self.now

    def _seconds(self, client: int, works: bool) -> float:
        """Return how long a client takes; in the further steps of a secure sum nobody `works`."""
        down, up = self._meter.sizes.get(client, (0, 0))
        return self._speed(client).seconds(self._units(client) if works else 0.0, down, up)
