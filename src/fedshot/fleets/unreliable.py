"""A fleet that drops, delays and corrupts replies according to a reproducible plan.

It serves tests, and studies of how training copes with failures, such as one lost reply in ten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.ranges import Share
from fedshot.core.seeds import Key
from fedshot.fleets.wrapper import Wrapper
from fedshot.protocol.exchange import Arrival, Exchange, Fault, Fleet, Reply

Trouble = Literal[
    "drop", "delay", "nan", "shape", "missing", "zero_weight", "negative_weight", "overflow"
]
Plan = Callable[[Exchange, int], Trouble | None]
CORRUPT: tuple[Trouble, ...] = get_args(Trouble)[2:]


@dataclass(frozen=True)
class Chances:
    """Simulated failures of clients: the probability of each failure, per training reply.

    Args:
        drop: probability that a training reply is lost.
        delay: probability that a training reply arrives after all others.
        corrupt: probability that a training reply has NaN, wrong shapes, a missing part, or an
            impossible weight.
    """

    drop: Share = 0.0
    delay: Share = 0.0
    corrupt: Share = 0.0

    def __post_init__(self) -> None:
        if not self.drop + self.delay + self.corrupt <= 1:
            raise ConfigError(
                f"run.unreliable is drop {self.drop}, delay {self.delay}, corrupt {self.corrupt}; "
                "expected probabilities that add up to at most 1."
            )


def by_chance(key: Key, *, drop: float = 0.0, delay: float = 0.0, corrupt: float = 0.0) -> Plan:
    """Return a plan that drops, delays or corrupts training replies with these probabilities.

    `key` seeds the random choices. The other steps of a secure sum are undisturbed.
    """

    def plan(exchange: Exchange, client: int) -> Trouble | None:
        if exchange.phase != "train" or exchange.work.method is None:
            return None
        rng = key.at(*exchange.version, exchange.work.name, client).numpy()
        roll = rng.random()
        if roll < drop:
            return "drop"
        if roll < drop + delay:
            return "delay"
        if roll < drop + delay + corrupt:
            return CORRUPT[int(rng.integers(len(CORRUPT)))]
        return None

    return plan


class Unreliable(Wrapper):
    """A fleet that applies `plan(exchange, client)` to every reply.

    Delayed replies arrive after all others, in reverse order. Clients always do their work; only
    what the server receives changes.
    """

    def __init__(self, fleet: Fleet, plan: Plan) -> None:
        super().__init__(fleet)
        self.plan = plan

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the fleet's arrivals after the plan has dropped, delayed or corrupted them."""
        late: list[Arrival] = []
        for arrival in self.fleet.replies(exchange):
            trouble = self.plan(exchange, arrival.client)
            if arrival.reply is None or trouble is None:
                yield arrival
            elif trouble == "drop":
                yield Arrival(arrival.client, None, Fault("lost", "dropped by plan"))
            elif trouble == "delay":
                late.append(arrival)
            else:
                yield arrival._replace(reply=_corrupt(arrival.reply, trouble))
        yield from reversed(late)


def _corrupt(reply: Reply, trouble: Trouble) -> Reply:
    if trouble == "zero_weight":
        return reply._replace(weight=0.0)
    if trouble == "negative_weight":
        return reply._replace(weight=-1.0)
    if not reply.up:
        return reply._replace(weight=math.nan)
    if trouble == "missing":
        return reply._replace(up=dict(list(reply.up.items())[1:]))
    # Integers cannot be NaN; they become floats, whose dtype the guard rejects.
    change: dict[str, Callable[[Tensor], Tensor]] = {
        "nan": lambda leaf: torch.full_like(_floating(leaf), math.nan),
        "shape": lambda leaf: leaf.unsqueeze(0),
        "overflow": lambda leaf: torch.full_like(_floating(leaf), 1e30),
    }
    return reply._replace(up=tree.map(change[trouble], dict(reply.up)))


def _floating(leaf: Tensor) -> Tensor:
    return leaf if leaf.is_floating_point() else leaf.float()
