"""Find and load recipes: those of the package, and those in a results folder.

`RESULTS/NAME/recipe.yaml` is a recipe of the user; `RESULTS/NAME/rows.yaml` adds rows to a recipe
of fedshot. Every command that reads the results folder finds both.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path

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
        return read(name, trees.load(results / name / _RECIPE))
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
    text = _PACKAGE.joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return read(name, trees.parse(text, origin=f"{name}.yaml"))
