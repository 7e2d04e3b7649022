"""Every option of a configuration, as text: what it takes, its default, and what it means.

All of it is read from the dataclasses and their docstrings; nothing is written twice.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any, get_type_hints

import docstring_parser

from fedshot.config.options import Option, options_of, shown, words
from fedshot.config.registry import KINDS, NO_HEAD, NOT_OPTIONS, SECTIONS
from fedshot.core.errors import ConfigError, nearest

PLACES = ("data", "split", "partition", "episode", "model", "model.backbone", "model.head",
          "method", "run", "test")  # fmt: skip
_WIDTH = 100


@dataclass(frozen=True)
class OptionSection:
    """A section, or one of the kinds that may stand at a place.

    Args:
        place: where it stands, such as "model.backbone".
        kind: its name there; "" for a section.
        cls: the dataclass.
    """

    place: str
    kind: str
    cls: type[Any]

    @property
    def summary(self) -> str:
        """What it is, in a sentence."""
        return str(docstring_parser.parse(self.cls.__doc__ or "").short_description or "")

    def options(self) -> Iterator[tuple[Option, str]]:
        """Yield every option with what it means."""
        for option in options_of(self.cls, self.place, NOT_OPTIONS.get(self.place, ())):
            names = option.place.removeprefix(f"{self.place}.").split(".")
            yield option, _meaning(self.cls, names)


@dataclass(frozen=True)
class _NoHead:
    """No head, for methods that answer from the features."""


def parts(place: str) -> list[OptionSection]:
    """Return what can stand at a place: a section, or kinds by name.

    Raises ConfigError for a place where nothing is.
    """
    if place in SECTIONS:
        return [OptionSection(place, "", SECTIONS[place])]
    if place in KINDS:
        found = [OptionSection(place, name, cls) for name, cls in KINDS[place][0].items()]
        return [*found, OptionSection(place, NO_HEAD, _NoHead)] if place == "model.head" else found
    above = next((one for one in PLACES if place.startswith(f"{one}.")), None)
    if above is not None:
        raise ConfigError(
            f"{place!r} is no place of its own. `fedshot options {above}` lists what is below it."
        )
    raise ConfigError(f"there are no options at {place!r}. {nearest(place, PLACES)}")


def overview() -> str:
    """Return a line for each place, and how to go on."""
    lines = []
    for place in PLACES:
        every = parts(place)
        what = every[0].summary if place in SECTIONS else ", ".join(part.kind for part in every)
        lines += _wrapped(f"{place:<16}", what)
    return "\n".join([*lines, "", "`fedshot options PLACE [NAME]` lists the options of one."])


def text(place: str, kind: str | None = None) -> str:
    """Return the options at a place; of a place of kinds its kinds, or the options of one.

    Raises ConfigError for a place, or a kind, that is none.
    """
    every = parts(place)
    if kind is None and place in KINDS:
        width = max(len(part.kind) for part in every) + 2
        lines = [line for part in every for line in _wrapped(f"{part.kind:<{width}}", part.summary)]
        return "\n".join([*lines, "", f"`fedshot options {place} NAME` lists the options of one."])
    held = {part.kind: part for part in every}
    if (kind or "") not in held:
        if place in SECTIONS:
            raise ConfigError(
                f"{place} has no kinds to choose {kind!r} from. `fedshot options {place}` lists "
                "all of its options."
            )
        raise ConfigError(f"there is no {place} {kind!r}. {nearest(str(kind), held)}")
    part = held[kind or ""]
    lines = [part.summary]
    for option, meaning in part.options():
        lines += ["", f"--{option.place} ({_takes(option)})", *_wrapped("    ", meaning)]
    return "\n".join(lines)


def markdown() -> str:
    """Return the page of all options: of every section, and of every kind of this package."""
    said = [_HEAD]
    for place in PLACES:
        said += [f"## {place}", ""]
        if place in KINDS:
            default = KINDS[place][1]
            said += [f"`{place}.name` chooses; `{default}` where it is not given.", ""]
        for part in parts(place):
            if not part.cls.__module__.startswith("fedshot."):
                continue
            said += [f"### {part.kind}", ""] if part.kind else []
            more = f" [Its page](methods/{part.kind}.md)." if place == "method" else ""
            said += [part.summary + more, "", *_table(part.options())]
    return "\n".join(said).rstrip() + "\n"


_HEAD = """\
# All options

Made by `fedshot options --markdown > docs/options.md`; not written by hand. Each is a key of the
configuration file and an option of the command line: `run.rounds` is `rounds:` below `run:`, and
`--run.rounds 50`. `fedshot options PLACE NAME` prints the same, and `fedshot methods NAME` that of
a method; what its options are for stands on its page. Beside the sections there are `name`, of the
run and its folder, and `seed`.
"""


def _table(options: Iterable[tuple[Option, str]]) -> list[str]:
    lines = [
        f"| `{option.place}` | {_cell(_default(option))} | {_cell(meaning)} |"
        for option, meaning in options
    ]
    return ["| option | default | what it is |", "|---|---|---|", *lines, ""] if lines else []


def _default(option: Option) -> str:
    return "must be given" if option.required else f"`{shown(option.default)}`"


def _cell(value: str) -> str:
    return " ".join(value.split()).replace("|", "\\|")


def _takes(option: Option) -> str:
    given = "must be given" if option.required else f"default {shown(option.default)}"
    return f"{words(option.hint)}; {given}"


def _meaning(cls: type[Any], names: list[str]) -> str:
    """Return what the docstring of a dataclass, or of one in it, says of an option."""
    first, *rest = names
    bases = [base for base in reversed(cls.__mro__) if is_dataclass(base)]
    every = [one for base in bases for one in docstring_parser.parse(base.__doc__ or "").params]
    told = {one.arg_name: one.description for one in every}
    mine, hint = " ".join((told.get(first) or "").split()), get_type_hints(cls)[first]
    if rest and isinstance(hint, type) and is_dataclass(hint):
        below = _meaning(hint, rest)
        return f"{mine.rstrip('.')}: {below}" if mine and below else below
    return mine


def _wrapped(head: str, what: str) -> list[str]:
    return textwrap.wrap(
        what, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head),
        break_on_hyphens=False,
    ) or [head.rstrip()]  # fmt: skip
