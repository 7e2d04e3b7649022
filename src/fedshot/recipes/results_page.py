"""The pages of results as Markdown, generated from the results of the cells of recipes.

A cell is one row and column of a recipe's table. The front page holds the papers' claims and a
leaderboard. Each recipe has a page with its tables, and on request each cell has a page with its
settings, seeds and validation curve.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeAlias

import yaml
from markupsafe import Markup, escape

from fedshot.config import settings as trees
from fedshot.config.registry import defaults
from fedshot.core.text import count, megabytes, percent, seconds, signed
from fedshot.evaluation.episodic_test import total_confusion
from fedshot.recipes import claims, plots, provenance
from fedshot.recipes.claims import ClaimResult, Front, Paper, Selection, check_claim
from fedshot.recipes.plan import marks
from fedshot.recipes.recipe import Recipe
from fedshot.recipes.results import CellResult, Results, command, row_of, validation_curve
from fedshot.recipes.runner import State, current
from fedshot.recipes.tables import (
    Marks,
    class_means,
    difference,
    measure,
    ours,
    published,
    shares,
    unfair,
)
from fedshot.reports.markup import plain, render_markdown
from fedshot.reports.significance import compare

_NOTES = "notes.md"
_CONFUSION = 12  # maximum number of classes of a confusion matrix on a page
_WIDTH, _HEIGHT = 560, 190  # pixels of a validation curve's plot


@dataclass(frozen=True)
class _Table:
    """The finished cells (rows, columns) of a recipe's table in one variant: budget and tuning."""

    recipe: Recipe
    variant: str
    states: list[State]

    @property
    def cells(self) -> dict[str, State]:
        return {state.cell.key: state for state in self.states}

    def at(self, selection: Selection) -> dict[str, list[State]]:
        """Return the selected finished cells by column; a column without such cells is absent."""
        cells, rows = self.cells, selection.rows or tuple(self.recipe.rows)
        keys = {column: [f"{row}/{column}" for row in rows] for column in selection.columns}
        found = {column: [cells[k] for k in some if k in cells] for column, some in keys.items()}
        return {column: states for column, states in found.items() if states}


_Tables: TypeAlias = Mapping[tuple[str, str], _Table]  # keyed by recipe and variant


def pages(
    results: Path,
    recipes: Mapping[str, Recipe],
    name: str = "results",
    figures: str = "../../results",
    *,
    cells: bool = False,
    every: Sequence[CellResult] | None = None,
) -> dict[str, str]:
    """Return the pages of recipes' results, and the charts of the front page, keyed by path.

    Results that are out of date are listed at the end of the front page.

    Args:
        results: the folder with the results of finished cells (rows and columns of recipes'
            tables); a recipe's page includes `RECIPE/notes.md` from it.
        recipes: the recipes by name.
        name: name of the front page, and of the folder of the other pages.
        figures: path of the folder `results`, relative to the page of a recipe.
        cells: whether to make a page for each cell, with links from the recipes' tables.
        every: the results of the finished cells in `results`; None to read them.
    """
    tables, left_out = _tables(Results(results).every() if every is None else every, recipes)
    front = claims.load()
    found = {f"{name}.md": _front(front, tables, left_out, name, name if cells else "")}
    for status, shape in claims.STATUS_SYMBOLS.items():
        size = 'xmlns="http://www.w3.org/2000/svg" width="14" height="14"'
        found[f"{name}/{_symbol_file(status)}"] = f"<svg {size}>{shape}</svg>\n"
    for key, paper in front.papers.items():
        table = tables.get((paper.recipe, paper.variant))
        if table and (headline := table.at(paper)):
            found[f"{name}/{key}.svg"] = plots.published_and_ours(paper.title, headline)
    for recipe, group in itertools.groupby(tables.values(), key=attrgetter("recipe")):
        mine, notes = list(group), results / recipe.name / _NOTES
        found[f"{name}/{recipe.name}.md"] = render_markdown(
            "results_recipe.md",
            recipe=recipe,
            front=f"../{name}.md",
            linked=cells,
            notes=Markup(notes.read_text(encoding="utf-8").strip()) if notes.exists() else "",
            tables=[_section(table, figures, cells) for table in mine],
        )
        for table, state in ((t, s) for t in mine if cells for s in t.states):
            path = f"{recipe.name}/{table.variant}/{state.cell.stem}.md"
            found[f"{name}/{path}"] = _cell(table, state, f"../../{figures}")
    return found


def _tables(
    every: Sequence[CellResult], recipes: Mapping[str, Recipe]
) -> tuple[_Tables, list[str]]:
    """Return the tables of results by recipe and variant, and messages on outdated results.

    The tables of a recipe begin with those of its budget `paper`.
    """
    tables: dict[tuple[str, str], _Table] = {}
    left_out: list[str] = []
    by_table = attrgetter("recipe", "variant")
    every = sorted(every, key=lambda one: (one.recipe, one.variant[:5] != "paper", one.variant))
    for (name, variant), group in itertools.groupby(every, by_table):
        states, others = current(name, variant, list(group), recipes.get(name))
        left_out += others
        if states:
            tables[name, variant] = _Table(recipes[name], variant, states)
    return tables, left_out


# The front page.


def _symbol_file(status: str) -> str:
    return f"{status.replace(' ', '-')}.svg"


def _front(front: Front, tables: _Tables, left_out: Sequence[str], name: str, linked: str) -> str:
    """Return the front page of results.

    Numbers link to the pages of cells in the folder `linked`, unless that is "".
    """
    papers = []
    for key, paper in front.papers.items():
        table = tables.get((paper.recipe, paper.variant))
        of = {one: tables.get((one.recipe, one.variant)) for one in paper.claims}
        checked = [check_claim(one, held.cells if held else {}) for one, held in of.items()]
        papers.append(
            {
                "paper": paper,
                "chart": f"{name}/{key}.svg",
                "measure": measure(table.recipe, table.states) if table else "",
                "lines": _headline(table, paper, linked) if table else [],
                "conditions": _conditions(table, paper) if table else [],
                "claims": [(one, _evidence(one)) for one in checked],
                "statuses": [one.status for one in checked],
            }
        )
    recipes = {}
    for recipe, group in itertools.groupby(tables.values(), key=attrgetter("recipe")):
        cells = [state.cell for table in group for state in table.states]
        recipes[recipe.name] = recipe.title_of(cells), count(len(cells), "cell")
    return render_markdown(
        "results_front.md",
        papers=papers,
        number_of_papers=count(len(papers), "paper"),
        symbols={
            status: Markup(f"![]({name}/{_symbol_file(status)}) {status.replace(' ', '&nbsp;')}")
            for status in claims.STATUS_SYMBOLS
        },
        boards=_leaderboard(tables, front.leaderboard, linked),
        leaderboard=front.leaderboard,
        recipes=recipes,
        left_out=left_out,
        name=name,
    )


def _headline(table: _Table, paper: Paper, linked: str) -> list[list[str]]:
    """Return the lines of a paper's table on the front page: a heading, then a line per method.

    A method's line has the published and fedshot's accuracies, and the number of seeds. The list is
    empty if no cell that the front page shows is finished. `linked` is as for `_front`.
    """
    cells, labels = table.cells, [table.recipe.columns[column].label for column in paper.columns]
    lines = [
        ["method", *(text for one in labels for text in (f"{one}: published", "ours")), "seeds"]
    ]
    for row in paper.rows or table.recipe.rows:
        states = [cells.get(f"{row}/{column}") for column in paper.columns]
        if held := [state for state in states if state]:
            numbers = [(published(s), _number(s, table, linked)) if s else ("", "") for s in states]
            seeds = [len(state.finished) for state in held]
            lines.append([held[0].cell.row.label, *itertools.chain(*numbers), _ends(seeds)])
    return lines if len(lines) > 1 else []


def _number(state: State, table: _Table, folder: str) -> str:
    """Return the accuracy of a cell of a recipe's table as text.

    If `folder`, the folder of the cells' pages, is not "", the text links to the cell's page.
    """
    if not folder:
        return ours(state)
    path = f"{table.recipe.name}/{table.variant}/{state.cell.stem}.md"
    return Markup(f"[{ours(state)}]({folder}/{path})")


def _conditions(table: _Table, paper: Paper) -> list[str]:
    """Return the notes that all cells of a paper on the front page share, those on data first.

    Notes on data that all cells of a column share are among them, with the column's label.
    """
    states = [*itertools.chain(*table.at(paper).values())]
    notes = [marks(state.cell, state.result) for state in states]
    common = _shared(notes)
    for key, column in {state.cell.column.key: state.cell.column for state in states}.items():
        here = [found for state, found in zip(states, notes, strict=True)
                if state.cell.column.key == key]  # fmt: skip
        common += [f"{note} ({column.label})" for note in _shared(here)
                   if note.startswith("data") and note not in common]  # fmt: skip
    return sorted(common, key=lambda note: not note.startswith("data"))


def _shared(notes: Sequence[Sequence[str]]) -> list[str]:
    return [note for note in notes[0] if all(note in one for one in notes)] if notes else []


def _evidence(result: ClaimResult) -> list[str]:
    """Return a claim's line on the front page.

    It has the comparisons, the published differences, fedshot's differences, and the seeds.
    """
    found = result.differences
    if not found:
        return ["-"] * 4
    outcomes = [
        f"{n} {what}" for what in ("above", "below", "unclear") if (n := result.count(what))
    ]
    untrained = f"; {result.untrained} of an untrained model" if result.untrained else ""
    return [
        f"{', '.join(outcomes)} of {len(found)}{untrained}",
        _span(result.published),
        _span([100 * one.difference for one in found]),
        _ends(result.seeds),
    ]


def _ends(values: Sequence[int]) -> str:
    """Return e.g. "1-3" for the range of whole numbers, or "3" if all are 3."""
    return "-".join(dict.fromkeys([str(min(values)), str(max(values))]))


def _span(values: Sequence[float]) -> str:
    """Return e.g. "+0.40 to +1.20" for differences in percentage points; "-" for none."""
    ends = dict.fromkeys([min(values), max(values)]) if values else ()
    return " to ".join(map(signed, ends)) or "-"


def _leaderboard(tables: _Tables, selection: Selection, linked: str) -> dict[str, list[list[Any]]]:
    """Return column -> lines of the leaderboard, ranked, with each difference from the first."""
    table = tables.get((selection.recipe, selection.variant))
    if table is None:
        return {}
    boards = {}
    for states in table.at(selection).values():
        held = [(row_of(state.result), state) for state in states if state.result]
        held.sort(key=lambda pair: pair[0].accuracy, reverse=True)
        lines: list[list[Any]] = []
        for row, state in held:
            found = compare(row, held[0][0])
            clear = found.outcome if found.outcome != "unclear" else "not distinguishable"
            behind = f"{clear}, {str(found).removesuffix(' points')}" if lines else "leader"
            traffic = megabytes(row.bytes_down + row.bytes_up)
            number = _number(state, table, linked)
            lines.append([state.cell.row.label, number, behind, traffic, row.seeds])
        boards[states[0].cell.column.label] = lines
    return boards


# The page of a recipe.


def _section(table: _Table, figures: str, linked: bool) -> dict[str, Any]:
    recipe, states, letters = table.recipe, table.states, Marks()
    link = f"{figures}/{recipe.name}/{table.variant}"
    held, extra = shares(states), dict[str, Callable[[State], str]]()
    if any(s.result and not s.result.first["queries"] for s in states):  # clients' own classes
        extra["over clients"] = partial(_over_clients, "spread")
        extra["worst tenth"] = partial(_over_clients, "worst_tenth")
    extra |= {share.column: share.text for share in held}
    lines = [_line(state, letters, table, linked, extra.values()) for state in states]
    title = recipe.title_of(state.cell for state in states)
    return {
        "variant": table.variant,
        "data": title.removeprefix(recipe.title),
        "measure": measure(recipe, states),
        "lines": lines,
        "extra": list(extra),
        "notes": letters.notes(),
        "unfair": unfair(states),
        "captions": [*class_means(states), *(share.note for share in held)],
        "figures": [
            (figure.caption, figure.title, f"{link}{figure.suffix}.svg")
            for figure in plots.figures(recipe, states)
        ],
        "commands": [Markup(text) for text in _commands(recipe, states)],
        "made": _made(states),
    }


def _over_clients(name: str, state: State) -> str:
    """Return how accuracies spread over clients, or that of the worst tenth, in percent.

    `name` is "spread" or "worst_tenth". The value is a mean over seeds; "-" if it is unknown.
    """
    found = [one["test"][name] for one in state.finished]
    return "-" if None in found else f"{100 * fmean(found):.2f}"


def _line(
    state: State,
    letters: Marks,
    table: _Table,
    linked: bool,
    extra: Iterable[Callable[[State], str]],
) -> list[str]:
    """Return the texts of a cell's line in the recipe's table.

    With `linked`, the accuracy links to the cell's page; `extra` give the texts of further columns.
    """
    result = state.result
    assert result is not None
    every = state.finished
    accuracies = [100 * one["test"]["accuracy"] for one in every]
    return [
        state.cell.row.label,
        state.cell.column.label,
        published(state),
        _number(state, table, "." if linked else ""),
        difference(state),
        str(len(every)),
        f"{stdev(accuracies):.2f}" if len(accuracies) > 1 else "-",
        *(text(state) for text in extra),
        _validation(result),
        megabytes(round(fmean([one["bytes_down"] + one["bytes_up"] for one in every]))),
        seconds(fmean([one["seconds"] for one in every])),
        letters.of(marks(state.cell, result)),
    ]


def _validation(result: CellResult) -> str:
    """Return a cell's validation accuracy before training and at the chosen round, or "-"."""
    pairs = []
    for one in result.seeds.values():
        curve = validation_curve(one)
        if 0 in curve and one["round"] in curve:
            pairs.append((curve[0], curve[one["round"]]))
    if not pairs:
        return "-"
    before, after = (100 * fmean([pair[i] for pair in pairs]) for i in (0, 1))
    on_test = trees.at(result.settings, "run.choose") == "best_on_test_classes"
    return f"{before:.1f} → {after:.1f}{' on the test' if on_test else ''}"


def _commands(recipe: Recipe, states: Sequence[State]) -> Iterator[str]:
    """Yield the commands that reproduce these cells, one for each number of seeds."""
    by_seeds: dict[int, list[State]] = {}
    for state in states:
        if state.result:
            by_seeds.setdefault(max(state.result.seeds) + 1, []).append(state)
    for n, some in sorted(by_seeds.items(), reverse=True):
        results = [state.result for state in some if state.result]
        whole = len(some) == len(recipe.cells(some[0].cell.budget.name))
        yield command(results, [] if whole else _patterns(some), n)


def _patterns(states: Sequence[State]) -> list[str]:
    """Return patterns for `--cells`: 'row/*' for a row with all of its cells, else each cell."""
    found = []
    for key in dict.fromkeys(state.cell.row.key for state in states):
        mine = [state.cell for state in states if state.cell.row.key == key]
        whole = len(mine) == len(mine[0].recipe.columns)
        found += [f"'{key}/*'"] if whole else [f"'{cell.key}'" for cell in mine]
    return found


def _made(states: Sequence[State]) -> str:
    """Return a line on how the cells were made: commits, machines, hashes of the test episodes."""
    every = [one for state in states for one in state.finished]
    parts = [part for one in every for part in one["made"]]
    commits = sorted({part["commit"] for part in parts})
    return (
        f"{count(len(commits), 'commit')}: {', '.join(commits)}. Made on "
        f"{'; '.join(sorted(provenance.kinds(parts)))}. "
        f"Test episodes: {', '.join(sorted({one['test']['tasks'][:12] for one in every}))}."
    )


# The page of a cell.


def _cell(table: _Table, state: State, results: str) -> str:
    """Return the page of a cell, i.e. of one row and column of a recipe's table.

    `results` is the folder of all results, relative to the page.
    """
    result = state.result
    assert result is not None
    usual = defaults(result.settings)
    changed = [
        (place, plain(value))
        for place, value in trees.flat(result.settings)
        if value is not None and (place not in usual or usual[place] != value)
    ]
    text = yaml.safe_dump(result.settings, sort_keys=False, allow_unicode=True)
    return render_markdown(
        "results_cell.md",
        recipe=table.recipe,
        variant=table.variant,
        cell=state.cell,
        ours=ours(state),
        published=published(state),
        difference=difference(state),
        class_means=class_means([state]),
        command=Markup(result.command()),
        made=_made([state]),
        seeds=[_seed(n, one) for n, one in result.seeds.items()],
        curve=_curve(state.finished),
        marks=marks(state.cell, result),
        changed=changed,
        config=escape(text),
        confusion=_confusion(total_confusion(one["test"] for one in state.finished)),
        numbers=f"{results}/{table.recipe.name}/{table.variant}/{state.cell.stem}.json",
    )


def _seed(n: int, one: Mapping[str, Any]) -> list[str]:
    return [
        str(n),
        percent(one["test"]["accuracy"], one["test"]["interval"]),
        f"{one['round']} of {one['rounds']}",
        megabytes(one["bytes_down"]),
        megabytes(one["bytes_up"]),
        seconds(one["seconds"]),
        ", ".join(dict.fromkeys(part["commit"] for part in one["made"])),
    ]


def _curve(every: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the validation curves of all seeds in pixels, with the ends of both axes.

    `every` holds the facts about each seed's run. None if no seed validated more than one round.
    """
    curves = [(one["round"], validation_curve(one)) for one in every]
    curves = [(chosen, curve) for chosen, curve in curves if len(curve) > 1]
    if not curves:
        return None
    values = [100 * value for _, curve in curves for value in curve.values()]
    low, high, last = min(values), max(values), max(max(curve) for _, curve in curves)

    def place(round: int, value: float) -> tuple[str, str]:
        up = (100 * value - low) / ((high - low) or 1)
        return f"{_WIDTH * round / last:.1f}", f"{_HEIGHT * (1 - up):.1f}"

    return {
        "width": _WIDTH, "height": _HEIGHT, "low": f"{low:.1f}", "high": f"{high:.1f}",
        "last": last,
        "lines": [" ".join(",".join(place(*point)) for point in curve.items())
                  for _, curve in curves],
        "dots": [place(chosen, curve[chosen]) for chosen, curve in curves if chosen in curve],
    }  # fmt: skip


def _confusion(total: Mapping[str, Counter[str]]) -> list[list[str]]:
    """Return the lines of a confusion matrix in percent; [] without 2 to `_CONFUSION` classes.

    `total` is true class -> predicted class -> number of queries.
    """
    names = sorted({*total, *itertools.chain(*total.values())})
    if not 1 < len(names) <= _CONFUSION:
        return []
    lines = [["true class", *names]]
    for true in names:
        row = total.get(true, Counter())
        shares = (100 * row[predicted] / (row.total() or 1) for predicted in names)
        lines.append([true, *(f"{share:.0f}" for share in shares)])
    return lines
