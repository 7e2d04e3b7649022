"""Build a `Recipe` from the content of its file.

An error is raised if the recipe is invalid or compares methods on unequal terms. Rows that a user
adds to a recipe follow the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Annotated, Any, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from fedshot.config import settings as trees
from fedshot.config.registry import KINDS as COMPONENTS
from fedshot.config.registry import expand_name, expand_names, lacks, layered
from fedshot.core.errors import ConfigError, nearest
from fedshot.core.records import Finite
from fedshot.recipes.recipe import (
    AGAINST,
    KINDS,
    ON_FEATURES,
    ROW_MAY_SET,
    Budget,
    Column,
    Recipe,
    Row,
)
from fedshot.recipes.trials import is_space

_KEY = re.compile(r"[A-Za-z0-9_-]{1,60}")
# ROW.tune.json is the file of a row's trials, BUDGET-tuneN the folder of a tuned budget.
_RESERVED = {"column": re.compile("tune", re.IGNORECASE), "budget": re.compile(".*-tune.*")}


_Part: TypeAlias = tuple[TypeAdapter[Any], str]
"""A check of a key's values, and a description of the valid ones."""

_TEXT: _Part = TypeAdapter(str), "text, in quotes where it is a number"
_TREE: _Part = TypeAdapter(dict), "keys and values"
_TREES = TypeAdapter(dict[Any, dict[Any, Any]])
_TEXTS: _Part = TypeAdapter(list[str]), "a list of texts"
_OF_KEYS = TypeAdapter(dict[Any, str])
_COUNT: _Part = TypeAdapter(Annotated[int, Field(ge=1)]), "a whole number, 1 or more"
_OF_COLUMNS: _Part = (
    TypeAdapter(list[Finite | None]),
    "a list with a number in percent, or null, for each column",
)
_TUNE: _Part = _TREES, "options, such as method.inner_lr, and their search spaces"
# The keys of a file are the names of the fields of Recipe, Column, Budget and Row.
_RECIPE: dict[str, _Part] = {
    "title": _TEXT, "source": _TEXT, "kind": _TEXT, "measure": _TEXT, "axis": _TEXT,
    "open": (_OF_KEYS, "keys and texts"), "deviations": _TEXTS, "tune": _TUNE, "against": _TEXTS,
    "settings": _TREE, "columns": _TREE, "rows": _TREE, "budgets": _TREE,
}  # fmt: skip
_COLUMN: dict[str, _Part] = {
    "label": _TEXT, "settings": _TREE, "x": (TypeAdapter(Finite), "a finite number")
}  # fmt: skip
_BUDGET: dict[str, _Part] = {
    "exchanges": _COUNT, "settings": _TREE, "trials_as": _TEXT,
    "rows": (_TREES, "keys of rows and their settings"),
}  # fmt: skip
_ROW: dict[str, _Part] = {
    "label": _TEXT, "settings": _TREE, "exchanges": _COUNT, "stops_after": _COUNT, "tune": _TUNE,
    "deviations": _TEXTS, "published": _OF_COLUMNS, "spread": _OF_COLUMNS, "trained_as": _TEXT,
    "trained_in": (_OF_KEYS, "columns, and for each the column whose training it has"),
    "at": (TypeAdapter(dict[Any, Finite]), "axes and numbers"),
}  # fmt: skip


def read(name: str, tree: Any) -> Recipe:
    """Return the recipe `name` from `tree`, the content of its file.

    Raises ConfigError if keys are missing, unknown or invalid, or the comparison is unfair.
    """
    what = f"recipe {name}"
    parts = _checked(what, tree, _RECIPE)
    if parts.get("kind", "table") not in KINDS:
        raise ConfigError(f"{what}: kind is {parts['kind']!r}; expected one of {', '.join(KINDS)}.")
    for required in ("title", "settings"):
        if required not in parts:
            raise ConfigError(f"{what} has no {required}.")
    _check_layer(what, parts["settings"])
    may = _row_may_set(parts["settings"])
    _check_places(f"{what}, tune", parts.get("tune", {}), may)
    _check_spaces(what, parts)
    columns, rows, budgets = (_keyed(what, kind, parts) for kind in ("column", "row", "budget"))
    recipe = Recipe(name, **parts | {
        "settings": expand_names(parts["settings"]),
        "columns": {key: _column(f"{what}, column {key}", key, one) for key, one in columns},
        "rows": {key: _row(f"{what}, row {key}", key, one, len(columns), may) for key, one in rows},
        "budgets": {key: _budget(f"{what}, budget {key}", key, one, may) for key, one in budgets},
    })  # fmt: skip
    _check_kind(recipe, parts)
    _check(recipe)
    return recipe


def joined(recipe: Recipe, tree: Any, origin: str) -> Recipe:
    """Return the recipe with the rows of `tree`, the content of the user's file `origin`.

    Raises ConfigError for invalid rows.
    """
    if not recipe.rows:
        raise ConfigError(
            f"{origin} adds rows to {recipe.name}, a picture without rows. Remove it."
        )
    rows, may = dict(recipe.rows), _row_may_set(recipe.settings)
    for key, one in _keyed(origin, "row", {"rows": tree}):
        if key.casefold() in {held.casefold() for held in recipe.rows}:
            raise ConfigError(f"{origin}: {recipe.name} has a row {key!r}. Choose another key.")
        made = _row(f"{origin}, row {key}", key, one, len(recipe.columns), may)
        rows[key] = replace(made, own=True)
    added = replace(recipe, rows=rows)
    _check(added)
    return added


def _checked(what: str, tree: Any, parts: Mapping[str, _Part]) -> dict[str, Any]:
    """Return `tree` without nulls, and with tuples in place of lists.

    `parts` describes the valid keys and values, and `what` names the tree in errors. Raises
    ConfigError for invalid keys or values.
    """
    if tree is None:
        raise ConfigError(
            f"{what} is null; expected keys and values. A null removes what `like` brings, and it "
            "brings nothing of this name."
        )
    if not isinstance(tree, dict):
        raise ConfigError(f"{what} holds {tree!r:.60}; expected keys and values.")
    held = {key: value for key, value in tree.items() if value is not None}
    for key, value in held.items():
        if key not in parts:
            raise ConfigError(f"{what} has {key!r:.60}. {nearest(str(key), parts)}")
        check, words = parts[key]
        try:
            check.validate_python(value, strict=True)
        except ValidationError:
            raise ConfigError(f"{what}: {key} is {value!r:.60}; expected {words}.") from None
    return {key: tuple(one) if isinstance(one, list) else one for key, one in held.items()}


def _keyed(what: str, kind: str, parts: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return (key, value) of each column, row or budget in `parts`, whichever `kind` names.

    `what` names the recipe in errors. Raises ConfigError for invalid keys.
    """
    found = parts.get(f"{kind}s", {})
    if not isinstance(found, dict):
        raise ConfigError(f"{what} holds {found!r:.60}; expected keys and values.")
    for key in found:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ConfigError(
                f"{what}: the key of a {kind} is {key!r:.60}; expected up to 60 letters, digits, "
                "'_' and '-', because it is part of file names."
            )
        if kind in _RESERVED and _RESERVED[kind].fullmatch(key):
            raise ConfigError(f"{what}: a {kind} cannot be called {key!r}. Choose another key.")
    if len({key.casefold() for key in found}) < len(found):
        raise ConfigError(f"{what}: two {kind}s differ only in capital letters. Rename one.")
    return list(found.items())


def _column(what: str, key: str, tree: Any) -> Column:
    parts = {"label": key, "settings": {}} | _checked(what, tree, _COLUMN)
    _check_layer(what, parts["settings"])
    return Column(key, **parts)


def _budget(what: str, key: str, tree: Any, may: Sequence[str]) -> Budget:
    parts = _checked(what, tree, _BUDGET)
    if "exchanges" not in parts:
        raise ConfigError(f"{what} has no exchanges, the number of communication rounds.")
    _check_layer(what, parts.get("settings", {}))
    for row, own in parts.get("rows", {}).items():
        places = [place for place, _ in trees.flat(own)]
        _check_places(f"{what}, row {row}", places, may, searched=False)
        if not isinstance(own.get("method", {}), dict) or "name" in own.get("method", {}):
            raise ConfigError(
                f"{what}, row {row} names a method, but a row is one method. Set only its options."
            )
    return Budget(key, **parts)


def _row(what: str, key: str, tree: Any, n: int, may: Sequence[str]) -> Row:
    unknown = {"published": (None,) * n, "spread": (None,) * n}
    parts = {"label": key, "settings": {}} | unknown | _checked(what, tree, _ROW)
    _check_spaces(what, parts)
    method = parts["settings"].get("method")
    if not isinstance(method.get("name") if isinstance(method, dict) else method, str):
        raise ConfigError(f"{what} names no method. Set settings.method.name.")
    parts["settings"] = parts["settings"] | {"method": expand_name("method", method)}
    places = [place for place, _ in trees.flat(parts["settings"])]
    _check_places(what, places, may, searched=False)
    _check_places(what, parts.get("tune", {}), may)
    if not len(parts["published"]) == len(parts["spread"]) == n:
        raise ConfigError(f"{what} has {len(parts['published'])} numbers for {n} columns.")
    return Row(key, **parts)


def _check_layer(what: str, settings: Mapping[str, Any]) -> None:
    for place in ("seed", "name"):
        if place in settings:
            raise ConfigError(f"{what} sets {place}, which differs between runs. Remove it.")
    for section, value in settings.items():
        named = section in COMPONENTS
        if not (value is None or isinstance(value, dict) or (named and isinstance(value, str))):
            words = f"{'a name, or ' if named else ''}keys and values"
            raise ConfigError(f"{what}: {section} is {value!r:.60}; expected {words}.")


def _row_may_set(settings: Mapping[str, Any]) -> tuple[str, ...]:
    encoded = trees.at(settings, "model.encoder") is not None
    return (*ROW_MAY_SET, ON_FEATURES) if encoded else ROW_MAY_SET


def _check_places(
    what: str, places: Iterable[str], may: Sequence[str], *, searched: bool = True
) -> None:
    """Raise ConfigError for key paths that a row may not set or, if `searched`, may not tune.

    `places` are key paths of options, and `may` those that a row may set.
    """
    for place in places:
        if not any(f"{place}.".startswith(f"{one}.") for one in may):
            raise ConfigError(
                f"{what} sets {place}; a row may set only {', '.join(may)}, so that all "
                "methods of a column are compared on equal terms."
            )
        if searched and (place in ("method", "model.head", ON_FEATURES) or place.endswith(".name")):
            raise ConfigError(
                f"{what} would search for {place}, but a row is one method. Add a row instead."
            )


def _check_spaces(what: str, parts: Mapping[str, Any]) -> None:
    """Raise ConfigError for an invalid search space of a tuned option."""
    for place, space in parts.get("tune", {}).items():
        if not is_space(space):
            raise ConfigError(
                f"{what}: the search space of {place} is {space!r:.60}; expected "
                "{log: [0.001, 0.1]}, {linear: [0, 1]}, {int: [1, 8]} or {choice: [1, 5, 10]}."
            )


def _check_kind(recipe: Recipe, parts: Mapping[str, Any]) -> None:
    """Raise ConfigError if the file's content, `parts`, has a key for other kinds of recipes."""
    for part, kind, given in (
        ("against", "table", "against" in parts),
        ("axis", "curve", "axis" in parts),
        ("x in a column", "curve", any(one.x is not None for one in recipe.columns.values())),
    ):
        if given and recipe.kind != kind:
            raise ConfigError(
                f"recipe {recipe.name} is a {recipe.kind} and has {part}, which is for a {kind}. "
                f"Leave it out, or set kind to {kind}."
            )


def _check(recipe: Recipe) -> None:
    """Raise ConfigError for a recipe with missing or contradictory parts."""
    what = f"recipe {recipe.name}"
    columns, budgets = list(recipe.columns.values()), list(recipe.budgets.values())
    if recipe.kind != "picture" and not (recipe.rows and columns and budgets):
        raise ConfigError(f"{what} needs rows, columns and budgets, at least one of each.")
    for over in product(
        [c.settings for c in columns] or [{}], [b.settings for b in budgets] or [{}]
    ):
        if not isinstance(trees.at(layered(recipe.settings, *over), "data.name"), str):
            raise ConfigError(f"{what} names no data. Set settings.data.name.")
    if not recipe.against:
        raise ConfigError(f"{what}: against is empty. Name one of {', '.join(AGAINST)}.")
    for axis in recipe.against:
        if axis not in AGAINST:
            raise ConfigError(f"{what}: against has {axis!r:.60}. {nearest(axis, AGAINST)}")
    if recipe.kind == "curve" and not all(column.x is not None for column in columns):
        raise ConfigError(f"{what} is a curve; every column needs an x.")
    for row in recipe.rows.values():
        _check_row(recipe, row)
    _check_tuned(recipe)
    _check_budgets(recipe)


def _check_row(recipe: Recipe, row: Row) -> None:
    """Raise ConfigError for a row that does not fit the recipe.

    Checked are its search space, `exchanges`, `stops_after`, `trained_as`, `trained_in` and `at`.
    """
    what = f"recipe {recipe.name}, row {row.key}"
    for a, b in product(row.tune, recipe.tune):
        if _overlap(a, b):
            raise ConfigError(
                f"{what} would search for {a} in its own space, but the recipe's tune sets one for "
                "all rows. Remove one of them."
            )
    for budget in recipe.budgets.values():
        if row.exchanges > budget.exchanges:
            raise ConfigError(
                f"{what} takes {row.exchanges} exchanges for one round, and budget {budget.name} "
                f"has {budget.exchanges}. Increase the budget's exchanges."
            )
    if row.stops_after is not None and row.exchanges > row.stops_after:
        raise ConfigError(
            f"{what} takes {row.exchanges} exchanges for one round, and stops_after is "
            f"{row.stops_after}. Set stops_after to {row.exchanges} or more."
        )
    if row.trained_as:
        lead = recipe.rows.get(row.trained_as)
        pace = (row.exchanges, row.stops_after)
        if lead is None or lead.trained_as or (lead.exchanges, lead.stops_after) != pace:
            raise ConfigError(
                f"{what} is trained as {row.trained_as!r}; expected another row with the same "
                "exchanges and stops_after, and without trained_as."
            )
    for column, there in row.trained_in.items():
        known = {column, there} <= recipe.columns.keys()
        if not known or there in row.trained_in or row.trained_as:
            raise ConfigError(
                f"{what} in {column} is trained in {there!r}; expected another column, which is "
                "not in trained_in, of a row without trained_as."
            )
    if recipe.kind == "sweep" and not row.at:
        raise ConfigError(
            f"recipe {recipe.name} is a sweep, and row {row.key} has no at; expected an axis and "
            "a number, or several."
        )


def _check_tuned(recipe: Recipe) -> None:
    """Raise ConfigError for a tuned option that no row has, or that a row tunes and lacks."""
    column = next(iter(recipe.columns.values()), None)
    over = column.settings if column else {}
    rows = {key: layered(recipe.settings, over, row.settings) for key, row in recipe.rows.items()}
    for place in recipe.tune:
        faults = [lacks(settings, place) for settings in rows.values()]
        if faults and all(faults):
            raise ConfigError(f"recipe {recipe.name}, tune: {faults[0]}")
    for key, row in recipe.rows.items():
        for place in row.tune:
            if fault := lacks(rows[key], place):
                raise ConfigError(f"recipe {recipe.name}, row {key}, tune: {fault}")


def _overlap(a: str, b: str) -> bool:
    """Whether one dotted key path equals or contains the other."""
    return f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")


def _check_budgets(recipe: Recipe) -> None:
    """Raise ConfigError for a budget that does not fit the recipe.

    A budget may set options of some rows (`rows`), and may name another budget for the trials of
    tuning (`trials_as`). The rows and the named budget must exist. Options that tuning searches
    must not be set, and the named budget must not have a `trials_as` of its own.
    """
    for budget in recipe.budgets.values():
        what = f"recipe {recipe.name}, budget {budget.name}"
        for key, own in budget.rows.items():
            if key not in recipe.rows:
                raise ConfigError(
                    f"{what} sets options of row {key!r:.60}, which does not exist. "
                    f"{nearest(str(key), recipe.rows)}"
                )
            for (a, _), b in product(trees.flat(own), [*recipe.tune, *recipe.rows[key].tune]):
                if _overlap(a, b):
                    raise ConfigError(
                        f"{what}, row {key} sets {a}, and a search for {b} would overwrite it. "
                        "Remove one of them."
                    )
        if budget.trials_as is None:
            continue
        if budget.trials_as not in recipe.budgets:
            raise ConfigError(
                f"{what}: trials_as is {budget.trials_as!r:.60}, a budget that does not exist. "
                f"{nearest(budget.trials_as, recipe.budgets)}"
            )
        if recipe.budgets[budget.trials_as].trials_as is not None:
            raise ConfigError(
                f"{what}: trials_as is {budget.trials_as!r}; expected another budget, and one "
                "without trials_as."
            )
