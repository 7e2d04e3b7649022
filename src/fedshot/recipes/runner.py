"""Train the cells of a recipe: what is finished is not trained again, what was begun goes on."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedshot.core.errors import ConfigError
from fedshot.methods import user_methods
from fedshot.methods.registry import METHODS
from fedshot.recipes import tuning
from fedshot.recipes.jobs import Event, Job, Jobs
from fedshot.recipes.plan import Obstacle, digest, look
from fedshot.recipes.recipe import Cell, Recipe, Row
from fedshot.recipes.results import CellResult, Results
from fedshot.recipes.sharing import shared
from fedshot.recipes.tuning import Chosen


@dataclass
class State:
    """How far a cell has come.

    Args:
        cell: which.
        obstacle: why it cannot be trained.
        seen: the facts of its data, while nothing is finished.
        result: what is finished of it.
        running: seed -> (round, rounds, last validation accuracy) of what is under way.
        failed: seed -> why its training broke off.
        wanted: seeds asked for.
    """

    cell: Cell
    obstacle: Obstacle | None = None
    seen: Mapping[str, Any] | None = None
    result: CellResult | None = None
    running: dict[int, tuple[int, int, float | None]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    wanted: int = 0


@dataclass(frozen=True)
class Request:
    """What is asked of a bench.

    Args:
        recipe: whose cells.
        budget: one of the recipe's.
        patterns: of cells, as "row/column"; all without any.
        seeds: trainings of each cell, seeds 0, 1, ...
        tune: trials for each method; 0 for none.
        jobs: processes at once; None for as many as cores and memory allow.
        runs: folder in which trainings live.
        results: folder of finished cells.
        data_dir: folder of datasets.
    """

    recipe: Recipe
    budget: str = "small"
    patterns: tuple[str, ...] = ()
    seeds: int = 3
    tune: int = 0
    jobs: int | None = None
    runs: Path = Path("runs")
    results: Path = Path("results")
    data_dir: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("seeds", 1), ("tune", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name} is {getattr(self, name)}; expected {least} or more.")
        if self.seeds > tuning.SEED:
            raise ConfigError(
                f"--seeds is {self.seeds}; expected {tuning.SEED} or fewer: the next one is for "
                "trials."
            )
        if self.jobs is not None and self.jobs < 1:
            raise ConfigError(f"--jobs is {self.jobs}; expected 1 or more.")

    @property
    def variant(self) -> str:
        """The name of budget and tuning in files."""
        return f"{self.budget}-tune{self.tune}" if self.tune else self.budget


class RecipeRunner:
    """The cells of one request; `states` changes while `run` is under way."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.results = Results(request.results)
        self.cells = request.recipe.cells(request.budget, request.patterns)
        self.states = {cell.key: State(cell, wanted=request.seeds) for cell in self.cells}
        self.tuned: dict[str, Chosen | None] = {}
        for cell in self.cells:
            if request.tune:
                self.tuned[cell.row.key] = self._tuned(cell.row)
            self._refresh(cell)

    def check(self) -> None:
        """Look for what stands in the way of each cell that is not finished.

        Raises ConfigError when --tune is asked for and no validation class could judge a trial.
        """
        for state in self.states.values():
            if self._missing(state):
                state.obstacle, state.seen = look(state.cell, self.request.data_dir)
                here = state.seen["data"]["digest"] if state.seen else None
            else:  # all it takes is a look at the data, where they are here
                here = digest(state.cell.settings()["data"], self.request.data_dir)
            _compare(state, here)
        for row in self._rows() if self.request.tune else ():
            self._check_trials(row)

    def prepare(self) -> None:
        """Make the folders of runs and results, so that a long training is not lost for them."""
        for folder in (self.request.runs, self.request.results):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass

    def run(self) -> Iterator[Event]:
        """Tune, train and test, yielding what the workers say."""
        self.prepare()
        yield from self._tune()
        self._share()
        for event in Jobs(self._jobs(), self.request.jobs):
            self._take(event)
            yield event

    def _share(self) -> None:
        """Take over the seeds that another recipe, or another row, has trained already."""
        every = self.results.readable()
        for state in self._ready():
            chosen = self._chosen(state.cell.row)
            if not self._missing(state):
                continue
            found = shared(state.cell, self.request.variant, chosen, every, state.seen)
            for seed in sorted(found.keys() & set(self._missing(state))):
                state.result = self.results.add(
                    state.cell, self.request.variant, chosen, seed, found[seed]
                )

    def _jobs(self) -> list[Job]:
        # Those that others follow come before these.
        ready = sorted(self._ready(), key=lambda state: state.cell.lead is not None)
        return [
            self._job(state.cell, seed, "train", self._chosen(state.cell.row))
            for seed in range(self.request.seeds)  # every cell has a number soon
            for state in ready
            if seed in self._missing(state)
        ]

    def _ready(self) -> list[State]:
        """Return the cells that nothing stands in the way of."""
        return [
            state
            for state in self.states.values()
            if state.obstacle is None
            and (not self.request.tune or self.tuned[state.cell.row.key] is not None)
        ]

    def _missing(self, state: State) -> list[int]:
        held = state.result.seeds if state.result else {}
        return [seed for seed in range(self.request.seeds) if seed not in held]

    def _job(self, cell: Cell, seed: int, do: str, chosen: Chosen | None) -> Job:
        settings, folder = self._run_of(cell, seed, chosen)
        lead = None
        # What tuning chose for one row is not what it chose for the other.
        if do == "train" and cell.lead is not None and not self.request.tune:
            do, lead = "follow", (*self._run_of(cell.lead, seed, None), cell.lead.key)
        return Job(
            f"{do} {cell.key} {seed} {folder.name}", do, settings, folder, self.request.data_dir,
            lead, cell.leads and not self.request.tune,
        )  # fmt: skip

    def _run_of(self, cell: Cell, seed: int, chosen: Chosen | None) -> tuple[dict[str, Any], Path]:
        """Return the settings of a training and the folder that it lives in."""
        settings = cell.settings(seed, chosen)
        nameless = {**settings, "name": ""} | user_methods.noted(cell.row.method)
        text = json.dumps(nameless, sort_keys=True)
        name = f"{cell.stem}.s{seed}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        place = self.request.runs / "recipes" / cell.recipe.name / cell.budget.name
        return settings, place / name

    def _take(self, event: Event) -> None:
        _, key, seed_text, _ = event.job.key.split(" ")
        state, seed, facts = self.states[key], int(seed_text), event.facts
        if event.kind in ("begun", "round"):
            before = state.running.get(seed, (0, 0, None))
            seen = facts.get("validation")
            now = before[2] if seen is None else seen
            state.running[seed] = (facts["round"], facts["rounds"], now)
            return
        state.running.pop(seed, None)
        if event.kind == "done":
            chosen = self._chosen(state.cell.row)
            state.result = self.results.add(state.cell, self.request.variant, chosen, seed, facts)
        else:
            state.failed[seed] = facts["reason"]

    def _refresh(self, cell: Cell) -> None:
        if self.request.tune and self.tuned[cell.row.key] is None:
            return
        if cell.row.method not in METHODS:
            return
        self.states[cell.key].result = self.results.of(
            cell, self.request.variant, self._chosen(cell.row)
        )

    def _chosen(self, row: Row) -> Chosen | None:
        return self.tuned.get(row.key)

    def _tuned(self, row: Row) -> Chosen | None:
        if row.method not in METHODS:
            return None
        cell = tuning.cell_of(self.request.recipe, self.request.budget, row)
        return tuning.read(self._trials_path(row), cell, self._trials(row))

    def _trials(self, row: Row) -> list[dict[str, Any]]:
        return tuning.trials(self.request.recipe, row, self.request.tune)

    def _trials_path(self, row: Row) -> Path:
        return tuning.path(self.request.results, self.request.recipe, self.request.variant, row)

    def _tune(self) -> Iterator[Event]:
        """Train the trials of every row that has none yet; keep those of which all came to an end.

        A row of which a trial broke off is not trained: it would have had fewer trials than others.
        """
        plan: dict[str, tuple[Row, list[int]]] = {}
        queue: dict[str, Job] = {}
        for row in self._untuned() if self.request.tune else ():
            cell = tuning.cell_of(self.request.recipe, self.request.budget, row)
            for i, options in enumerate(self._trials(row)):
                job = self._job(cell, tuning.SEED, "tune", options)
                queue[job.key] = job  # two draws may come to the same
                plan.setdefault(job.key, (row, []))[1].append(i)
        told: dict[str, dict[int, Mapping[str, Any]]] = {row.key: {} for row, _ in plan.values()}
        for event in Jobs(list(queue.values()), self.request.jobs):
            row, places = plan[event.job.key]
            if event.kind == "done":
                told[row.key] |= dict.fromkeys(places, event.facts)
                if len(told[row.key]) == self.request.tune:
                    self._settle(row, told[row.key])
            elif event.kind in ("refused", "failed"):
                self._give_up(row, f"trial {places[0]}: {event.facts['reason']}")
            yield event

    def _give_up(self, row: Row, reason: str) -> None:
        for state in self._of_row(row.key):
            state.failed[tuning.SEED] = reason

    def _check_trials(self, row: Row) -> None:
        """Look for what stands in the way of a row's trials, or of the use of those it has."""
        states = [state for state in self._of_row(row.key) if state.obstacle is None]
        if not any(self._missing(state) for state in states):
            return
        cell = tuning.cell_of(self.request.recipe, self.request.budget, row)
        known = self.states.get(cell.key)  # it may be one that was asked for, and looked at
        same = known is not None and known.cell.budget.name == cell.budget.name
        if known is not None and same and (known.seen or known.obstacle):
            obstacle, seen = known.obstacle, known.seen
        else:
            obstacle, seen = look(cell, self.request.data_dir)
        file = self._trials_path(row)
        if seen is not None and not seen["validated"]:
            raise ConfigError(
                f"{cell.key}, in which {row.key} is tuned, has no validation classes that could "
                "judge a trial; leave out --tune. Where clients are tested on their own classes, "
                "partition.validation would set images aside for that."
            )
        if self.tuned[row.key] is None:
            if obstacle is not None:
                reason = f"{cell.key}, in which it is tuned: {obstacle.reason}"
                obstacle = Obstacle(obstacle.kind, reason)
        elif seen is not None:
            held, here = tuning.data_of(file), seen["data"]["digest"]
            obstacle = None if held == here else _other_data("its trials were", held, here, file)
        else:
            obstacle = None  # what was tuned before needs the cell no more
        for state in states:
            if self._missing(state):
                state.obstacle = obstacle

    def _rows(self) -> list[Row]:
        return list({state.cell.row.key: state.cell.row for state in self.states.values()}.values())

    def _untuned(self) -> list[Row]:
        ready = {state.cell.row.key for state in self.states.values() if state.obstacle is None}
        return [row for row in self._rows() if row.key in ready and self.tuned[row.key] is None]

    def _of_row(self, key: str) -> list[State]:
        return [state for state in self.states.values() if state.cell.row.key == key]

    def _settle(self, row: Row, told: Mapping[int, Mapping[str, Any]]) -> None:
        cell = tuning.cell_of(self.request.recipe, self.request.budget, row)
        trials = self._trials(row)
        facts = [told[i] for i in range(len(trials))]
        try:
            self.tuned[row.key] = tuning.write(self._trials_path(row), cell, trials, facts)
        except ConfigError as error:
            self._give_up(row, str(error))
            return
        for state in self._of_row(row.key):
            self._refresh(state.cell)
            _compare(state, state.seen["data"]["digest"] if state.seen else None)


def _compare(state: State, here: str | None) -> None:
    """Let seeds on other data than is here stand in the way of more; None where none is here."""
    held = state.result.first["data"]["digest"] if state.result else None
    if here is not None and held not in (None, here):
        path = state.result.path if state.result else None
        state.obstacle = _other_data("its seeds were trained", held, here, path)


def _other_data(what: str, held: Any, here: str, path: Path | None) -> Obstacle:
    """Return why what is finished and what is to come do not go together."""
    return Obstacle(
        "refused",
        f"{what} on other data ({held[:12]}) than is here ({here[:12]}). Put the data back, or "
        f"move {path} away and begin again.",
    )
