"""Products of parameters, of which the quick suite has each value once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest

CHARACTERS = "".join(map(chr, range(0x250))) + "\u0301\u2019\u2028\u3000漢😀\ufeff"
"""Alphabet of random texts; Hypothesis computes for two seconds before it draws all of Unicode."""


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


def diagonal(*axes: Iterable[Any]) -> list[Any]:
    """Return the quick combinations of `covering` alone: for axes that do not interact."""
    return [param for param in covering(*axes) if not param.marks]


def pairwise(*axes: Iterable[Any]) -> list[Any]:
    """Return some combinations of `covering`: each two values of two axes meet in one of them."""
    values = [list(axis) for axis in axes]
    whole = covering(*values)
    places = list(product(*(range(len(v)) for v in values)))
    met = [set(combinations(enumerate(at), 2)) for at in places]
    kept = [i for i, param in enumerate(whole) if not param.marks]
    left = set[Any]().union(*met).difference(*(met[i] for i in kept))
    while left:
        kept.append(max(range(len(met)), key=lambda i: len(met[i] & left)))
        left -= met[kept[-1]]
    return [whole[i] for i in sorted(kept)]


def slow(*values: Any) -> list[Any]:
    """Return values of one parameter that the quick suite leaves out."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
