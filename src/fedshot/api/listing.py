"""Tables of the methods, datasets and options, displayed as text or HTML."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshot.config import option_help
from fedshot.config.options import MUST_BE_GIVEN, shown, summary
from fedshot.config.registry import KINDS
from fedshot.core.errors import ConfigError, nearest
from fedshot.core.extras import require
from fedshot.core.ranges import words
from fedshot.core.text import joined, printable
from fedshot.data.files.places import data_folder
from fedshot.data.sources.in_memory import InMemory
from fedshot.data.sources.publishers import PUBLISHERS
from fedshot.data.sources.registry import SOURCES
from fedshot.methods.registry import METHODS
from fedshot.reports.table import add_row, grid, plain_text

if TYPE_CHECKING:
    import pandas as pd  # an extra

_WIDTH = 100
# The paper in the paragraph "Source: ..." of a module, without section, equations and explanations.
_PAPER = re.compile(
    r"^Source: (.*?)(?=;|:\s+[a-z]|[,:]\s+(?:algorithm|section|appendi|eqs?\b|because)|"
    r"(?<=[a-z\d]{2})\.\s+[A-Z]|\.?\s*\Z|\n\n)",
    re.MULTILINE | re.DOTALL,
)


class Listing:
    """A table that prints as text and, in a notebook, as HTML.

    Iterating yields its rows, which are dicts. `listing["fl_proto"]` is the row with this name in
    the first column, and `listing[0]` the first row.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = [dict(row) for row in rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, key: int | str) -> dict[str, Any]:
        if not isinstance(key, str):
            return self._rows[key]
        if key not in self:
            raise KeyError(f"there is no row {key!r}. {nearest(key, self.names)}")
        return self._rows[self.names.index(key)]

    @property
    def names(self) -> list[str]:
        """The values of the first column."""
        return [str(next(iter(row.values()))) for row in self._rows]

    def to_pandas(self) -> pd.DataFrame:
        """Return the table as a DataFrame. Raises ConfigError if pandas is not installed."""
        return data_frame({name: [row[name] for row in self._rows] for name in self._columns})

    @property
    def _columns(self) -> list[str]:
        return list(self._rows[0]) if self._rows else []

    def __repr__(self) -> str:
        table = grid(self._columns, left=self._columns)
        for row in self._rows:
            add_row(table, map(_cell, row.values()))
        return plain_text(table, _WIDTH)

    def _repr_html_(self) -> str:
        return html_table(self._columns, [list(row.values()) for row in self._rows])


def html_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return the HTML of a table, with the text of every cell escaped."""

    def line(tag: str, cells: Sequence[Any]) -> str:
        inner = "".join(f'<{tag} style="text-align: left">{escape(_cell(one))}</{tag}>'
                        for one in cells)  # fmt: skip
        return f"<tr>{inner}</tr>"

    head = f"<thead>{line('th', columns)}</thead>" if columns else ""
    return f"<table>{head}<tbody>{''.join(line('td', row) for row in rows)}</tbody></table>"


def data_frame(columns: Mapping[str, Sequence[Any]]) -> pd.DataFrame:
    """Return a DataFrame with these columns. Raises ConfigError if pandas is not installed."""
    require("pandas", "a DataFrame")
    import pandas as pd

    return pd.DataFrame(dict(columns))


def methods() -> Listing:
    """Return a table of the methods: name, summary, and the paper that each implements.

    It includes the methods that your own code has registered. `fedshot.options(name)` lists the
    options of a method with their defaults.

    Example:
        ```python
        fs.methods()["fl_proto"]["paper"]
        ```
    """
    return Listing([
        {"name": name, "summary": _summary(cls), "paper": _paper(cls)}
        for name, cls in METHODS.items()
    ])  # fmt: skip


def datasets(data_dir: str | None = None) -> Listing:
    """Return a table of the data sources: name, where the data are, and a summary.

    Args:
        data_dir: folder of downloaded datasets; by default $FEDSHOT_DATA.

    Example:
        ```python
        fs.datasets().names
        ```
    """
    folder = data_folder(data_dir)
    return Listing([
        {"name": name, "available": availability(name, folder), "summary": _summary(cls)}
        for name, cls in SOURCES.items()
    ])  # fmt: skip


def options(place: str, name: str | None = None) -> Listing:
    """Return the options of a section or of a component, such as a method, with their defaults.

    Args:
        place: a section ("run"), the name of a component ("fl_proto", "conv4"), or a key path at
            which a component is chosen ("method", "model.backbone"). Such a key path without
            `name` lists the components that can be chosen there.
        name: name of the component, if `place` is a key path.

    Raises ConfigError if there is no such section or component.

    Example:
        ```python
        fs.options("fl_proto")
        fs.options("model.backbone", "conv4")
        ```
    """
    if name is None and place in KINDS:
        return Listing([{"name": p.kind, "summary": p.summary} for p in option_help.parts(place)])
    owners = [path for path, (kinds, _) in KINDS.items() if place in kinds]
    if name is None and owners:
        place, name = owners[0], place
    elif name is None and place not in option_help.PATHS:
        components = {kind for kinds, _ in KINDS.values() for kind in kinds}
        near = [close[0] for words in (option_help.PATHS, components)
                if (close := difflib.get_close_matches(place, words, 1))]  # fmt: skip
        fix = (
            f"Did you mean {joined([repr(word) for word in near], 'or')}?"
            if near
            else nearest(place, {*option_help.PATHS, *components})
        )
        raise ConfigError(f"there are no options of {place!r}. {fix}")
    return Listing([
        {"option": option.path, "default": MUST_BE_GIVEN if option.required else option.default,
         "takes": words(option.hint), "meaning": option.description}
        for option in option_help.part(place, name or "").options()
    ])  # fmt: skip


def availability(name: str, folder: Path) -> str:
    """Return where the data of a source or publisher are, such as "downloaded" or "included".

    If they are missing, the text says how to get them.
    """
    if name not in PUBLISHERS:
        if SOURCES[name] is InMemory:
            return "in memory"
        options = fields(SOURCES[name])  # type: ignore[arg-type]
        return "your files" if any(one.default is MISSING for one in options) else "included"
    place = folder / PUBLISHERS[name].folder
    if place.is_dir() and any(place.iterdir()):
        return "downloaded"
    by_command = PUBLISHERS[name].files
    return f"missing: {'`fedshot data get NAME`' if by_command else 'manual download'}"


def _summary(cls: type[Any]) -> str:
    return summary(cls)  # type: ignore[arg-type]  # a class is hashable


def _paper(method: type[Any]) -> str:
    """Return the first source that the docstring of a method's module names; "" if none."""
    found = _PAPER.search(sys.modules[method.__module__].__doc__ or "")
    return " ".join(found[1].split()) if found else ""


def _cell(value: Any) -> str:
    return printable(value if isinstance(value, str) else shown(value))
