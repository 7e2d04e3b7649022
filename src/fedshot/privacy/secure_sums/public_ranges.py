"""The ranges to which clients round what they upload in a secure sum.

All clients of a sum need the same range for a tensor, and the server must not learn the range of
one of them. So each client adds to the sum, for each tensor, its largest |w * x| to the power
`POWER`, and the next range is `HEADROOM` times their power mean. The largest of n clients is at
most n**(1 / POWER) times this mean, so for up to HEADROOM**POWER = 256 clients the range holds all
that they reported, whatever their weights. What is above the range is cut off, and is in the error
that a client remembers.

Where nothing is known yet, in the first exchange of a client function, the tensor is not rounded,
and has 8 bytes an entry. Its values have no unit yet in which powers would fit in fixed point, so
this exchange sums the largest values themselves, and the next range follows from their mean.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fedshot.core import tree
from fedshot.fleets.compressing import LARGEST, mean_size, tensor_name
from fedshot.protocol.compressors import Compressor, is_large
from fedshot.protocol.exchange import Exchange, Outcome
from fedshot.protocol.reducers import MIN_RANGE, Grid, Mean, Reducer, Sum

HEADROOM = 2.0
"""A range divided by the power mean of the clients' largest values in the last exchange.

After 150 rounds of 50 alike clients on a quadratic, with int8, 1 and 1.5 leave entries cut off, 2
leaves only errors of rounding, and more makes the steps coarser.
"""


class PublicRanges:
    """The ranges of a run, by client function, part and path.

    Args:
        compressor: how uploads are compressed: one that rounds to integers.
        found: the ranges so far; exchanges change them.
    """

    def __init__(self, compressor: Compressor, found: dict[str, float]) -> None:
        assert compressor.most is not None, "PreparedRun refuses other compressors"
        self._compressor, self._most, self._found = compressor, compressor.most, found

    def in_grids(self, exchange: Exchange) -> Exchange:
        """Return an exchange whose compressed parts are rounded to the present ranges."""
        reduce: dict[str, Reducer] = dict(exchange.reduce)
        names, limit = list[str](), 0.0
        for part, reducer in exchange.reduce.items():
            if not isinstance(reducer, Mean | Sum) or not self._compressor.uploads(part, reducer):
                continue
            large = {path: tensor_name(part, path)
                     for path, leaf in tree.items(reducer.like) if is_large(leaf)}  # fmt: skip
            ranges = {path: self._found[of] for path, name in large.items()
                      if (of := f"{exchange.work.name}:{name}") in self._found}  # fmt: skip
            reduce[part] = replace(reducer, grid=Grid(self._most, ranges))
            names, limit = [*names, *large.values()], max(limit, reducer.limit)
        if not names:
            return exchange
        scalar = torch.empty((), dtype=torch.float64, device="meta")
        reduce[LARGEST] = Sum(dict.fromkeys(names, scalar), limit)
        return replace(exchange, reduce=reduce)

    def updated(self, exchange: Exchange, outcome: Outcome) -> Outcome:
        """Set the ranges that follow from an outcome; return it without the part `LARGEST`.

        `exchange` is what `in_grids` returned. A range is forgotten if nothing was sent, or if
        clients that are dishonest have reported impossible sizes.
        """
        parts, limits = dict(outcome.parts), dict[str, float]()
        asked = exchange.reduce.get(LARGEST)
        if not isinstance(asked, Sum):
            return outcome
        for part, reducer in exchange.reduce.items():
            if isinstance(reducer, Mean | Sum) and reducer.grid is not None:
                for path, _ in tree.items(reducer.like):
                    limits[tensor_name(part, path)] = reducer.limit
        for name, total in parts.pop(LARGEST, {}).items():
            of = f"{exchange.work.name}:{name}"
            in_use = self._found.pop(of, None)
            mean = mean_size(float(total) / len(outcome.accepted), in_use, asked.limit)
            if MIN_RANGE < mean <= limits[name]:
                self._found[of] = HEADROOM * mean
        return replace(outcome, parts=parts)
