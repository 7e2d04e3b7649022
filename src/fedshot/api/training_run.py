"""Access from Python to a run's folder: result, history, clients, plot, report, classifier."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshot.api.listing import data_frame, html_table
from fedshot.core.errors import CheckpointError, as_path
from fedshot.core.extras import require
from fedshot.core.text import percent
from fedshot.reports import Run, Series
from fedshot.runs import run_folder
from fedshot.runs.test_protocol import TestProtocol

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from fedshot.use.calibration import Calibration
    from fedshot.use.classifier import FewShotClassifier

_SIZE = (6.4, 4.0)  # inches


@dataclass(frozen=True)
class RunResult:
    """The result of a run's test.

    Args:
        accuracy: mean accuracy over the test episodes, in [0, 1].
        interval: half-width of the 95 % interval of `accuracy` over episodes.
        episodes: number of test episodes.
        round: the round that was tested.
        chosen_by: how the round was chosen, such as "validation".
        baselines: name of a baseline -> (accuracy, interval) on the same episodes.
        clients: client number -> accuracy of the client; empty if the server's model predicts.
        worst_tenth: mean accuracy of the tenth of the clients with the lowest accuracy; None if
            `clients` is empty.
        tasks: hash of the test episodes; results with equal hashes can be compared by episode.
        tested: description of the test, such as its way and shot; `tested.marks` says why the
            result is not a fair estimate, and is empty if it is one.
    """

    accuracy: float
    interval: float
    episodes: int
    round: int
    chosen_by: str
    baselines: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    clients: Mapping[int, float] = field(default_factory=dict)
    worst_tenth: float | None = None
    tasks: str = ""
    tested: TestProtocol = field(default_factory=TestProtocol)

    def __str__(self) -> str:
        marks = "".join(f" ({mark})" for mark in self.tested.marks)
        early = " (before training)" if self.round == 0 else ""
        return f"{percent(self.accuracy, self.interval)} %{early}{marks}"

    def __repr__(self) -> str:
        return f"<RunResult: {self._line()}>"

    def _line(self) -> str:
        chosen = f", chosen by {self.chosen_by}" if self.chosen_by not in ("", "last round") else ""
        return f"{self} over {self.tested.on(self.episodes)}; round {self.round}{chosen}"


class TrainingRun:
    """A run in a folder. Each use of an attribute reads the files, so the run may still train.

    Args:
        folder: folder of the run.
        encoder: the encoder that was passed to `fedshot.train`, if any.
        backbone: the backbone that was passed to `fedshot.train`, if any.

    Raises CheckpointError if the folder holds no run.
    """

    def __init__(
        self, folder: str | os.PathLike[str], encoder: Any = None, backbone: Any = None
    ) -> None:
        self._modules = {"encoder": encoder, "backbone": backbone}
        self._path = as_path("folder", folder)
        run_folder.check(self._path)

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return self._path

    @property
    def config(self) -> dict[str, Any]:
        """The whole configuration, as in config.yaml. Change it and pass it to `fedshot.train`."""
        return run_folder.written(self._path)

    @property
    def finished(self) -> bool:
        """Whether all rounds are trained and the test is done."""
        return self._read().result is not None

    @property
    def result(self) -> RunResult:
        """The result of the test. Raises CheckpointError while the run is unfinished."""
        return _result(self._read())

    @property
    def history(self) -> pd.DataFrame:
        """The rounds as a DataFrame, one row each; round 0 is before training.

        Columns: `round`; the method's metrics, such as `loss` (in nats) and `accuracy` on training
        episodes; `validation_accuracy` and `validation_interval`, in [0, 1], NaN where a round was
        not validated; `mb_down` and `mb_up`, MB of 10^6 bytes sent to and received from all clients
        in training so far; `seconds` of the round without validation; `faults`, the number of
        lost or rejected replies; `skipped`, the reason why a round was skipped, or None. With
        simulated time also `hours`, simulated hours so far, and `late`, the number of clients that
        were late. With `privacy` also `epsilon`, the privacy loss so far.

        Raises ConfigError if pandas is not installed.
        """
        records = self._read().records
        metrics = dict.fromkeys(name for record in records for name in record["metrics"])
        scores = [record["validation"] or {} for record in records]
        fixed = {
            "validation_accuracy": [score.get("accuracy", float("nan")) for score in scores],
            "validation_interval": [score.get("interval", float("nan")) for score in scores],
            "mb_down": [record.get("bytes_down", 0) / 1e6 for record in records],
            "mb_up": [record.get("bytes_up", 0) / 1e6 for record in records],
            "seconds": [float(record["seconds"]) for record in records],
            "faults": [len(record["faults"]) for record in records],
            "skipped": [record["skipped"] for record in records],
        }
        if any("simulated" in record for record in records):
            fixed |= {
                "hours": [record["simulated"] / 3600 for record in records],
                "late": [len(record["late"]) for record in records],
            }
        if any("epsilon" in record for record in records):
            fixed["epsilon"] = [record["epsilon"] for record in records]
        named = {
            f"metric_{name}" if name in {"round", *fixed} else name: [
                record["metrics"].get(name, float("nan")) for record in records
            ]
            for name in metrics
        }
        return data_frame({"round": [record["round"] for record in records], **named, **fixed})

    @property
    def clients(self) -> pd.DataFrame:
        """The clients as a DataFrame, one row for each client that was tested or had a fault.

        Columns: `client`, its number; `name`, if the data name the clients; `accuracy` on the test,
        in [0, 1], NaN if the server's model predicts or the run is unfinished; `faults`, the number
        of its lost or rejected replies.

        Raises ConfigError if pandas is not installed.
        """
        run = self._read()
        scores = (run.result or {}).get("test", {}).get("clients") or {}
        accuracies = {int(client): accuracy for client, accuracy in scores.items()}
        faults = Counter(
            one["client"] for r in run.records for one in r["faults"] if "client" in one
        )
        numbers = sorted({*accuracies, *faults})
        names = run.client_names
        return data_frame({
            "client": numbers,
            **({"name": [names[client] for client in numbers]} if names else {}),
            "accuracy": [accuracies.get(client, float("nan")) for client in numbers],
            "faults": [faults[client] for client in numbers],
        })  # fmt: skip

    def plot(self) -> Figure:
        """Return a matplotlib figure of the accuracy during training, in percent.

        The accuracy is on validation episodes, with its 95 % interval; without validation, it is on
        the clients' training episodes. Raises CheckpointError if no accuracy was recorded, and
        ConfigError if the extra `reports` is not installed.

        Example:
            ```python
            figure = run.plot()
            figure.axes[0].set_title("FL-Proto")
            figure.savefig("curve.pdf")
            ```
        """
        require("reports", "`run.plot`")
        from matplotlib.ticker import MaxNLocator

        from fedshot.reports.figure_export import PALETTE

        run = self._read()
        series = Series.of_runs(run.label, [run])
        if series is None:
            raise CheckpointError(
                f"{self._path} has recorded no accuracy: {run.rounds} of {run.planned} rounds are "
                "trained. Continue the run, or plot a column of `history`."
            )
        figure = _figure()
        axes = figure.add_subplot()
        values = [100 * accuracy for accuracy in series.accuracies]
        axes.plot(series.rounds, values, ".-", color=PALETTE[0], label=run.label)
        if series.intervals is not None:
            halves = [100 * half for half in series.intervals]
            low, high = ([v + sign * h for v, h in zip(values, halves, strict=True)]
                         for sign in (-1, 1))  # fmt: skip
            axes.fill_between(series.rounds, low, high, color=PALETTE[0], alpha=0.2, linewidth=0)
        kind = "test (NOT HONEST)" if series.episodes == "peeked" else series.episodes
        axes.set(xlabel="communication round", ylabel=f"accuracy on {kind} episodes (%)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
        return figure

    def classifier(self, **options: Any) -> FewShotClassifier:
        """Return the model of the chosen round as a scikit-learn classifier for new classes.

        Args:
            options: as for `fedshot.FewShotClassifier`, such as `client`.

        Raises CheckpointError, ConfigError or DataError if the run cannot be used.
        """
        from fedshot.use.classifier import FewShotClassifier

        return FewShotClassifier.from_run(self._path, **{**self._modules, **options})

    def evaluate(
        self, data: Any = None, *, data_dir: str | None = None, **options: Any
    ) -> RunResult:  # fmt: skip
        """Test the chosen round on other episodes. The run and its stored result do not change.

        Nodes of Flower are not asked: a run on nodes is tested without their private states.

        Args:
            data: the data in memory that were passed to `fedshot.train`; None if files hold them.
            data_dir: folder of downloaded datasets; by default $FEDSHOT_DATA.
            options: options of `test` that differ from the run's, such as `shot=5`.

        Raises ConfigError for an unknown option, CheckpointError for data that are not the run's,
        and DataError if the data are missing or too few.

        Example:
            ```python
            print(run.evaluate(shot=5))
            ```
        """
        from fedshot.api.training import prepared_again
        from fedshot.config.load import Config
        from fedshot.config.settings import merged
        from fedshot.runs.experiment import Experiment

        prepared = prepared_again(self._path, data, data_dir, **self._modules)
        asked = Config.of(merged(self.config, {"test": options}))
        experiment = Experiment(prepared, self._path)
        test = prepared.episodic_test(asked.test)
        score = experiment.evaluate(test)
        baselines = experiment.raw_baselines(test).items()
        stored = {
            "round": experiment.best_round,
            "chosen_by": (self._read().result or {}).get("chosen_by", ""),
            "baselines": {name: one.to_json() for name, one in baselines},
        }
        own = prepared.own_tests
        shape = {"way": list(test.ways), "shot": None if own else asked.test.shot}
        tested = replace(
            TestProtocol.of(asked.settings, {"own": own, "shape": shape}),
            classes=self._read().tested.classes,
        )
        return _result_of(score.to_json(), stored, tested)

    def calibrate(
        self, data: Any = None, *, way: int | None = None, shot: int | None = None,
        episodes: int = 400, client: int | str | None = None, data_dir: str | None = None,
    ) -> Calibration:  # fmt: skip
        """Measure the confidence on the validation classes and store it in the run's folder.

        `classifier` then gives calibrated probabilities and can refuse examples of unknown classes.

        Args:
            data: the data in memory that were passed to `fedshot.train`; None if files hold them.
            way: number of classes of an episode; None for the way of the run's test.
            shot: support examples per class; None for the shot of the run's test.
            episodes: number of episodes, half of them to fit and half to measure.
            client: number or name of the client whose model predicts; None for the server's model.
            data_dir: folder of downloaded datasets; by default $FEDSHOT_DATA.

        Raises ConfigError for too few validation classes, and DataError if the data are missing,
        too few or not the run's.
        """
        from fedshot.api.training import prepared_again
        from fedshot.use.calibration import store
        from fedshot.use.measuring import measure
        from fedshot.use.trained import TrainedRun

        run = TrainedRun(self._path, data_dir, **self._modules)
        if data is not None:
            again = prepared_again(self._path, data, data_dir, **self._modules, any_device=True)
            run.federated = run.checked(again)
        found = measure(run, way=way, shot=shot, episodes=episodes, client=client)
        store(self._path, found)
        return found

    def report(
        self, to: str | os.PathLike[str] | None = None, *, with_data: bool = True,
        data_dir: str | None = None,
    ) -> Path:  # fmt: skip
        """Write an HTML page about the run, and return its path.

        Args:
            to: the file; by default report.html in the run's folder.
            with_data: whether to load the data and the model, for the figures that need them. If
                the data cannot be loaded, the page says so in their place.
            data_dir: folder of downloaded datasets; by default $FEDSHOT_DATA.
        """
        from fedshot.api.comparing import write_report

        return write_report(
            [self._path], to=None if to is None else as_path("to", to), title=None,
            with_data=with_data, data_dir=data_dir, notify=lambda _: None,
        )  # fmt: skip

    def _read(self) -> Run:
        return Run.read(self._path)

    @property
    def _facts(self) -> dict[str, str]:
        run = self._read()
        settings = run.settings
        return {
            "run": str(self._path),
            "method": str(settings.get("method", {}).get("name", "")),
            "data": run.data[0],
            "rounds": f"{run.rounds} of {run.planned}",
            "result": _result(run)._line() if run.result else "unfinished",
        }

    def __repr__(self) -> str:
        facts = self._facts
        return (
            f"<TrainingRun {facts['run']}: {facts['method']} on {facts['data']}, "
            f"{facts['rounds']} rounds, {facts['result']}>"
        )

    def _repr_html_(self) -> str:
        return html_table([], list(self._facts.items()))


def open_run(
    folder: str | os.PathLike[str], encoder: Any = None, backbone: Any = None
) -> TrainingRun:
    """Open the run in a folder, finished or not.

    `encoder` and `backbone` are the modules that were passed to `fedshot.train`, if any.

    Raises CheckpointError if the folder holds no run.

    Example:
        ```python
        run = fs.open_run("runs/digits")
        run.history.plot(x="round", y="loss")
        ```
    """
    return TrainingRun(folder, encoder, backbone)


def _result(run: Run) -> RunResult:
    return _result_of(run.test, {"round": run.rounds, **(run.result or {})}, run.tested)


def _result_of(
    test: Mapping[str, Any], stored: Mapping[str, Any], tested: TestProtocol
) -> RunResult:
    held = (stored.get("baselines") or {}).items()
    return RunResult(
        accuracy=test["accuracy"],
        interval=test["interval"],
        episodes=test["episodes"],
        round=stored["round"],
        chosen_by=stored.get("chosen_by", ""),
        baselines={name: (one["accuracy"], one["interval"]) for name, one in held},
        clients={int(c): accuracy for c, accuracy in (test.get("clients") or {}).items()},
        worst_tenth=test.get("worst_tenth"),
        tasks=test.get("tasks", ""),
        tested=tested,
    )


def _figure() -> Figure:
    """Return an empty figure that notebooks can show although pyplot did not make it."""
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:
            import io

            out = io.BytesIO()
            self.savefig(out, format="png")
            return out.getvalue()

    return NotebookFigure(figsize=_SIZE, layout="constrained")
