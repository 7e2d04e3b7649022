"""Cells that share the training of another cell and differ from it only at test.

A cell is one row of a recipe in one column. Methods with equal `training` options train the same
models from the same settings and seed. If they train on one pool, visible to all clients, the
models are the same even if the partitions differ. The cell that is trained, the lead, keeps its
model of every validated round. The cells that share its training, the followers, evaluate these
models on their own episodes. This gives exactly the results of training each of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from fedshot.config import settings as trees
from fedshot.core import records, storage
from fedshot.core.errors import CheckpointError
from fedshot.evaluation.episodic_test import ScoreFields, ValidationResult, checked_episodes
from fedshot.recipes.recipe import ROW_MAY_SET
from fedshot.runs.experiment import Experiment

_FILE = "looks.json"


class _Validation(ScoreFields):
    """The validation result of a round; `of` names the settings, data and model behind it."""

    of: dict[str, Any]


def trained_alike(run: Experiment, lead: Experiment) -> bool:
    """Whether two runs train the same models, so that `run` may evaluate the models of `lead`."""
    first, second = (one.method.training for one in (run, lead))
    return (
        first is not None
        and first == second
        and _other_settings(run) == _other_settings(lead)
        and run.config.run.choose == "validation"
        and run.prepared.validation is not None
    )


def kept_all(lead: Experiment) -> bool:
    """Whether a finished run `lead` has kept the models of all its validated rounds."""
    return set(_validated(lead)) <= set(lead.checkpoints.rounds())


def follow(
    run: Experiment, lead: Experiment, validated: Callable[[int, float], None]
) -> dict[str, Any]:
    """Validate all kept models of `lead`, a finished run, on the episodes of `run`; test the best.

    `validated` is called with each round and its validation accuracy. Returns "test" and "round",
    as in `result.json`, and "validation", [round, accuracy, interval] of every validated round.
    """
    best, chosen = None, 0
    validation = []
    for round, result in _validate(run, lead):
        found = ValidationResult.from_json(result)
        if found.beats(best):
            best, chosen = found, round
        validation.append([round, result["accuracy"], result["interval"]])
        validated(round, result["accuracy"])
    test = run.evaluate_state(run.prepared.test, _server(lead, chosen), chosen)
    return {"test": test.to_json(), "round": chosen, "validation": validation}


def _other_settings(run: Experiment) -> dict[str, Any]:
    """Return the settings that the trained models depend on, besides the method's `training`."""
    settings = run.config.settings
    ignored = ["name", *ROW_MAY_SET, "test"]
    if settings["partition"]["name"] == "resampled" and run.method.traits.trains_on_pool:
        ignored += ["partition.by", "partition.per_client", "partition.shards"]
    prefixes = tuple(f"{place}." for place in ignored)
    found = {k: v for k, v in trees.flat(settings) if not f"{k}.".startswith(prefixes)}
    return found | {"test.seed": settings["test"]["seed"]}  # the seed of a random class split


def _validate(run: Experiment, lead: Experiment) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (round, validation result) of the models of `lead` on the episodes of `run`.

    Results of unchanged models are read from the file of an earlier call.
    """
    path = run.folder / _FILE
    held = _read(path)
    inputs = {"settings": run.config.settings, "data": run.prepared.dataset.digest}
    assert run.prepared.validation is not None
    for round in _validated(lead):
        key, of = str(round), inputs | {"model": lead.checkpoints.hash(round)}
        if held.get(key, {}).get("of") != of or "per_episode" not in held[key]:
            found = run.evaluate_state(run.prepared.validation, _server(lead, round), round)
            held[key] = {**found.to_json(), "of": of}
            storage.write_bytes(path, json.dumps(held).encode(), sync=True)
        yield round, held[key]


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = records.read(
            path, dict[str, Annotated[_Validation, AfterValidator(checked_episodes)]]
        )
    except (FileNotFoundError, CheckpointError):  # a damaged file is computed again
        return {}
    return found


def _validated(lead: Experiment) -> list[int]:
    return [one["round"] for one in lead.recorder.records() if one["validation"]]


def _server(lead: Experiment, round: int) -> Any:
    return lead.checkpoints.read(round, lead.server)[0]
