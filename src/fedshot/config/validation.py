"""Checks plain values against the dataclasses that they configure, and builds the dataclasses.

Pydantic checks the values once, against a schema made from the fields of the dataclasses. Its
errors are reworded as fedshot's own messages, which begin with the key path.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    TypeAlias,
    Union,
    get_args,
    get_origin,
)

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict

from fedshot.config.options import (
    descriptions,
    is_required,
    is_section,
    members,
    options_of,
    shown,
)
from fedshot.config.registry import unknown_option
from fedshot.config.settings import flat, parse
from fedshot.core.errors import ConfigError, FedshotError, nearest
from fedshot.core.ranges import words

_BITS = 1 << 63
_STRICT = {"strict": True, "extra": "forbid", "allow_inf_nan": False,
           "arbitrary_types_allowed": True}  # fmt: skip
# What else was expected of a number, by the type of pydantic's error.
_EXPECTED = {"finite_number": "finite number", "value_error": "number of 64 bits"}


def checked(cls: type[Any], path: str, given: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Check the values of a dataclass's options; return them, with nested dataclasses built.

    Args:
        cls: the dataclass.
        path: its key path in the configuration.
        given: the keys and values to check.
        names: the name of the chosen component for each key path.

    Raises:
        ConfigError: a key is unknown or missing, or a value does not fit its option's type.
    """
    try:
        adapter = _adapter(cls, path)  # type: ignore[arg-type]  # a class is hashable
        found: dict[str, Any] = adapter.validate_python(given)
        return found
    except ValidationError as error:
        options = {option.path: option.hint for option in options_of(cls, path)}
        raise ConfigError(_refusal(error, path, given, options, names)) from None


def value_of(path: str, hint: Any, value: Any) -> Any:
    """Check one value against an option's type and return it converted.

    Raises ConfigError if it does not fit.
    """
    try:
        return _value_adapter(hint).validate_python(value)
    except ValidationError as error:
        raise ConfigError(_refusal(error, path, value, {path: hint}, {})) from None


def built(cls: type[Any], path: str, given: Mapping[str, Any], instance: Any = None) -> Any:
    """Build a dataclass from checked values.

    Fields without a value are copied from `instance`, or else take their defaults.
    """
    with with_option_path(path, cls):
        return cls(**given) if instance is None else replace(instance, **given)


@contextmanager
def with_option_path(path: str, cls: type[Any]) -> Iterator[None]:
    """Put the key path at the beginning of a dataclass's error message about one of its options.

    A dataclass can report that its `clients` is 0, but not that it is the `partition` of a
    configuration. If the message already begins with a name for the nested dataclass, such as
    `inner` in `inner.lr is 0`, the key path replaces that name.
    """
    try:
        yield
    except FedshotError as error:
        names = {one.name for one, _, _ in members(cls, path)}
        first, _, rest = str(error).partition(" is ")[0].partition(".")
        if first in names:
            error.args = (f"{path}.{error}",)
        elif rest in names and "." in path:
            error.args = (f"{path}.{str(error).partition('.')[2]}",)
        raise


def schema_of(
    cls: type[Any], path: str, instance: Any = None, *, title: str = "", described: bool = False
) -> Any:
    """Return a TypedDict, named `title`, of the keys and values that configure a dataclass.

    With `instance`, whose values are then the defaults, no key is required. With `described`, it
    includes defaults and descriptions, for JSON Schema.
    """
    keys: dict[str, Any] = {}
    for one, hint, default in members(cls, path, instance):
        below, name = f"{path}.{one.name}", f"{title}_{one.name}"
        if is_section(hint):
            schema = schema_of(hint, below, default, title=name, described=described)
            build = partial(built, hint, below, instance=default)
            value: Any = Annotated[schema, AfterValidator(build)]
        else:
            value = _accepting(hint)
        required = instance is None and is_required(one)
        if described:
            text = descriptions(cls).get(one.name)  # type: ignore[arg-type]
            plain = {} if required or is_section(hint) else {"default": default}
            value = Annotated[value, Field(description=text, json_schema_extra=plain)]
        keys[one.name] = Required[value] if required else NotRequired[value]
    made = TypedDict(title, keys)  # type: ignore[misc]  # mypy needs literal keys
    made.__pydantic_config__ = _STRICT  # type: ignore[attr-defined]
    return made


@lru_cache(256)
def _adapter(cls: type[Any], path: str) -> TypeAdapter[Any]:
    return TypeAdapter(schema_of(cls, path, title=cls.__name__))


@lru_cache(64)
def _value_adapter(hint: Any) -> TypeAdapter[Any]:
    config: Any = {key: value for key, value in _STRICT.items() if key != "extra"}
    return TypeAdapter(_accepting(hint), config=config)


def _accepting(hint: Any) -> Any:
    """Return the type `hint`, adapted so that pydantic's strict mode accepts values from YAML.

    A number is accepted where `hint` is `str`, and a list where `hint` is a tuple. Integers are
    limited to 64 bits.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return Union[tuple(map(_accepting, inner))]  # noqa: UP007
    if inner == (str, ...):
        return Annotated[
            hint, BeforeValidator(_as_texts, json_schema_input_type=list[_Word] | _Word)
        ]
    if origin is tuple:
        each = tuple(one if one is Ellipsis else _accepting(one) for one in inner)
        return Annotated[tuple[each], BeforeValidator(_as_tuple)]  # type: ignore[valid-type]
    kind, *marks = inner if origin is Annotated else (hint,)
    return Annotated[(kind, *marks, _ACCEPTING[kind])] if kind in _ACCEPTING else hint


def _as_text(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_texts(value: Any) -> Any:
    items = value if isinstance(value, list | tuple) else [value]
    return value if isinstance(value, Mapping | types.NoneType) else tuple(map(_as_text, items))


def _in_64_bits(value: int) -> int:
    if -_BITS <= value < _BITS:
        return value
    raise ValueError


_Word: TypeAlias = str | int | float | bool
_ACCEPTING = {
    int: AfterValidator(_in_64_bits),
    str: BeforeValidator(_as_text, json_schema_input_type=_Word),
}


def _refusal(
    error: ValidationError, path: str, given: Any, hints: Mapping[str, Any],
    names: Mapping[str, str],
) -> str:  # fmt: skip
    """Return an error message with the wrong value, the expected values and a fix.

    `hints` are the types of the options by key path.
    """
    errors = error.errors(include_url=False)
    # Report a misspelt key before the key that is missing because of it. (The location of an
    # item that is missing from a list ends with a number.)
    missing = [e["type"] == "missing" and isinstance(e["loc"][-1], str) for e in errors]
    i = missing.index(False) if False in missing else 0
    at, value = _at(errors[i], path, given, hints)
    if missing[i]:
        fix = f"Set it in the file, or with --{at} VALUE. `fedshot data list` lists the sources."
        return f"{at} is not set, and there is no default" + (
            f". {fix}" if at.startswith("data.") else f"; add --{at} VALUE."
        )
    if at not in hints:
        if errors[i]["type"] in ("extra_forbidden", "invalid_key"):
            return unknown_option(next(flat({at: value}))[0], names)
        below = ", ".join(sorted(one for one in hints if one.startswith(f"{at}.")))
        kind = hints.get(f"{at}.name")
        if isinstance(value, str) and get_origin(kind) is Literal:
            return f"{at} is {value!r}. Set {at}.name. Valid: {', '.join(get_args(kind))}."
        return f"{at} is {value!r}; expected keys and values below it: {below}."
    if get_origin(hints[at]) is Literal and isinstance(value, str):
        return f"{at} is {shown(value)}. {nearest(value, map(str, get_args(hints[at])))}"
    expected, fix = words(hints[at]), ""
    if errors[i]["type"] in _EXPECTED:
        expected = expected.replace("number", _EXPECTED[errors[i]["type"]])
    if isinstance(value, Mapping):
        fix = " It has no options below it."
    if isinstance(value, str) and _fits_without_quotes(value, hints[at]):
        fix = " Leave out the quotes."
    return f"{at} is {shown(value)}; expected {expected}.{fix}"


def _fits_without_quotes(text: str, hint: Any) -> bool:
    """Whether a text, read as unquoted YAML, fits an option's type."""
    try:
        value = parse(text, origin="the text")
        _value_adapter(hint).validate_python(value)
    except (ConfigError, ValidationError):
        return False
    return True


def _at(error: ErrorDetails, path: str, given: Any, hints: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the key path and value of an error, without the union members that pydantic adds."""
    for key in error["loc"]:
        if path in hints or not isinstance(given, Mapping):
            break
        path, given = f"{path}.{key}", given.get(key)
    return path, given
