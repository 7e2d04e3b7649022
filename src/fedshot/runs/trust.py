"""The record of what each client contributed to the aggregates of a run: `trust.jsonl`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from fedshot.core import records, storage
from fedshot.protocol.robust_reducers import Influences
from fedshot.runs.recorder import Round

FILE = "trust.jsonl"
_EXTREME, _FEWEST = 10.0, 3  # multiple of the median norm; fewest clients with a useful median
_Numbers = Annotated[list[float], Field(min_length=3, max_length=3)]


class PartInfluences(TypedDict):
    """The influence on one part: for each client [norm, cosine to the aggregate, share kept]."""

    exchange: int
    work: str
    part: str
    clients: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], _Numbers]


class TrustRecord(TypedDict):
    """A line of trust.jsonl: a round."""

    round: Round
    liars: list[int]
    parts: list[PartInfluences]


def append(
    folder: Path, round: int, liars: Iterable[int], measured: Iterable[Influences]
) -> None:  # fmt: skip
    """Add the line of a round; `liars` are the clients that an attack makes lie in it."""
    parts = [
        {"exchange": one.exchange, "work": one.work, "part": one.part,
         "clients": {str(c): [_short(values[c]) for values in (one.norms, one.cosines, one.kept)]
                     for c in one.norms}}
        for one in measured
    ]  # fmt: skip
    line = {"round": round, "liars": sorted(liars), "parts": parts}
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run, the last one of each round; [] if the run has none.

    Raises CheckpointError if the file is damaged.
    """
    if not (folder / FILE).exists():
        return []
    fix = "Delete the file, and the report leaves it out"
    found = records.read_lines(folder / FILE, TrustRecord, fix)
    return list({line["round"]: line for line in found}.values())


def rewind(folder: Path, round: int) -> None:
    """Delete the lines of rounds after `round`."""
    if (folder / FILE).exists():
        kept = [line for line in read(folder) if line["round"] <= round]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        storage.write_bytes(folder / FILE, text.encode(), sync=True)


def extreme(measured: Iterable[Influences]) -> dict[int, str]:
    """Return a text for each client whose norm is far above the cohort's median, by client."""
    found: dict[int, str] = {}
    for one in measured:
        median = statistics.median(one.norms.values())
        if len(one.norms) < _FEWEST or median == 0:
            continue
        for client, norm in one.norms.items():
            if norm > _EXTREME * median:
                found.setdefault(
                    client,
                    f"part {one.part!r} has norm {norm:.3g}, {norm / median:.0f} times the median "
                    "of the cohort",
                )
    return dict(sorted(found.items()))


def _short(value: float) -> float:
    """Round a number to six significant digits."""
    return float(f"{value:.6g}")
