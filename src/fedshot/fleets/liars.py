"""The dishonest clients of a run: who they are, when they lie, and which parts they change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.devices import CPU
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.fleets.attacks import Attack, Collusion, PrototypePoisoning
from fedshot.fleets.wrapper import Wrapper
from fedshot.protocol.client_vectors import ClientVectors
from fedshot.protocol.exchange import Arrival, Exchange, Fleet, Reply
from fedshot.protocol.reducers import Gather, Mean
from fedshot.protocol.robust_reducers import COUNTS, SUMS, are_by_class

_MOST = 2.0**16  # largest |weight * x| of a lie, which every mean and sum of the methods accepts


class Liars:
    """The dishonest clients of a run, on the machine that holds their data.

    Args:
        attack: the attack that they carry out.
        key: key of the run, which draws the clients if the attack does not name them.
        clients: number of clients of the run.

    Raises ConfigError if the attack names a client that does not exist.
    """

    def __init__(self, attack: Attack, key: Key, clients: int) -> None:
        self.attack, self._key = attack, key.at("attack")
        self._n = clients
        self.asked = self.changed = False  # whether a liar has replied; whether it changed anything
        self._data: dict[int, ClientData] = {}
        others = sorted(c for c in attack.clients or () if c >= clients)
        if others:
            raise ConfigError(
                f"attack.clients names client {others[0]}, but there are {clients}, numbered from "
                "0. Correct attack.clients."
            )
        self._drawn = math.floor(attack.fraction * clients + 0.5)  # where no clients are named
        if attack.clients is None and attack.fraction and not self._drawn:
            raise ConfigError(
                f"attack.fraction is {attack.fraction}, which of {clients} clients is none. Raise "
                "it, or name clients in attack.clients."
            )

    @cached_property
    def clients(self) -> frozenset[int]:
        """The ids of the dishonest clients."""
        if self.attack.clients is not None:
            return frozenset(self.attack.clients)
        chosen = self._key.at("clients").numpy().choice(self._n, self._drawn, replace=False)
        return frozenset(chosen.tolist())

    def lies(self, exchange: Exchange, client: int) -> bool:
        """Whether a client lies in an exchange."""
        attack, (round, number) = self.attack, exchange.version
        return (
            exchange.phase == "train"
            and client in self.clients
            and round >= attack.from_round
            and attack.exchange in (None, number)
        )

    def data(self, exchange: Exchange, client: int, data: ClientData) -> ClientData:
        """Return the data that a client uses in an exchange: `data`, or poisoned if it lies."""
        if not self.attack.poisons_data or not self.lies(exchange, client):
            return data
        self.asked = self.changed = True
        if client not in self._data:
            self._data[client] = self.attack.data(data, self._key.at("data", client))
        return self._data[client]

    def reply(self, exchange: Exchange, client: int, down: Tree, reply: Reply) -> Reply:
        """Return the reply that a client sends, given its message `down` and its honest `reply`."""
        if isinstance(self.attack, Collusion) or not self.lies(exchange, client):
            return reply
        idle = False  # whether the client holds too few classes to exchange them
        key, up = exchange.client_key(client).at("attack"), dict(reply.up)
        for name, start in _parts(exchange, down, reply):
            part = up[name]
            if name == SUMS and are_by_class(part, up.get(COUNTS)):
                lie = self.attack.sums(part, up[COUNTS], key.at(name))
                one = int((up[COUNTS] > 0).sum()) < 2
                idle = one and isinstance(self.attack, PrototypePoisoning)
            else:
                x = part if start is None else tree.sub(part, start)
                lie = tree.shaped(self.attack.change(tree.flat(x), key.at(name)), part)
                lie = lie if start is None else tree.add(start, lie)
            weighted = isinstance(exchange.reduce[name], Mean)
            up[name] = _admitted(lie, float(reply.weight) if weighted else 1.0)
            self.changed = self.changed or tree.digest(up[name]) != tree.digest(part)
        self.asked = self.asked or not idle
        return reply._replace(up=up)

    def collude(self, exchange: Exchange, arrivals: Iterator[Arrival]) -> Iterator[Arrival]:
        """Yield the arrivals of an exchange; colluding clients' replies are replaced by lies.

        All replies are kept until the last has arrived.
        """
        attack = self.attack
        lie = any(self.lies(exchange, client) for client in exchange.to)
        if not lie or not isinstance(attack, Collusion):
            yield from arrivals
            return
        held = list(arrivals)
        liars = [a for a in held if a.reply is not None and self.lies(exchange, a.client)]
        honest = [a for a in held if a.reply is not None and not self.lies(exchange, a.client)]
        lies: dict[str, Tensor] = {}
        self.asked |= bool(liars and honest)
        if liars and honest:
            first = honest[0].reply
            assert first is not None
            for name, reducer in exchange.reduce.items():
                if isinstance(reducer, Mean) and tree.leaves(first.up.get(name, {})):
                    lies[name] = _common_lie(attack, name, honest, len(liars))
                    self.changed = True
        for arrival in held:
            reply = arrival.reply
            if reply is None or not self.lies(exchange, arrival.client):
                yield arrival
                continue
            own = {name: _admitted(tree.shaped(lie, reply.up[name]), float(reply.weight))
                   for name, lie in lies.items()}  # fmt: skip
            yield arrival._replace(reply=reply._replace(up={**reply.up, **own}))

    def check_changed(self) -> None:
        """Raise ConfigError if clients were to lie, but the attack has changed nothing so far."""
        if self.asked and not self.changed:
            raise ConfigError(
                "attack.name has no effect: the method uploads no part that this attack changes "
                "in the exchanges in which clients lie. Choose another attack, or another "
                "attack.exchange."
            )


class Colluding(Wrapper):
    """A fleet whose dishonest clients know the honest clients' replies, and send the same lie.

    This is so for a `Collusion`; other attacks change nothing here.
    """

    def __init__(self, fleet: Fleet, liars: Liars) -> None:
        super().__init__(fleet)
        self._liars = liars

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the fleet's arrivals; colluding clients' replies are replaced by lies."""
        yield from self._liars.collude(exchange, iter(self.fleet.replies(exchange)))


def _common_lie(attack: Collusion, name: str, honest: list[Arrival], liars: int) -> Tensor:
    vectors: ClientVectors | None = None
    for arrival in honest:
        assert arrival.reply is not None
        x = tree.flat(arrival.reply.up[name])
        vectors = vectors or ClientVectors(len(honest), len(x), x.dtype)
        vectors.add(arrival.client, x, 1.0)
    assert vectors is not None
    return attack.collude(vectors, liars)


def _parts(exchange: Exchange, down: Tree, reply: Reply) -> Iterator[tuple[str, Tree | None]]:
    """Yield (name, start) of each part of a reply that an attack can change.

    `start` is the model that the client received, or None if the part is a change or sums.
    """
    for name, part in reply.up.items():
        leaves = tree.leaves(part)
        if name == COUNTS or not leaves or not all(map(torch.is_floating_point, leaves)):
            continue
        if not isinstance(exchange.reduce[name], Gather):
            yield name, None
            continue
        sent = down if isinstance(down, Mapping) else {name: down}
        received = [sent[other] for other in sorted(sent, key=lambda other: (other != name, other))
                    if tree.difference(part, sent[other]) is None]  # fmt: skip
        if received:
            yield name, tree.to(received[0], CPU)


def _admitted(part: Tree, weight: float) -> Tree:
    """Return a part bounded so that the guard admits it."""
    most = _MOST / max(weight, 1.0)
    return tree.map(lambda leaf: torch.nan_to_num(leaf).clamp(-most, most), part)
