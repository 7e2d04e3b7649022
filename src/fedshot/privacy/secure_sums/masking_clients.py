"""The clients' side of secure sums: keys, shares, masked uploads, and shares to remove masks.

It wraps the fleet that runs the clients, in a simulation and on each node alike. A client refuses
every request that could reveal its own upload to an honest-but-curious server.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.fleets.guard import fault
from fedshot.fleets.wrapper import Wrapper
from fedshot.privacy.secure_sums.ciphers import (
    KEY_BYTES,
    agree,
    decrypt,
    derive,
    encrypt,
    private_key,
    public_key,
)
from fedshot.privacy.secure_sums.client_noise import ClientNoise
from fedshot.privacy.secure_sums.masks import (
    context_of,
    pair_key,
    pair_mask,
    point,
    rows,
    self_mask,
    sign,
    text,
)
from fedshot.privacy.secure_sums.neighbourhoods import (
    LARGEST_COMPLETE,
    MIN_CLIENTS,
    degree,
    needed,
)
from fedshot.privacy.secure_sums.ring import Layout, encode, to_bytes
from fedshot.privacy.secure_sums.shamir import SECRET_BYTES, SHARE_BYTES, split
from fedshot.protocol.exchange import MASKED, Arrival, Exchange, Fault, Fleet, Masking, Reply

KEYS, SHARES, UNMASK = STEPS = ("advertise_keys", "share_secrets", "unmask")
"""Names of the steps that precede and follow the masked uploads."""

RandomBytes = Callable[[int], bytes]
"""Returns n random bytes."""


def of_the_system(key: Key) -> RandomBytes:
    """Return the operating system's source of random bytes, for real clients; `key` is not used."""
    del key
    return secrets.token_bytes


def simulated(key: Key) -> RandomBytes:
    """Return a reproducible source of random bytes, seeded by `key`, for simulations."""
    return key.at("secrets").numpy().bytes


class Signatures(Protocol):
    """Signatures of nodes under the keys of their clients."""

    def sign(self, text: bytes) -> bytes:
        """Return this node's signature, 64 bytes."""
        ...

    def check(self, client: int, text: bytes, signature: bytes) -> None:
        """Raise ValueError unless the node of a client has signed a text."""
        ...


class _RefusedError(Exception):
    """The client does not do what the server asks."""


@dataclass
class _Secrets:
    """What a client keeps during an exchange."""

    context: str  # names the exchange
    self_seed: bytes  # of its own mask
    pair_seed: bytes  # of the private key from which the masks with neighbours are derived
    share_key: Any  # X25519 private key, under which it receives shares
    threshold: int = 0
    cohort: int = 0  # number of clients that were asked, once the upload is masked
    own_share: int = 0  # of its self seed
    pair_keys: dict[int, bytes] = field(default_factory=dict)  # neighbours' public keys, for masks
    receiving: dict[int, bytes] = field(default_factory=dict)  # keys of the shares of neighbours
    masked_with: tuple[int, ...] | None = None  # neighbours whose masks are in the upload


class MaskingClients(Wrapper):
    """A fleet whose clients take part in secure sums.

    Args:
        fleet: runs the clients.
        random_bytes: returns a client's source of random bytes for a step of an exchange.
        noise: how clients clip and what noise they add; None for neither.
        threshold: the least share of the group of a client and its neighbours whose help is needed
            to recover the client's secrets. A client refuses a server that asks for fewer.
        signatures: sign the clients' keys, and check those of others; None for neither.
        min_noise: the least noise multiplier of the neighbours that a client masks with.
        min_cohort: a sum must have at least `threshold` times as many clients. More than 61 count
            as 61, because a client then knows its neighbours only.
    """

    def __init__(
        self,
        fleet: Fleet,
        random_bytes: Callable[[Key], RandomBytes] = of_the_system,
        noise: ClientNoise | None = None,
        threshold: float = 0.5,
        signatures: Signatures | None = None,
        min_noise: float = 0.0,
        min_cohort: int = 0,
    ) -> None:
        super().__init__(fleet)
        self._random_bytes, self._noise = random_bytes, noise
        self._threshold, self._signatures, self._min_noise = threshold, signatures, min_noise
        self._fewest = needed(threshold, min(min_cohort, LARGEST_COMPLETE))
        self._secrets: dict[int, _Secrets] = {}

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the answers to a step of a secure sum, or the replies, masked if asked for."""
        if exchange.work.method is None:
            yield from (self._answer(exchange, client) for client in exchange.to)
        elif exchange.masking is None:
            yield from self.fleet.replies(exchange)
        else:
            for arrival in self.fleet.replies(unmasked(exchange)):
                yield self.masked(exchange, arrival)

    def masked(self, exchange: Exchange, arrival: Arrival) -> Arrival:
        """Return a client's arrival with its reply masked, if the exchange asks for it.

        A reply with a fault is not sent, since the server could not see the fault. If clients add
        noise, zeros are sent in its place, so that nobody learns of the fault.
        """
        client, reply, found = arrival
        if exchange.masking is None:
            return arrival
        if reply is not None and (reason := fault(unmasked(exchange), client, reply)):
            reply, found = None, Fault("refused", reason)
        if found is not None and found.kind == "refused" and self._noise is not None:
            # That a client is refused would say something of its data: it contributes zeros.
            like = {name: reducer.like for name, reducer in exchange.masking.reduce.items()}
            reply = Reply(tree.map(_zeros, like), {}, 1.0)
        if reply is None:
            return Arrival(client, None, found)
        try:
            up = self._mask(exchange, exchange.masking, client, reply)
        except (_RefusedError, ValueError) as error:
            return Arrival(client, None, Fault("lost", str(error)))
        return Arrival(client, Reply({MASKED: up}, {}, 1.0))

    def _answer(self, exchange: Exchange, client: int) -> Arrival:
        step = {KEYS: self._keys, SHARES: self._shares, UNMASK: self._unmask}[exchange.work.name]
        try:
            answer = step(exchange, client, exchange.message(client))
        except (_RefusedError, ValueError) as error:
            return Arrival(client, None, Fault("lost", str(error)))
        return Arrival(client, Reply({"answer": answer}, {}, 1.0))

    def _keys(self, exchange: Exchange, client: int, message: Tree) -> Tree:
        """Make the client's secrets; return its two public keys, uint8 [2, 32].

        Two more rows are their signature, if keys are signed.
        """
        del message
        draw, context = self._random_bytes(exchange.client_key(client)), context_of(exchange)
        share_key = private_key(draw(SECRET_BYTES), "share key", context)
        own = _Secrets(context, draw(SECRET_BYTES), draw(SECRET_BYTES), share_key)
        self._secrets[client] = own
        keys = public_key(pair_key(own.pair_seed, context)), public_key(share_key)
        if self._signatures is None:
            return rows(*keys)
        signature = self._signatures.sign(_signed(context, client, *keys))
        return rows(*keys, signature[:KEY_BYTES], signature[KEY_BYTES:])

    def _shares(self, exchange: Exchange, client: int, message: Tree) -> Tree:
        """Return, for each neighbour, shares of the client's two seeds.

        Only that neighbour can decrypt them.
        """
        own = self._of(exchange, client)
        neighbours, threshold = message["clients"].tolist(), int(message["threshold"])
        n = len({client, *neighbours})
        if own.pair_keys or n != len(neighbours) + 1:
            raise _RefusedError("it has shared its secrets already, or a neighbour is named twice")
        least = max(needed(self._threshold, n), n // 2 + 1)
        if n < MIN_CLIENTS or not least <= threshold <= n:
            raise _RefusedError(
                f"{threshold} of {n} clients are too few, or too many, for a secret"
            )
        own.threshold = threshold
        draw = self._random_bytes(exchange.client_key(client))
        points = [point(c) for c in (client, *neighbours)]
        of_self, of_pair = (
            split(int.from_bytes(seed), points, threshold, draw)
            for seed in (own.self_seed, own.pair_seed)
        )
        own.own_share = of_self[point(client)]
        sent = []
        for other, keys in zip(neighbours, message["keys"], strict=True):
            public, share_public, *signature = keys
            if self._signatures is not None:
                signed = _signed(own.context, other, text(public), text(share_public))
                self._signatures.check(other, signed, b"".join(map(text, signature)))
            secret = agree(own.share_key, text(share_public))
            own.receiving[other] = derive(secret, "share", own.context, other, client)
            shares = (share[point(other)].to_bytes(SHARE_BYTES) for share in (of_self, of_pair))
            sending = derive(secret, "share", own.context, client, other)
            sent.append(encrypt(sending, b"".join(shares)))
            own.pair_keys[other] = text(public)
        return rows(*sent)

    def _mask(self, exchange: Exchange, masking: Masking, client: int, reply: Reply) -> Tree:
        """Return the reply as an element of the ring, with the masks added."""
        own = self._of(exchange, client)
        if own.masked_with is not None:
            raise _RefusedError("it has sent a masked upload in this exchange already")
        others = tuple(c for c in own.pair_keys if c in masking.clients)
        if len(others) + 1 < max(own.threshold, self._fewest):
            raise _RefusedError(f"{len(others)} of its {len(own.pair_keys)} neighbours are left")
        own.masked_with = others
        if self._noise is None:
            element = encode(masking.reduce, masking.cohort, reply)
        else:
            self._check_cohort(masking.cohort, len(others) + 1)
            own.cohort = masking.cohort
            sums, reply = self._noise.sums(masking.reduce), self._noise.contribution(reply)
            element = encode(sums, self._noise.population, reply)
            element.vector += self._noise.share(sums, masking.cohort, exchange.client_key(client))
        element.add_mask(self_mask(own.self_seed, own.context, element.nbytes), 1)
        private = pair_key(own.pair_seed, own.context)
        for other in others:
            public, pair = own.pair_keys[other], (client, other)
            mask = pair_mask(private, public, own.context, pair, element.nbytes)
            element.add_mask(mask, sign(client, other))
        weight, *metrics = map(to_bytes, element.scalars)
        return {
            **Layout.of(masking.reduce, masking.cohort).sent(element.vector),
            "weight": weight,
            "metrics": dict(zip(sorted(reply.metrics), metrics, strict=True)),
        }

    def _check_cohort(self, cohort: int, left: int) -> None:
        """Refuse a sum with less noise than the configuration says."""
        assert self._noise is not None
        if cohort > self._noise.cohort:
            raise _RefusedError(f"the sum is one of {cohort} clients, not of {self._noise.cohort}")
        if degree(cohort) == cohort - 1 and left < needed(self._noise.threshold, cohort):
            raise _RefusedError(f"{left} of {cohort} clients are too few for the noise of a sum")
        if (seen := self._noise.seen(cohort, left)) < self._min_noise:
            raise _RefusedError(
                f"the client's {left - 1} neighbours add noise of {seen:.2g}, and the policy "
                f"of this node has min_noise {self._min_noise:g}"
            )

    def _unmask(self, exchange: Exchange, client: int, message: Tree) -> Tree:
        """Return the client's shares of one seed of each neighbour and of the client's self seed.

        They are "others", uint8 [neighbours, 17], and "own", uint8 [1, 17]. For a neighbour whose
        upload has arrived, the share is one of the neighbour's self seed. For a neighbour whose
        upload was lost, it is one of the neighbour's pair seed.
        """
        own = self._of(exchange, client)
        asked, lost = message["clients"].tolist(), message["lost"].tolist()
        if len(set(asked)) < len(asked):
            raise _RefusedError("the server asks twice for a share of one client: of both secrets")
        if own.masked_with is None or set(asked) != set(own.masked_with):
            raise _RefusedError(
                "the server asks for shares of other clients than it has masked with"
            )
        if lost.count(False) + 1 < max(own.threshold, self._fewest):
            raise _RefusedError(f"{lost.count(False) + 1} clients are too few for a sum")
        if self._noise is not None:
            self._check_cohort(own.cohort, lost.count(False) + 1)
        del self._secrets[client]  # it answers once
        given = []
        for other, is_lost, sent in zip(asked, lost, message["shares"], strict=True):
            shares = decrypt(own.receiving[other], text(sent))
            given.append(shares[SHARE_BYTES:] if is_lost else shares[:SHARE_BYTES])
        return {"others": rows(*given), "own": rows(own.own_share.to_bytes(SHARE_BYTES))}

    def _of(self, exchange: Exchange, client: int) -> _Secrets:
        own = self._secrets.get(client)
        if own is None or own.context != context_of(exchange):
            raise _RefusedError("it has no keys for this exchange")
        return own


def _signed(context: str, client: int, *keys: bytes) -> bytes:
    """Return what a node signs: the keys of a client in an exchange."""
    return json.dumps(["fedshot secure sums", context, client, *map(bytes.hex, keys)]).encode()


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=like.dtype)  # on the CPU, also if `like` has no data


def unmasked(exchange: Exchange) -> Exchange:
    """Return the exchange without the masking, as the client function gets it."""
    masking = exchange.masking
    return exchange if masking is None else replace(exchange, masking=None, reduce=masking.reduce)
