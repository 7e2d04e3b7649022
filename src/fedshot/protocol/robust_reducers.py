"""Robust reducers, which take the place of `Mean`, and of a `Sum` by class, in training.

All leaves of a part that `Mean` reduces form one vector for each client, and each part has its own
aggregate. Class prototypes are uploaded as a part "sums" [classes, d], with the numbers of
examples or clients in a part "counts" [classes]. There each class has its own aggregate: of the
means sums / counts of the clients with the class. The result is that mean times the sum of the
counts, so a method that divides by the counts gets the robust prototype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.tree import Tree
from fedshot.protocol.aggregators import Aggregator
from fedshot.protocol.client_vectors import ClientVectors
from fedshot.protocol.reducers import Accumulator, Mean, Reducer, Sum

SUMS, COUNTS = "sums", "counts"
Where: TypeAlias = tuple[int, str, str]
"""(Number of the exchange in its round, name of the client function, name of the part)."""


@dataclass(frozen=True)
class Influences:
    """What each client contributed to the aggregate of one part in one exchange of a round.

    `norms` are the norms of the clients' vectors, `cosines` the cosines of their angles to the
    aggregate, and `kept` says how much of each vector counted, from 0 to 1; all by client. `work`
    is the name of the client function.
    """

    exchange: int
    work: str
    part: str
    norms: dict[int, float]
    cosines: dict[int, float]
    kept: dict[int, float]

    @classmethod
    def of(
        cls, where: Where, vectors: ClientVectors, result: Tensor, kept: Tensor
    ) -> Influences:  # fmt: skip
        """Measure the vectors of the clients against their aggregate `result`, float64 [length]."""
        norms = vectors.norms
        lengths = norms * torch.linalg.vector_norm(result)
        cosines = torch.where(lengths > 0, vectors.dots(result) / lengths, 0.0)
        found = (dict(zip(vectors.clients, values.tolist(), strict=True))
                 for values in (norms, cosines, kept))  # fmt: skip
        return cls(*where, *found)


@dataclass
class Aggregation:
    """How the parts of a run are aggregated.

    Args:
        rule: the aggregator.
        folder: where the vectors of large cohorts are kept, as in `ClientVectors`.
        measured: receives the influences of the clients, part by part, in each exchange.
    """

    rule: Aggregator
    folder: Path | None = None
    measured: list[Influences] = field(default_factory=list)

    def reducers(self, work: str, number: int, reduce: Mapping[str, Reducer]) -> dict[str, Reducer]:
        """Return the reducers of an exchange, with robust ones in place of `Mean` and `Sum`.

        `work` is the name of the client function, `number` that of the exchange in its round.

        Raises ConfigError if a part of the exchange has no robust aggregate.
        """
        found = dict(reduce)
        for name, reducer in reduce.items():
            if isinstance(reducer, Mean) and tree.leaves(reducer.like):
                found[name] = RobustMean(
                    **vars(reducer), aggregation=self, where=(number, work, name)
                )
        sums, counts = reduce.get(SUMS), reduce.get(COUNTS)
        if (
            isinstance(sums, Sum)
            and isinstance(counts, Sum)
            and are_by_class(sums.like, counts.like)
        ):
            held: dict[int, Tensor] = {}
            found[SUMS] = RobustSums(
                **vars(sums), aggregation=self, where=(number, work, SUMS), counts=held
            )
            found[COUNTS] = RecordedCounts(**vars(counts), counts=held)
        if not self.rule.exact:
            self._check(work, found)
        return found

    def _check(self, work: str, reduce: Mapping[str, Reducer]) -> None:
        robust = any(isinstance(reducer, RobustMean | RobustSums) for reducer in reduce.values())
        for name, reducer in reduce.items():
            is_plain_sum = isinstance(reducer, Sum) and not isinstance(
                reducer, RobustSums | RecordedCounts
            )
            if is_plain_sum or not robust:
                how = "summed" if isinstance(reducer, Sum) else "kept for each client apart"
                raise ConfigError(
                    f"aggregate.name is not 'mean', and part {name!r} of {work!r} is {how}: there "
                    "is no mean that a robust one could replace. Set aggregate.name to 'mean', or "
                    "choose another method."
                )


@dataclass(frozen=True)
class RobustMean(Mean):
    """A robust aggregate of a part that the method averages.

    It accepts what `Mean` accepts. Its memory is the cohort's uploads, in a file above 1 GiB, and a
    vector and a block of 32 MiB in float64.
    """

    aggregation: Aggregation = field(kw_only=True)
    where: Where = field(kw_only=True)

    def start(self, cohort: int) -> Accumulator:  # type: ignore[override]
        """Begin an aggregate. Raises ConfigError if the cohort is too small for it."""
        exact = super().start(cohort)
        self.aggregation.rule.check(cohort)
        return _RobustVector(self, cohort, exact)


class _RobustVector:
    """The vectors received so far; under the plain mean also the exact sum."""

    def __init__(self, reducer: RobustMean, cohort: int, exact: Accumulator) -> None:
        self._reducer, self._exact = reducer, exact
        leaves = tree.leaves(reducer.like)
        wide = any(leaf.dtype == torch.float64 for leaf in leaves)
        length, dtype = sum(map(Tensor.numel, leaves)), torch.float64 if wide else torch.float32
        self._vectors = ClientVectors(cohort, length, dtype, reducer.aggregation.folder)

    def add(self, client: int, part: Tree, weight: float) -> None:
        self._vectors.add(client, tree.flat(part), weight)
        if self._reducer.aggregation.rule.exact:
            self._exact.add(client, part, weight)

    def result(self) -> Tree:
        if not len(self._vectors):
            raise ValueError("the aggregate of no contributions is not defined")
        aggregation, where = self._reducer.aggregation, self._reducer.where
        found, kept = aggregation.rule.combine(self._vectors)
        aggregation.measured.append(Influences.of(where, self._vectors, found, kept))
        if aggregation.rule.exact:
            return self._exact.result()
        return tree.shaped(found, self._reducer.like)


@dataclass(frozen=True)
class RobustSums(Sum):
    """Sums by class [classes, d]; the means, sums / counts, are aggregated robustly."""

    aggregation: Aggregation = field(kw_only=True)
    where: Where = field(kw_only=True)
    counts: dict[int, Tensor] = field(kw_only=True)

    def start(self, cohort: int) -> Accumulator:  # type: ignore[override]
        """Begin a sum."""
        return _RobustClasses(self, super().start(cohort))


class _RobustClasses:
    def __init__(self, reducer: RobustSums, exact: Accumulator) -> None:
        self._reducer, self._exact = reducer, exact
        self._sums: dict[int, Tensor] = {}

    def add(self, client: int, part: Tree, weight: float) -> None:
        self._sums[client] = part
        if self._reducer.aggregation.rule.exact:
            self._exact.add(client, part, weight)

    def result(self) -> Tree:
        rule, like = self._reducer.aggregation.rule, self._reducer.like
        clients = sorted(self._sums)
        counts = torch.stack([self._reducer.counts[c].double() for c in clients])  # [n, classes]
        sums = torch.stack([self._sums[c].double() for c in clients])  # [n, classes, d]
        means = torch.where(counts > 0, 1 / counts, 0.0)[:, :, None] * sums
        found = torch.zeros_like(sums[0])
        kept = torch.zeros_like(counts)
        for i in range(len(found)):
            held = [k for k in range(len(clients)) if counts[k, i] > 0]
            if held:
                vectors = _vectors(means[held, i], counts[held, i])
                found[i], kept[held, i] = rule.combine(vectors)
        share = kept.sum(1) / (counts > 0).sum(1).clamp_min(1)
        whole = _vectors(means.flatten(1), counts.sum(1), clients)
        self._reducer.aggregation.measured.append(
            Influences.of(self._reducer.where, whole, found.flatten(), share)
        )
        if rule.exact:
            return self._exact.result()
        return (found * counts.sum(0)[:, None]).to(like.dtype)


@dataclass(frozen=True)
class RecordedCounts(Sum):
    """A sum of the counts by class that also records them for `RobustSums`."""

    counts: dict[int, Tensor] = field(kw_only=True)

    def start(self, cohort: int) -> Accumulator:  # type: ignore[override]
        """Begin a sum."""
        return _Recording(super().start(cohort), self.counts)

    def fault(self, client: int, part: Tree, weight: float) -> str | None:
        """Return why these counts must be rejected; None if they are valid."""
        reason = super().fault(client, part, weight)
        if reason is None and (part < 0).any():
            return f"{COUNTS} holds {part.min().item():.3g}, expected 0 or more"
        return reason


class _Recording:
    def __init__(self, exact: Accumulator, counts: dict[int, Tensor]) -> None:
        self._exact, self._counts = exact, counts

    def add(self, client: int, part: Tree, weight: float) -> None:
        self._counts[client] = part
        self._exact.add(client, part, weight)

    def result(self) -> Tree:
        return self._exact.result()


def are_by_class(sums: Tree, counts: Tree) -> bool:
    """Whether two parts are sums by class [classes, d] and their counts [classes]."""
    both = isinstance(sums, Tensor) and isinstance(counts, Tensor)
    return both and sums.ndim == 2 and counts.shape == sums.shape[:1]


def _vectors(
    rows: Tensor, weights: Tensor, clients: list[int] | None = None
) -> ClientVectors:  # fmt: skip
    found = ClientVectors(len(rows), rows.shape[1], torch.float64)
    for i, (row, weight) in enumerate(zip(rows, weights.tolist(), strict=True)):
        found.add(i if clients is None else clients[i], row, weight)
    return found
