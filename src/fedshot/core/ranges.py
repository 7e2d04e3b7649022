"""Option types with a valid range, and the check of dataclasses whose fields have them.

Ranges are part of the JSON Schema. Values of a configuration are checked when it is loaded;
`check_options` checks a dataclass that is made without one.
"""

from __future__ import annotations

import math
import operator
import types
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from pydantic import Field

from fedshot.core.errors import ConfigError, check_word
from fedshot.core.text import joined

AtLeast0: TypeAlias = Annotated[int, Field(ge=0)]
AtLeast1: TypeAlias = Annotated[int, Field(ge=1)]
Episodes: TypeAlias = Annotated[int, Field(le=1_000_000)]
Side: TypeAlias = Annotated[int, Field(ge=1, le=8192)]  # pixels
SmallSide: TypeAlias = Annotated[int, Field(ge=1, le=1024)]
Width: TypeAlias = Annotated[int, Field(ge=1, le=65_536)]
OptionalWidth: TypeAlias = Annotated[int, Field(ge=0, le=65_536)]  # 0: no such layer
Way: TypeAlias = Annotated[int, Field(ge=2, le=65_536)]
Cores: TypeAlias = Annotated[int, Field(ge=1, le=1024)]
Above0: TypeAlias = Annotated[float, Field(gt=0)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Majority: TypeAlias = Annotated[float, Field(gt=0.5, le=1)]
Below1: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
BelowHalf: TypeAlias = Annotated[float, Field(ge=0, lt=0.5)]
OpenShare: TypeAlias = Annotated[float, Field(gt=0, lt=1)]
PositiveShare: TypeAlias = Annotated[float, Field(gt=0, le=1)]

_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def check_options(options: Any) -> None:
    """Raise ConfigError unless the fields of a dataclass have valid words and numbers.

    Checked are the fields whose type is a `Literal`, or a number with a range, and not None.
    """
    for name, kind in _limited(type(options)):  # type: ignore[arg-type]  # a class is hashable
        value = getattr(options, name)
        if value is None:
            continue
        if get_origin(kind) is Literal:
            check_word(name, value, get_args(kind))
        elif not math.isfinite(value):
            raise ConfigError(f"{name} is {value!r}; expected a finite number.")
        elif not _is_within(value, kind):
            raise ConfigError(f"{name} is {value!r}; expected {words(kind)}.")


@cache
def _limited(kind: type) -> list[tuple[str, Any]]:
    """Return (name, type) of each field with words or a range; without the None of its type."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for name in (field.name for field in fields(kind)):
        union = get_origin(hints[name]) in (Union, types.UnionType)
        parts = get_args(hints[name]) if union else (hints[name],)
        found += [(name, one) for one in parts if get_origin(one) in (Annotated, Literal)]
    return found


def _is_within(value: float, kind: Any) -> bool:
    limits = [limit for mark in get_args(kind)[1:] for limit in getattr(mark, "metadata", [mark])]
    bounds = [(name, getattr(limit, name, None)) for limit in limits for name in _BOUNDS]
    holds = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}
    return all(holds[name](value, bound) for name, bound in bounds if bound is not None)


def words(hint: Any) -> str:
    """Describe the values that an option takes, such as "a whole number of at least 1"."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is types.NoneType:
        return "null"
    if origin is dict:
        return "keys and values"
    if origin is Annotated:
        return f"{words(inner[0])}{_range(inner[1:])}"
    if origin is Literal:
        return joined([repr(word) for word in inner], "or")
    if origin in (Union, types.UnionType):
        return joined([words(one) for one in inner], "or")
    if origin is tuple:
        kind = words(inner[0]).removeprefix("a ")
        kinds = kind.replace("number", "numbers").replace("text", "texts")
        if inner[-1] is Ellipsis:
            return f"a list of {kinds}, such as {'[a, b]' if inner[0] is str else '[1, 2]'}"
        return f"a list of {len(inner)} {kinds}, such as {[*range(1, len(inner) + 1)]}"
    return _TYPES.get(hint, getattr(hint, "__name__", str(hint)))


def _range(marks: tuple[Any, ...]) -> str:
    """Return text for a number's range, such as " of at least 0 and below 1"; "" if unbounded."""
    limits = [limit for mark in marks for limit in getattr(mark, "metadata", [mark])]
    bounds = [(word, getattr(limit, name, None)) for limit in limits
              for name, word in _BOUNDS.items()]  # fmt: skip
    text = " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)
    return (" of " if text.startswith("at ") else " " if text else "") + text
