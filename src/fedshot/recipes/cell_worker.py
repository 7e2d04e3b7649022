"""The process that trains one cell: an order comes in on stdin, events go out on stdout.

It ends when its parent does, since stdin closes then; a run goes on from its last checkpoint, so
ending at any instant loses nothing.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

from fedshot.config import settings as trees
from fedshot.config.load import Config
from fedshot.core import records
from fedshot.core.errors import DivergenceError, FedshotError
from fedshot.methods import user_methods
from fedshot.recipes import provenance
from fedshot.recipes.pixel_baseline import pixels
from fedshot.recipes.plan import facts
from fedshot.recipes.plane import plane
from fedshot.recipes.shared_training import follow, kept_all, trained_alike
from fedshot.recipes.tuning import check_honest
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun
from fedshot.runs.recorder import Record
from fedshot.runs.run_folder import RESULT
from fedshot.runs.test_protocol import ResultJson

_events: TextIO = sys.stdout


def main() -> int:
    """Obey one order, as `jobs.Job` tells it."""
    global _events  # noqa: PLW0603  (stdout is for events alone, whatever a library prints)
    _events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        user_methods.load()
        user_methods.check(order["own"])
        done = _DEEDS[order["do"]](_opened(order), order)
    except FedshotError as error:
        _say("refused", {"reason": str(error), "error": type(error).__name__})
        return 2
    _say("done", done)
    return 0


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(3)


def _opened(order: dict[str, Any]) -> Experiment:
    # Other cells run beside this one; workers change no bits, so it is no setting of a recipe.
    settings = trees.merged(order["settings"], {"run": {"workers": 1}})
    setting = PreparedRun(Config.of(settings), order["data_dir"])
    return Experiment(setting, Path(order["folder"]), keep_looks=order["keep_looks"])


def _train(run: Experiment, order: dict[str, Any]) -> dict[str, Any]:
    """Train to the end, test, and tell all that a table needs."""
    del order
    result = run.folder / RESULT
    if run.round < run.config.run.rounds or not result.exists():
        _to_the_end(run)
        run.result()
    found = records.read(result, ResultJson)
    return _told(run, run, found) | plane(run, found["test"]["per_episode"])


def _follow(run: Experiment, order: dict[str, Any]) -> dict[str, Any]:
    """Answer with the models of another row's training, which is brought to its end first."""
    lead = _opened(order["lead"])
    if not trained_alike(run, lead):
        return _train(run, order)
    if lead.round < lead.config.run.rounds:
        _to_the_end(lead)
    if not kept_all(lead):
        return _train(run, order)

    def seen(round: int, accuracy: float) -> None:
        told = {"round": round, "rounds": run.config.run.rounds, "validation": accuracy}
        _say("round", told | {"seconds": 0.0, "peak": _peak()})

    with run.alone():
        provenance.note(run.folder, -1, _here(run))
        found = follow(run, lead, seen)
    return _told(run, lead, found) | {
        "validation": found["validation"],
        "followed": order["lead"]["key"],
        "answered": provenance.history(run.folder),
    }


def _told(run: Experiment, trained: Experiment, found: dict[str, Any]) -> dict[str, Any]:
    """Return what a table needs of a run: what it found, and of the run that trained for it."""
    setting, options = run.setting, run.config.test
    return facts(setting) | {
        "test": found["test"],
        # Questions of the clients' own have as many queries as each has images.
        "queries": 0 if setting.own_tests else options.spec.max_way * options.query,
        "pixels": pixels(setting, found),
        "round": found["round"],
        "bytes_down": trained.meter.total("train", "down"),
        "bytes_up": trained.meter.total("train", "up"),
        **_history(trained),
        "made": provenance.history(trained.folder),
    }


def _here(run: Experiment) -> dict[str, Any]:
    """Return which code trains a run, and where."""
    method = run.config.settings["method"]["name"]
    return {
        "commit": provenance.revision(method),
        "code": provenance.code(method),
        "machine": provenance.machine(),
    }


def _to_the_end(run: Experiment) -> None:
    with run.alone():  # who finds another process at work has trained nothing
        run.refresh()
        if run.round < run.config.run.rounds:
            provenance.note(run.folder, _last(run), _here(run))
    _advance(run)


def _tune(run: Experiment, order: dict[str, Any]) -> dict[str, Any]:
    """Train to the end and tell the validation alone: the novel classes are not looked at.

    One that diverges has come to its end, too. Refused where the settings would have the novel
    classes looked at.
    """
    del order
    check_honest(run.config.settings["name"], run.config.settings)
    diverged = {}
    if run.round < run.config.run.rounds:
        try:
            _to_the_end(run)
        except DivergenceError as error:
            diverged = {"diverged": str(error)}
    told = facts(run.setting) | _history(run) | {"round": run.best_round} | diverged
    return told | {"made": provenance.history(run.folder)}


def _last(run: Experiment) -> int:
    """Return the last complete round, -1 before any."""
    return run.round if run.checkpoints.rounds() else -1


_DEEDS = {"train": _train, "follow": _follow, "tune": _tune}


def _advance(run: Experiment) -> None:
    _say("begun", {"round": run.round, "rounds": run.config.run.rounds})
    for record in run.run():
        _say("round", _seen(record, run.config.run.rounds))


def _seen(record: Record, rounds: int) -> dict[str, Any]:
    accuracy = record.validation.accuracy if record.validation else None
    return {
        "round": record.round,
        "rounds": rounds,
        "validation": accuracy,
        "seconds": record.seconds,
        "peak": _peak(),
    }


def _history(run: Experiment) -> dict[str, Any]:
    records = run.recorder.records()
    looks = [r for r in records if r["validation"]]
    return {
        "validation": [
            [r["round"], r["validation"]["accuracy"], r["validation"]["interval"]] for r in looks
        ],
        "traffic": [r["bytes_down"] + r["bytes_up"] for r in looks],
        "seconds": sum(r["seconds"] for r in records),
        "rounds": records[-1]["round"],
        "exchanges": max(r.get("exchanges", 0) for r in records),
        "faults": sum(len(r["faults"]) for r in records),
        "skipped": sum(r["skipped"] is not None for r in records),
        "metrics": records[-1]["metrics"],
        "peak": _peak(),
    }


def _peak() -> int:
    """Return the most memory this process has held, in bytes; 0 where the system does not tell."""
    if sys.platform == "win32":
        return 0
    import resource

    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else held * 1024


def _say(event: str, content: dict[str, Any]) -> None:
    _events.write(json.dumps({"event": event} | content) + "\n")
    _events.flush()


if __name__ == "__main__":
    sys.exit(main())
