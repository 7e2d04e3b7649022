"""SyntheticMethod as a method that a configuration can name: a message of its own for each client.

Run as a program it is fedshot with that method, so that nodes know it too.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from conformance.synthetic_method import SyntheticMethod
from fedshot.cli.main import main
from fedshot.methods.registry import METHODS


@dataclass(frozen=True)
class RegisteredMethod(SyntheticMethod):
    """Two exchanges a round, messages that differ by client, private states, all reducers."""

    def __post_init__(self) -> None:
        if not isinstance(self.classes, int):  # the base classes, which a configuration gives
            object.__setattr__(self, "classes", 10)

    @property
    def max_way(self) -> None:
        return None


METHODS.setdefault("synthetic", RegisteredMethod)  # type: ignore[arg-type]

if __name__ == "__main__":
    argv: Any = None
    sys.exit(main(argv))
