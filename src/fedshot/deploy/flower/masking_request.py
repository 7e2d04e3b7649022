"""The request to mask replies in a secure sum, as JSON in the head of a message to a node."""

from __future__ import annotations

from typing import Any

import torch

from fedshot.core import tree
from fedshot.core.serialised import Form, Limits, build, form_of
from fedshot.protocol.exchange import Masking
from fedshot.protocol.reducers import Mean, Reducer, Sum

_DTYPES = {str(t).removeprefix("torch."): t for t in (
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64
)}  # fmt: skip


def masking_to_json(masking: Masking) -> dict[str, Any]:
    """Return a masking request as JSON values."""
    reduce = {name: _to_json(reducer) for name, reducer in masking.reduce.items()}
    return {"clients": sorted(masking.clients), "cohort": masking.cohort, "reduce": reduce}


def masking_from_json(found: dict[str, Any], limits: Limits) -> Masking:
    """Parse what `masking_to_json` returned.

    Raises CodecError, LookupError, TypeError, ValueError or OverflowError if it is invalid.
    """
    reduce = {str(name): _from_json(one, limits) for name, one in found["reduce"].items()}
    return Masking(frozenset(map(int, found["clients"])), int(found["cohort"]), reduce)


def _to_json(reducer: Reducer) -> dict[str, Any]:
    assert isinstance(reducer, Mean | Sum), "secure sums refuse other reducers"
    leaves = {path: [str(leaf.dtype).removeprefix("torch."), *leaf.shape]
              for path, leaf in tree.items(reducer.like)}  # fmt: skip
    found = {"form": form_of(reducer.like), "leaves": leaves, "limit": reducer.limit}
    return found | ({"max_weight": reducer.max_weight} if isinstance(reducer, Mean) else {})


def _from_json(found: dict[str, Any], limits: Limits) -> Reducer:
    flat = {
        path: torch.empty(shape, dtype=_DTYPES[dtype], device="meta")
        for path, (dtype, *shape) in found["leaves"].items()
    }
    form: Form = found["form"]
    like, limit = build(form, flat, "", limits.depth), float(found["limit"])
    if "max_weight" not in found:
        return Sum(like, limit)
    return Mean(like, limit, float(found["max_weight"]))
