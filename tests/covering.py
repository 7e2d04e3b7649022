"""Products of parameters, of which the quick suite has each value once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def covering(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of the axes' values; those that only repeat values are slow.

    The quick ones go through all axes at once, the shorter ones again and again, each shifted
    otherwise.
    """
    values = [list(axis) for axis in axes]
    quick = {
        tuple((i + k * (i // len(v))) % len(v) for k, v in enumerate(values))
        for i in range(max(map(len, values)))
    }
    return [
        pytest.param(
            *(v[k] for v, k in zip(values, at, strict=True)),
            marks=() if at in quick else pytest.mark.slow,
        )
        for at in product(*(range(len(v)) for v in values))
    ]


def slow(*values: Any) -> list[Any]:
    """Return values of one parameter that the quick suite leaves out."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
