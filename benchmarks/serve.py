"""The child's side of `children`. No import of fedshot."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import payloads


def serve(works: Mapping[str, Callable[[], Any]], facts: Mapping[str, Any]) -> None:
    """Do what is asked for until stdin ends.

    Args:
        works: what can be asked for; the results, trees of tensors, are saved for a `check`.
        facts: what the parent is told at the start, such as versions.
    """
    _say(dict(facts))
    for line in sys.stdin:
        verb, name, *rest = line.split()
        start = time.perf_counter()
        result = works[name]()
        seconds = time.perf_counter() - start
        if verb == "check":
            payloads.write(Path(rest[0]), result)
        _say({"seconds": seconds})


def _say(words: dict[str, Any]) -> None:
    print("@" + json.dumps(words), flush=True)
