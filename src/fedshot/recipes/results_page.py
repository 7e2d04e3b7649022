"""The page of results: Markdown made of the files of finished cells, and of nothing else."""

from __future__ import annotations

import html
import itertools
import statistics
from collections.abc import Mapping, Sequence

from fedshot.config import settings as trees
from fedshot.core.text import count, megabytes, printable, seconds
from fedshot.methods import user_methods
from fedshot.recipes import provenance
from fedshot.recipes.current import current
from fedshot.recipes.learning import shown, swept
from fedshot.recipes.plan import marks
from fedshot.recipes.plane import planar
from fedshot.recipes.recipe import AGAINST, Recipe
from fedshot.recipes.results import CellResult, mean, split
from fedshot.recipes.runner import State
from fedshot.recipes.tables import Marks, difference, floors, measure, ours, published, unfair

_HEAD = """\
# Results

Made by `fedshot reproduce results --to docs/results.md` from the files below `results/`; not
written by hand. One line is one cell of a published table. "Ours" is the mean over the test
episodes in percent, ± the half-width of its 95 % interval over episodes; several seeds sit the same
episodes and are averaged episode by episode, and "over seeds" is the standard deviation of their
accuracies. "Validation" is the accuracy on validation classes before training and at the round that
they chose, mean over seeds; where it says "on the test", the test classes chose, and these are
accuracies on them. MB (all clients, down and up) and seconds are of one seed. The letters
tell what sets a number apart from the published one. The command beside a table, with
`--data-dir DATA` where its data need it, makes its numbers again, to the last digit with the same
code (the commits stand below it) on the same kind of machine.
"""


def markdown(
    results: Sequence[CellResult], recipes: Mapping[str, Recipe], figures: str = "../results"
) -> str:
    """Return the page; what belongs to no cell of the recipes is named at its end.

    Args:
        results: finished cells.
        recipes: by name.
        figures: folder of the figures, as seen from the page.
    """
    parts, left = [_HEAD], []
    for (name, variant), group in itertools.groupby(sorted(results, key=_place), _place):
        states, others = current(name, variant, list(group), recipes.get(name))
        left += others
        if states:
            parts.append(_section(recipes[name], variant, states, figures))
    if len(parts) == 1:
        parts.append("Nothing is finished yet.\n")
    if left:
        parts.append("\n".join(["## Left out", "", *(f"- {plain(text)}" for text in left), ""]))
    return "\n".join(parts)


def _place(result: CellResult) -> tuple[str, str]:
    return result.recipe, result.variant


def _section(recipe: Recipe, variant: str, states: Sequence[State], figures: str) -> str:
    letters = Marks()
    lines = [_line(state, letters) for state in states]
    said = [
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
        *[f"- {letter}: {plain(text)}" for letter, text in letters.told()],
        *[f"- **{plain(text)}**" for text in unfair(states)],
        *[f"- {plain(text)}" for text in floors(states)],
        *_figures(recipe, variant, states, figures),
        "",
        *_commands(recipe, states),
        "",
        _made(states),
        "",
    ]
    if recipe.open:
        said += ["What the paper leaves open:", ""]
        said += [f"- {plain(key)}: {plain(text)}" for key, text in recipe.open.items()]
        said.append("")
    return "\n".join(said)


def _figures(recipe: Recipe, variant: str, states: Sequence[State], folder: str) -> list[str]:
    """Return links to the figures that are drawn beside the files, if any, and what they show."""
    title = plain(recipe.title_of(state.cell for state in states))
    link = f"{folder}/{recipe.name}/{variant}"
    if recipe.kind in ("curve", "sweep") or (recipe.kind == "plane" and planar(states)):
        return ["", f"![{title}]({link}.svg)"]
    said = []
    if recipe.kind == "table" and shown(states):
        said += [
            "",
            "What the exchanges bought: accuracy on the validation classes, mean over seeds; a dot "
            "is the round that they chose for the test.",
        ]
        for by in recipe.against:
            said += ["", f"![{title}, against {by}]({link}{AGAINST[by]}.svg)"]
    if recipe.kind == "table" and swept(states):
        said += ["", f"![{title}, along an axis]({link}-at.svg)"]
    return said


def _line(state: State, letters: Marks) -> str:
    result = state.result
    assert result is not None
    every = [one for _, one in sorted(result.seeds.items())]
    accuracies = [100 * one["test"]["accuracy"] for one in every]
    spread = f"{statistics.stdev(accuracies):.2f}" if len(accuracies) > 1 else "-"
    traffic = mean([one["bytes_down"] + one["bytes_up"] for one in every])
    cells = (
        state.cell.row.label,
        state.cell.column.label,
        published(state),
        ours(state),
        difference(state),
        str(len(every)),
        spread,
        _validation(result),
        megabytes(round(traffic)),
        seconds(mean([one["seconds"] for one in every])),
        letters.of(marks(state.cell, result)),
    )
    return _row(cells)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(plain(cell) for cell in cells)} |"


def plain(text: str) -> str:
    """Return text that a page shows as it is: nothing in it is a tag, a link or a table's bar."""
    return html.escape(printable(text), quote=False).replace("|", r"\|").replace("](", r"]\(")


def _clients(states: Sequence[State]) -> list[str]:
    """Return a table of how clients fared who were tested on their own; none of other tests."""
    lines = []
    for state in states:
        result = state.result
        if result is None or result.first["queries"]:
            continue
        tests = [one["test"] for one in result.seeds.values()]
        spread, worst = (100 * mean([t[name] for t in tests]) for name in ("spread", "worst_tenth"))
        cells = (state.cell.row.label, state.cell.column.label, f"{spread:.2f}", f"{worst:.2f}")
        lines.append(_row(cells))
    if not lines:
        return []
    head = "| method | setting | standard deviation over clients | worst tenth of the clients |"
    return [head, "|---|---|---:|---:|", *lines, ""]


def _validation(result: CellResult) -> str:
    """Return accuracy before training and at the chosen round; "-" without validation classes.

    Says so where the looks were at the test.
    """
    pairs = []
    for one in result.seeds.values():
        curve = {round: accuracy for round, accuracy, _ in one["validation"]}
        if 0 in curve and one["round"] in curve:
            pairs.append((curve[0], curve[one["round"]]))
    if not pairs:
        return "-"
    before, after = (100 * mean([pair[i] for pair in pairs]) for i in (0, 1))
    peeked = trees.at(result.settings, "run.choose") == "best_on_test_classes"
    return f"{before:.1f} → {after:.1f}{' on the test' if peeked else ''}"


def _commands(recipe: Recipe, states: Sequence[State]) -> list[str]:
    """Return a command for all lines of as many seeds, naming the cells unless it is every one."""
    held: dict[int, list[State]] = {}
    for state in states:
        if state.result:
            held.setdefault(max(state.result.seeds) + 1, []).append(state)
    found: list[str] = []
    for seeds, some in sorted(held.items(), reverse=True):
        results = [state.result for state in some if state.result]
        words = [*user_methods.program(*(r.method for r in results)), "reproduce", recipe.name]
        budget, trials = split(results[0].variant)
        if len(some) < len(recipe.cells(budget)):
            words += ["--cells", *_patterns(some)]
        words += ["--budget", budget, "--seeds", str(seeds)]
        found += ["", f"`{' '.join(words + (['--tune', trials] if trials else []))}`"]
    return found[1:]


def _patterns(states: Sequence[State]) -> list[str]:
    """Return 'row/*' where a row is whole, else its cells."""
    found = []
    for key in dict.fromkeys(state.cell.row.key for state in states):
        mine = [state.cell for state in states if state.cell.row.key == key]
        whole = len(mine) == len(mine[0].recipe.columns)
        found += [f"'{key}/*'"] if whole else [f"'{cell.key}'" for cell in mine]
    return found


def _made(states: Sequence[State]) -> str:
    """Say with which code and on what kind of machine."""
    seeds = [one for state in states if state.result for one in state.result.seeds.values()]
    parts = [part for one in seeds for part in one["made"]]
    commits = sorted({part["commit"] for part in parts})
    machines = sorted(provenance.kinds(parts))
    return plain(
        f"{count(len(commits), 'commit')}: {', '.join(commits)}. Made on {'; '.join(machines)}. "
        f"Test episodes: {', '.join(sorted({one['test']['tasks'][:12] for one in seeds}))}."
    )
