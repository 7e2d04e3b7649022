"""Runs and scores for pages, by hand; names that would do harm if they were not escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedshot.reports.run_files import Run

EVIL = "<script>alert('x')</script> & \"$a$\" \x1b[1m"


def score(marks: tuple[float, ...], **more: Any) -> dict[str, Any]:
    return {
        "accuracy": float(np.mean(marks)),
        "interval": 0.01,
        "episodes": len(marks),
        "tasks": "abc123",
        "per_episode": list(marks),
    } | more


def run(label: str, result: bool = True, **settings: Any) -> Run:
    records: list[dict[str, Any]] = [
        {
            "round": r,
            "metrics": {"accuracy": 0.1 * r},
            "validation": {"accuracy": 0.2 + 0.1 * r, "interval": 0.05} if result else None,
            "faults": [],
            "skipped": None,
            "bytes_down": 2_000_000 * r,
            "bytes_up": 1_000_000 * r,
            "seconds": 1.5,
        }
        for r in range(4)
    ]
    if not result:
        records[2]["faults"] = [{"client": 7, "kind": "refused", "reason": f"not finite {EVIL}"}]
        records[3]["skipped"] = "too few replies"
    tree = {"name": "x", "seed": 3, "run": {"rounds": 9}, "data": {"name": EVIL}} | settings
    more = {"clients": {"0": 0.5, "1": 0.6}, "worst_tenth": 0.5, "confusion": {EVIL: {"b": 3}}}
    test = {"test": score((0.5, 0.6), **more), "round": 3, "chosen_by": "validation", "own": False}
    ledger = [{"phase": "train", "work": "train", "direction": "up", "part": EVIL,
               "bytes": 3_000_000, "messages": 12}]  # fmt: skip
    folder = Path("r")
    return Run(label, folder, tree, records, test if result else None, {"python": EVIL}, ledger)
