"""Rows that a folder of results adds to the recipes: `RESULTS/NAME/rows.yaml`, by key.

Each is written as a row of a recipe is, and is held to what such a row is held to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedshot import settings as trees
from fedshot.errors import ConfigError, nearest
from fedshot.recipes.recipe import Recipe, check, row_of

OWN_ROWS = "rows.yaml"
_KEY = re.compile(r"[A-Za-z0-9_-]{1,60}")
_NUMBERS = "a list with a number in percent, or null, for each column"
# What a row may hold, what that is, and what is in it if it is a list.
_PARTS: dict[str, tuple[type, str, tuple[type, ...]]] = {
    "label": (str, "text, in quotes where it is a number", ()),
    "settings": (dict, "keys and values", ()),
    "published": (list, _NUMBERS, (int, float, type(None))),
    "spread": (list, _NUMBERS, (int, float, type(None))),
    "exchanges": (int, "1 or more", ()),
    "tune": (dict, "options and their search spaces", ()),
    "departs": (list, "a list of texts", (str,)),
    "trained_as": (str, "the key of a row", ()),
    "at": (dict, "axes and numbers", ()),
}


def load(name: str, results: Path) -> Recipe:
    """Read a recipe with the rows of a folder of results. Raises ConfigError as `joined` does."""
    recipe, file = Recipe.load(name), results / name / OWN_ROWS
    if not file.exists():
        return recipe
    return joined(recipe, trees.load(file, lambda _: False), str(file))


def joined(recipe: Recipe, tree: Mapping[str, Any], origin: str) -> Recipe:
    """Return a recipe with more rows. Raises ConfigError for rows that cannot be."""
    if not recipe.rows:
        raise ConfigError(f"{origin} adds rows to {recipe.name}, a picture without rows.")
    rows = dict(recipe.rows)
    for key, parts in tree.items():
        _check_row(f"{origin}, row {key!r:.60}", key, parts, recipe)
        made = row_of(recipe.name, key, {"label": key, **parts}, len(recipe.columns))
        rows[key] = replace(made, own=True)
    added = replace(recipe, rows=rows)
    check(added)
    return added


def _check_row(what: str, key: Any, parts: Any, recipe: Recipe) -> None:
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ConfigError(
            f"{what}: its key names files; expected up to 60 letters, digits, '_' and '-'."
        )
    if key in recipe.rows:
        raise ConfigError(f"{what}: {recipe.name} has a row of that key. Choose another.")
    if not isinstance(parts, dict):
        raise ConfigError(f"{what} is {parts!r:.60}; expected keys and values.")
    for part, held in parts.items():
        if part not in _PARTS:
            raise ConfigError(f"{what} has {part!r:.60}. {nearest(str(part), _PARTS)}")
        kind, words, inside = _PARTS[part]
        if type(held) is not kind or (
            isinstance(held, list) and not all(isinstance(one, inside) for one in held)
        ):
            raise ConfigError(f"{what}: {part} is {held!r:.60}; expected {words}.")
    if parts.get("exchanges", 1) < 1:
        raise ConfigError(f"{what}: exchanges is {parts['exchanges']}; expected 1 or more.")
    if not parts.get("settings", {}).get("method"):
        raise ConfigError(f"{what} names no method. Set settings.method.name.")
