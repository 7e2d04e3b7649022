"""The ordinary simulator of `plain`, in a process of its own.

    python peer_plain.py FOLDER [flush]      reads FOLDER/plain.safetensors; see `children`

So that nothing fedshot asks of its process, such as how memory is kept, is done to the simulator;
unless it is asked for.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import payloads
import torch
from nets import build, place
from plain import State, laid_out, one_round
from serve import serve


def on(threads: int, work: Any) -> State:
    """Do the work on so many threads."""
    torch.set_num_threads(threads)
    found: State = work()
    return found


def main() -> None:
    """Load a round and serve it in every layout and number of threads."""
    if sys.argv[2:] == ["flush"]:
        torch.set_flush_denormal(True)
    held = payloads.read(Path(sys.argv[1]) / "plain.safetensors")
    dtype = next(leaf.dtype for leaf in held["state"].values())
    works = {}
    for layout in held["layouts"]:
        server = build(held["net"], held["table"]).to(dtype)
        server.load_state_dict(held["state"], strict=False)
        server = place(server, layout)
        tasks = laid_out(held["tasks"], layout)
        rule = held["optimizer"], held["lr"]
        one = partial(one_round, server, server.state_dict(), tasks, *rule)
        for threads in held["threads"]:
            works[f"{layout}-{threads}"] = partial(on, threads, one)
    serve(works, {})


if __name__ == "__main__":
    main()
