"""Find and load recipes: those of the package, and those in a results folder.

`RESULTS/NAME/recipe.yaml` is a recipe of the user; `RESULTS/NAME/rows.yaml` adds rows to a recipe
of fedshot. Every command that reads the results folder finds both. A recipe that is `like` another
one of fedshot's has only what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from fedshot.config import settings as trees
from fedshot.core.errors import ConfigError, nearest
from fedshot.recipes.reading import joined, read
from fedshot.recipes.recipe import Recipe

CLAIMS = "claims.yaml"
"""The file in the package that is not a recipe: the claims of the papers."""
_RECIPE, _ROWS = "recipe.yaml", "rows.yaml"
_PACKAGE = resources.files("fedshot.recipes")


def names(results: Path | None = None) -> tuple[str, ...]:
    """Return the sorted names of fedshot's recipes, and of the user's in the folder `results`."""
    if results is None:
        return _packaged()
    own = (file.parent.name for file in results.glob(f"*/{_RECIPE}"))
    return tuple(sorted({*_packaged(), *own}))


def load(name: str, results: Path | None = None) -> Recipe:
    """Read a recipe, and the rows that the user adds to it in the results folder `results`.

    Raises ConfigError if the recipe does not exist or is invalid.
    """
    if name not in names(results):
        raise ConfigError(f"there is no recipe {name!r}. {nearest(name, names(results))}")
    if name not in _packaged():
        assert results is not None
        if (results / name / _ROWS).exists():
            raise ConfigError(
                f"{results / name / _ROWS} is beside a {_RECIPE}, but it may only add rows to a "
                f"recipe of fedshot. Move its rows into {_RECIPE}."
            )
        return read(name, _whole(name, trees.load(results / name / _RECIPE)))
    recipe = _loaded(name)
    if results is None:
        return recipe
    if (results / name / _RECIPE).exists():
        raise ConfigError(
            f"{results / name / _RECIPE} has the name of a recipe of fedshot, {name!r}. Rename the "
            f"folder; to add rows to fedshot's recipe, call the file {_ROWS}."
        )
    rows = results / name / _ROWS
    return joined(recipe, trees.load(rows), str(rows)) if rows.exists() else recipe


@cache
def _packaged() -> tuple[str, ...]:
    files = (entry.name for entry in _PACKAGE.iterdir())
    held = (name for name in files if name.endswith(".yaml") and name != CLAIMS)
    return tuple(sorted(name.removesuffix(".yaml") for name in held))


@cache
def _loaded(name: str) -> Recipe:
    return read(name, content(name))


def content(name: str) -> Any:
    """Return the content of a file of fedshot's, with what it inherits."""
    return _whole(name, _parsed(name))


@cache
def _parsed(name: str) -> Any:
    text = _PACKAGE.joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return trees.parse(text, origin=f"{name}.yaml")


def _whole(name: str, tree: Any) -> Any:
    """Return the content of a recipe's file over that of the recipe that it is `like`, if any.

    Of the other recipe, `title`, `source`, `measure`, `published` and `spread` are not inherited.
    Raises ConfigError if that recipe is not fedshot's, or is itself like another one.
    """
    if not isinstance(tree, Mapping) or "like" not in tree:
        return tree
    own = dict(tree)
    like = own.pop("like")
    if like not in _packaged():
        raise ConfigError(
            f"recipe {name}: like is {like!r:.60}, which is not a recipe of fedshot. "
            f"{nearest(str(like), _packaged())}"
        )
    base = dict(_parsed(like))
    if "like" in base:
        raise ConfigError(
            f"recipe {name}: like is {like!r}, a recipe that has a like itself. "
            f"Set like to {base['like']!r}."
        )
    for key in ("title", "source", "measure"):
        base.pop(key, None)
    base["rows"] = {
        key: {part: value for part, value in row.items() if part not in ("published", "spread")}
        for key, row in base.get("rows", {}).items()
    }
    return _over(base, own)


def _over(old: Any, new: Any) -> Any:
    """Return `new` merged over `old`; a null removes a key of `old`, and else stays a null."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    kept = {key: value for key, value in old.items() if key not in new or new[key] is not None}
    return kept | {
        key: _over(kept.get(key), value)
        for key, value in new.items()
        if value is not None or key not in old
    }
