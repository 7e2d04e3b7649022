"""How far a run's confidence can be trusted: what was measured, stored with the run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypeAlias

from pydantic import Field
from torch import Tensor
from typing_extensions import TypedDict

from fedshot.core import records, storage
from fedshot.core.errors import ConfigError
from fedshot.core.locks import locked
from fedshot.core.records import Finite, Share, Whole
from fedshot.use.confidence import End, Interval, Signal, Unknown, signals
from fedshot.use.trained import TrainedRun

FILE = "calibration.json"


class CalibrationWarning(UserWarning):
    """A threshold is used on another shape of support than it was measured on."""


_Count: TypeAlias = Annotated[int, Field(ge=1, lt=2**31)]
_Pair: TypeAlias = Annotated[list[Share], Field(min_length=2, max_length=2)]


class _Threshold(TypedDict):
    asked: Share
    threshold: Finite
    false_accept: Share
    false_reject: Share
    interval: NotRequired[_Pair | None]


class _Entry(TypedDict):
    """What is relied on in a measurement, as calibration.json holds it."""

    __pydantic_config__ = {"extra": "forbid"}  # type: ignore[misc]  # noqa: RUF012

    round: Whole
    way: _Count
    shot: _Count
    client: Whole | None
    episodes: Whole
    seed: int
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    at_bound: bool
    accuracy: Share
    ece_before: Share
    ece_after: Share
    nll_before: float
    nll_after: float
    signal: NotRequired[Signal]
    auroc: NotRequired[Share | None]
    unknown: NotRequired[list[_Threshold]]
    end: NotRequired[End]
    apart: NotRequired[bool]
    ece_interval: NotRequired[_Pair | None]


class _Entries(TypedDict):
    """What calibration.json holds."""

    calibrations: list[_Entry]


@dataclass(frozen=True)
class Calibration:
    """A temperature and what it is worth, for one shape of episode.

    Args:
        round: the run's round that answered.
        way: classes of an episode.
        shot: examples of each.
        client: whose model answered; None for the server's, or for all clients in turn.
        episodes: how many, half to fit and half to measure.
        seed: of the episodes.
        temperature: what logits are divided by.
        at_bound: whether the best temperature lies outside of what is searched; 1 is taken then.
        accuracy: on the measured half, in [0, 1].
        ece_before: expected calibration error on the measured half, in [0, 1], at temperature 1.
        ece_after: the same at the temperature found.
        nll_before: cross-entropy in nats, at temperature 1.
        nll_after: at the temperature found.
        signal: what thresholds are of: the largest "probability" or the largest "logit".
        auroc: chance that an example of the classes has more of it than one of another class.
        unknown: thresholds by the share asked for; empty where no class was left to ask about.
        end: at which end of what is searched: "cold" or "hot" (see `temperature`).
        apart: whether no image of the half that fits is in the half that measures.
        ece_interval: 95 % of bootstraps of `ece_after` over episodes.
    """

    round: int
    way: int
    shot: int
    client: int | None
    episodes: int
    seed: int
    temperature: float
    at_bound: bool
    accuracy: float
    ece_before: float
    ece_after: float
    nll_before: float
    nll_after: float
    signal: Signal = "probability"
    auroc: float | None = None
    unknown: tuple[Unknown, ...] = ()
    end: End = ""
    apart: bool = False
    ece_interval: Interval | None = None

    def at(self, accept_unknown: float) -> Unknown:
        """Return the threshold of the largest share measured that is not above the one asked for.

        Raises ConfigError for a share below all, or where none was measured.
        """
        fit = [one for one in self.unknown if one.asked <= accept_unknown]
        if not self.unknown:
            raise ConfigError(
                f"accept_unknown is {accept_unknown}; thresholds were not measured, because the "
                f"validation classes are only {self.way}. Calibrate with a smaller --way."
            )
        if not fit or not accept_unknown < 1:
            shown = ", ".join(str(one.asked) for one in self.unknown)
            raise ConfigError(
                f"accept_unknown is {accept_unknown}; expected a share from {self.unknown[0].asked}"
                f" and below 1. Measured: {shown}."
            )
        return fit[-1]

    def accepts(self, logits: Tensor, accept_unknown: float) -> Tensor:
        """Return for each row of logits whether it is taken for one of the classes."""
        sure = signals(logits, self.temperature)[self.signal]
        return sure >= self.at(accept_unknown).threshold


def store(folder: Path, found: Calibration) -> Path:
    """Put a measurement into the run's folder, in the place of an earlier one of its shape."""
    with locked(folder / ".calibration.lock"):  # or another process's entry may be lost
        kept = [one for one in stored(folder) if _shape(one) != _shape(found)]
        entries = sorted([*kept, found], key=_order)
        text = json.dumps({"calibrations": [asdict(one) for one in entries]}, indent=1) + "\n"
        storage.write_bytes(folder / FILE, text.encode(), sync=False)
    return folder / FILE


def _order(one: Calibration) -> tuple[int, int, int]:
    return one.way, one.shot, -1 if one.client is None else one.client


def stored(folder: Path) -> list[Calibration]:
    """Return the measurements that a run's folder holds. Raises CheckpointError for damage."""
    path = folder / FILE
    if not path.exists():
        return []
    fix = f"Delete it and run `fedshot calibrate {folder}` again"
    return [_entry(entry) for entry in records.read(path, _Entries, fix)["calibrations"]]


def calibration_of(
    run: TrainedRun, way: int, shot: int, client: int | None, *, thresholds: bool = False
) -> Calibration | None:
    """Return the measurement nearest to a shape, of the round that answers; None if there is none.

    Temperatures differ between shapes, more with the shots than with the ways. With `thresholds`
    one that has none for what is none of the classes is taken only where no other is there.
    """
    fit = [one for one in stored(run.folder) if one.round == run.round]
    if thresholds:
        fit = [one for one in fit if one.unknown] or fit
    own = [one for one in fit if one.client == client] or [one for one in fit if one.client is None]

    def far(one: Calibration) -> float:
        return abs(math.log(one.shot / max(1, shot))) + abs(math.log(one.way / way)) / 2

    return min(own, key=far, default=None)


def _entry(entry: dict[str, Any]) -> Calibration:
    unknown = tuple(
        Unknown(**{**one, "interval": _pair(one.get("interval"))})
        for one in entry.get("unknown", ())
    )
    interval = _pair(entry.get("ece_interval"))
    return Calibration(**{**entry, "unknown": unknown, "ece_interval": interval})


def _pair(found: Sequence[float] | None) -> Interval | None:
    return None if found is None else (found[0], found[1])


def _shape(one: Calibration) -> tuple[int, int, int | None]:
    return one.way, one.shot, one.client
