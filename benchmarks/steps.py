"""Cases: the local steps of one client in JAX."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import payloads
import torch
from case import Case, Options, Result, agree
from children import Child, PeerError
from nets import build
from ours import N, Round
from rounds import ROUNDED, Simulator
from timing import Contestant, interleave, rows, say, timed
from work import PreparedWork, Work, distance, named

WORKS = (
    Work("conv4-28", "conv4", (28, 28, 1), clients=1, steps=10),
    Work("conv4-32", "conv4", (32, 32, 3), clients=1, steps=10),
)


def jax(work: Work, options: Options) -> Result:
    """Measure ten steps of one client."""
    result, bench, folder = (
        Result(work.what),
        PreparedWork(work),
        options.folder / f"jax-{work.name}",
    )
    folder.mkdir()
    module = build(bench.net)
    before = named(bench.server.theta, bench.server.stats)
    module.load_state_dict(before, strict=False)
    spec = {"state": module.state_dict(), "tasks": bench.tasks[0], "shot": work.shot}
    payloads.write(folder / "jax.safetensors", spec)
    counts = sorted({N, 1}, reverse=True)
    everyone = [
        Contestant(f"fedshot, {say(n)}", timed(Round(bench, "sequential", folder, n)), n)
        for n in counts
    ]
    one = PreparedWork(replace(work.gradient(), clients=work.clients))
    after = Round(one, "sequential", folder).state()
    moved = {name: before[name] - after[name] for name in after if "running" not in name}
    zero = {name: torch.zeros_like(leaf) for name, leaf in moved.items()}
    with ExitStack() as children:
        try:
            for n in counts:
                child = children.enter_context(Child("peer_jax.py", folder, str(n)))
                found = distance(
                    moved, child.check("gradient", folder / "jax-check.safetensors"), zero
                )
                of = f"fedshot and JAX on {say(n)}, gradient in float32"
                agree(result.checks, of, found, ROUNDED)
                everyone.append(Contestant(f"JAX, {say(n)}", child.go("visit"), n))
            result.notes.append(str(child.facts["version"]))
        except PeerError as error:
            result.left_out["JAX"] = str(error)
        everyone += children.enter_context(Simulator(bench, folder)).contestants()
        interleave(everyone, options.repeats)
    result.rows = rows(everyone, everyone[0].name)
    return result


CASES = [Case(f"jax/{work.name}", partial(jax, work)) for work in WORKS]
