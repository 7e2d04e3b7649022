"""The calibration of a run's confidence, as measured and stored in the run's folder."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import ConfigDict, Field
from torch import Tensor
from typing_extensions import TypedDict

from fedshot.core import records, storage
from fedshot.core.errors import ConfigError
from fedshot.core.locks import locked
from fedshot.core.records import Share, Whole
from fedshot.core.text import typed
from fedshot.use.confidence import End, Interval, Signal, Unknown, signals
from fedshot.use.trained import TrainedRun

FILE = "calibration.json"
_ENDS = {
    "": "",
    "cold": ": not fitted. All predictions are right, so the best temperature is 0",
    "hot": ": not fitted. Predictions are no better than chance, so the best one is infinite",
}


class CalibrationWarning(UserWarning):
    """Warns that a threshold was measured with a way or shot that the support set does not have."""


_Count: TypeAlias = Annotated[int, Field(ge=1, lt=2**31)]


@dataclass(frozen=True)
class Calibration:
    """Temperature and thresholds for episodes of one way and shot, and measured error rates.

    One half of the episodes is used to fit temperature and thresholds; accuracy, errors and AUROC
    are measured on the other half.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    round: Whole
    way: _Count
    shot: _Count
    client: Whole | None  # client whose model was measured; None: the server's, or all clients'
    episodes: Whole  # number of episodes, both halves together
    seed: int  # seed of the episodes
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]  # divisor of the logits
    accuracy: Share
    ece_before: Share  # expected calibration error at temperature 1
    ece_after: Share  # expected calibration error at `temperature`
    signal: Signal = "probability"  # thresholds apply to the largest "probability" or "logit"
    auroc: Share | None = None  # AUROC of `signal`, known against unknown examples
    unknown: tuple[Unknown, ...] = ()  # sorted by `asked`; empty if no threshold was measured
    end: End = ""  # the best temperature is out of range, at this end; `temperature` is 1 instead
    apart: bool = False  # the two halves share no image
    ece_interval: Interval | None = None  # 95 % bootstrap interval of `ece_after`

    def at(self, accept_unknown: float) -> Unknown:
        """Return the threshold that accepts at most the share `accept_unknown` of unknown examples.

        Each threshold was fitted for a share, `Unknown.asked`; the largest one up to
        `accept_unknown` is used. Raises ConfigError if all are larger, or none was measured.
        """
        fit = [one for one in self.unknown if one.asked <= accept_unknown]
        if not self.unknown:
            raise ConfigError(
                f"accept_unknown is {accept_unknown}, but no thresholds were measured, because "
                f"there are only {self.way} validation classes. {self._fix_for_thresholds}"
            )
        if not fit or not accept_unknown < 1:
            shown = ", ".join(str(one.asked) for one in self.unknown)
            raise ConfigError(
                f"accept_unknown is {accept_unknown}; expected a share from {self.unknown[0].asked}"
                f" and below 1. Measured: {shown}."
            )
        return fit[-1]

    def __str__(self) -> str:
        images = "other images" if self.apart else "the same images, as there are too few"
        lines = [
            f"{self.way}-way {self.shot}-shot, {self.episodes} episodes of the validation classes, "
            f"half to fit and half to measure on {images}: accuracy {100 * self.accuracy:.2f} %",
            f"temperature {self.temperature:.4g}{_ENDS[self.end]}",
            f"expected calibration error {100 * self.ece_before:.2f} % before, "
            f"{100 * self.ece_after:.2f} % after{_between(self.ece_interval)}",
        ]
        if self.auroc is not None:
            lines.append(
                f"examples of other classes are detected by their largest {self.signal}: it is "
                f"lower than for examples of these classes in {100 * self.auroc:.1f} % of pairs "
                "(AUROC)"
            )
        lines += [
            f"none of these at {100 * one.asked:g} %: accepts {100 * one.false_accept:.1f} % of "
            f"examples of other classes{_between(one.interval)}, rejects "
            f"{100 * one.false_reject:.1f} % of examples of these classes"
            for one in self.unknown
        ]
        if not self.unknown:
            lines.append(
                "none of these: not measured, since each episode has all validation classes"
            )
        elif self.unknown[0].interval is not None:
            lines.append(
                "intervals: 95 %, by bootstrap over episodes; exact binomial for 0 or 100 %"
            )
        return "\n".join(lines)

    @property
    def _fix_for_thresholds(self) -> str:
        if self.way > 2:
            return "Calibrate with a smaller way."
        return "Thresholds need a run with at least three (split.validation)."

    def accepts(self, logits: Tensor, accept_unknown: float) -> Tensor:
        """Return whether the example of each row of logits is accepted as known, bool [n]."""
        signal = signals(logits, self.temperature)[self.signal]
        return signal >= self.at(accept_unknown).threshold


def _between(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f" ({100 * interval[0]:.1f} to {100 * interval[1]:.1f})"


class _Entries(TypedDict):
    calibrations: list[Calibration]


def store(folder: Path, found: Calibration) -> Path:
    """Store a calibration in the run's folder, in place of one of the same way, shot and client."""
    with locked(folder / ".calibration.lock"):
        kept = [one for one in stored(folder) if _key(one) != _key(found)]
        entries = sorted([*kept, found], key=_key)
        text = json.dumps({"calibrations": [asdict(one) for one in entries]}, indent=1) + "\n"
        storage.write_bytes(folder / FILE, text.encode(), sync=False)
    return folder / FILE


def _key(one: Calibration) -> tuple[int, int, int]:
    return one.way, one.shot, -1 if one.client is None else one.client


def stored(folder: Path) -> list[Calibration]:
    """Return the calibrations in a run's folder. Raises CheckpointError for a damaged file."""
    path = folder / FILE
    if not path.exists():
        return []
    fix = f"Delete it and run `fedshot calibrate {typed(folder)}` again"
    found: _Entries = records.load(path, _Entries, fix)
    return found["calibrations"]


def calibration_of(
    run: TrainedRun, way: int, shot: int, client: int | None, *, thresholds: bool = False
) -> Calibration | None:
    """Return the stored calibration with the nearest way and shot, or None if there is none.

    Only calibrations of the chosen round are considered: those of `client` or, if there are none,
    those of no single client. The shot counts more than the way, because temperatures depend on it
    more. With `thresholds`, calibrations with thresholds are preferred.
    """
    fit = [one for one in stored(run.folder) if one.round == run.round]
    if thresholds:
        fit = [one for one in fit if one.unknown] or fit
    own = [one for one in fit if one.client == client] or [one for one in fit if one.client is None]

    def distance(one: Calibration) -> float:
        return abs(math.log(one.shot / max(1, shot))) + abs(math.log(one.way / way)) / 2

    return min(own, key=distance, default=None)
