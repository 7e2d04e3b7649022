"""Train the cells of a recipe with several seeds; a cell is one row in one column.

Finished seeds are skipped, and interrupted runs resume.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedshot.core.devices import devices_of
from fedshot.core.errors import CheckpointError, ConfigError
from fedshot.core.text import printable
from fedshot.methods import user_methods
from fedshot.methods.registry import METHODS
from fedshot.recipes.jobs import Event, Job, Jobs
from fedshot.recipes.plan import Obstacle, check_cell, digest
from fedshot.recipes.recipe import Cell, Recipe, Row
from fedshot.recipes.results import CellResult, Results, outdated, shared, split
from fedshot.recipes.trials import train
from fedshot.recipes.tuning import SEED, Chosen, Search


@dataclass
class State:
    """The progress of a cell, i.e. of one row and column of the recipe's table."""

    cell: Cell
    obstacle: Obstacle | None = None  # why the cell cannot be trained
    facts: Mapping[str, Any] | None = None  # from `plan.facts_of`, if seeds are missing
    result: CellResult | None = None  # the finished seeds
    # seed -> (round, rounds, last validation accuracy)
    running: dict[int, tuple[int, int, float | None]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)  # seed -> reason
    wanted: int = 0  # number of seeds requested

    @property
    def finished(self) -> list[Mapping[str, Any]]:
        """The facts about the training run of each finished seed, in order of the seeds."""
        return list(self.result.seeds.values()) if self.result else []

    @property
    def missing(self) -> list[int]:
        """The seeds that are requested and have not finished."""
        finished = self.result.seeds if self.result else {}
        return [seed for seed in range(self.wanted) if seed not in finished]


@dataclass(frozen=True)
class Request:
    """The cells (rows and columns of a recipe's table) to train, with which options, and where."""

    recipe: Recipe
    budget: str = "small"
    patterns: tuple[str, ...] = ()  # select cells by "row/column"; empty for all cells
    seeds: int = 3  # number of training runs of each cell, with seeds 0, 1, ...
    tune: int = 0  # tuning trials for each method; 0 for no tuning
    jobs: int | None = None  # processes at a time; None for as many as cores and memory allow
    runs: Path = Path("runs")
    results: Path = Path("results")
    data_dir: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, value, least in (
            ("seeds", self.seeds, 1),
            ("tune", self.tune, 0),
            ("jobs", 1 if self.jobs is None else self.jobs, 1),
        ):
            if value < least:
                raise ConfigError(f"--{name} is {value}; expected {least} or more.")
        devices_of(self.device, "--device")
        if self.seeds > SEED:
            raise ConfigError(
                f"--seeds is {self.seeds}; expected {SEED} or fewer, because seed "
                f"{SEED} is for the trials of tuning."
            )

    @property
    def at_once(self) -> int | None:
        """Processes at a time; None for as many as cores and memory allow. A GPU gets one."""
        return self.jobs or (None if self.device == "cpu" else 1)

    @property
    def variant(self) -> str:
        """Budget and tuning as a folder name, such as "small-tune4"."""
        return f"{self.budget}-tune{self.tune}" if self.tune else self.budget


class RecipeRunner:
    """Train the cells (rows and columns of the recipe's table) of a request.

    `run` updates `states`, the progress of each cell, keyed by "row/column".
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.results = Results(request.results)
        self.cells = request.recipe.cells(request.budget, request.patterns)
        self.states = {cell.key: State(cell, wanted=request.seeds) for cell in self.cells}
        rows = {cell.row.key: cell.row for cell in self.cells} if request.tune else {}
        self.tuned = {key: self._tuned(row) for key, row in rows.items()}
        for state in self.states.values():
            self._refresh(state)

    def check(self) -> None:
        """Set `State.obstacle` of each cell that cannot be trained on this machine's data.

        Raises ConfigError if tuning is requested and there are no validation classes.
        """
        for state in self.states.values():
            if state.missing:
                state.obstacle, state.facts = check_cell(state.cell, self.request.data_dir)
                here = state.facts["data"]["digest"] if state.facts else None
            else:
                here = digest(state.cell.settings(), self.request.data_dir)
            _check_same_data(state, here)
        for key in self.tuned:
            self._check_search(self.request.recipe.rows[key])

    def prepare(self) -> None:
        """Create the folders of runs and results, and check that files can be written to them."""
        for folder in (self.request.runs, self.request.results):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass

    def run(self) -> Iterator[Event]:
        """Tune if so requested, train the cells and test them; yield the workers' events."""
        self.prepare()
        yield from self._tune()
        self._share()
        for event in Jobs(self._jobs(), self.request.at_once):
            self._handle(event)
            yield event

    def _share(self) -> None:
        """Add the missing seeds that cells of any recipe have trained with the same settings."""
        every = self.results.readable()
        for state in self._ready():
            if not state.missing:
                continue
            chosen, variant = self._chosen(state.cell), self.request.variant
            found = shared(state.cell, variant, chosen, every, state.facts)
            for seed in sorted(found.keys() & set(state.missing)):
                state.result = self.results.add(state.cell, variant, chosen, seed, found[seed])

    def _jobs(self) -> list[Job]:
        """Return the jobs, sorted by seed; within a seed, cells with a `lead` come last."""
        ready = sorted(self._ready(), key=lambda state: state.cell.lead is not None)
        return [
            self._job(state.cell, seed, "train", self._chosen(state.cell))
            for seed in range(self.request.seeds)
            for state in ready
            if seed in state.missing
        ]

    def _ready(self) -> list[State]:
        """Return the cells that can be trained: without obstacle, and tuned if requested."""
        return [
            state
            for state in self.states.values()
            if state.obstacle is None and not self._is_untuned(state.cell.row)
        ]

    def _job(self, cell: Cell, seed: int, do: str, chosen: Chosen | None) -> Job:
        settings, folder = self._run_of(cell, seed, chosen)
        where, lead, untuned = self.request, None, not self.request.tune
        # Tuned rows have different options, so no row can share the training of another.
        if do == "train" and cell.lead is not None and untuned:
            run = self._run_of(cell.lead, seed, None)
            do = "follow"
            lead = Job(cell.lead.key, "train", *run, where.data_dir, None, True, where.device)
        key = f"{do} {cell.key} {seed} {folder.name}"
        keep = cell.leads and untuned
        return Job(key, do, settings, folder, where.data_dir, lead, keep, where.device)

    def _run_of(self, cell: Cell, seed: int, chosen: Chosen | None) -> tuple[dict[str, Any], Path]:
        """Return the settings and the folder of a training run."""
        settings = cell.settings(seed, chosen)
        nameless = {**settings, "name": ""} | user_methods.noted(cell.row.method)
        text = json.dumps(nameless, sort_keys=True)
        name = f"{cell.stem}.s{seed}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        return settings, self.request.runs / "recipes" / cell.recipe.name / cell.budget.name / name

    def _handle(self, event: Event) -> None:
        _, key, seed_text, _ = event.job.key.split(" ")
        state, seed, facts = self.states[key], int(seed_text), event.facts
        if event.kind in ("begun", "round"):
            accuracy = facts.get("validation")
            if accuracy is None and seed in state.running:
                accuracy = state.running[seed][2]
            state.running[seed] = (facts["round"], facts["rounds"], accuracy)
            return
        state.running.pop(seed, None)
        if event.kind == "done":
            chosen = self._chosen(state.cell)
            state.result = self.results.add(state.cell, self.request.variant, chosen, seed, facts)
        else:
            state.failed[seed] = facts["reason"]

    def _refresh(self, state: State) -> None:
        """Read the results of a cell's finished seeds from its file."""
        row = state.cell.row
        if row.method in METHODS and not self._is_untuned(row):
            chosen = self._chosen(state.cell)
            state.result = self.results.of(state.cell, self.request.variant, chosen)

    def _chosen(self, cell: Cell) -> Chosen | None:
        return self.tuned.get(cell.row.key)

    def _is_untuned(self, row: Row) -> bool:
        """Whether tuning is requested, and the row's trials have not finished."""
        return row.key in self.tuned and self.tuned[row.key] is None

    def _tuned(self, row: Row) -> Chosen | None:
        """Return the tuned options of a row; None if its trials have not finished."""
        if row.method not in METHODS:
            return None
        return self._search(row).read()

    def _search(self, row: Row) -> Search:
        recipe, request = self.request.recipe, self.request
        folder = request.results / recipe.name / request.variant
        return Search.of(recipe, request.budget, row, request.tune, folder)

    def _tune(self) -> Iterator[Event]:
        """Train the tuning trials of every untuned row; when a row's are done, choose its options.

        A row with a failed trial is not trained: it would have had fewer trials than other rows.
        """
        able = {s.cell.row.key: s.cell.row for s in self.states.values() if s.obstacle is None}
        groups = {}
        for key, row in able.items():
            if self._is_untuned(row):
                search = self._search(row)
                groups[key] = [self._job(search.cell, SEED, "tune", one) for one in search.trials]
        yield from train(groups, self.request.at_once, self._choose, self._fail_trial)

    def _choose(self, key: str, facts: Sequence[Mapping[str, Any]]) -> None:
        """Write the finished tuning trials of a row; give the row the options of the best trial."""
        search = self._search(self.request.recipe.rows[key])
        try:
            self.tuned[key] = search.write(facts)
        except ConfigError as error:
            self._fail(key, str(error))
            return
        for state in self._of_row(key):
            self._refresh(state)
            _check_same_data(state, state.facts["data"]["digest"] if state.facts else None)

    def _fail_trial(self, key: str, number: int, reason: str) -> None:
        self._fail(key, f"trial {number}: {reason}")

    def _fail(self, key: str, reason: str) -> None:
        for state in self._of_row(key):
            state.failed[SEED] = reason

    def _check_search(self, row: Row) -> None:
        """Set `State.obstacle` of a row's cells if its trials cannot be trained or used here."""
        states = [s for s in self._of_row(row.key) if s.obstacle is None and s.missing]
        if not states:
            return
        search = self._search(row)
        cell = search.cell
        known = self.states.get(cell.key)
        if known and known.cell.budget == cell.budget and (known.facts or known.obstacle):
            obstacle, facts = known.obstacle, known.facts
        else:
            obstacle, facts = check_cell(cell, self.request.data_dir)
        if facts is not None and not facts["validated"]:
            raise ConfigError(
                f"{cell.key}, in which {row.key} is tuned, has no validation classes to judge "
                "trials by. Leave out --tune, or, where clients are tested on their own classes, "
                "set partition.validation."
            )
        if self.tuned[row.key] is not None:  # then the cell need not be trained
            obstacle = None
            if facts is not None:
                trained_on, here = search.data(), facts["data"]["digest"]
                if trained_on != here:
                    obstacle = _other_data("its trials were", trained_on, here, search.file)
        elif obstacle is not None:
            reason = f"{cell.key}, in which it is tuned: {obstacle.reason}"
            obstacle = Obstacle(obstacle.kind, reason)
        for state in states:
            state.obstacle = obstacle

    def _of_row(self, key: str) -> list[State]:
        return [state for state in self.states.values() if state.cell.row.key == key]


def _check_same_data(state: State, here: str | None) -> None:
    """Set `state.obstacle` if finished seeds were trained on other data than this machine has."""
    if state.result is None or here is None:
        return
    trained_on = state.result.first["data"]["digest"]
    if trained_on != here:
        what = "its seeds were trained"
        state.obstacle = _other_data(what, trained_on, here, state.result.path)


def _other_data(what: str, trained_on: str, here: str, path: Path | None) -> Obstacle:
    return Obstacle(
        "refused",
        f"{what} on other data ({trained_on[:12]}) than those here ({here[:12]}). Restore the "
        f"data, or move {path} away to start again.",
    )


def current(
    name: str, variant: str, results: Sequence[CellResult], recipe: Recipe | None
) -> tuple[list[State], list[str]]:
    """Return a `State` for each up-to-date result, and a message for each outdated result.

    A `State` is a cell (row and column of a recipe's table) with its results.

    Args:
        name: name of the recipe of all `results`.
        variant: budget and tuning of all `results`, such as "small-tune4".
        results: results of finished cells.
        recipe: the current recipe; None if it no longer exists.
    """
    budget = split(variant)[0]
    if recipe is None or budget not in recipe.budgets:
        return [], [f"{name}/{variant}: there is no such recipe or budget"]
    by_key = {result.key: result for result in results}
    states, left_out = [], []
    for cell in recipe.cells(budget):
        result = by_key.pop(cell.key, None)
        if result is None:
            continue
        changed = outdated(result, cell, result.tuned) or _trials_changed(result, cell)
        if changed:
            left_out.append(f"{name}/{variant}, {cell.key}: out of date, {printable(changed)}")
        else:
            states.append(State(cell, result=result))
    left_out += [f"{name}/{variant}, {key}: the recipe has no such cell" for key in by_key]
    return states, left_out


def _trials_changed(result: CellResult, cell: Cell) -> str | None:
    """Return why the tuning trials behind a result are out of date; None if they are valid."""
    trials = split(result.variant)[1]
    if not trials or result.path is None or cell.row.method not in METHODS:
        return None
    if not trials.isdecimal():
        return f"{result.variant} names no number of trials"
    folder = result.path.parent
    try:
        search = Search.of(cell.recipe, cell.budget.name, cell.row, int(trials), folder)
        chosen = search.read()
    except (CheckpointError, ConfigError) as error:
        return str(error)
    name = search.file.name
    if chosen is None:
        return f"its file of trials, {name}, is missing or belongs to another search"
    return None if chosen == result.tuned else f"the trials in {name} chose other options"
