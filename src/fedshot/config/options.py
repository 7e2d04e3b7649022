"""Options of dataclasses: their places, types, defaults, and what fits them, in plain words."""

from __future__ import annotations

import difflib
import math
import re
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fedshot.config.settings import flat
from fedshot.core.errors import ConfigError, FedshotError, nearest
from fedshot.protocol.method import DIAGNOSTIC

_BITS = 1 << 63
_VALUE = re.compile(r"([a-z]\w*(?:\.\w+)*) is ('[^']*'|[\[(].*?[\])]|[^ ]*?)(?=[,;]| of | and |$)")
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True)
class Option:
    """One leaf of a tree of dataclasses."""

    place: str  # such as "method.inner.lr"
    hint: Any
    required: bool = False
    default: Any = None  # as a plain value
    most: int = _BITS - 1  # the largest whole number it takes
    is_diagnostic: bool = (
        False  # it tells more of a training, and changes nothing of what it comes to
    )


def options_of(
    cls: type[Any],
    place: str,
    skip: Collection[str] = (),
    made: Any = None,
    *,
    is_diagnostic: bool = False,
) -> Iterator[Option]:
    """Yield the options of a dataclass, those of dataclasses in it included.

    `made` is an instance whose values are the defaults, where another dataclass has one as such;
    what lies in an option that only watches does, too.
    """
    hints = get_type_hints(cls)
    for one in fields(cls):
        hint, below = hints[one.name], f"{place}.{one.name}"
        if one.name in skip or not one.init:
            continue
        seen = is_diagnostic or DIAGNOSTIC in one.metadata
        required = one.default is MISSING and one.default_factory is MISSING
        default = _default(one) if made is None else getattr(made, one.name)
        if isinstance(hint, type) and is_dataclass(hint):
            yield from options_of(hint, below, made=default, is_diagnostic=seen)
        else:
            plain = list(default) if isinstance(default, tuple) else default
            yield Option(below, hint, required, plain, is_diagnostic=seen)


def _default(one: Field[Any]) -> Any:
    if one.default_factory is not MISSING:
        return one.default_factory()
    return None if one.default is MISSING else one.default


def takes_text(hint: Any) -> bool:
    """Whether `2024` or `true` is meant as text: in a text, words to choose from, or a list."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return all(isinstance(word, str) for word in inner)
    if origin in (Union, types.UnionType):
        return all(one is types.NoneType or takes_text(one) for one in inner)
    if origin is tuple:
        return all(one is Ellipsis or takes_text(one) for one in inner)
    return hint is str


def validated(option: Option, value: Any) -> Any:
    """Return the value as its option takes it: numbers as text and one text as a list of one.

    Raises:
        ConfigError: the value does not fit, is not finite, or is too large.
    """
    if takes_text(option.hint):
        value = _as_text(value)
        if isinstance(value, str) and _is_list_of_text(option.hint):
            value = [value]
    if not _fits(value, option.hint):
        raise ConfigError(f"{option.place} is {shown(value)}{_wanted(option.hint, value)}")
    for number in value if isinstance(value, list | tuple) else [value]:
        if isinstance(number, float) and not math.isfinite(number):
            raise ConfigError(f"{option.place} is {number}; expected a finite number.")
        if isinstance(number, int) and not -_BITS <= number <= option.most:
            raise ConfigError(
                f"{option.place} is {shown(number)}; expected {option.most} at most."
                if number > 0
                else f"{option.place} is {shown(number)}; expected a number of 64 bits."
            )
    return value


@contextmanager
def with_option_path(settings: Mapping[str, Any]) -> Iterator[None]:
    """Let what is refused of an option begin with the option's place.

    A dataclass knows that its `clients` is 0, and not that it is the `partition` of these settings.
    Of several options of that name and value the one that lies least deep is meant; where two lie
    equally deep, the message stays as it is.
    """
    try:
        yield
    except FedshotError as error:
        found = _VALUE.match(text := str(error))
        if found:
            name, value = found.groups()
            places = [place for place, held in flat(settings)
                      if place.endswith(f".{name}") and value in _written(held)]  # fmt: skip
            least = min((place.count(".") for place in places), default=0)
            places = [place for place in places if place.count(".") == least]
            if len(places) == 1:
                error.args = (f"{places[0]}{text.removeprefix(name)}",)
        raise


def _written(value: Any) -> set[str]:
    """Return how a message may have a value."""
    return {str(value), repr(value)} | ({str(tuple(value))} if isinstance(value, list) else set())


def nearest_options(place: str, valid: Collection[str]) -> str:
    """Return a sentence that names the options meant by a place that is none, and its section's.

    An option of the same last name counts as near, however deep it lies, and what is there in a
    section of nearly the same name.
    """
    sections = {one.partition(".")[0] for one in valid}
    first, dot, below = place.partition(".")
    near = difflib.get_close_matches(first, sections, 1)
    if dot and near and first not in sections:
        place = f"{near[0]}.{below}"
        if any(f"{one}.".startswith(f"{place}.") for one in valid):
            return f"Did you mean {place!r}?"
    parts = [part for part in place.split(".") if part]
    last = parts[-1] if parts else ""
    for depth in range(len(parts) - 1, -1, -1):
        above = ".".join(parts[:depth])
        section = [one for one in valid if not above or one.startswith(f"{above}.")]
        same = sorted(one for one in section if one.rpartition(".")[2] == last)
        if same:
            hint = f"Did you mean {_either([repr(one) for one in same[:4]])}?"
            return f"{hint} {_listed(section)}".strip()
        if section and above:
            return nearest(place, section)
    return nearest(place, {*valid, *sections})


def _listed(section: Collection[str]) -> str:
    return f"Valid: {', '.join(sorted(section))}." if len(section) <= 20 else ""


def _as_text(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    return [_as_text(item) for item in value] if isinstance(value, list | tuple) else value


def _is_list_of_text(hint: Any) -> bool:
    return get_origin(hint) is tuple and get_args(hint)[-1] is Ellipsis


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return any(value == word and type(value) is type(word) for word in inner)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return False
        each = [inner[0]] * len(value) if inner[-1] is Ellipsis else list(inner)
        return len(each) == len(value) and all(map(_fits, value, each))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else True


def _wanted(hint: Any, value: Any) -> str:
    """Finish the sentence `x is 3 ...`."""
    if get_origin(hint) is Literal and isinstance(value, str):
        return f". {nearest(value, map(str, get_args(hint)))}"
    fix = ""
    if isinstance(value, Mapping):
        fix = " It has no options below it."
    elif isinstance(value, str) and _fits_unquoted(value, hint):
        fix = " Leave out the quotes."
    return f"; expected {words(hint)}.{fix}"


def _fits_unquoted(value: str, hint: Any) -> bool:
    try:
        number: Any = int(value)
    except ValueError:
        try:
            number = float(value)
        except ValueError:
            return False
    return _fits(number, hint)


def words(hint: Any) -> str:
    """Return what an option of a type takes, in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is types.NoneType:
        return "null"
    if origin is Literal:
        return _either([repr(word) for word in inner])
    if origin in (Union, types.UnionType):
        return _either([words(one) for one in inner])
    if origin is tuple:
        kind = words(inner[0]).removeprefix("a ")
        if inner[-1] is Ellipsis:
            return f"a list of {kind}s, such as {'[a, b]' if inner[0] is str else '[1, 2]'}"
        example = ", ".join(str(i + 1) for i in range(len(inner)))
        return f"a list of {len(inner)} {kind}s, such as [{example}]"
    return _KINDS.get(hint, getattr(hint, "__name__", str(hint)))


def _either(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def shown(value: Any) -> str:
    """Return the value as YAML has it, cut where it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    # Python does not write whole numbers of more than 4300 digits.
    if isinstance(value, int) and value.bit_length() > 400:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
