"""Reading the JSON records of runs, recipes and nodes, with limits and a schema.

A record may come from another machine, or be damaged, so neither its size, nor its depth, nor its
values are trusted. A schema is a type, usually a `TypedDict`, that declares what the reader relies
on; keys that it does not declare may hold anything. `read` returns the JSON value unchanged, or
raises CheckpointError with the file, the key and the line.
"""

from __future__ import annotations

import errno
import json
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from fedshot.core.errors import CheckpointError
from fedshot.core.regular_files import read_regular

COPY = "Restore it from a copy"
LARGEST = 2**64
"""Integers in a record must be smaller than this in absolute value."""
DEEPEST = 32
"""Lists and objects may be nested this deep."""

_MOST_BYTES = 64 << 20
_MOST_VALUES = 5_000_000  # a list of empty lists takes thirty times the memory of its text
_MOST_LINES = 2 << 30  # most bytes of a file with one record per line
# pydantic's error types for a missing key; its older versions give the second for named tuples.
_MISSING = ("missing", "missing_argument")
_FIND_LINE = 256 << 10  # the line of a key is only searched in texts of at most this many bytes

Whole: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
"""A count, a number of bytes, or the index of a round, a client or an episode."""
Finite: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class _DamageError(Exception):
    """A record is damaged. `keys` are the path of the damaged value; `line` is its line number."""

    def __init__(self, why: str, keys: tuple[Any, ...] = (), line: int | None = None) -> None:
        super().__init__(why)
        self.why, self.keys, self.line = why, keys, line


def content(path: Path, most: int | None = _MOST_BYTES, fix: str = COPY) -> bytes:
    """Return the content of a regular file of at most `most` bytes, or of any size for None.

    `fix` is as in `read`.

    Raises:
        CheckpointError: the path is a folder, a pipe or a device, or the file is larger.
        OSError: the file does not exist, or cannot be read.
    """
    with refusing(path, fix):
        return read_regular(path, most)


@contextmanager
def refusing(path: Path, fix: str = COPY) -> Iterator[None]:
    """Raise CheckpointError in place of the OSError for a folder, a pipe, or too large a file.

    `fix` is as in `read`; other errors of reading name the file afterwards.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EISDIR, errno.EFBIG):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise CheckpointError(f"{path} cannot be read ({error.strerror}). {fix}.") from None


def read(path: Path, schema: Any, fix: str = COPY) -> Any:
    """Return the value of a JSON file, checked against a schema.

    Args:
        path: the file.
        schema: the type that its content must have.
        fix: what to do about a damaged file, a sentence without its full stop.

    Raises CheckpointError and OSError as `content` does, and CheckpointError for content that is
    not JSON, exceeds the limits, or does not match the schema.
    """
    return parse(content(path, fix=fix), schema, str(path), fix)


def parse(data: bytes, schema: Any, origin: str, fix: str = COPY) -> Any:
    """Return the value of a JSON text, checked as in `read`; errors call the text `origin`."""
    try:
        return _checked(data, schema)
    except _DamageError as error:
        line = error.line or _line(data, error.keys)
        raise _refusal(error, origin, line, fix) from None


def load(path: Path, schema: Any, fix: str = COPY) -> Any:
    """Return the content of a JSON file as a value of the type `schema`, such as a dataclass.

    Arguments and errors are those of `read`.
    """
    data = content(path, fix=fix)
    value = parse(data, Any, str(path), fix)
    try:
        return _adapter(schema).validate_json(data, strict=True)
    except ValidationError as error:
        damage = _damage(error, value)
        raise _refusal(damage, str(path), _line(data, damage.keys), fix) from None


def read_lines(path: Path, schema: Any, fix: str = COPY) -> list[Any]:
    """Return the records of a JSON Lines file; a truncated last line is left out.

    Arguments and errors are those of `read`.
    """
    *lines, _ = content(path, _MOST_LINES, fix).split(b"\n")
    found = []
    for n, line in enumerate(lines, 1):
        if line:
            try:
                found.append(_checked(line, schema))
            except _DamageError as error:
                raise _refusal(error, str(path), n, fix) from None
    return found


def check(value: Any, schema: Any, path: Path, fix: str = COPY) -> None:
    """Raise CheckpointError unless a value that was read from `path` matches a schema."""
    try:
        _check(value, schema)
    except _DamageError as error:
        text = content(path) if path.suffix in (".yaml", ".json") else b""
        raise _refusal(error, str(path), _line(text, error.keys), fix) from None


def _refusal(error: _DamageError, origin: str, line: int | None, fix: str) -> CheckpointError:
    key = ".".join(str(part) for part in error.keys)[:200]
    where = f" (line {line})" if line else ""
    damage = f"{key} {error.why}" if key else error.why
    return CheckpointError(f"{origin} is damaged: {damage}{where}. {fix}.")


def _checked(data: bytes, schema: Any) -> Any:
    if len(data) > _MOST_BYTES:
        raise _DamageError(f"it holds {len(data):,} bytes, expected at most {_MOST_BYTES:,}")
    if data.count(b",") + data.count(b"[") + data.count(b"{") > _MOST_VALUES:
        raise _DamageError(f"it holds more than {_MOST_VALUES:,} values")
    try:
        value = json.loads(data.decode("utf-8"))
    except json.JSONDecodeError as error:
        line = error.lineno if b"\n" in data else None
        raise _DamageError(
            f"it is not JSON ({error.msg.removesuffix(' at')} at column {error.colno})", line=line
        ) from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1 if b"\n" in data else None
        raise _DamageError(f"it is not text in UTF-8 ({error.reason})", line=line) from None
    except RecursionError:
        raise _DamageError(f"it is nested deeper than {DEEPEST} lists and objects") from None
    except ValueError:  # Python refuses integers of more than 4300 digits
        raise _DamageError("it holds a whole number of thousands of digits") from None
    _check(value, schema)
    return value


def _excesses(value: Any) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield (keys, message) for values that are nested too deeply and for integers too large."""
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    while waiting:
        keys, value = waiting.pop()
        if isinstance(value, int) and not -LARGEST < value < LARGEST:
            yield keys, f"is a whole number of {value.bit_length()} bits, expected at most 64"
        if not isinstance(value, dict | list):
            continue
        if len(keys) >= DEEPEST:
            yield keys, f"is nested deeper than {DEEPEST} lists and objects"
            continue
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        waiting += [((*keys, k), v) for k, v in inside if isinstance(v, dict | list | int)]


def _check(value: Any, schema: Any) -> None:
    """Raise _DamageError unless a value is within the limits and matches a schema."""
    for keys, why in _excesses(value):
        raise _DamageError(why, keys)
    try:
        _adapter(schema).validate_python(value, strict=True)
    except ValidationError as error:
        raise _damage(error, value) from None


def _damage(error: ValidationError, value: Any) -> _DamageError:
    first = error.errors(include_url=False, include_context=False)[0]
    location, said = first["loc"], first["msg"]
    if first["type"] in _MISSING:
        return _DamageError(f"has no {location[-1]!r}", location[:-1])
    why = f"is {reprlib.repr(first['input'])}; {said[:1].lower()}{said[1:]}"
    return _DamageError(why, _keys(value, location))


@lru_cache(maxsize=64)
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def _keys(value: Any, location: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return pydantic's error location without the names of union members, which are not keys."""
    found: list[Any] = []
    for part in location:
        try:
            value = value[part]
        except (LookupError, TypeError):
            continue
        found.append(part)
    return tuple(found)


def _line(data: bytes, keys: tuple[Any, ...]) -> int | None:
    """Return the line number, counted from 1, of the value at the path `keys` in a JSON text.

    Returns None if the text is long or has a single line.
    """
    if b"\n" not in data.strip() or len(data) > _FIND_LINE or not keys:
        return None
    try:
        node: Any = yaml.compose(data.decode("utf-8"), Loader=yaml.SafeLoader)  # JSON is YAML
        for part in keys:
            if isinstance(node, yaml.MappingNode):
                node = next(inner for key, inner in node.value if key.value == part)
            else:
                node = node.value[part]
        return int(node.start_mark.line) + 1
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, StopIteration,
            RecursionError):  # fmt: skip
        return None
