"""How fast clients compute and transfer, and when they are online, in simulated time."""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fedshot.core.errors import ConfigError
from fedshot.core.ranges import Above0, AtLeast1, NotNegative
from fedshot.core.seeds import Key

Floats = npt.NDArray[np.float64]
_SPEEDS = ["client", "compute", "download", "upload"]
_WINDOWS = ["client", "from", "to"]


@dataclass(frozen=True)
class ClockOptions:
    """Simulated time: what clients need for a round, and for how long the server waits.

    Without options the run has no simulated time, and the server waits for all clients. The time of
    a client is that of its download, its computation and its upload.

    Args:
        compute: seconds of a client for one `unit` of work, the median over clients.
        unit: what `compute` counts in an exchange: "step", the local steps of the method (1 for a
            method without), or "example", the training examples that the client has.
        download: MB (10^6 bytes) per second to a client, the median over clients; null: no limit.
        upload: MB per second from a client, the median over clients; null: no limit.
        distribution: how the clients' values of `compute`, `download` and `upload` differ, each by
            a factor of its own. "lognormal": exp(`spread` z), where z is standard normal.
            "uniform": between 1 - `spread` and 1 + `spread`.
        spread: 0 for equal clients.
        speeds: CSV file with the columns client, compute, download and upload, in the units above
            and with a line for each client, in place of these medians and the distribution.
        availability: CSV file with the columns client, from and to: a client is online in these
            seconds since the start. The file repeats after its last second. Only clients that are
            online are sampled, and clients that go offline before their reply arrives are lost.
        wait_for: number of replies that the server waits for in an exchange; later ones do not
            count (over-selection). null: all.
        deadline: seconds after which the server stops waiting in an exchange; null: never.
        asynchronous: replies that come after the first `wait_for` count in a later round (FedBuff).
            `run.cohort` is then the number of clients that train at the same time, and `run.quorum`
            a share of `wait_for`.
        staleness: in asynchronous rounds, the exponent a of the factor (1 + tau)^-a of a change
            that comes tau rounds after its client has started.
    """

    compute: NotNegative = 0.0
    unit: Literal["step", "example"] = "step"
    download: Above0 | None = None
    upload: Above0 | None = None
    distribution: Literal["lognormal", "uniform"] = "lognormal"
    spread: NotNegative = 0.0
    speeds: str | None = None
    availability: str | None = None
    wait_for: AtLeast1 | None = None
    deadline: Above0 | None = None
    asynchronous: bool = False
    staleness: NotNegative = 0.5

    def __post_init__(self) -> None:
        if self.distribution == "uniform" and self.spread >= 1:
            raise ConfigError(
                f"run.clock.spread is {self.spread} with run.clock.distribution 'uniform'; expected"
                " a number below 1, so that all values are positive."
            )
        if self.speeds is not None and (self.compute or self.download or self.upload):
            raise ConfigError(
                "run.clock.speeds is set, and so are run.clock.compute, download or upload, which "
                "it replaces. Remove one or the other."
            )
        if self.asynchronous and (self.wait_for is None or self.deadline is not None):
            raise ConfigError(
                "run.clock.asynchronous is true; expected run.clock.wait_for, the number of replies"
                " that end a round, and no run.clock.deadline. Set wait_for, and deadline to null."
            )


class Speed(NamedTuple):
    """A client's seconds per unit of work, and its MB per second down and up."""

    compute: float
    download: float
    upload: float

    def seconds(self, units: float, down: int, up: int) -> float:
        """Return the time of `units` of work and of messages of `down` and `up` bytes, seconds."""
        return down / (1e6 * self.download) + units * self.compute + up / (1e6 * self.upload)


def speeds(options: ClockOptions, clients: int, key: Key) -> Callable[[int], Speed]:
    """Return the function from a client to its speed; drawn speeds are a function of `key`.

    Raises ConfigError if the file of speeds is missing or damaged, or lacks a client.
    """
    if options.speeds is not None:
        held = _read_speeds(Path(options.speeds), clients)
        return lambda client: Speed(*held[client].tolist())
    medians = Speed(options.compute, options.download or math.inf, options.upload or math.inf)

    def drawn(client: int) -> Speed:
        rng = key.at("speed", client).numpy()
        if options.distribution == "lognormal":
            factors = np.exp(options.spread * rng.standard_normal(3))
        else:
            factors = 1 + options.spread * rng.uniform(-1, 1, 3)
        compute, download, upload = (m * f for m, f in zip(medians, factors.tolist(), strict=True))
        return Speed(compute, download, upload)

    return drawn


class Availability:
    """When clients are online: windows of time, which repeat after the end of the last one.

    Args:
        clients: client of each window, int64 [n].
        starts: start of each window in seconds, at least 0.
        ends: end of each window in seconds, after its start.
    """

    def __init__(self, clients: npt.NDArray[np.int64], starts: Floats, ends: Floats) -> None:
        order = np.lexsort((starts, clients))
        self._clients, self._starts, self._ends = clients[order], starts[order], ends[order]
        self._period = float(ends.max())

    @classmethod
    def read(cls, path: Path, clients: int) -> Availability:
        """Read a CSV file. Raises ConfigError if it is missing or damaged, or has no window."""
        rows = []
        for line, (client, start, end) in _rows(path, _WINDOWS, clients):
            if not 0 <= start < end:
                raise ConfigError(
                    f"{path}, line {line}: from is {start:g} and to is {end:g}; expected seconds "
                    "from 0, with to after from."
                )
            rows.append((client, start, end))
        if not rows:
            raise ConfigError(f"{path} has no window in which a client is online. Add lines.")
        table = np.array(rows, dtype=np.float64)
        return cls(table[:, 0].astype(np.int64), table[:, 1], table[:, 2])

    @property
    def windows(self) -> int:
        """The number of windows."""
        return len(self._clients)

    def online(self, now: float) -> npt.NDArray[np.int64]:
        """Return the clients that are online, sorted."""
        t = now % self._period
        return np.unique(self._clients[(self._starts <= t) & (t < self._ends)])

    def ever(self, clients: npt.NDArray[np.int64]) -> bool:
        """Whether any of these clients is ever online."""
        return bool(np.isin(clients, self._clients).any())

    def until(self, client: int, now: float) -> float:
        """Return the time at which a client goes offline: `now` if it is offline, inf if never."""
        first, last = np.searchsorted(self._clients, [client, client + 1]).tolist()
        windows = list(zip(self._starts[first:last].tolist(), self._ends[first:last].tolist(),
                           strict=True))  # fmt: skip
        start = now - now % self._period
        at = now % self._period
        end = at
        for repeat in (0.0, self._period):  # a window at the end may go on at the beginning
            for window_start, window_end in windows:
                if window_start + repeat <= end:
                    end = max(end, window_end + repeat)
        if end >= at + self._period:
            return math.inf
        return now if end == at else start + end

    def next_start(self, now: float) -> float:
        """Return the first time after `now` at which a window of any client starts."""
        t = now % self._period
        later = self._starts[self._starts > t]
        start = float(later.min()) if len(later) else self._period + float(self._starts.min())
        return max(now - t + start, math.nextafter(now, math.inf))


def times_digest(options: ClockOptions) -> str:
    """Return the SHA-256 of the files that the options name; "" if there are none."""
    paths = [path for path in (options.speeds, options.availability) if path is not None]
    sha = hashlib.sha256()
    for path in paths:
        sha.update(hashlib.sha256(Path(path).read_bytes()).digest())
    return sha.hexdigest() if paths else ""


def _read_speeds(path: Path, clients: int) -> Floats:
    """Return the speeds in a CSV file, [clients, 3]."""
    table = np.full((clients, 3), np.nan)
    for line, (client, *values) in _rows(path, _SPEEDS, clients):
        if not np.isnan(table[int(client), 0]):
            raise ConfigError(f"{path}, line {line}: client {client:g} occurs twice.")
        if values[0] < 0 or min(values[1:]) <= 0:
            raise ConfigError(
                f"{path}, line {line}: expected seconds from 0, and MB per second above 0."
            )
        table[int(client)] = values
    lacking = np.flatnonzero(np.isnan(table[:, 0]))
    if len(lacking):
        raise ConfigError(
            f"{path} has no line for client {lacking[0]}; expected one for each of the {clients} "
            "clients, counted from 0."
        )
    return table


def _rows(path: Path, names: Sequence[str], clients: int) -> Iterator[tuple[int, list[float]]]:
    """Yield (line number, values) for each line of a CSV file with these columns."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.reader(file)
            if (head := next(rows, [])) != names:
                raise ConfigError(
                    f"{path}: the first line is {','.join(head)[:80]!r}; expected "
                    f"{','.join(names)!r}."
                )
            for row in rows:
                yield rows.line_num, _values(row, names, clients, f"{path}, line {rows.line_num}")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}. Name a CSV file with the columns {','.join(names)}."
        ) from None


def _values(row: Sequence[str], names: Sequence[str], clients: int, where: str) -> list[float]:
    try:
        values = [float(value) for value in row]
    except ValueError:
        values = []
    if len(values) != len(names) or not all(map(math.isfinite, values)):
        raise ConfigError(f"{where} is {','.join(row)[:80]!r}; expected {len(names)} numbers.")
    if not (values[0].is_integer() and 0 <= values[0] < clients):
        raise ConfigError(
            f"{where}: client is {row[0]}; expected a client of this run, 0 to {clients - 1}."
        )
    return values
