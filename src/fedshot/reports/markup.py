"""Pieces of HTML. What comes from data or settings is escaped here, by `e` or `island`."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedshot.core.text import printable


def e(text: object) -> str:
    """Return the text on one line, safe between tags and in attributes."""
    return html.escape(printable(text))


def section(name: str, title: str, parts: Iterable[str]) -> str:
    """Return a part of the page with a heading; empty when there is nothing in it."""
    inside = "\n".join(part for part in parts if part)
    if not inside:
        return ""
    return f'<section id="{name}" aria-label="{e(title)}"><h2>{e(title)}</h2>\n{inside}\n</section>'


def figure(
    name: str, title: str, caption: str, choices: Sequence[tuple[str, Any]], kind: str = "wide"
) -> str:
    """Return a place where the page's script draws a figure, with a button for each choice.

    Args:
        name: an id of its own.
        title: what it shows, for those who do not see it.
        caption: below it.
        choices: (what the button says, plotly's tree); the first is drawn, one alone has no button.
        kind: "wide", or "square" for what would be stretched.
    """
    buttons = "".join(
        f'<button type="button" aria-controls="{name}" aria-pressed="{str(not i).lower()}">'
        f"{e(label)}</button>"
        for i, (label, _) in enumerate(choices)
    )
    switch = (
        f'<div class="switch" role="group" aria-label="Show: {e(title)}">{buttons}</div>'
        if len(choices) > 1
        else ""
    )
    return (
        f'<figure class="{kind}">{switch}'
        f'<div class="plot" id="{name}" role="img" aria-label="{e(title)}"></div>'
        f'<script type="application/json" data-for="{name}">'
        f"{island([tree for _, tree in choices])}</script>"
        f"<figcaption>{e(caption)}</figcaption></figure>"
    )


def island(value: Any) -> str:
    """Return JSON that no parser of HTML can mistake for anything else."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "", name: str) -> str:
    """Return a table in a frame that scrolls by itself.

    Cells are HTML already. `kind` is a class of the table, `name` what a screen reader says.
    """
    said = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    return framed(f"<thead><tr>{said}</tr></thead><tbody>{body}</tbody>", kind=kind, name=name)


def framed(inside: str, *, kind: str, name: str) -> str:
    """Return the inside of a table in its frame."""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{e(name)}">'
        f'<table class="{kind}">{inside}</table></div>'
    )


def folded(title: str, beside: str, inside: str) -> str:
    """Return what opens at a click."""
    return (
        f"<details><summary>{e(title)} <span>{e(beside)}</span></summary>"
        f'<div class="inside">{inside}</div></details>'
    )


def pairs(title: str, tree: Mapping[str, Any]) -> str:
    """Return names and values of a tree, nested names joined by dots."""
    lines = (f"<dt>{e(k)}</dt><dd><code>{e(plain(v))}</code></dd>" for k, v in tree.items())
    return f"<h3>{e(title)}</h3><dl>{''.join(lines)}</dl>" if tree else ""


def plain(value: Any) -> str:
    """Return a setting as a reader would type it."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
