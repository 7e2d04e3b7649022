"""Settings as a tree of plain values: read from YAML, merged, and looked up by key path.

Unlike in YAML 1.1, `010` is ten, `1e-3` is a number, and `no` and `2024-01-01` are texts. A key
that is given twice is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from fedshot.core import records
from fedshot.core.errors import CheckpointError, ConfigError

Settings: TypeAlias = dict[str, Any]
IsText: TypeAlias = Callable[[str], bool]
"""Says whether the option at a key path takes text, so that `2024` must be read as text there."""

_MOST_NODES = 100_000  # nested anchors can expand a small file enormously
_MOST_BYTES = 4 << 20  # of a file; parsing it takes about a second per 100 KB
_PREFIX = "tag:yaml.org,2002:"
_NO_TAGS = {_PREFIX + name for name in ("binary", "omap", "pairs", "set", "timestamp")}


class _Loader(yaml.SafeLoader):
    """Reads unquoted words as text, except decimal numbers, booleans and null."""

    def decimal(self, node: yaml.ScalarNode) -> int:
        return int(node.value)


_Loader.yaml_implicit_resolvers = {}
for _tag, _words, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    # Python refuses to parse integers of more than 4300 digits; they are read as float infinity.
    ("int", r"[-+]?[0-9]{1,4000}", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(
        _PREFIX + _tag, re.compile(f"(?:{_words})$"), [*_first, ""] if _tag == "null" else [*_first]
    )
_Loader.add_constructor(f"{_PREFIX}int", _Loader.decimal)


def load(path: Path, is_text: IsText) -> Settings:
    """Read settings from a YAML file. Raises ConfigError if it does not hold a tree of settings."""
    try:
        text = records.content(path, _MOST_BYTES, "Name a YAML file of settings").decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist.") from None
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: {error}.") from None
    settings = parse(text, is_text, origin=str(path))
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{path} holds {'nothing' if settings is None else repr(settings)[:60]}; expected keys "
            "and values, such as `data: {name: digits}`."
        )
    return settings


def parse(text: str, is_text: IsText, *, origin: str, path: str = "") -> Any:
    """Return the value that a YAML text holds.

    Args:
        text: YAML.
        is_text: whether the option at a key path takes text.
        origin: name of the text in error messages, such as its file name.
        path: the key path of the value; "" for the whole tree of settings.

    Raises:
        ConfigError: the text is not YAML, gives a key twice, or has an anchor that contains itself.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return "" if not text and path and is_text(path) else None
            _DocumentCheck(origin, is_text).check(node, path, ())
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin} is not YAML: {_problem(error)}.") from None
    except RecursionError:
        raise ConfigError(f"{origin} is nested too deeply.") from None
    except (ValueError, LookupError) as error:  # `!!int x`, `!!bool 3`
        raise ConfigError(f"{origin} holds a value that is not of its tag: {error}.") from None


class _DocumentCheck:
    """Checks the nodes of a YAML document before the loader turns them into values."""

    def __init__(self, origin: str, is_text: IsText) -> None:
        self._origin, self._is_text, self._seen = origin, is_text, 0
        self._values: set[str] = set()  # key paths that have a value, dotted or nested
        self._merging = 0

    def check(self, node: yaml.Node, path: str, above: tuple[yaml.Node, ...]) -> None:
        """Refuse an ambiguous or too large node, and tag the values of text options as text."""
        self._seen += 1
        if any(node is one for one in above):
            self._refuse(node, "an anchor holds itself. Write the value out")
        if self._seen > _MOST_NODES:
            self._refuse(node, f"more than {_MOST_NODES} values. Use fewer anchors")
        if len(above) > records.DEEPEST:
            self._refuse(node, f"nested deeper than {records.DEEPEST} lists and sections")
        if node.tag in _NO_TAGS:
            self._refuse(node, f"the tag {node.tag[:60]!r} is not known here. Leave it out")
        below = (*above, node)
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node, path, below)
        elif isinstance(node, yaml.SequenceNode):
            values = self._values
            for item in node.value:
                self._values = set()  # each item has its own key paths
                self.check(item, path, below)
            self._values = values
        elif _is_bare(node) and self._is_text(path):
            node.tag = f"{_PREFIX}str"

    def _check_keys(self, node: yaml.MappingNode, path: str, below: tuple[yaml.Node, ...]) -> None:
        found = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._refuse(key, "a key is a list or a tree. Expected a word")
            if key.tag == f"{_PREFIX}merge":
                self._merging += 1  # keys of this mapping override merged ones
                self.check(value, path, below)
                self._merging -= 1
                continue
            key.tag = f"{_PREFIX}str"
            whole = f"{path}.{key.value}" if path else key.value
            twice = whole in self._values and not self._merging
            if key.value in found or twice:
                self._refuse(key, f"{whole!r} is given twice. Keep one of them")
            found.add(key.value)
            if not self._merging and not isinstance(value, yaml.MappingNode):
                self._values.add(whole)
            self.check(value, whole, below)

    def _refuse(self, node: yaml.Node, text: str) -> None:
        raise ConfigError(f"{self._origin}, line {node.start_mark.line + 1}: {text}.")


def _is_bare(node: yaml.Node) -> bool:
    """Whether a scalar has no quotes and is not null."""
    bare = isinstance(node, yaml.ScalarNode) and node.style is None
    return bare and node.tag != f"{_PREFIX}null"


def _problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})"
    return " ".join(str(error).split())


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key path, value) for the leaves of a tree; an empty tree is a leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def at(tree: Mapping[str, Any], path: str) -> Any:
    """Return the value at a key path; None if the path does not exist."""
    found: Any = tree
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def put(tree: Settings, path: str, value: Any) -> None:
    """Set the value at a key path; a tree is merged into the tree that is there."""
    *above, last = path.split(".")
    section = tree
    for i, part in enumerate(above):
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ConfigError(
                f"{path} cannot be set: {'.'.join(above[: i + 1])} is {section!r}, not a section "
                "of keys and values."
            )
    section[last] = merged(section.get(last), value)


def merged(old: Any, new: Any) -> Any:
    """Return `new` merged over `old`: trees key by key, other values replaced."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    return {**old, **{key: merged(old.get(key), value) for key, value in new.items()}}


def without_nulls(tree: Mapping[str, Any]) -> Settings:
    """Return a tree without the keys whose value is null."""
    return {
        key: without_nulls(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
        if value is not None
    }
