"""What a node lets a server ask for: a file of the node's own, and a log of what it was asked.

    methods: [fedavg, fedavg_probe]  # that may be run here
    parts: [theta, stats, logits]    # that may leave, by their names
    most_up_mb: 20                   # of what one client sends in one exchange
    min_batch: 16                    # the method's `batch` or `inner_batch`, if not null
    min_local_steps: 2               # the method's `local_steps` or `prepare_steps`
    min_cohort: 3                    # clients of a round
    most_seconds: 600                # of work for one message
    most_disk_mb: 500                # of the private states of one run

Every line may be left out, and then bounds nothing. A method that has none of the options of a line
is refused. A server chooses the model, the method and its options; here is written what it may
choose. None of this makes what leaves private: it keeps out the worst of what a server could
choose.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedshot.config import settings as trees
from fedshot.config.load import Config
from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.tree import Tree
from fedshot.deploy.flower.codec import short
from fedshot.protocol.method import BATCH_OPTIONS, STEP_OPTIONS

_MB = 1 << 20
_OPTIONS = {"min_batch": BATCH_OPTIONS, "min_local_steps": STEP_OPTIONS}  # that a line bounds
_GRADIENT = "gradient"  # the part in which methods upload the gradient of a single step


class PolicyError(ConfigError):
    """A server asks for what the policy of this node does not allow."""


@dataclass(frozen=True)
class Policy:
    """What may be asked for; None for anything.

    Args:
        methods: names of methods that may be run.
        parts: names of the parts that may leave.
        most_up_mb: of what one client sends in one exchange.
        min_batch: examples of a step, by the method's options `batch` and `inner_batch`; null is
            all that a client has for it.
        min_local_steps: steps between two uploads, by the method's options `local_steps` and
            `prepare_steps`. Above 1, no gradient of a single step may leave.
        min_cohort: clients of a round.
        most_seconds: of work for one message; seen to between two clients, and then those that
            are left do none.
        most_disk_mb: of the private states of one run; seen to before work begins.
    """

    methods: tuple[str, ...] | None = None
    parts: tuple[str, ...] | None = None
    most_up_mb: float | None = None
    min_batch: int | None = None
    min_local_steps: int | None = None
    min_cohort: int | None = None
    most_seconds: float | None = None
    most_disk_mb: float | None = None

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read a policy. Raises ConfigError for an unknown key, or a value of another kind."""
        found = trees.load(path, lambda place: place in ("methods", "parts"))
        known = {field.name for field in fields(cls)}
        if strange := sorted(found.keys() - known):
            raise ConfigError(f"{path} has {strange[0]!r}; expected some of {sorted(known)}.")
        for name, value in found.items():
            listed = name in ("methods", "parts")
            good = (
                isinstance(value, list) and all(isinstance(word, str) for word in value)
                if listed
                else type(value) in (int, float) and 0 < value < float("inf")
            )
            if not good:
                what = "a list of names" if listed else "a number above 0"
                raise ConfigError(f"{path}: {name} is {value!r}; expected {what}.")
            found[name] = tuple(value) if listed else value
        return cls(**found)

    def check_run(self, config: Config, clients: int) -> None:
        """Raise PolicyError for a run of a method, or with options, that may not be."""
        chosen = config.settings["method"]
        name = str(chosen["name"])
        if self.methods is not None and name not in self.methods:
            raise PolicyError(self._words("methods", f"method {short(name, 60)!r}"))
        for line, options in _OPTIONS.items():
            least = getattr(self, line)
            if least is None:
                continue
            found = {option: chosen[option] for option in options if option in chosen}
            if not found:
                asked = f"method {short(name, 60)!r}, which has no `{options[0]}`"
                raise PolicyError(self._words(line, asked))
            for option, value in found.items():
                everything = value is None and line == "min_batch"
                if not everything and not (type(value) in (int, float) and value >= least):
                    raise PolicyError(self._words(line, f"method.{option} {short(value, 60)}"))
        cohort = min(config.run.cohort or clients, clients)
        if self.min_cohort is not None and cohort < self.min_cohort:
            raise PolicyError(self._words("min_cohort", f"a cohort of {cohort}"))

    def check_seconds(self, seconds: float) -> None:
        """Raise PolicyError where the work for one message has taken longer than it may."""
        if self.most_seconds is not None and seconds > self.most_seconds:
            raise PolicyError(self._words("most_seconds", "more work"))

    def check_disk(self, folder: Path) -> None:
        """Raise PolicyError where the private states of a run take more than they may."""
        if self.most_disk_mb is None:
            return
        held = sum(
            entry.stat().st_size
            for root, _, names in os.walk(folder)
            for entry in (Path(root) / name for name in names)
            if entry.is_file()
        )
        if held > self.most_disk_mb * _MB:
            raise PolicyError(self._words("most_disk_mb", f"{held / _MB:.1f} MB of states"))

    def check_up(self, up: Mapping[str, Tree]) -> None:
        """Raise PolicyError for parts that may not leave, or are too large together."""
        strange = sorted(set(up) - set(self.parts)) if self.parts is not None else []
        if strange:
            raise PolicyError(self._words("parts", f"part {short(strange[0], 60)!r}"))
        if _GRADIENT in up and self.min_local_steps is not None and self.min_local_steps > 1:
            raise PolicyError(self._words("min_local_steps", f"part {_GRADIENT!r}, of one step"))
        size = tree.nbytes(dict(up))
        if self.most_up_mb is not None and size > self.most_up_mb * _MB:
            raise PolicyError(self._words("most_up_mb", f"{size / _MB:.1f} MB"))

    def _words(self, line: str, asked: str) -> str:
        allowed = getattr(self, line)
        told = ", ".join(allowed) if isinstance(allowed, tuple) else f"{allowed:g}"
        return f"the policy of this node has {line} {told}, and the server asks for {asked}."


def note(path: Path, **told: Any) -> None:
    """Add a line of JSON to the log of what a node was asked for, and what came of it."""
    line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **told})
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
