"""Every option with a range or a list of words refuses the values just outside."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

import pytest

from conformance.cases import METHODS
from fedshot.core.errors import ConfigError
from fedshot.core.ranges import _limited
from fedshot.learners.maml import InnerLoop
from fedshot.learners.probe import FeatureProbe
from fedshot.nn.models.recurrent import GRU, BiLSTM

MADE: dict[type, Any] = {type(method): method for method in METHODS.values()}
MADE |= {kind: kind() for kind in (InnerLoop, FeatureProbe, GRU, BiLSTM)}


def outside(kind: Any) -> Iterator[Any]:
    """Yield values that an option of this type must not have."""
    if get_origin(kind) is Literal:
        yield "another"
        return
    step = 1 if get_args(kind)[0] is int else 1e-6
    limits = [limit for mark in get_args(kind)[1:] for limit in getattr(mark, "metadata", [mark])]
    for limit in limits:
        for name, shift in (("ge", -step), ("gt", 0), ("le", step), ("lt", 0)):
            if (bound := getattr(limit, name, None)) is not None:
                yield bound + shift
    if get_args(kind)[0] is float:
        yield from (math.nan, math.inf)


@pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.__name__)
def test_values_outside_are_refused_by_the_name_of_the_option(kind: type) -> None:
    for option, values in _limited(kind):  # type: ignore[arg-type]
        for value in outside(values):
            with pytest.raises(ConfigError, match=rf"^{option} is {value!r}[.;]"):
                replace(MADE[kind], **{option: value})
