"""Renders the templates of HTML and Markdown pages; every value is escaped."""

from __future__ import annotations

import html
import json
import re
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedshot import __version__
from fedshot.core.text import printable


def render(template: str, **values: Any) -> bytes:
    """Return a page as UTF-8. Control characters and line breaks are removed from the values."""
    page = environment().get_template(template)
    return page.render(version=__version__, **values).encode("utf-8", "replace")


@cache
def environment() -> Environment:
    """Return the Jinja2 environment of all templates."""
    made = Environment(
        loader=PackageLoader("fedshot.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(value),
    )
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return made


def render_markdown(template: str, **values: Any) -> str:
    """Return a Markdown page; values are escaped by `markdown_text`."""
    return _markdown().get_template(template).render(**values)


@cache
def _markdown() -> Environment:
    return environment().overlay(
        autoescape=False,
        keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markup) else markdown_text(value),
    )


def markdown_text(value: object) -> str:
    """Escape HTML tags, Markdown links and "|", which separates the columns of a table.

    Backslashes before a "|" are doubled, since they would cancel the backslash that escapes it.
    """
    text = html.escape(printable(value), quote=False)
    return re.sub(r"(\\*)\|", r"\1\1\\|", text).replace("](", r"]\(")


def template_source(name: str) -> Markup:
    """Return the text of a file in the templates folder, marked so that it is not escaped."""
    env = environment()
    assert env.loader is not None
    return Markup(env.loader.get_source(env, name)[0])


def plain(value: Any) -> str:
    """Return the value of a setting as text: a string unchanged, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
