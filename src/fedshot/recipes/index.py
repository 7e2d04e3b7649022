"""Where recipes are: in this package, and in a folder of results.

`RESULTS/NAME/recipe.yaml` is a recipe of one's own, and `RESULTS/NAME/rows.yaml` adds rows to one
of fedshot's. So they lie beside what was made by them, and every command that looks there knows
them.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from fedshot.config import settings as trees
from fedshot.core.errors import ConfigError, nearest
from fedshot.recipes.reading import joined, read
from fedshot.recipes.recipe import Recipe

OWN, OWN_ROWS = "recipe.yaml", "rows.yaml"


def names(results: Path | None = None) -> tuple[str, ...]:
    """Return the names of all recipes, in order; also of those that a folder of results adds."""
    if results is None:
        return _packaged()
    own = (file.parent.name for file in results.glob(f"*/{OWN}"))
    return tuple(sorted({*_packaged(), *own}))


def load(name: str, results: Path | None = None) -> Recipe:
    """Read a recipe, and the rows that a folder of results adds to it.

    Raises ConfigError when there is none of that name, and for one that cannot be.
    """
    if name not in names(results):
        raise ConfigError(f"there is no recipe {name!r}. {nearest(name, names(results))}")
    if name not in _packaged():
        assert results is not None
        if (results / name / OWN_ROWS).exists():
            raise ConfigError(
                f"{results / name / OWN_ROWS} stands beside a {OWN}. Write its rows there: the "
                "file adds rows to fedshot's recipes alone."
            )
        return read(name, _tree(results / name / OWN))
    recipe = _loaded(name)
    if results is None:
        return recipe
    if (results / name / OWN).exists():
        raise ConfigError(
            f"{results / name / OWN}: fedshot has a recipe {name!r} itself. Give the folder "
            f"another name; to add rows to fedshot's, call the file {OWN_ROWS}."
        )
    rows = results / name / OWN_ROWS
    return joined(recipe, _tree(rows), str(rows)) if rows.exists() else recipe


def _tree(path: Path) -> trees.Settings:
    return trees.load(path, lambda _: False)


@cache
def _packaged() -> tuple[str, ...]:
    files = (entry.name for entry in _folder().iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml")))


@cache
def _loaded(name: str) -> Recipe:
    text = _folder().joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return read(name, trees.parse(text, lambda _: False, origin=f"{name}.yaml"))


def _folder() -> Any:
    return resources.files("fedshot.recipes")
