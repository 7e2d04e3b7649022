"""Case: the peak memory of a round, in a process of its own.

python memory.py WORK FLEET      one round in this process; prints MiB before and at the peak
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from case import Case, Options, Result, add_row, peak
from ours import Round, taking
from rounds import MANY, WORKS
from work import PreparedWork

from fedshot.core.machine import keep_freed_memory

BY_NAME = {work.name: work for work in (*WORKS, *MANY)}


def measure(work: str, fleet: str, quick: bool) -> dict[str, object]:
    """Run a round in this process."""
    keep_freed_memory()
    bench = PreparedWork(BY_NAME[work].quick() if quick else BY_NAME[work])
    with tempfile.TemporaryDirectory() as folder:
        one = Round(bench, fleet, Path(folder))
        before = peak()
        one()
    return {"work": work, "fleet": fleet, "before MiB": before, "peak MiB": peak()}


def memory(options: Options) -> Result:
    """Measure every work on every fleet."""
    result = Result("peak resident memory of one round; before: Python, torch and the data")
    for work in BY_NAME:
        for fleet in taking("conv4"):
            words = [work, fleet, *["quick"] * options.quick]
            add_row(result, f"{work}, {fleet}", __file__, *words)
    return result


CASES = [Case("memory/rounds", memory)]

if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], "quick" in sys.argv[3:])))
