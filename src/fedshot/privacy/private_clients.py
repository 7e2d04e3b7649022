"""The clients of a private run: every exchange clips, and its sums get noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.fleets.client_checks import checked_init
from fedshot.privacy.adaptive_clip import COUNT, AdaptiveClip
from fedshot.privacy.differential import Mechanism, Noisy
from fedshot.protocol.clients import Clients, reduce_replies
from fedshot.protocol.exchange import Arrival, Exchange, Fleet, Outcome
from fedshot.protocol.method import Method
from fedshot.protocol.reducers import Mean, Sum

T = TypeVar("T")
R = TypeVar("R")


class PrivateClients(Clients):
    """The population during one round of a private run.

    A client is in the cohort with the same probability, independently of others, so the number of
    clients varies and `cohort` is the expected number; or, if the mechanism says so, all cohorts
    have this size. All exchanges of a round go to one cohort. The outcome of an exchange has no
    metrics, and a weight that does not depend on the replies.

    Args:
        fleet, ids, options: as for `Clients`.
        mechanism: how contributions are bounded, and how much noise is added.
        releases: maximum number of exchanges in a round; None for no limit.
        clips: the clips that have adapted so far, by name; exchanges change them if the mechanism
            has a quantile.
    """

    def __init__(
        self,
        fleet: Fleet,
        ids: Sequence[int],
        mechanism: Mechanism,
        releases: int | None = None,
        clips: dict[str, float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(fleet, ids, **options)
        self._mechanism, self._releases = mechanism, releases
        self._adaptive: AdaptiveClip | None = None
        if mechanism.quantile is not None:
            clips = {} if clips is None else clips
            self._adaptive = AdaptiveClip(mechanism, self.expected, clips)
        self._cohorts: dict[Key, tuple[int, ...]] = {}

    @property
    def expected(self) -> int:
        """The expected number of clients in a cohort."""
        return min(self._cohort or len(self.ids), len(self.ids))

    def sample(self, key: Key) -> tuple[int, ...]:
        """Sample this round's cohort, each client with the same probability."""
        if key not in self._cohorts:
            n, drawn_by = len(self.ids), self._mechanism.key(key)
            if self._mechanism.fixed or self.expected == n:
                self._cohorts[key] = super().sample(drawn_by)
            else:
                rolls = drawn_by.at("cohort").numpy().random(n)
                self._cohorts[key] = tuple(c for c, roll in zip(self.ids, rolls, strict=True)
                                           if roll < self.expected / n)  # fmt: skip
        return self._cohorts[key]

    def exchange(self, *args: Any, **options: Any) -> Outcome:
        """Run an exchange on the round's cohort; return noisy sums of clipped replies.

        The arguments are those of `Clients.exchange`.

        Raises:
            ConfigError: epsilon does not cover the exchange: it belongs to an evaluation, gathers
                replies instead of adding them, goes to other clients than the round's cohort, or
                comes after the `releases` exchanges that the run has counted on.
            QuorumError, DivergenceError, MethodError: as `Clients.exchange`.
        """
        parts = super().exchange(*args, **options).parts
        (to,) = self._cohorts.values()
        return Outcome(parts, to, weight=float(self.expected))

    def _noisy(self, exchange: Exchange, mechanism: Mechanism) -> dict[str, Noisy]:
        """Return the reducers of an exchange, with noise added, by part.

        Raises ConfigError if epsilon does not cover the exchange.
        """
        work, reduce = exchange.work, exchange.reduce
        name = type(work.method).name or type(work.method).__name__
        if self._phase == "evaluate":
            raise ConfigError(
                f"privacy is set, and {name} is tested by predictions of the clients' own models, "
                "which are uploaded without noise. Choose a method whose server model predicts, "
                "such as fl_proto, or set privacy to none."
            )
        if list(self._cohorts.values()) != [exchange.to]:
            raise ConfigError(
                f"privacy is set, and {name} sends {work.name!r} to other clients than the cohort "
                "of the round, as one call of clients.sample returns it. The loss of privacy would "
                "not be counted correctly. Choose another method, or set privacy to none."
            )
        if self._releases is not None and self.exchanges > self._releases:
            raise ConfigError(
                f"privacy is set, and {name} asks for more than {self._releases} exchanges in a "
                "round, which the run has counted on. Choose another method, or set privacy to "
                "none."
            )
        noisy = {}
        for part, reducer in reduce.items():
            if not isinstance(reducer, Mean | Sum):
                raise ConfigError(
                    f"privacy is set, and {name} keeps the part {part!r} of {work.name!r} of each "
                    "client apart (Gather), so there is no sum to add noise to. Choose a method "
                    "that averages, such as fl_proto, or set privacy to none."
                )
            if isinstance(mechanism.clip, Mapping) and part not in mechanism.clip:
                raise ConfigError(
                    f"privacy.clip has no {part!r}, a part that {name} uploads. Add "
                    f"privacy.clip.{part}, or set privacy.clip to one number for all parts."
                )
            deviation = mechanism.deviation(part, len(reduce))
            largest = mechanism.largest(part, reducer.limit)
            noisy[part] = self._with_noise(exchange, part, reducer, deviation, largest)
        return noisy

    def _with_noise(
        self, exchange: Exchange, part: str, of: Mean | Sum, deviation: float, largest: float
    ) -> Noisy:
        normals = self._mechanism.normals(exchange.key.at("noise", exchange.work.name, part))
        return Noisy(of, deviation, self.expected, len(self.ids), largest, normals)

    def _reduce(self, exchange: Exchange) -> Outcome:
        name, adaptive = exchange.work.name, self._adaptive
        mechanism = self._mechanism if adaptive is None else adaptive.mechanism(name)
        reduce = self._noisy(exchange, mechanism)
        if adaptive is not None:
            like = adaptive.below(name, {part: one.of.like for part, one in reduce.items()})
            deviation = adaptive.deviation(len(like))
            reduce[COUNT] = self._with_noise(exchange, COUNT, Sum(like), deviation, 0.5)
        if not exchange.to:  # an empty cohort: there is only noise
            found = Outcome({part: one.start(1).result() for part, one in reduce.items()}, ())
        else:
            clipping: Any = _Clipping(self._fleet, mechanism, adaptive)
            found = reduce_replies(clipping, replace(exchange, reduce=reduce))
        if adaptive is not None and found.parts:
            parts = dict(found.parts)
            adaptive.update(name, parts.pop(COUNT))
            found = replace(found, parts=parts)
        return found

    def _check_quorum(self, outcome: Outcome, asked: int) -> None:
        if asked:
            super()._check_quorum(outcome, asked)


class _Clipping:
    """A stand-in for a fleet, with the function that `reduce_replies` calls."""

    def __init__(self, fleet: Fleet, mechanism: Mechanism, adaptive: AdaptiveClip | None) -> None:
        self._fleet, self._mechanism, self._adaptive = fleet, mechanism, adaptive

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the fleet's arrivals with clipped parts and counts, and without metrics."""
        work, adaptive = exchange.work.name, self._adaptive
        reduce: Any = exchange.reduce
        asked = {part: one.of for part, one in reduce.items() if part != COUNT}
        for arrival in self._fleet.replies(replace(exchange, reduce=asked)):
            reply = arrival.reply
            if reply is not None:
                up = self._mechanism.clipped(reply.up)
                up |= {} if adaptive is None else {COUNT: adaptive.below(work, reply.up)}
                reply = reply._replace(up=up, weight=1.0, metrics={})
            yield arrival._replace(reply=reply)


class Rehearsal(PrivateClients):
    """Clients that upload zeros, to find out what a method exchanges in a round.

    Nothing runs but the method's own code at the server. `parts` are the names of the parts of all
    exchanges, and `leaves` the paths of their tensors.
    """

    def __init__(self, ids: Sequence[int], mechanism: Mechanism, **options: Any) -> None:
        nobody: Any = _Nobody()
        super().__init__(nobody, ids, mechanism, **options)
        self.parts: set[str] = set()
        self.leaves: set[str] = set()

    def sample(self, key: Key) -> tuple[int, ...]:
        """Return all clients."""
        self._cohorts[key] = tuple(self.ids)
        return self._cohorts[key]

    def _reduce(self, exchange: Exchange) -> Outcome:
        likes = {name: one.of.like for name, one in self._noisy(exchange, self._mechanism).items()}
        self.parts |= {*likes}
        self.leaves |= {path for like in likes.values() for path, _ in tree.items(like)}
        return Outcome(tree.zeros_like(likes), exchange.to)


class _Nobody:
    """A stand-in for a fleet without clients, whose storage keeps nothing."""

    @property
    def bank(self) -> _Nobody:
        return self

    def parallel_map(self, fn: Callable[[T], R], items: Sequence[T]) -> list[R]:
        return [fn(item) for item in items]

    def load(self, client: int, upto: tuple[int, int]) -> None:
        """Find nothing."""

    def save(self, client: int, version: tuple[int, int], state: object) -> None:
        """Keep nothing."""

    def settle(self, exchange: Exchange, accepted: frozenset[int]) -> None:
        """Keep nothing."""


def rehearse(method: Method[Any], ids: Sequence[int], mechanism: Mechanism, key: Key) -> int:
    """Return how many exchanges a round of a method has.

    Raises ConfigError if privacy does not cover one of them, or the method's evaluation.
    """
    server = checked_init(method, key)
    clients = Rehearsal(ids, replace(mechanism, secret=False), round=1)
    method.round(server, clients, key)
    if not clients.parts:
        raise ConfigError(
            f"privacy is set, and the clients of {method.name} send nothing, so there is nothing "
            "to hide. Set privacy to none."
        )
    if any(path.rpartition("/")[2] == "var" for path in clients.leaves):
        raise ConfigError(
            f"privacy is set, and the clients of {method.name} upload variances of batch norm, "
            "which noise may turn negative. Choose a backbone without batch norm: mlp, on the "
            "features of a frozen encoder."
        )
    if isinstance(mechanism.clip, Mapping) and (unknown := {*mechanism.clip} - clients.parts):
        raise ConfigError(
            f"privacy.clip has {sorted(unknown)[0]!r}, and {method.name} uploads "
            f"{', '.join(sorted(clients.parts))}. Remove it."
        )
    method.evaluate(server, Rehearsal(ids, mechanism, phase="evaluate"), [], key)
    return clients.exchanges
