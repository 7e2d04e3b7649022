"""Cells whose rounds are those of another cell: one training, and every cell's own answers.

Methods whose rounds depend on the same options (their `training`) make the same models of the same
settings and seed; where they draw from a pool that all clients see, also however its images are
dealt. So one of them trains and keeps its models of the rounds that have a look at the
validation classes; the others sit those looks and the test with these models. That gives what their
own trainings would have given, to the last digit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from fedshot.config import settings as trees
from fedshot.core import records, storage
from fedshot.core.errors import CheckpointError
from fedshot.core.records import Share, Whole
from fedshot.evaluation.episodic_test import HalfWidth, ValidationResult, checked_episodes
from fedshot.recipes.recipe import ROW_MAY_SET
from fedshot.runs.experiment import Experiment

_FILE = "looks.json"


class _Held(TypedDict):
    """What was answered of a look."""

    accuracy: Share
    interval: HalfWidth
    per_episode: Annotated[list[Share], Field(min_length=1)]
    missing: NotRequired[list[Whole]]
    of: dict[str, Any]


def trained_alike(run: Experiment, lead: Experiment) -> bool:
    """Whether a run would train what another trains, and chooses its round as a follower can."""
    first, second = (one.method.training for one in (run, lead))
    return (
        first is not None
        and first == second
        and _besides(run) == _besides(lead)
        and run.config.run.choose == "validation"
        and run.setting.validation is not None
    )


def kept_all(lead: Experiment) -> bool:
    """Whether a run that is at its end has kept the models of all its looks."""
    return set(_looks(lead)) <= set(lead.checkpoints.rounds())


def follow(run: Experiment, lead: Experiment, seen: Callable[[int, float], None]) -> dict[str, Any]:
    """Sit the looks of a training, and the test with the round that they choose.

    Args:
        run: of the row, whose folder is there and holds what has been answered so far.
        lead: that has trained.
        seen: told a round and its accuracy, in [0, 1].

    Returns:
        "test" and "round", as `result.json` of a run has them, and "validation": [round, accuracy,
        interval] of every look.
    """
    best, chosen = None, 0
    validation = []
    for round, look in _answered(run, lead):
        found = ValidationResult.from_json(look)
        if found.beats(best):
            best, chosen = found, round
        validation.append([round, look["accuracy"], look["interval"]])
        seen(round, look["accuracy"])
    test = run.evaluate_chosen(run.setting.test, _server(lead, chosen), chosen)
    return {"test": test.to_json(), "round": chosen, "validation": validation}


def _besides(run: Experiment) -> dict[str, Any]:
    """Return the settings, by place, that the rounds depend on beside the method's `training`."""
    settings = run.config.settings
    no_part = ["name", *ROW_MAY_SET, "test"]
    if settings["partition"]["name"] == "redealt" and run.method.traits.trains_on_pool:
        no_part += ["partition.by", "partition.per_client", "partition.shards"]
    own = tuple(f"{place}." for place in no_part)
    found = {k: v for k, v in trees.flat(settings) if not f"{k}.".startswith(own)}
    return found | {"test.seed": settings["test"]["seed"]}  # it draws a random split


def _answered(run: Experiment, lead: Experiment) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the looks, in order; what this model has answered here before is not answered again."""
    path = run.folder / _FILE
    held = _read(path)
    asked = {"settings": run.config.settings, "data": run.setting.dataset.digest}
    assert run.setting.validation is not None
    for round in _looks(lead):
        place, of = str(round), asked | {"model": lead.checkpoints.hash(round)}
        if held.get(place, {}).get("of") != of or "missing" not in held[place]:
            found = run.evaluate_chosen(run.setting.validation, _server(lead, round), round)
            held[place] = {
                "accuracy": found.accuracy,
                "interval": found.interval,
                "per_episode": found.per_episode,
                "missing": found.missing,
                "of": of,
            }
            storage.write_bytes(path, json.dumps(held).encode(), sync=True)
        yield round, held[place]


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = records.read(
            path, dict[str, Annotated[_Held, AfterValidator(checked_episodes)]]
        )
    except (FileNotFoundError, CheckpointError):  # nothing yet; or damaged, and answered again
        return {}
    return found


def _looks(lead: Experiment) -> list[int]:
    return [one["round"] for one in lead.recorder.records() if one["validation"]]


def _server(lead: Experiment, round: int) -> Any:
    return lead.checkpoints.read(round, lead.server)[0]
