"""Sweeps from Python, and the steps that the command `sweep` shares with them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshot.api.listing import Listing
from fedshot.api.training import given_settings, is_settings, merged_settings, note, plain
from fedshot.api.training_run import TrainingRun
from fedshot.config.settings import Settings
from fedshot.core.console import tell
from fedshot.core.errors import ConfigError, as_folder
from fedshot.core.extras import require
from fedshot.core.text import percent
from fedshot.methods.user_methods import refuse_while_loading
from fedshot.recipes.sweep_runner import Sweep, all_spaces, named_space
from fedshot.recipes.trials import Space
from fedshot.reports import plain_text

if TYPE_CHECKING:
    from fedshot.recipes.sweep_tables import Rows

_WIDTH = 100


@dataclass(frozen=True)
class SweepPoint:
    """A point of a sweep: one value for each swept option.

    Args:
        label: short text of the values, such as "lr 0.001, local_steps 5".
        options: values of the swept options, keyed by key path.
        rank: position by validation accuracy, 1 for the best; None for a point that has not
            finished, or has diverged.
        validation: validation accuracy in [0, 1], the mean over seeds; None without a rank.
        interval: half-width of the 95 % interval over episodes, the mean over seeds.
        deviation: standard deviation over seeds; None for a single seed.
        test: test accuracy, if the point is the best; else None.
        test_interval: half-width of its 95 % interval.
        state: "chosen" for the best point, or why the point has no rank, or "".
        folders: the folders of its runs, one for each seed.
    """

    label: str
    options: Mapping[str, Any]
    rank: int | None
    validation: float | None
    interval: float | None
    deviation: float | None
    test: float | None
    test_interval: float | None
    state: str
    folders: tuple[Path, ...]

    @property
    def runs(self) -> list[TrainingRun]:
        """The runs of the point, one for each seed. Raises CheckpointError if one is missing."""
        return [TrainingRun(folder) for folder in self.folders]

    def __str__(self) -> str:
        texts = [self.label]
        if self.validation is not None:
            texts.append(f"validation {percent(self.validation, self.interval or 0.0)}")
        if self.test is not None:
            texts.append(f"test {percent(self.test, self.test_interval or 0.0)}")
        return "; ".join([*texts, *([self.state] if self.state else [])])


class SweepResult:
    """The points of a sweep, ranked by validation accuracy; it prints as a table."""

    def __init__(self, made: Sweep, rows: Rows) -> None:
        self._made, self._rows = made, rows

    @property
    def path(self) -> Path:
        """The folder of the sweep, with `table.csv`, `table.json` and the page `index.html`."""
        return self._made.folder

    @property
    def table(self) -> Listing:
        """The points as rows, with accuracies in [0, 1]: the content of `table.csv`."""
        return Listing(self._rows)

    @property
    def points(self) -> tuple[SweepPoint, ...]:
        """The points in the order of the table: the best first, those without a rank last."""
        return tuple(map(self._point, self._rows))

    @property
    def best(self) -> SweepPoint | None:
        """The point with the highest validation accuracy, the only one that is tested.

        None if a training failed or if all points diverged; the `state` of each point says why.
        """
        return next((self._point(row) for row in self._rows if row["chosen"]), None)

    def _point(self, row: Mapping[str, Any]) -> SweepPoint:
        made, point = self._made, self._made.points[row["point"]]
        shared = ("rank", "validation", "interval", "deviation", "test", "test_interval", "state")
        return SweepPoint(
            label=made.label(point),
            options=dict(point.options),
            folders=tuple(made.run_folder(point, seed) for seed in range(made.seeds)),
            **{name: row[name] for name in shared},
        )

    def __str__(self) -> str:
        from fedshot.recipes.sweep_tables import table

        return plain_text(table(self._made, self._rows), _WIDTH)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table._repr_html_()


def sweep(
    config: str | os.PathLike[str] | Mapping[str, Any] | None,
    over: Mapping[str, Any],
    *,
    seeds: int = 3,
    jobs: int | None = 1,
    out: str | os.PathLike[str] | None = None,
    random: int = 0,
    optuna: int = 0,
    data: str | Mapping[str, Any] | None = None,
    data_dir: str | None = None,
    progress: bool = True,
    **settings: Any,
) -> SweepResult:
    """Train with several values of some options, and test the best point by validation.

    A point is one value for each option in `over`. Points are ranked by their validation accuracy,
    averaged over seeds. Once every point has finished, only the best one is tested. `fedshot sweep`
    does the same on the command line. The same call continues a stopped sweep, and a call with more
    values, options or seeds adds to it. A failed training raises no error: the `state` of its point
    reports it, and there is no best point.

    Args:
        config: a YAML file, or a mapping with its content: the settings that all points share.
        over: key path -> values, as a list or as a text in the form of `--set`, such as "1,2,4".
            With `random` or `optuna`, it can also be a range: "log:1e-4,1e-2", "uniform:0,1" or
            "int:1,8".
        seeds: number of trainings of each point, with seeds 0, 1, ...
        jobs: number of processes at once; None for as many as cores and memory allow.
        out: folder of the sweep; by default `sweeps/<name>`, with the name of the configuration.
        random: number of points to draw at random, instead of all combinations of the values.
        optuna: number of points that Optuna proposes, with the extra `optuna`.
        data: the name of a source such as "digits", or the settings of `data`.
        data_dir: folder of downloaded datasets; by default $FEDSHOT_DATA.
        progress: whether to show progress and notices on stderr.
        settings: sections and options of the configuration, as for `fedshot.train`.

    Raises:
        ConfigError: a setting or a search space is wrong, there are no validation classes, or
            `out` holds a sweep of another configuration or of other data, or a method's file calls
            `sweep` while it is loaded.
        DataError: the data are missing or too small.
        CheckpointError: the file in `out` that describes the sweep is damaged.
        BusyError: another process trains in `out`.

    Example:
        ```python
        rates = {"method.optimizer.lr": [1e-3, 1e-2]}
        found = fs.sweep("digits.yaml", rates, seeds=2, out="sweeps/digits")
        print(found)
        print(found.best)
        ```
    """
    refuse_while_loading("fedshot.sweep")
    require("reports", "`fedshot.sweep`")
    if data is not None and not (isinstance(data, str) or is_settings(data)):
        raise ConfigError(
            f"data is a {type(data).__name__} in memory, which the processes of a sweep cannot "
            "read. Save it as files that the source 'npz' or 'folder' reads, and name that source."
        )
    given, _ = given_settings(data, settings)
    tree, notices = merged_settings(config, given)
    for text in notices:
        note(text, progress)
    folder = as_folder("out", default_folder(tree) if out is None else out)
    base = _json_value("the configuration", tree)
    spaces = all_spaces(_space(*one) for one in over.items())
    made = Sweep(folder, base, spaces, seeds, random, optuna, jobs, data_dir)
    rows, written = completed_sweep(made, show=progress)
    for path in written if progress else ():
        tell(f"wrote {path}")
    return SweepResult(made, rows)


def default_folder(settings: Settings) -> Path:
    """Return the default folder of a sweep, `sweeps/<name>`."""
    return Path("sweeps") / str(settings.get("name", "sweep"))


def completed_sweep(made: Sweep, *, show: bool) -> tuple[Rows, list[Path]]:
    """Train the points, test the best and write the tables; show progress on stderr if `show`.

    Returns the rows of the tables, and the paths of the files written.
    """
    from fedshot.recipes import sweep_tables
    from fedshot.recipes.job_progress import show_jobs

    made.check()
    show_jobs(
        made.run(),
        lambda: sweep_tables.table(made, sweep_tables.rows(made)),
        made.named,
        silent=not show,
    )
    rows = sweep_tables.rows(made)
    return rows, sweep_tables.write(made, rows)


def _space(path: str, values: Any) -> tuple[str, Space]:
    """Return an option's key path and its search space, given as a text or as a list of values."""
    if isinstance(values, str):
        return named_space(path, values)
    if not isinstance(values, Iterable) or isinstance(values, Mapping):
        raise ConfigError(
            f"the values of {path} are {values!r:.80}; expected a list, such as [1e-3, 3e-3]."
        )
    return named_space(path, _json_value(f"the values of {path}", list(values)))


def _json_value(what: str, value: Any) -> Any:
    """Return a value in JSON's types, with arrays as lists. Raises ConfigError for other types."""

    def refused(one: Any) -> Any:
        raise ConfigError(
            f"{what} has a value of type {type(one).__name__}; expected numbers, texts, lists, "
            "mappings and None."
        )

    return json.loads(json.dumps(plain(value), default=refused))
