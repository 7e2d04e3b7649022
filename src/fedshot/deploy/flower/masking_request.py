"""Reducers in the head of a message to a node: their names, and a request to mask replies."""

from __future__ import annotations

from typing import Any

import torch

from fedshot.core import tree
from fedshot.core.serialised import CodecError, Form, Limits, build, form_of
from fedshot.core.tree import Tree
from fedshot.protocol.compressors import is_large
from fedshot.protocol.exchange import Masking
from fedshot.protocol.reducers import MIN_RANGE, Gather, Grid, Mean, Reducer, Sum

_DTYPES = {str(t).removeprefix("torch."): t for t in (
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64
)}  # fmt: skip


REDUCERS: dict[str, Reducer] = {
    "mean": Mean({}), "mean by class": Mean({}, by_class=True), "sum": Sum({}), "gather": Gather(),
}  # fmt: skip
"""Reducers by name. By it, a node knows which parts an attack changes, and which it compresses."""


def reducer_name(reducer: Reducer) -> str:
    """Return the name of a reducer in `REDUCERS`."""
    if isinstance(reducer, Mean) and reducer.by_class:
        return "mean by class"
    return next(name for name, one in REDUCERS.items() if isinstance(reducer, type(one)))


def masking_to_json(masking: Masking) -> dict[str, Any]:
    """Return a masking request as JSON values."""
    reduce = {name: _to_json(reducer) for name, reducer in masking.reduce.items()}
    return {"clients": sorted(masking.clients), "cohort": masking.cohort, "reduce": reduce}


def masking_from_json(found: dict[str, Any], limits: Limits) -> Masking:
    """Parse what `masking_to_json` returned.

    Raises CodecError, LookupError, TypeError, ValueError or OverflowError if it is invalid.
    """
    reduce = {str(name): _from_json(one, limits) for name, one in found["reduce"].items()}
    cohort = int(found["cohort"])
    if not 1 <= cohort <= 2**32:
        raise CodecError(f"a cohort of {cohort} clients; expected 1 to 2**32")
    return Masking(frozenset(map(int, found["clients"])), cohort, reduce)


def _to_json(reducer: Mean | Sum) -> dict[str, Any]:
    leaves = {path: [str(leaf.dtype).removeprefix("torch."), *leaf.shape]
              for path, leaf in tree.items(reducer.like)}  # fmt: skip
    found: dict[str, Any] = {
        "form": form_of(reducer.like),
        "leaves": leaves,
        "limit": reducer.limit,
    }
    if isinstance(reducer, Mean):
        found |= {"max_weight": reducer.max_weight, "by_class": reducer.by_class}
    if reducer.grid is not None:
        found["grid"] = {"most": reducer.grid.most, "ranges": dict(reducer.grid.ranges)}
    return found


def _from_json(found: dict[str, Any], limits: Limits) -> Mean | Sum:
    flat = {
        path: torch.empty(shape, dtype=_DTYPES[dtype], device="meta")
        for path, (dtype, *shape) in found["leaves"].items()
    }
    form: Form = found["form"]
    like, limit = build(form, flat, "", limits.depth), float(found["limit"])
    grid = _grid(found["grid"], like, limit) if "grid" in found else None
    if "max_weight" not in found:
        return Sum(like, limit, grid)
    by_class = bool(found.get("by_class"))
    return Mean(like, limit, float(found["max_weight"]), by_class=by_class, grid=grid)


def _grid(found: dict[str, Any], like: Tree, limit: float) -> Grid:
    most, ranges = int(found["most"]), {str(k): float(v) for k, v in found["ranges"].items()}
    if not 0 < most < 128 or not all(MIN_RANGE < r <= 2 * limit for r in ranges.values()):
        raise CodecError("a grid of no integers, or of an invalid range")
    if not ranges.keys() <= {path for path, leaf in tree.items(like) if is_large(leaf)}:
        raise CodecError("a range of no tensor that is compressed")
    return Grid(most, ranges)
