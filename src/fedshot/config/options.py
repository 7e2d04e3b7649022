"""The options that dataclasses define: key paths, types, defaults, and their descriptions."""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Collection, Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import docstring_parser

from fedshot.core.errors import nearest
from fedshot.core.text import joined
from fedshot.protocol.method import DIAGNOSTIC

# Fields that a configuration does not set, by the key path of their dataclass. fedshot itself gives
# a method its model, its episode, the base classes, the number of clients, and whether each round
# partitions the images anew.
NOT_OPTIONS = {
    "method": {"model", "episode", "classes", "clients", "resampled"},
    "model": {"backbone", "head", "encoder"},
    "compress": {"up", "down"},
}
MUST_BE_GIVEN = "must be given"  # in place of a default, in lists of options


@dataclass(frozen=True)
class Option:
    """An option: a field of a dataclass, or of a dataclass nested in it.

    Args:
        path: key path, such as "method.inner.lr".
        hint: type of the value, with its range.
        required: whether there is no default.
        default: the default, as a plain value.
        is_diagnostic: whether the option only adds to a run's report, without effect on training.
        fields: (dataclass, field name) of each step from the outer dataclass to the option.
    """

    path: str
    hint: Any
    required: bool
    default: Any
    is_diagnostic: bool
    fields: tuple[tuple[type[Any], str], ...]

    @property
    def description(self) -> str:
        """The descriptions of `fields` from their docstrings, joined with ": "."""
        *above, last = (descriptions(cls).get(name, "") for cls, name in self.fields)  # type: ignore[arg-type]
        return ": ".join([*(text.rstrip(".") for text in above if text), last])


def options_of(
    cls: type[Any], path: str, instance: Any = None, above: Option | None = None
) -> Iterator[Option]:
    """Yield the options of a dataclass and of the dataclasses nested in it.

    If `instance` is given, its values are the defaults. `above` is the option whose value is this
    dataclass, if it is nested; if `above` is diagnostic, so are the options yielded.
    """
    for one, hint, default in members(cls, path, instance):
        option = Option(
            f"{path}.{one.name}",
            hint,
            instance is None and is_required(one),
            list(default) if isinstance(default, tuple) else default,
            DIAGNOSTIC in one.metadata or (above is not None and above.is_diagnostic),
            (*(above.fields if above else ()), (cls, one.name)),
        )
        if is_section(hint):
            yield from options_of(hint, option.path, default, option)
        else:
            yield option


def members(
    cls: type[Any], path: str, instance: Any = None
) -> Iterator[tuple[Field[Any], Any, Any]]:
    """Yield (field, type, default) for each field that a configuration may set.

    If `instance` is given, its values are the defaults.
    """
    hints = _hints(cls)  # type: ignore[arg-type]  # a class is hashable
    for one in fields(cls):
        if one.init and one.name not in NOT_OPTIONS.get(path, ()):
            yield one, hints[one.name], _default(one, instance)


@cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _default(one: Field[Any], instance: Any) -> Any:
    if instance is not None:
        return getattr(instance, one.name)
    if one.default_factory is not MISSING:
        return one.default_factory()
    return None if one.default is MISSING else one.default


def is_required(one: Field[Any]) -> bool:
    """Whether a field has no default."""
    return one.default is MISSING and one.default_factory is MISSING


def is_section(hint: Any) -> bool:
    """Whether a field's type is a dataclass, whose fields are then options of their own."""
    return isinstance(hint, type) and is_dataclass(hint)


@cache
def summary(cls: type[Any]) -> str:
    """Return the summary line of a class's docstring."""
    return str(docstring_parser.parse(cls.__doc__ or "").short_description or "")


@cache
def descriptions(cls: type[Any]) -> dict[str, str]:
    """Return the description of each field of a dataclass, from the docstring's `Args:`."""
    docs = [base.__doc__ or "" for base in reversed(cls.__mro__)]
    found = [one for text in docs for one in docstring_parser.parse(text).params]
    return {one.arg_name: " ".join((one.description or "").split()) for one in found}


def takes_text(hint: Any) -> bool:
    """Whether a type takes text, so that `2024` or `true` in YAML must be read as text.

    True for strings, string literals, and lists of strings or string literals.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return all(isinstance(word, str) for word in inner)
    if origin in (Union, types.UnionType):
        return all(one is types.NoneType or takes_text(one) for one in inner)
    if origin is tuple:
        return all(one is Ellipsis or takes_text(one) for one in inner)
    return hint is str


def nearest_options(path: str, valid: Collection[str]) -> str:
    """Return a sentence that suggests replacements for an unknown option.

    It suggests options with the same last key, at any depth, or the same option of a section with
    a similar name. It may also list the section's options.
    """
    sections = {one.partition(".")[0] for one in valid}
    first, dot, below = path.partition(".")
    near = difflib.get_close_matches(first, sections, 1)
    if dot and near and first not in sections:
        path = f"{near[0]}.{below}"
        if any(f"{one}.".startswith(f"{path}.") for one in valid):
            return f"Did you mean {path!r}?"
    parts = [part for part in path.split(".") if part]
    last = parts[-1] if parts else ""
    for depth in range(len(parts) - 1, -1, -1):
        above = ".".join(parts[:depth])
        section = [one for one in valid if not above or one.startswith(f"{above}.")]
        same = sorted(one for one in section if one.rpartition(".")[2] == last)
        if same:
            listed = f" Valid: {', '.join(sorted(section))}." if len(section) <= 20 else ""
            return f"Did you mean {joined([repr(one) for one in same[:4]], 'or')}?{listed}"
        if section and above:
            return nearest(path, section, f"{above}.")
    return nearest(path, {*valid, *sections})


def shown(value: Any) -> str:
    """Return a value as YAML writes it, shortened if it is long."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    # Python refuses to convert integers of more than 4300 digits to text.
    if isinstance(value, int) and value.bit_length() > 400:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
