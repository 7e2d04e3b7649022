"""Settings as a tree of plain values: read from YAML, merged, and looked up by key path.

Unlike in YAML 1.1, `010` is ten, `1e-3` is a number, and `no` and `2024-01-01` are texts. A key
that is given twice is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import yaml

from fedshot.core import records
from fedshot.core.errors import CheckpointError, ConfigError

Settings: TypeAlias = dict[str, Any]
IsText: TypeAlias = Callable[[str], bool]
"""Function that says whether the option at a key path takes text, so that `2024` is text."""

_MOST_NODES = 100_000  # nested anchors can expand a small file enormously
_MOST_BYTES = 4 << 20  # of a file; parsing takes about a second per 100 KB
_UNTAGGED = "untagged"  # tag of a scalar that has neither quotes nor a tag in the text
_TAGS = {
    yaml.ScalarNode: {_UNTAGGED, "tag:yaml.org,2002:str"},
    yaml.SequenceNode: {"tag:yaml.org,2002:seq"},
    yaml.MappingNode: {"tag:yaml.org,2002:map"},
}
_CONSTANTS = {"~": None, "": None} | {
    form(word): value
    for word, value in (("true", True), ("false", False), ("null", None))
    for form in (str.lower, str.title, str.upper)
}
# Python refuses to parse integers of more than 4300 digits; these are read as float infinity.
_INT = re.compile(r"[-+]?[0-9]{1,4000}")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)


class _Loader(yaml.SafeLoader):
    """Composes nodes; scalars with neither quotes nor a tag get the tag `_UNTAGGED`."""

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        event: yaml.ScalarEvent = self.peek_event()  # type: ignore[no-untyped-call]
        if event.tag == "!":  # the tag that makes a text of anything
            event.implicit = (False, True)
        return super().compose_scalar_node(anchor)


_Loader.yaml_implicit_resolvers = {None: [(_UNTAGGED, re.compile(""))]}


def load(path: Path, is_text: IsText = lambda _: False) -> Settings:
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


def parse(text: str, is_text: IsText = lambda _: False, *, origin: str, path: str = "") -> Any:
    """Return the value that a YAML text holds.

    Args:
        text: YAML.
        is_text: whether the option at a key path takes text.
        origin: name of the text in error messages, such as its file name.
        path: the key path of the value; "" for the whole tree of settings.

    Raises:
        ConfigError: the text is not YAML, gives a key twice, or uses a custom tag.
    """
    try:
        node = yaml.compose(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin} is not YAML: {_problem(error)}.") from None
    except RecursionError:
        raise ConfigError(f"{origin} is nested too deeply.") from None
    except (ValueError, OverflowError):  # of a number, such as that of a character
        raise ConfigError(
            f"{origin} is not YAML: the number of an escape such as \\U00110000 is too large. "
            "Correct it, or write the character itself."
        ) from None
    if node is None:
        return "" if is_text(path) else None
    return _Reader(origin, is_text).value(node, path, set())


class _Reader:
    """Turns the nodes of a YAML document into plain values; refuses tags and duplicate keys."""

    def __init__(self, origin: str, is_text: IsText) -> None:
        self._origin, self._is_text, self._nodes = origin, is_text, 0

    def value(self, node: yaml.Node, path: str, seen: set[str], depth: int = 0) -> Any:
        """Return a node's value; `seen` has the key paths that already have a value."""
        self._nodes += 1
        if self._nodes > _MOST_NODES:
            self._refuse(node, f"more than {_MOST_NODES} values. Use fewer anchors")
        if depth > records.DEEPEST:
            nested = f"nested deeper than {records.DEEPEST} lists and sections"
            self._refuse(node, f"{nested}, or an anchor contains itself. Write the value out")
        if node.tag not in _TAGS[type(node)]:
            self._refuse(node, f"the tag {node.tag[:60]!r} is not known here. Leave it out")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, seen, depth + 1)
        if isinstance(node, yaml.SequenceNode):  # each item has its own key paths
            return [self.value(item, path, set(), depth + 1) for item in node.value]
        if node.tag == _UNTAGGED:
            return _plain(node.value, is_text=self._is_text(path))
        return node.value

    def _mapping(
        self, node: yaml.MappingNode, path: str, seen: set[str], depth: int
    ) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._refuse(key, "a key is a list or a tree. Expected a word")
            if key.value == "<<" and key.style is None:
                above = self.value(value, path, set(), depth)
                for one in reversed(above if isinstance(above, list) else [above]):
                    if not isinstance(one, dict):
                        self._refuse(value, "'<<' merges a value that is not a mapping")
                    merged |= one
                continue
            whole = f"{path}.{key.value}" if path else key.value
            if key.value in own or whole in seen:
                self._refuse(key, f"{whole!r} is given twice. Keep one of them")
            if not isinstance(value, yaml.MappingNode):
                seen.add(whole)
            own[key.value] = self.value(value, whole, seen, depth)
        return merged | own

    def _refuse(self, node: yaml.Node, text: str) -> NoReturn:
        raise ConfigError(f"{self._origin}, line {node.start_mark.line + 1}: {text}.")


def _plain(text: str, *, is_text: bool) -> Any:
    """Return the value of an unquoted scalar; numbers and booleans stay text if `is_text`."""
    if text in _CONSTANTS and (_CONSTANTS[text] is None or not is_text):
        return _CONSTANTS[text]
    if not is_text and _INT.fullmatch(text):
        return int(text)
    if not is_text and _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


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
    """Set the value at a key path; a tree is merged into an existing tree."""
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
