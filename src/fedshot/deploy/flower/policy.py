"""A node's policy, which restricts what a server may request, and the node's audit log.

    methods: [fedavg, fedavg_probe]  # methods that may run
    parts: [theta, stats, logits]    # parts that may be uploaded, by name
    most_up_mb: 20                   # MiB that one client uploads in one exchange
    min_batch: 16                    # minimum `batch` or `inner_batch` of a method, unless null
    min_local_steps: 2               # minimum `local_steps` or `prepare_steps` of a method
    min_cohort: 3                    # clients of a round, and secure_threshold of them in a sum
    most_seconds: 600                # work for one message; checked after each client or stack
    most_disk_mb: 500                # MiB of private states of one run; checked before work begins
    secure_sums: true                # only runs with `run.secure_sums`
    min_noise: 1                     # noise multiplier of `privacy`, in noise that clients add
    attack: true                     # also runs in which `attack` makes clients lie

All lines are optional, and a node without a policy refuses only runs with `attack`. `min_batch` and
`min_local_steps` each bound two options of methods. If a policy has one of these lines, it refuses
a method that has neither of the two options. A batch of null means a client's whole data, and is
allowed. With `min_local_steps` above 1, the gradient of a single step may not be uploaded. After
`most_seconds`, the remaining clients are skipped. The server chooses the model, the method and its
options; a policy excludes the worst choices, but does not make uploads private. `min_noise` refuses
runs without `run.secure_sums`, in which the server adds the noise and a node cannot know whether it
does. In cohorts from 62 on, the neighbours of a client alone must add as much. Clients whom the
server invents add none: only a node with `--peers` refuses these.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedshot.config import settings as trees
from fedshot.config.load import Config
from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.serialised import short
from fedshot.core.tree import Tree
from fedshot.privacy.secure_sums.neighbourhoods import degree, needed
from fedshot.protocol.method import BATCH_OPTIONS, STEP_OPTIONS
from fedshot.runs.private_runs import client_noise

_MB = 1 << 20
_OPTIONS = {"min_batch": BATCH_OPTIONS, "min_local_steps": STEP_OPTIONS}  # options of the method
_GRADIENT = "gradient"  # name of the part with the gradient of a single step


class PolicyError(ConfigError):
    """The policy of this node does not allow a request of the server."""


@dataclass(frozen=True)
class Policy:
    """Bounds on the requests of a server, as in the policy file; None for no bound.

    Unlike `None`, the default False of `attack` refuses.
    """

    methods: tuple[str, ...] | None = None
    parts: tuple[str, ...] | None = None
    most_up_mb: float | None = None
    min_batch: int | None = None
    min_local_steps: int | None = None
    min_cohort: int | None = None
    most_seconds: float | None = None
    most_disk_mb: float | None = None
    min_noise: float | None = None
    secure_sums: bool = False
    attack: bool = False

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read a policy file. Raises ConfigError if it is invalid."""
        found = trees.load(path, lambda place: place in ("methods", "parts"))
        known = {field.name for field in fields(cls)}
        if unknown := sorted(found.keys() - known):
            raise ConfigError(f"{path} has {unknown[0]!r}; expected some of {sorted(known)}.")
        for name, value in found.items():
            if name in ("methods", "parts"):
                good = isinstance(value, list) and all(isinstance(word, str) for word in value)
                expected, found[name] = "a list of names", tuple(value) if good else ()
            elif name in ("secure_sums", "attack"):
                good, expected = isinstance(value, bool), "true or false"
            elif name in ("min_batch", "min_local_steps", "min_cohort"):
                good, expected = type(value) is int and value > 0, "a whole number above 0"
            else:
                good = type(value) in (int, float) and 0 < value < float("inf")
                expected = "a number above 0"
            if not good:
                raise ConfigError(f"{path}: {name} is {value!r}; expected {expected}.")
        return cls(**found)

    def check_run(self, config: Config, clients: int) -> None:
        """Raise PolicyError if a method, options, noise, a cohort or an attack is not allowed.

        `clients` is the number of clients of the run.
        """
        if config.attack is not None and not self.attack:
            asked = f"attack {short(config.settings['attack']['name'], 60)!r}"
            raise PolicyError(self._describe("attack", asked))
        chosen = config.settings["method"]
        name = str(chosen["name"])
        if self.methods is not None and name not in self.methods:
            raise PolicyError(self._describe("methods", f"method {short(name, 60)!r}"))
        for line, options in _OPTIONS.items():
            least = getattr(self, line)
            if least is None:
                continue
            found = {option: chosen[option] for option in options if option in chosen}
            if not found:
                asked = f"method {short(name, 60)!r}, which has no `{options[0]}`"
                raise PolicyError(self._describe(line, asked))
            for option, value in found.items():
                whole_data = value is None and line == "min_batch"
                if not whole_data and not (type(value) in (int, float) and value >= least):
                    raise PolicyError(self._describe(line, f"method.{option} {short(value, 60)}"))
        if self.secure_sums and not config.run.secure_sums:
            raise PolicyError(self._describe("secure_sums", "uploads that are not masked"))
        if self.min_noise is not None and (asked := self._weak_noise(config, clients)):
            raise PolicyError(self._describe("min_noise", asked))
        cohort = min(config.run.cohort or clients, clients)
        if self.min_cohort is not None and cohort < self.min_cohort:
            raise PolicyError(self._describe("min_cohort", f"a cohort of {cohort}"))

    def _weak_noise(self, config: Config, clients: int) -> str:
        """Return how a run's noise falls short of `min_noise`, or ""."""
        assert self.min_noise is not None
        noise = client_noise(config, clients)
        if noise is None:
            return "uploads to which clients add no noise"
        if noise.mechanism.noise < self.min_noise:
            return f"privacy.noise {noise.mechanism.noise:g}"
        seen = noise.seen(noise.cohort, needed(noise.threshold, degree(noise.cohort) + 1))
        if seen < self.min_noise:
            return f"cohorts of {noise.cohort}, in which a client's neighbours add {seen:.2g}"
        return ""

    def check_seconds(self, seconds: float) -> None:
        """Raise PolicyError if the work for one message has taken too long."""
        if self.most_seconds is not None and seconds > self.most_seconds:
            raise PolicyError(self._describe("most_seconds", "more work"))

    def check_disk(self, folder: Path) -> None:
        """Raise PolicyError if the private states of a run take too much space."""
        if self.most_disk_mb is None:
            return
        held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if held > self.most_disk_mb * _MB:
            raise PolicyError(self._describe("most_disk_mb", f"{held / _MB:.1f} MB of states"))

    def check_up(self, up: Mapping[str, Tree], parts: Collection[str]) -> None:
        """Raise PolicyError for an upload that is too large, or of parts that are not allowed.

        `parts` names the parts before they are masked.
        """
        others = sorted(set(parts) - set(self.parts)) if self.parts is not None else []
        if others:
            raise PolicyError(self._describe("parts", f"part {short(others[0], 60)!r}"))
        if _GRADIENT in parts and self.min_local_steps is not None and self.min_local_steps > 1:
            raise PolicyError(self._describe("min_local_steps", f"part {_GRADIENT!r}, of one step"))
        if self.most_up_mb is None:
            return
        size = tree.nbytes(dict(up))
        if size > self.most_up_mb * _MB:
            raise PolicyError(self._describe("most_up_mb", f"{size / _MB:.1f} MB"))

    def _describe(self, line: str, requested: str) -> str:
        allowed = getattr(self, line)
        value = ", ".join(allowed) if isinstance(allowed, tuple) else f"{allowed:g}"
        value = str(allowed).lower() if isinstance(allowed, bool) else value
        return f"the policy of this node has {line} {value}, and the server asks for {requested}."


NO_BOUNDS = Policy()


def append_to_log(path: Path, **entry: Any) -> None:
    """Add a line of JSON, with the time, to an audit log."""
    line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **entry})
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
