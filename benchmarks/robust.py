"""Case: time and memory of each aggregator, for many clients of a million parameters.

python robust.py AGGREGATOR CLIENTS LENGTH FOLDER   one aggregate; prints its numbers
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from case import Case, Options, Result, add_row, peak

from fedshot.core.machine import arithmetic
from fedshot.protocol import client_vectors
from fedshot.protocol.aggregators import AGGREGATORS
from fedshot.protocol.reducers import Mean
from fedshot.protocol.robust_reducers import Aggregation

COHORTS, LENGTH = (10, 100, 1000), 10**6


def measure(name: str, clients: int, length: int, folder: Path) -> dict[str, object]:
    """Aggregate once in this process; the processor's time, since other programs may run."""
    with arithmetic(1):
        like = {"w": torch.zeros(length)}
        aggregation = Aggregation(AGGREGATORS[name](), folder)
        reduce = aggregation.reducers("train", 0, {"delta": Mean(like)})
        accumulator = reduce["delta"].start(clients)
        drawn = torch.randn(length, generator=torch.Generator().manual_seed(0))
        before, start = peak(), time.process_time()
        for client in range(clients):
            accumulator.add(client, {"w": drawn.roll(client) + client / clients}, 1.0)
        received = time.process_time()
        accumulator.result()
        seconds = time.process_time() - received
    return {
        "aggregator": name, "clients": clients,
        "s per reply": round((received - start) / clients, 4),
        "s to combine": round(seconds, 2), "before MiB": before, "peak MiB": peak(),
        "in a file": clients * length * 4 > client_vectors.IN_MEMORY,
    }  # fmt: skip


def robust(options: Options) -> Result:
    """Measure every aggregator at every size of a cohort."""
    result = Result(
        "one aggregate of 1,000,000 parameters: seconds of one core, and peak resident memory",
        notes=[
            "The pages of a file, which the system keeps in memory while there is room, do not "
            "count. The time to combine includes the norms and cosines of the record",
        ],
    )  # fmt: skip
    length = 1000 if options.quick else LENGTH
    for clients in COHORTS:
        for name in AGGREGATORS:
            words = [name, str(clients), str(length), str(options.folder)]
            add_row(result, f"{name}, {clients}", __file__, *words)
    return result


CASES = [Case("memory/aggregators", robust)]

if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))))
