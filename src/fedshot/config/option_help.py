"""Help on every option of a configuration, as text, as Markdown and as JSON Schema.

It is generated from the dataclasses of the options and their docstrings.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, make_dataclass
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from fedshot.config.options import (
    MUST_BE_GIVEN,
    Option,
    options_of,
    shown,
    summary,
)
from fedshot.config.registry import KINDS, NONE, OPTIONAL, SECTIONS
from fedshot.config.validation import schema_of
from fedshot.core.errors import ConfigError, nearest
from fedshot.core.ranges import words

PATHS = ("data", "split", "partition", "episode", "model", "model.backbone", "model.head",
         "model.encoder", "method", "run", "test", "privacy", "attack", "aggregate",
         "compress", "compress.up", "compress.down")  # fmt: skip
_WIDTH = 100


@dataclass(frozen=True)
class OptionSection:
    """A section of a configuration, or a component that can be chosen at a key path.

    Args:
        path: key path, such as "model.backbone".
        kind: name of the component, such as "conv4"; "" for a section.
        cls: dataclass of the section or component.
    """

    path: str
    kind: str
    cls: type[Any]

    @property
    def summary(self) -> str:
        """The summary line of the dataclass's docstring."""
        return summary(self.cls)  # type: ignore[arg-type]  # a class is hashable

    def options(self) -> Iterator[Option]:
        """Yield every option of the section or component."""
        return options_of(self.cls, self.path)

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the section or component; nested dataclasses are in `$defs`."""
        title = "_".join(filter(None, (self.path.replace(".", "_"), self.kind)))
        schema = TypeAdapter(schema_of(self.cls, self.path, title=title, described=True))
        return schema.json_schema(schema_generator=_Untitled) | {"description": self.summary}


_NO: dict[str, type[Any]] = {
    path: make_dataclass("No", (), namespace={"__doc__": text, "__module__": __name__})
    for path, text in {
        "model.head": "No head, for methods that classify from the features.",
        "model.encoder": "No encoder: the backbone takes the data themselves.",
        "privacy": "No differential privacy.",
        "attack": "All clients are honest.",
        "compress.up": "Messages are not compressed.",
        "compress.down": "Messages are not compressed.",
    }.items()
}


class _Untitled(GenerateJsonSchema):
    """Schema generator without the titles that pydantic derives from the names of options."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        del schema
        return False


def parts(path: str) -> list[OptionSection]:
    """Return the section at a key path, or all components that can be chosen there.

    Raises ConfigError if the key path has neither.
    """
    if path in SECTIONS:
        return [OptionSection(path, "", SECTIONS[path])]
    if path in KINDS:
        found = [OptionSection(path, name, cls) for name, cls in KINDS[path][0].items()]
        return [*found, OptionSection(path, NONE, _NO[path])] if path in OPTIONAL else found
    above = next((one for one in PATHS if path.startswith(f"{one}.")), None)
    if above is not None:
        raise ConfigError(
            f"{path!r} is not a section of its own. `fedshot options {above}` lists the options "
            "below it."
        )
    raise ConfigError(f"there are no options at {path!r}. {nearest(path, PATHS)}")


def part(path: str, kind: str = "") -> OptionSection:
    """Return the section at a key path, or the component named `kind` that can be chosen there.

    Raises ConfigError for a key path or a component that does not exist.
    """
    every = {one.kind: one for one in parts(path)}
    if kind in every:
        return every[kind]
    if path in SECTIONS:
        raise ConfigError(
            f"`{path}` is a section without components, so it takes no name {kind!r}. Leave it out."
        )
    raise ConfigError(f"there is no {path} {kind!r}. {nearest(kind, every)}")


def overview() -> str:
    """Return a line of help for each key path, and a line on how to see the options."""
    lines = _list([
        (path, summary(SECTIONS[path]) if path in SECTIONS  # type: ignore[arg-type]
         else ", ".join(part.kind for part in parts(path)))
        for path in PATHS
    ])  # fmt: skip
    return "\n".join([*lines, "", "`fedshot options PLACE [NAME]` lists the options of a place."])


def text(path: str, kind: str | None = None) -> str:
    """Return help on the options of a section, or of the component named `kind`.

    Without `kind`, list the components that can be chosen at the key path. Raises ConfigError for
    a key path or a component that does not exist.
    """
    if kind is None and path in KINDS:
        lines = _list([(one.kind, one.summary) for one in parts(path)])
        return "\n".join([*lines, "", f"`fedshot options {path} NAME` lists the options of NAME."])
    section = part(path, kind or "")
    lines = [section.summary]
    for one in section.options():
        given = MUST_BE_GIVEN if one.required else f"default {shown(one.default)}"
        takes = f"--{one.path} ({words(one.hint)}; {given})"
        lines += ["", takes, *_wrapped("    ", one.description)]
    return "\n".join(lines)


def pages() -> dict[str, str]:
    """Return the Markdown pages of `docs/options`, keyed by file name.

    They list the options of all sections and of all of fedshot's components: a page for each
    section, a page for each family of methods, and `index.md`.
    """
    found: dict[str, list[str]] = {}
    index = [_INDEX]
    for path in PATHS:
        row: list[str] = []
        for part in parts(path):
            if not part.cls.__module__.startswith("fedshot."):
                continue
            name, title = _page(part)
            page = found.setdefault(name, [f"# {title}", "", _HEAD])
            same = sum(line.endswith(f"# {part.kind}") for line in page)  # headings before it
            page += _section(part, first=not row, titled=title == path)
            link = f"{name}#{part.kind}{f'_{same}' if same else ''}" if part.kind else name
            row.append(f"[`{part.kind or path}`]({link})")
        default = f"`{KINDS[path][1]}`" if path in KINDS else ""
        index.append(f"| `{path}` | {', '.join(row)} | {default} |")
    lines = {"index.md": index} | found
    return {name: "\n".join(page).rstrip() + "\n" for name, page in lines.items()}


def _page(part: OptionSection) -> tuple[str, str]:
    """Return the file name and the title of the page that lists a section or component."""
    if part.path != "method":
        section = part.path.split(".")[0]
        return f"{section}.md", section
    family = part.cls.__module__.split(".")[2]
    return f"method-{family}.md", f"method: {_FAMILIES.get(family, family)}"


def _section(part: OptionSection, *, first: bool, titled: bool) -> Iterator[str]:
    """Yield the lines of a section or component; `first` adds the heading of its key path."""
    if first and part.path != "method":
        yield from () if titled else (f"## {part.path}", "")
        if part.path in KINDS:
            yield from (f"`{part.path}.name` chooses one of these; the default is "
                        f"`{KINDS[part.path][1]}`.", "")  # fmt: skip
    if part.kind:
        yield from (f"{'##' if titled or part.path == 'method' else '###'} {part.kind}", "")
    more = f" [Its page](../methods/{part.kind}.md)." if part.path == "method" else ""
    yield from (part.summary + more, "")
    if rows := [_row(one) for one in part.options()]:
        yield from ("| option | default | meaning |", "|---|---|---|", *rows, "")


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a whole configuration, with all sections and components."""
    defs: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for path in PATHS:
        kinds = []
        for part in parts(path):
            schema = part.json_schema()
            defs |= schema.pop("$defs", {})
            kinds.append(schema)
            if part.kind:
                kind = {"const": part.kind, "description": part.summary}
                schema["properties"] = {"name": kind, **schema["properties"]}
                if part.kind != KINDS[path][1]:
                    schema["required"] = ["name", *schema.get("required", [])]
        if path in SECTIONS:
            found[path] = kinds[0] | {"type": ["object", "null"]}
        else:
            names = {"enum": [part.kind for part in parts(path)]}
            found[path] = {"anyOf": [names, *kinds], "default": KINDS[path][1]}
    for path in filter(lambda one: "." in one, PATHS):
        section, _, last = path.partition(".")
        found[section]["properties"][last] = found.pop(path)
    name = {"type": ["string", "number", "boolean"], "default": "run",
            "description": "Name of the run and of its folder."}  # fmt: skip
    seed = {"type": "integer", "default": 0, "description": "Seed of everything that is random."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A configuration of fedshot",
        "type": "object",
        "properties": {"name": name, "seed": seed, **found},
        "additionalProperties": False,
        "$defs": defs,
    }


_INDEX = """\
# Options

The pages of this table list every option of a configuration. An option is a key of the YAML file
and an option of the command line: `run.rounds` is `rounds:` below `run:`, or `--run.rounds 50`.
Beside the sections there are `name`, the name of the run and its folder, and `seed`.

`fedshot options PLACE NAME` prints one section, `fedshot methods NAME` the options of a method.
`fedshot config schema` prints all of them for [editors](../start.md#completion).

`fedshot options --markdown docs/options` writes these pages.

| key path | options | default |
|---|---|---|"""
_HEAD = "[All options](index.md). `fedshot options --markdown docs/options` writes this page.\n"
_FAMILIES = {"base": "controls", "fedfsl": "FedFSL", "f2l": "F2L", "frl": "few-round learning",
             "one_round": "one round", "personal": "personal models"}  # fmt: skip


def _row(option: Option) -> str:
    default = MUST_BE_GIVEN if option.required else f"`{shown(option.default)}`"
    cells = (f"`{option.path}`", default, option.description)
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _list(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows) + 2
    return [line for name, what in rows for line in _wrapped(f"{name:<{width}}", what)]


def _wrapped(head: str, what: str) -> list[str]:
    return textwrap.wrap(
        what, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head),
        break_on_hyphens=False,
    ) or [head.rstrip()]  # fmt: skip
