"""The server's side of secure sums: it passes keys and shares on, and removes masks from the sum.

The server keeps to the protocol (honest-but-curious). It learns who takes part, who is lost in
which step, and the sum of the uploads, but no single upload. It cannot check the values of a masked
reply: each client checks its own reply, and the server checks that the sum is in range.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedshot.core.serialised import short
from fedshot.core.tree import Tree
from fedshot.fleets.guard import MAX_METRICS, METRIC_NAME
from fedshot.privacy.secure_sums.ciphers import KEY_BYTES, TAG_BYTES
from fedshot.privacy.secure_sums.client_noise import ClientNoise
from fedshot.privacy.secure_sums.masking_clients import KEYS, SHARES, UNMASK
from fedshot.privacy.secure_sums.masks import (
    context_of,
    pair_key,
    pair_mask,
    point,
    self_mask,
    sign,
    text,
)
from fedshot.privacy.secure_sums.neighbourhoods import needed, neighbourhoods
from fedshot.privacy.secure_sums.public_ranges import PublicRanges
from fedshot.privacy.secure_sums.requirements import needs_each
from fedshot.privacy.secure_sums.ring import SCALAR_BYTES, Element, Layout, decode, from_bytes
from fedshot.privacy.secure_sums.shamir import SECRET_BYTES, SHARE_BYTES, combine
from fedshot.protocol.clients import reduce_replies
from fedshot.protocol.exchange import (
    MASKED,
    ClientWork,
    Exchange,
    Fault,
    Fleet,
    Masking,
    Outcome,
    PerClient,
)
from fedshot.protocol.reducers import Gather, Mean, Reducer, Sum

Names = tuple[str, ...]


class SecureSums:
    """Combines the replies of a training exchange without learning any of them alone.

    Called with a fleet and an exchange, like `reduce_replies`, whose outcome has the same bits. The
    fleet's clients are those of `MaskingClients`. Exchanges of an evaluation are not masked.

    Args:
        threshold: share of a cohort, above 1/2, that must be left at each step. This many clients
            together can recover secrets of others.
        noise: the noise that clients add; None for none. With noise, the outcome's parts are sums
            in float64.
        ranges: the ranges of compressed uploads; None if uploads are not compressed.
    """

    def __init__(
        self, threshold: float, noise: ClientNoise | None = None,
        ranges: PublicRanges | None = None,
    ) -> None:  # fmt: skip
        self.threshold, self.noise, self.ranges = threshold, noise, ranges

    def __call__(self, fleet: Fleet, exchange: Exchange) -> Outcome:
        """Return the outcome. Raises ConfigError if the exchange does not only add replies."""
        if exchange.phase == "evaluate":
            return reduce_replies(fleet, exchange)
        if self.ranges is not None:
            exchange = self.ranges.in_grids(exchange)
        outcome = _OneSum(fleet, exchange, self.threshold, self.noise).outcome()
        return outcome if self.ranges is None else self.ranges.updated(exchange, outcome)


class _LostError(Exception):
    """The sum cannot be recovered."""


class _OneSum:
    """The secure sum of one exchange."""

    def __init__(
        self, fleet: Fleet, exchange: Exchange, threshold: float, noise: ClientNoise | None
    ) -> None:
        self.reduce = _only_sums(exchange)
        self.sums: Mapping[str, Mean | Sum] = self.reduce
        self.scale = len(exchange.to)
        if noise is not None:
            self.sums, self.scale = noise.sums(self.reduce), noise.population
        self.fleet, self.exchange, self.threshold = fleet, exchange, threshold
        self.context, self.faults = context_of(exchange), dict[int, Fault]()
        self.least = needed(threshold, len(exchange.to))

    def outcome(self) -> Outcome:
        """Run the steps; if too few clients are left, no client is accepted."""
        try:
            return self._sum()
        except _LostError as error:
            lost = dict.fromkeys(sorted(self.exchange.to), Fault("lost", str(error)))
            return Outcome({}, (), lost | self.faults)

    def _sum(self) -> Outcome:
        self.keys = self._ask(KEYS, sorted(self.exchange.to), flaw=_flaw)
        self.near = neighbourhoods(self.keys, self.exchange.key)
        length = 2 * SHARE_BYTES + TAG_BYTES
        sent = self._ask(
            SHARES, self.keys, lambda c: _bytes(len(self.near[c]), length), self._neighbours
        )
        total, metrics, clients = self._masked(sent)
        self._remove_masks(total, sent, clients)
        try:
            parts, weight, means = decode(self.sums, self.scale, metrics, total, len(clients))
        except ValueError as error:
            raise _LostError(str(error)) from None
        return Outcome(
            parts, tuple(sorted(clients)), dict(sorted(self.faults.items())), weight, means
        )

    def _ask(
        self,
        step: str,
        to: Collection[int],
        like: Callable[[int], Tree] | None = None,
        message: Callable[[int], Tree] = lambda _: {},
        flaw: Callable[[Tree], str | None] | None = None,
    ) -> dict[int, Tree]:
        """Send each client its message of a step; return the answers by client.

        `like` and `flaw` check the answers, as in `Gather`.
        """
        got = reduce_replies(
            self.fleet,
            replace(
                self.exchange,
                work=ClientWork(None, step),
                down=PerClient(message),
                to=tuple(to),
                reduce={"answer": Gather(like, limit=None, flaw=flaw)},
            ),
        )
        if step != UNMASK:  # by then the sum has the client's reply
            self.faults |= got.faults
        self._require(got.accepted, step)
        answers: dict[int, Tree] = got["answer"]
        return answers

    def _require(self, left: Collection[int], step: str) -> None:
        if len(left) < self.least:
            raise _LostError(
                f"{len(left)} of {len(self.exchange.to)} clients were left in step {step!r} of the "
                f"secure sum, which needs {self.least}"
            )

    def _neighbours(self, client: int) -> Tree:
        near = self.near[client]
        threshold = needed(self.threshold, len(near) + 1)
        return {
            "clients": torch.tensor(near),
            "keys": pad_sequence([self.keys[c] for c in near], batch_first=True),
            "threshold": torch.tensor(threshold),
        }

    def _masked(self, sent: Collection[int]) -> tuple[Element, Names, list[int]]:
        """Return the sum of the masked replies, the names of their metrics, and their clients.

        Clients whose metrics have other names than those of most count as refused.
        """
        exchange = self.exchange
        masking = Masking(frozenset(sent), len(exchange.to), self.reduce)
        reduce = {MASKED: _MaskedReplies(Layout.of(self.reduce, masking.cohort))}
        got = reduce_replies(
            self.fleet, replace(exchange, to=tuple(sent), reduce=reduce, masking=masking)
        )
        self.faults |= got.faults
        self._require(got.accepted, exchange.work.name)
        sums: dict[Names, tuple[Element, list[int]]] = got[MASKED]
        names = max(sorted(sums), key=lambda one: len(sums[one][1]))
        total, clients = sums[names]
        reason = f"its metrics are not {', '.join(names) or 'none'}, as those of most clients"
        self.faults |= dict.fromkeys(set(got.accepted) - {*clients}, Fault("refused", reason))
        self._require(clients, exchange.work.name)
        return total, names, clients

    def _remove_masks(
        self, total: Element, sent: Mapping[int, Tensor], clients: Collection[int]
    ) -> None:
        """Remove from the sum each client's own mask, and its masks with neighbours now lost.

        Args:
            total: the sum of the masked replies; changed in place.
            sent: for each client that has masks, the encrypted shares for its neighbours.
            clients: the clients whose replies are in the sum.
        """
        near = {c: [other for other in self.near[c] if other in sent] for c in sent}
        arrived = set(clients)

        def message(client: int) -> Tree:
            texts = [sent[c][self.near[c].index(client)] for c in near[client]]
            lost = [c not in arrived for c in near[client]]
            return {
                "clients": torch.tensor(near[client]),
                "lost": torch.tensor(lost),
                "shares": torch.stack(texts),
            }

        def like(client: int) -> Tree:
            return {"others": _bytes(len(near[client]), SHARE_BYTES), "own": _bytes(1, SHARE_BYTES)}

        shares: dict[int, dict[int, int]] = defaultdict(dict)
        for client, given in self._ask(UNMASK, clients, like, message).items():
            for other, share in zip(near[client], given["others"], strict=True):
                shares[other][point(client)] = int.from_bytes(text(share))
            shares[client][point(client)] = int.from_bytes(text(given["own"]))
        for client in sent:
            seed = self._recovered(client, shares[client])
            if client in arrived:
                total.add_mask(self_mask(seed, self.context, total.nbytes), -1)
                continue
            private = pair_key(seed, self.context)
            for other in arrived.intersection(near[client]):
                public = text(self.keys[other][0])
                mask = pair_mask(private, public, self.context, (client, other), total.nbytes)
                total.add_mask(mask, -sign(other, client))

    def _recovered(self, client: int, shares: Mapping[int, int]) -> bytes:
        """Return a seed of a client from its shares, by `point`.

        Raises _LostError if there are too few shares, or they are damaged.
        """
        threshold = needed(self.threshold, len(self.near[client]) + 1)
        if len(shares) < threshold:
            raise _LostError(
                f"{len(shares)} shares of a secret of client {client} are left, and {threshold} "
                "are needed"
            )
        chosen = dict(sorted(shares.items())[:threshold])
        try:
            return combine(chosen).to_bytes(SECRET_BYTES)
        except OverflowError:
            raise _LostError(f"the shares of a secret of client {client} are damaged") from None


class _MaskedReplies(Reducer):
    """Adds masked replies with metrics of the same names.

    Args:
        layout: how the integers of a reply's parts are sent.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def start(self, cohort: int) -> _MaskedReplySums:
        """Begin the sums."""
        del cohort
        return _MaskedReplySums(self.layout)

    def fault(self, client: int, part: Tree, weight: float) -> str | None:
        """Return why this part cannot be added."""
        held: Any = part.get("metrics") if isinstance(part, Mapping) else None
        if isinstance(held, Mapping):
            if len(held) > MAX_METRICS:
                return f"its reply has more than {MAX_METRICS} metrics"
            if odd := [name for name in held if not METRIC_NAME.fullmatch(str(name))]:
                return f"it has a metric named {short(str(odd[0]), 64)!r}"
        like = {
            **self.layout.like(),
            "weight": _bytes(SCALAR_BYTES),
            "metrics": {n: _bytes(SCALAR_BYTES) for n in held} if isinstance(held, Mapping) else {},
        }
        return Gather(like, limit=None).fault(client, part, weight)


class _MaskedReplySums:
    """The sum of the masked replies, and their clients, by the names of the metrics."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._sums: dict[Names, tuple[Element, list[int]]] = {}

    def add(self, client: int, part: Tree, weight: float) -> None:
        del weight
        names = tuple(sorted(part["metrics"]))
        vector = self._layout.received(part)
        scalars = [part["weight"], *(part["metrics"][name] for name in names)]
        new = Element(vector, [from_bytes(scalar) for scalar in scalars])
        if names not in self._sums:
            self._sums[names] = Element.zero(len(vector), len(scalars)), []
        total, clients = self._sums[names]
        total.add(new)
        clients.append(client)

    def result(self) -> dict[Names, tuple[Element, list[int]]]:
        return self._sums


def _only_sums(exchange: Exchange) -> dict[str, Mean | Sum]:
    """Return the reducers of an exchange. Raises ConfigError for one that keeps replies apart."""
    found = dict[str, Mean | Sum]()
    for name, reducer in exchange.reduce.items():
        if not isinstance(reducer, Mean | Sum):
            raise needs_each(exchange.work.method.name, exchange.work.name, name)
        found[name] = reducer
    return found


def _flaw(keys: Tree) -> str | None:
    """Return why these cannot be a client's two public keys, with or without a signature."""
    shapes = (2, KEY_BYTES), (4, KEY_BYTES)
    if isinstance(keys, Tensor) and keys.dtype == torch.uint8 and keys.shape in shapes:
        return None
    return "its keys are not 2 rows of 32 bytes, or 4 with a signature"


def _bytes(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="meta")
