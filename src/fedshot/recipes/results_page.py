"""The page of results as Markdown, generated from the result files of recipes' cells."""

from __future__ import annotations

import html
import itertools
from collections.abc import Mapping, Sequence
from operator import attrgetter
from statistics import fmean, stdev

from fedshot.config import settings as trees
from fedshot.core.text import count, megabytes, printable, seconds
from fedshot.recipes import provenance
from fedshot.recipes.plan import marks
from fedshot.recipes.plane import planar
from fedshot.recipes.plots import shown, swept
from fedshot.recipes.recipe import AGAINST, Recipe
from fedshot.recipes.results import CellResult, command, validation_curve
from fedshot.recipes.runner import State, current
from fedshot.recipes.tables import Marks, difference, measure, ours, published, raw_pixels, unfair

_HEAD = """\
# Results

Made by `fedshot reproduce results --to docs/results.md` from the files below `results/`; not
written by hand. One line is one cell of a published table. "Ours" is the mean over the test
episodes in percent, ± the half-width of its 95 % interval over episodes; seeds of a cell have the
same episodes and are averaged episode by episode, and "over seeds" is the standard deviation of
their accuracies. "Validation" is the accuracy on validation classes before training and at the
round that they chose, mean over seeds; where it says "on the test", the test classes chose, and
these are accuracies on them. MB (all clients, down and up) and seconds are of one seed. The
letters tell what sets a number apart from the published one. The command beside a table, with
`--data-dir DATA` where its data need it, makes its numbers again, to the last digit with the same
code (the commits stand below it) on the same kind of machine.
"""


def markdown(
    results: Sequence[CellResult], recipes: Mapping[str, Recipe], figures: str = "../results"
) -> str:
    """Return the page; results that are out of date are listed at its end.

    `figures` is the folder of the figures, relative to the page.
    """
    parts, left_out = [_HEAD], []
    table = attrgetter("recipe", "variant")
    for (name, variant), group in itertools.groupby(sorted(results, key=table), table):
        states, others = current(name, variant, list(group), recipes.get(name))
        left_out += others
        if states:
            parts.append(_section(recipes[name], variant, states, figures))
    if len(parts) == 1:
        parts.append("Nothing is finished yet.\n")
    if left_out:
        parts.append("\n".join(["## Left out", "", *(f"- {plain(text)}" for text in left_out), ""]))
    return "\n".join(parts)


def _section(recipe: Recipe, variant: str, states: Sequence[State], figures: str) -> str:
    letters = Marks()
    lines = [_line(state, letters) for state in states]
    text = [
        f"## {plain(recipe.title_of(state.cell for state in states))} ({plain(variant)})",
        "",
        f"{plain(recipe.source)}. {plain(measure(recipe, states))}.",
        "",
        "| method | setting | published | ours | difference | seeds | over seeds | validation | MB "
        "| seconds | |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
        *lines,
        "",
        *_clients(states),
        *[f"- {plain(note)}" for note in letters.notes()],
        *[f"- **{plain(reason)}**" for reason in unfair(states)],
        *[f"- {plain(line)}" for line in raw_pixels(states)],
        *_figures(recipe, variant, states, figures),
        "",
        *_commands(recipe, states),
        "",
        _made(states),
        "",
    ]
    if recipe.open:
        text += ["What the paper leaves open:", ""]
        text += [f"- {plain(topic)}: {plain(choice)}" for topic, choice in recipe.open.items()]
        text.append("")
    return "\n".join(text)


def _figures(recipe: Recipe, variant: str, states: Sequence[State], folder: str) -> list[str]:
    """Return the links to the recipe's figures, with captions."""
    title = plain(recipe.title_of(state.cell for state in states))
    link = f"{folder}/{recipe.name}/{variant}"
    if recipe.kind in ("curve", "sweep") or (recipe.kind == "plane" and planar(states)):
        return ["", f"![{title}]({link}.svg)"]
    text = []
    if recipe.kind == "table" and shown(states):
        text += [
            "",
            "What the exchanges bought: accuracy on the validation classes, mean over seeds; a dot "
            "is the round that they chose for the test.",
        ]
        for by in recipe.against:
            text += ["", f"![{title}, against {by}]({link}{AGAINST[by]}.svg)"]
    if recipe.kind == "table" and swept(states):
        text += ["", f"![{title}, along an axis]({link}-at.svg)"]
    return text


def _line(state: State, letters: Marks) -> str:
    result = state.result
    assert result is not None
    every = [one for _, one in sorted(result.seeds.items())]
    accuracies = [100 * one["test"]["accuracy"] for one in every]
    spread = f"{stdev(accuracies):.2f}" if len(accuracies) > 1 else "-"
    traffic = fmean([one["bytes_down"] + one["bytes_up"] for one in every])
    return _row(
        state.cell.row.label,
        state.cell.column.label,
        published(state),
        ours(state),
        difference(state),
        str(len(every)),
        spread,
        _validation(result),
        megabytes(round(traffic)),
        seconds(fmean([one["seconds"] for one in every])),
        letters.of(marks(state.cell, result)),
    )


def _row(*cells: str) -> str:
    return f"| {' | '.join(plain(cell) for cell in cells)} |"


def plain(text: str) -> str:
    """Escape HTML tags, Markdown links and "|", which separates the columns of a table."""
    return html.escape(printable(text), quote=False).replace("|", r"\|").replace("](", r"]\(")


def _clients(states: Sequence[State]) -> list[str]:
    """Return a table of how accuracy varies between clients tested on their own classes."""
    lines = []
    for state in states:
        result = state.result
        if result is None or result.first["queries"]:
            continue
        tests = [one["test"] for one in result.seeds.values()]
        spread, worst = (
            100 * fmean([t[name] for t in tests]) for name in ("spread", "worst_tenth")
        )
        labels = state.cell.row.label, state.cell.column.label
        lines.append(_row(*labels, f"{spread:.2f}", f"{worst:.2f}"))
    if not lines:
        return []
    head = "| method | setting | standard deviation over clients | worst tenth of the clients |"
    return [head, "|---|---|---:|---:|", *lines, ""]


def _validation(result: CellResult) -> str:
    """Return the validation accuracy before training and at the chosen round, or "-"."""
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


def _commands(recipe: Recipe, states: Sequence[State]) -> list[str]:
    """Return the commands that reproduce the table, one for each number of seeds."""
    by_seeds: dict[int, list[State]] = {}
    for state in states:
        if state.result:
            by_seeds.setdefault(max(state.result.seeds) + 1, []).append(state)
    found: list[str] = []
    for seeds, some in sorted(by_seeds.items(), reverse=True):
        results = [state.result for state in some if state.result]
        whole = len(some) == len(recipe.cells(some[0].cell.budget.name))
        text = command(results, [] if whole else _patterns(some), seeds)
        found += ["", f"`{text}`"]
    return found[1:]


def _patterns(states: Sequence[State]) -> list[str]:
    """Return patterns for `--cells`: 'row/*' for a row with all its cells, else each cell."""
    found = []
    for key in dict.fromkeys(state.cell.row.key for state in states):
        mine = [state.cell for state in states if state.cell.row.key == key]
        whole = len(mine) == len(mine[0].recipe.columns)
        found += [f"'{key}/*'"] if whole else [f"'{cell.key}'" for cell in mine]
    return found


def _made(states: Sequence[State]) -> str:
    """Return a line with the commits, the kinds of machine and the hashes of the test episodes."""
    seeds = [one for state in states if state.result for one in state.result.seeds.values()]
    parts = [part for one in seeds for part in one["made"]]
    commits = sorted({part["commit"] for part in parts})
    machines = sorted(provenance.kinds(parts))
    return plain(
        f"{count(len(commits), 'commit')}: {', '.join(commits)}. Made on {'; '.join(machines)}. "
        f"Test episodes: {', '.join(sorted({one['test']['tasks'][:12] for one in seeds}))}."
    )
