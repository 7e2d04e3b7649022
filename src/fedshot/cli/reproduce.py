"""The command `reproduce`: takes the parsed options and returns an exit code.

A recipe reproduces a published table or figure. A cell is one row (a method) in one column of a
table. A budget is a named set of settings that determines how long training takes.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from fedshot import reports
from fedshot.config.load import Config
from fedshot.config.registry import expand_name
from fedshot.core import storage
from fedshot.core.console import say, tell
from fedshot.core.errors import ConfigError, DataError, nearest
from fedshot.core.regular_files import real_path
from fedshot.core.text import count
from fedshot.data.files.places import find_data_dir
from fedshot.methods.registry import METHODS
from fedshot.recipes import plots, results_page, tables, timing
from fedshot.recipes.index import load, names
from fedshot.recipes.job_progress import show_jobs
from fedshot.recipes.overview import overview, overview_json, overview_text
from fedshot.recipes.recipe import Recipe
from fedshot.recipes.results import Results, split
from fedshot.recipes.runner import RecipeRunner, Request
from fedshot.runs.prepare import FederatedDataset

BROKE_OFF = 1


def reproduce(options: argparse.Namespace) -> int:
    """Train cells (rows and columns) of a recipe's table, list the recipes, or write result pages.

    Returns 1 if a training failed. Raises ConfigError if a cell named by --cells cannot be trained,
    or if none can.
    """
    if options.name == "list":
        return _list(options)
    if options.name == "results":
        return _results(options)
    recipe = load(options.name, options.results)
    options.budget = options.budget or _budget(recipe, options)
    if recipe.kind == "picture":
        return _picture(recipe, options)
    runner = RecipeRunner(_request(recipe, options))
    runner.check()
    variant, states = runner.request.variant, list(runner.states.values())
    if not options.plan:
        show_jobs(
            runner.run(),
            lambda: tables.table(recipe, variant, states),
            lambda job: " ".join(job.key.split(" ")[:3]),
            silent=options.quiet or options.json,
        )
        for drawn in plots.write(options.results, recipe, variant):
            if not options.quiet:
                tell(f"wrote {drawn}")
    say(tables.as_json(states) if options.json else tables.as_text(recipe, variant, states))
    blocked = [state for state in states if state.obstacle]
    if blocked and (options.cells or (len(blocked) == len(states) and not options.plan)):
        cell, why = blocked[0].cell, blocked[0].obstacle
        raise ConfigError(
            f"{len(blocked)} of {count(len(states), 'cell')} cannot be trained, such as "
            f"{cell.row.key}/{cell.column.key}: {why and why.reason}"
        )
    return BROKE_OFF if any(state.failed for state in states) else 0


def _budget(recipe: Recipe, options: argparse.Namespace) -> str:
    """Return the default budget; if its dataset is missing, a budget that uses another one."""
    usual = recipe.default_budget
    others = [b for b in recipe.budgets.values() if b.name != usual]
    others = [b for b in others if "name" in expand_name("data", b.settings.get("data", {}))]
    if not others or not recipe.rows:
        return usual
    stand_in, folder = others[0], find_data_dir(options.data_dir)
    try:
        Config.of(recipe.cells(usual)[0].settings()).data.load(folder)
    except DataError as error:
        other = Config.of(recipe.cells(stand_in.name)[0].settings()).settings["data"]["name"]
        tell(f"{error}\n{other} is used instead (--budget {stand_in.name}).")
        return stand_in.name
    return usual


def _request(recipe: Recipe, options: argparse.Namespace) -> Request:
    return Request(
        recipe,
        options.budget or recipe.default_budget,
        tuple(options.cells),
        options.seeds,
        options.tune,
        options.jobs,
        options.out,
        options.results,
        options.data_dir,
        options.device,
    )


def _list(options: argparse.Namespace) -> int:
    """Print the recipes, each with its data, its methods and the estimated training time."""
    recipes = list(_readable(options.results))
    _request(recipes[0], options)  # raises ConfigError for impossible numbers
    if options.budget:
        had = dict.fromkeys(name for recipe in recipes for name in recipe.budgets)
        if options.budget not in had:
            raise ConfigError(
                f"no recipe has a budget {options.budget!r}. {nearest(options.budget, had)}"
            )
        recipes = [recipe for recipe in recipes if options.budget in recipe.budgets]
    if options.measure:
        _measure(recipes, options)
    lines = []
    for recipe in recipes:
        budget = options.budget or recipe.default_budget
        lines.append(overview(recipe, budget, options.seeds, options.data_dir, options.jobs))
    say(overview_json(lines) if options.json else overview_text(lines, options))
    return 0


def _measure(recipes: list[Recipe], options: argparse.Namespace) -> None:
    """Time two short rounds of every cell (row and column of a table) that has no time yet."""
    folder = options.data_dir
    cells = [
        cell
        for recipe in recipes
        for cell in (recipe.cells(options.budget or recipe.default_budget) if recipe.rows else [])
        if cell.row.method in METHODS
    ]
    wanted = timing.unknown(cells, folder)
    for i, cell in enumerate(wanted, start=1):  # not in parallel, which would slow them
        found = timing.measure(cell, folder)
        timing.keep(cell, found)
        told = (
            f"{found['step']:.3f} s a step" if "step" in found else f"refused: {found['refused']}"
        )
        if not options.quiet:
            tell(f"{i}/{len(wanted)} {cell.settings()['name']}: {told}")


def _readable(results: Path) -> Iterator[Recipe]:
    """Yield all recipes that can be read; for each of the others, print the error."""
    for name in names(results):
        try:
            yield load(name, results)
        except ConfigError as error:
            tell(f"{name} is left out: {error}")


def _results(options: argparse.Namespace) -> int:
    """Write the pages of the recipes' results, and draw figures into the results folder."""
    front, folder = options.to or Path("results.md"), options.results
    if options.cell_pages and options.to is None:
        raise ConfigError("--cell-pages writes a folder of pages. Name the front page with --to.")
    if not folder.is_dir():
        raise ConfigError(f"--results is {folder}, which is not a folder. Correct it.")
    every = Results(folder).every()
    held = {result.recipe for result in every} & {*names(folder)}
    recipes = {name: load(name, folder) for name in held}
    pages_in = real_path(front.with_suffix(""))
    drawn_in = Path(os.path.relpath(real_path(folder), pages_in)).as_posix()
    pages = results_page.pages(
        folder, recipes, front.stem, drawn_in, cells=options.cell_pages, every=every
    )
    if options.to is None:
        say("\n".join(text for name, text in pages.items() if name.endswith(".md")))
        return 0
    for name, text in pages.items():
        path = front.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.deliver(path, text.encode())
    tell(f"wrote {front} and {count(len(pages) - 1, 'file')} in {front.with_suffix('')}")
    for (name, variant), group in itertools.groupby(every, attrgetter("recipe", "variant")):
        if name in recipes and split(variant)[0] in recipes[name].budgets:
            for drawn in plots.write(folder, recipes[name], variant, list(group)):
                tell(f"wrote {drawn}")
    return 0


def _picture(recipe: Recipe, options: argparse.Namespace) -> int:
    """Draw the figures of a recipe that has no cells to train."""
    federated = FederatedDataset(Config.of(recipe.settings), options.data_dir)
    folder: Path = options.results / recipe.name
    for path in reports.pictures(federated, folder):
        say(f"wrote {path}")
    return 0
