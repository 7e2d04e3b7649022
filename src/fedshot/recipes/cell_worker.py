"""The process that trains one cell, i.e. one row and column of a recipe's table.

It reads a job from stdin and writes events to stdout. It exits when its parent does, because stdin
then closes. The next worker for the cell resumes the run from its last checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from fedshot.config import settings as trees
from fedshot.config.load import Config
from fedshot.core import records
from fedshot.core.errors import DivergenceError, FedshotError
from fedshot.evaluation.episodic_test import score
from fedshot.evaluation.raw_baselines import FEATURES, PIXELS, feature_logits, pixel_logits
from fedshot.methods import user_methods
from fedshot.protocol.method import predict_at_server
from fedshot.recipes import provenance
from fedshot.recipes.plan import facts_of
from fedshot.recipes.results import validation_curve
from fedshot.recipes.scatter import scatter_data
from fedshot.recipes.shared_training import follow, kept_all, trained_alike
from fedshot.recipes.trials import check_honest
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun
from fedshot.runs.run_folder import RESULT
from fedshot.runs.test_protocol import ResultJson

_events: TextIO = sys.stdout


def main() -> int:
    """Run the job on stdin, the JSON of a `Job.order`; return the exit code."""
    global _events  # noqa: PLW0603  (stdout carries events only, whatever a library prints)
    _events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        user_methods.load()
        user_methods.check(order["methods"])
        done = execute(order)
    except FedshotError as error:
        _emit("refused", {"reason": str(error), "error": type(error).__name__})
        return 2
    _emit("done", done)
    return 0


def execute(order: dict[str, Any]) -> dict[str, Any]:
    """Run a job, given as `Job.order`, in this process; return the facts for its "done" event."""
    return _ACTIONS[order["do"]](_experiment(order), order)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(3)


def _experiment(order: dict[str, Any]) -> Experiment:
    # Other cells train at the same time. `workers` does not change the results.
    run = {"workers": 1, "device": order["device"]}
    settings = trees.merged(order["settings"], {"run": run})
    prepared = PreparedRun(Config.of(settings), order["data_dir"])
    return Experiment(prepared, Path(order["folder"]), keep_validated=order["keep_validated"])


def _train(run: Experiment, _: Any) -> dict[str, Any]:
    """Train to the last round, test, and return the facts that a recipe's table needs."""
    result = run.folder / RESULT
    if run.round < run.config.run.rounds or not result.exists():
        _finish(run)
        run.result()
    found = records.read(result, ResultJson)
    return _summary(run, run, found) | scatter_data(run, found["test"]["per_episode"])


def _follow(run: Experiment, order: dict[str, Any]) -> dict[str, Any]:
    """Test with the models of another cell's run, trained first if unfinished; return the facts.

    `order` is the JSON of a job whose `lead` describes the other run. If the two runs do not train
    the same models, or some of the models were not kept, `run` is trained itself. The facts are
    those that a recipe's table needs.
    """
    lead = _experiment(order["lead"])
    if not trained_alike(run, lead):
        return _train(run, order)
    if lead.round < lead.config.run.rounds:
        _finish(lead)
    if not kept_all(lead):
        return _train(run, order)

    def validated(round: int, accuracy: float) -> None:
        _emit_round(round, run.config.run.rounds, accuracy, 0.0)

    with run.alone():
        provenance.note(run.folder, -1, _here(run))
        found = follow(run, lead, validated)
    return _summary(run, lead, found) | {
        "validation": found["validation"],
        "followed": order["lead"]["key"],
        "answered": provenance.history(run.folder),
    }


def _tune(run: Experiment, _: Any) -> dict[str, Any]:
    """Train a tuning trial to its last round, or until it diverges; return its validation results.

    Raises ConfigError if the settings would use the novel classes.
    """
    settings = run.config.settings
    check_honest(settings["name"], settings)
    diverged = {}
    if run.round < run.config.run.rounds:
        try:
            _finish(run)
        except DivergenceError as error:
            diverged = {"diverged": str(error)}
    found = facts_of(run.prepared) | _history(run) | {"round": run.best_round} | diverged
    if not diverged and run.best_round not in validation_curve(found):
        found["diverged"] = "validation: no client gave a usable reply"
    return found | {"made": provenance.history(run.folder)}


_ACTIONS = {"train": _train, "follow": _follow, "tune": _tune}


def _summary(run: Experiment, trained: Experiment, found: dict[str, Any]) -> dict[str, Any]:
    """Return the facts about a cell's training run that a recipe's table needs.

    Args:
        run: the run of the cell (row and column of the table).
        trained: the run that trained the cell's models; `run` itself unless training is shared.
        found: the test score and the chosen round.
    """
    prepared, test = run.prepared, run.config.test
    return facts_of(prepared) | {
        "test": found["test"],
        # Clients' own test episodes differ in their number of queries.
        "queries": 0 if prepared.own_tests else test.spec.max_way * test.query,
        **class_means(prepared, found),
        **({"attack": found["attack"]} if "attack" in found else {}),
        "round": found["round"],
        "bytes_down": trained.meter.total("train", "down"),
        "bytes_up": trained.meter.total("train", "up"),
        **_history(trained),
        "made": provenance.history(trained.folder),
    }


_CLASS_MEANS = {
    "images": ("pixels", PIXELS, pixel_logits),
    "features": ("features", FEATURES, feature_logits),
}


def class_means(prepared: PreparedRun, result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the accuracy and interval of classification by nearest class mean, keyed by input.

    Images are classified by raw pixels (key "pixels"), given features as they are (key "features");
    for texts, returns `{}`. The numbers are read from the run's `result` if it contains them, else
    computed.
    """
    if prepared.dataset.kind not in _CLASS_MEANS:
        return {}
    key, name, logits = _CLASS_MEANS[prepared.dataset.kind]
    if known := result.get("baselines", {}).get(name):
        return {key: {part: known[part] for part in ("accuracy", "interval")}}
    test = prepared.test
    found = score(predict_at_server(logits, test.eval_episodes), test)
    return {key: {"accuracy": found.accuracy, "interval": found.interval}}


def _finish(run: Experiment) -> None:
    """Train to the last round; record code and machine in the history if any round is left."""
    with run.alone():
        run.refresh()
        if run.round < run.config.run.rounds:
            last = run.round if run.checkpoints.rounds() else -1
            provenance.note(run.folder, last, _here(run))
    rounds = run.config.run.rounds
    _emit("begun", {"round": run.round, "rounds": rounds})
    for record in run.run():
        accuracy = record.validation.accuracy if record.validation else None
        _emit_round(record.round, rounds, accuracy, record.seconds)


def _here(run: Experiment) -> dict[str, Any]:
    return provenance.here(run.method.name, run.config.run.devices)


def _history(run: Experiment) -> dict[str, Any]:
    records = run.recorder.records()
    validated = [r for r in records if r["validation"]]
    return {
        "validation": [
            [r["round"], r["validation"]["accuracy"], r["validation"]["interval"]]
            for r in validated
        ],
        "traffic": [r["bytes_down"] + r["bytes_up"] for r in validated],
        "seconds": sum(r["seconds"] for r in records),
        "rounds": records[-1]["round"],
        "exchanges": max(r.get("exchanges", 0) for r in records),
        "faults": sum(len(r["faults"]) for r in records),
        "skipped": sum(r["skipped"] is not None for r in records),
        "metrics": records[-1]["metrics"],
        "peak": _peak(),
    }


def _peak() -> int:
    """Return the peak memory of this process in bytes; 0 on Windows, which does not report it."""
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _emit_round(round: int, rounds: int, validation: float | None, seconds: float) -> None:
    facts = {"round": round, "rounds": rounds, "validation": validation}
    _emit("round", facts | {"seconds": seconds, "peak": _peak()})


def _emit(event: str, facts: dict[str, Any]) -> None:
    _events.write(json.dumps({"event": event} | facts) + "\n")
    _events.flush()


if __name__ == "__main__":
    sys.exit(main())
