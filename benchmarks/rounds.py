"""Cases: a round of FL-Proto against the ordinary simulator and Flower's simulation engine."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ceiling
import payloads
from case import Case, Options, Result, agree
from children import Child, PeerError
from nets import build
from ours import FLEETS, REFERENCE, N, Round, taking
from plain import State
from timing import Contestant, interleave, rows, say, timed
from work import PreparedWork, Work, difference, distance, named

WORKS = (
    Work("conv4-28", "conv4", (28, 28, 1), clients=10, steps=10),
    Work("conv4-32", "conv4", (32, 32, 3), clients=10, steps=10),
    Work("conv4-84", "conv4", (84, 84, 3), clients=4, steps=3),
    Work("resnet12-32", "resnet12", (32, 32, 3), clients=2, steps=1),
    Work("gru-20", "gru", (20, 300), clients=10, steps=1),
    Work("head-640", "mlp", (1, 1, 640), clients=50, steps=10),
)
MANY = (
    Work("conv4-28-many", "conv4", (28, 28, 1), clients=50, steps=1),
    Work("conv4-32-many", "conv4", (32, 32, 3), clients=50, steps=1),
)
MAPS = ("conv4", "resnet12")
EXACT, ROUNDED = 1e-6, 3e-2  # of `difference` in float64, of `distance` in float32


# glibc's own switches for what `keep_freed_memory` does.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "MALLOC_ARENA_MAX": "1",
}


class Simulator:
    """The ordinary simulator on the round of a bench, in a process of its own.

    Args:
        bench: the round.
        folder: a place for its files.
        alike: whether its process has the settings of a run of fedshot: freed memory is kept, and
            numbers below 1e-38 are taken for 0.
    """

    def __init__(self, bench: PreparedWork, folder: Path, *, alike: bool = False) -> None:
        self._place = tempfile.mkdtemp(dir=folder)
        work, self.layouts = bench.work, layouts(bench.work)
        self.counts = sorted({N, 1}, reverse=True)
        spec = {
            "net": bench.net,
            "table": bench.table,
            "state": named(bench.server.theta, bench.server.stats),
            "tasks": bench.tasks,
            "layouts": self.layouts,
            "threads": self.counts,
            "optimizer": work.optimizer.name,
            "lr": work.optimizer.lr,
        }
        payloads.write(Path(self._place, "plain.safetensors"), spec)
        self._child = Child(
            "peer_plain.py",
            Path(self._place),
            *(["flush"] if alike else []),
            python=Path(sys.executable),
            environment=ALLOCATOR if alike else {},
        )
        self._also = ", settings of fedshot" if alike else ""

    def state(self, layout: str) -> State:
        """Return the server's state dict after the round."""
        found: State = self._child.check(f"{layout}-{N}", Path(self._place, "after.safetensors"))
        return found

    def contestants(self, flops: int = 0) -> list[Contestant]:
        """Return every layout with every number of threads."""
        return [
            Contestant(f"simulator, {layout}, {say(n)}{self._also}",
                       self._child.go(f"{layout}-{n}"), n, flops)
            for layout in self.layouts
            for n in self.counts
        ]  # fmt: skip

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close()


def layouts(work: Work) -> tuple[str, ...]:
    """Return the memory layouts that make a difference."""
    return ("nchw", "channels_last") if work.net in MAPS else ("nchw",)


def check(work: Work, folder: Path, result: Result) -> None:
    """Compare the updates of every fleet with the simulator's, in float64 and in float32."""
    for kind, small, tolerance in (
        (f"float64, {work.small().steps} Adam steps", work.small(), EXACT),
        ("float32, one gradient step", work.gradient(), ROUNDED),
    ):
        bench = PreparedWork(small)
        before = named(bench.server.theta, bench.server.stats)
        with Simulator(bench, folder) as peer:
            for layout in peer.layouts if small.dtype == "float32" else ("nchw",):
                theirs = peer.state(layout)
                for fleet in taking(work.net):
                    measure = difference if small.dtype == "float64" else distance
                    found = measure(Round(bench, fleet, folder).state(), theirs, before)
                    of = f"{fleet} and the simulator ({layout}), {kind}"
                    agree(result.checks, of, found, tolerance)


def ours(
    bench: PreparedWork, folder: Path, flops: int, fleets: tuple[str, ...]
) -> list[Contestant]:
    """Return fedshot's contestants."""
    return [
        Contestant(f"fedshot, {f}", timed(Round(bench, f, folder)), FLEETS[f].cores, flops)
        for f in fleets
    ]


def simulator(work: Work, options: Options) -> Result:
    """Measure the round on every fleet and in the ordinary simulator, in each of its forms."""
    work = work.quick() if options.quick else work
    result = Result(work.what)
    check(work, options.folder, result)
    bench = PreparedWork(work)
    flops = bench.flops if work.net in MAPS else 0
    everyone = ours(bench, options.folder, flops, taking(work.net))
    if work.net in MAPS:
        half = Round(PreparedWork(replace(work, bf16=True)), "threads", options.folder)
        everyone.append(Contestant("fedshot, threads, bf16", timed(half), N, flops))
    everyone.append(Contestant("of fedshot's: drawing the episodes, 1 thread", timed(bench.draw)))
    tops = {}
    if flops:
        for threads in sorted({1, N}):
            top = ceiling.best(threads)
            name = f"the best 3x3 convolution, {say(threads)}"
            tops[threads] = Contestant(name, top.run, threads, top.flops)
    with (
        Simulator(bench, options.folder) as one,
        Simulator(bench, options.folder, alike=True) as other,
    ):
        everyone[-1:-1] = [*one.contestants(flops), *other.contestants(flops)]
        interleave([*everyone, *tops.values()], options.repeats)
    ceilings = {n: top.flops / min(top.seconds) for n, top in tops.items()}
    result.rows = rows([*everyone, *tops.values()], REFERENCE, ceilings)
    result.notes = [f"{say(n)}: the ceiling is {c / 1e9:.0f} GFLOP/s"
                    for n, c in ceilings.items()]  # fmt: skip
    return result


def flower(work: Work, options: Options) -> Result:
    """Measure the round in Flower's simulation engine, beside fedshot's default fleet."""
    work = work.quick() if options.quick else work
    result, bench, folder = Result(work.what), PreparedWork(work), options.folder / work.name
    folder.mkdir()
    state = named(bench.server.theta, bench.server.stats)
    module = build(bench.net)
    module.load_state_dict(state, strict=False)
    spec: dict[str, Any] = {"net": bench.net, "state": module.state_dict(), "tasks": bench.tasks}
    payloads.write(folder / "flower.safetensors", spec)
    everyone = ours(bench, folder, 0, ("threads",))
    try:
        with Child("peer_flower.py", folder) as child, Simulator(bench, folder) as ordinary:
            everyone += ordinary.contestants()
            result.notes.append(str(child.facts["version"]))
            one = PreparedWork(replace(work.gradient(), clients=work.clients))
            after = Round(one, "threads", folder).state()
            for layout in layouts(work):
                theirs = child.check(f"{layout}-gradient", folder / "flower-check.safetensors")
                of = f"threads and Flower ({layout}), float32, one gradient step"
                agree(result.checks, of, distance(after, theirs, state), ROUNDED)
                everyone.append(Contestant(f"Flower, {layout} inside", child.go(layout), N))
            name = "Flower, channels_last inside, looks for replies every 5 ms"
            everyone.append(Contestant(name, child.go("eager"), N))
            interleave(everyone, options.repeats)
    except PeerError as error:
        result.left_out["Flower"] = str(error)
        return result
    result.rows = rows(everyone, REFERENCE)
    return result


CASES = [
    *(Case(f"simulator/{w.name}", partial(simulator, w)) for w in (*WORKS, *MANY)),
    *(Case(f"flower/{w.name}", partial(flower, w)) for w in (*WORKS[:2], *MANY)),
]
