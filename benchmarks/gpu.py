"""What fedshot does on a GPU: right, fast, and the published setting itself, within ten minutes.

    python benchmarks/gpu.py --to FOLDER [--parts check speed cells] [--data FOLDER] [--minutes 10]

The parts, most important first: `check` compares every method with the CPU in float64, and its bits
from run to run; `speed` measures rounds per second beside an ordinary simulator on the same GPU;
`cells` trains cells of FedFSL's and F2L's tables on FC100 in their own setting. Each result is
written to `gpu.json` as it is made, and another call goes on from there; `gpu.md` is the table.
`--minutes` ends `cells`. `--rehearse` runs all of it in tiny sizes on the CPU. Images for `cells`
come from `--data`: a folder that `gpu_data.py` packed, or any data folder with CIFAR-100.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import gpu_data
import torch
from nets import build
from plain import Task, average, proto_loss
from report import table
from torch import Tensor
from work import PreparedWork, Work, named

from conformance.cases import METHODS
from fedshot.config import settings as trees
from fedshot.config.load import Config
from fedshot.config.schema import RunOptions
from fedshot.conformance.checks import REFERENCE
from fedshot.conformance.federation import Federation, FixedCohort, FleetCase
from fedshot.conformance.small import CLIENTS, episodic_test
from fedshot.core import tree
from fedshot.core.devices import described
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.private import PrivateStore
from fedshot.fleets.sequential import Sequential
from fedshot.fleets.streams import Streams
from fedshot.fleets.vectorised import Vectorised
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Fleet
from fedshot.protocol.method import Method
from fedshot.recipes import index
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun

Say = Callable[..., None]
CLOSE = 1e-6  # largest relative difference from the CPU in float64, of numbers from 1e-3


class Book:
    """The results so far, in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self._table = folder / "gpu.json", folder / "gpu.md"
        self.held: dict[str, dict[str, Any]] = {}
        if self._file.exists():
            self.held = json.loads(self._file.read_text())
        self._start = time.perf_counter()

    def note(self, part: str, name: str, /, **found: Any) -> None:
        """Keep a result and print it."""
        self.held.setdefault(part, {})[name] = found
        self._file.write_text(json.dumps(self.held, indent=1))
        self._table.write_text(sections(self.held))
        shown = ", ".join(f"{key} {value}" for key, value in found.items())
        print(f"[{time.perf_counter() - self._start:6.1f}] {part} {name}: {shown}", flush=True)

    def has(self, part: str, name: str) -> bool:
        """Whether a result is there."""
        return name in self.held.get(part, {})


def sections(held: dict[str, dict[str, Any]]) -> str:
    """Return all results as Markdown."""
    parts = [
        f"## {part}\n" + table([{"": name, **row} for name, row in rows.items()])
        for part, rows in held.items()
    ]
    return "\n".join(parts)


# Right.


def check_method(name: str, device: str) -> dict[str, Any]:
    """Compare a method on the device with the CPU, in float64; return what differs."""
    torch.set_num_threads(1)
    method: Method[Any] = METHODS[name]
    method = replace(method, model=replace(method.model, dtype="float64"))  # type: ignore[type-var]
    graphs: dict[str, str] = {}

    def on(kind: Callable[[Host], Fleet]) -> FleetCase:
        def make(host: Host) -> Fleet:
            host.devices = (torch.device(device),)
            fleet = kind(host)
            if isinstance(fleet, Streams):
                refused = fleet.graphs[host.device].refused
                graphs.update({str(k)[:40]: v for k, v in refused.items()})
                fleet.graphs[host.device].refused = _Noted(graphs)
            return fleet

        return FleetCase(device, make, exact=False, rtol=1e-6, atol=1e-9)

    found: dict[str, Any] = {}
    stacks = method.model.backbone.vmappable and not method.traits.unstackable
    kinds: dict[str, Callable[[Host], Fleet]] = {
        "alone": Sequential, "graphs": lambda host: Streams(host, 2),
        "graphs again": lambda host: Streams(host, 2),
        **({"vectorised": lambda host: Vectorised(host, 4)} if stacks else {}),
    }  # fmt: skip
    states: dict[str, dict[str, Tensor]] = {}
    with RunOptions(device=device, threads=1).arithmetic(), tempfile.TemporaryDirectory() as where:
        cpu = Federation(method, REFERENCE, Path(where, "cpu")).train(3)
        expected = cpu.everything() | _logits(cpu, "cpu")
        for kind, make in kinds.items():
            try:
                run = Federation(method, on(make), Path(where, kind)).train(3)
                states[kind] = run.everything() | _logits(run, device)
                found[kind] = f"{_apart(states[kind], expected):.0e}"
            except Exception as error:
                found[kind] = f"{type(error).__name__}: {str(error)[:160]}".replace("\n", " ")
    if {"alone", "graphs", "graphs again"} <= states.keys():
        found["same bits as alone"] = _equal(states["graphs"], states["alone"])
        found["same bits again"] = _equal(states["graphs"], states["graphs again"])
    found.pop("graphs again", None)
    found["not recorded"] = "; ".join(sorted({reason[:140] for reason in graphs.values()}))
    return found


class _Noted(dict[Any, str]):
    """A dictionary that copies what is put in."""

    def __init__(self, to: dict[str, str]) -> None:
        super().__init__()
        self._to = to

    def __setitem__(self, key: Any, value: str) -> None:
        super().__setitem__(key, value)
        self._to[str(key)[:40]] = value


def _logits(run: Federation, device: str) -> dict[str, Tensor]:
    clients = FixedCohort(run.fleet, range(CLIENTS), round=run.round, phase="evaluate", choose=None)
    where = torch.device(device)
    episodes, key = episodic_test(5).eval_episodes.on(where), run.key.at("exam")
    predictions = run.method.evaluate(tree.to(run.server, where), clients, episodes, key)
    return {f"logits {p.eval_episode} by {p.client}": p.logits.cpu() for p in predictions}


def _apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative difference; numbers below 1e-3 count as 1e-3."""
    worst = 0.0
    for name, leaf in expected.items():
        other = found[name]
        if tree.form(other) != tree.form(leaf):
            raise ValueError(f"{name} is {tree.form(other)}, on the CPU {tree.form(leaf)}")
        if leaf.numel():
            one, two = other.double(), leaf.double()
            gap = (one - two).abs() / two.abs().clamp_min(1e-3)
            gap = gap.where(~(one.isnan() & two.isnan()) & (one != two), 0.0).nan_to_num(torch.inf)
            worst = max(worst, float(gap.max()))
    return worst


def _equal(found: dict[str, Tensor], other: dict[str, Tensor]) -> str:
    differ = [name for name, leaf in other.items() if tree.digest(found[name]) != tree.digest(leaf)]
    return "yes" if not differ else f"no: {len(differ)} of {len(other)}, {differ[0]}"


def check(book: Book, device: str, *, few: bool) -> None:
    """Check every method, several at a time."""
    names = list(METHODS)[:3] if few else list(METHODS)
    waiting = [name for name in names if not book.has("check", name)]
    context = multiprocessing.get_context("spawn")
    with context.Pool(1 if few else 6) as pool:
        jobs = {name: pool.apply_async(check_method, (name, device)) for name in waiting}
        for name, job in jobs.items():
            book.note("check", name, **job.get())


# Fast.


@dataclass(frozen=True)
class Timed:
    """A round to time: what fedshot and the ordinary simulator are given."""

    work: Work
    tf32: bool
    fleets: tuple[str, ...] = ("threads",)


TF32 = True
SPEEDS = (
    Timed(Work("conv4-28, 50 clients", "conv4", (28, 28, 1), 50, 10), TF32,
          ("threads", "sequential", "vectorised")),
    Timed(Work("conv4-28, 10 clients", "conv4", (28, 28, 1), 10, 10), TF32),
    Timed(Work("conv4-28, 200 clients", "conv4", (28, 28, 1), 200, 10), TF32),
    Timed(Work("conv4-32, 50 clients", "conv4", (32, 32, 3), 50, 10), TF32),
    Timed(Work("conv4-84, 50 clients", "conv4", (84, 84, 3), 50, 10), TF32,
          ("threads", "vectorised")),
    Timed(Work("conv4-84, 10 clients", "conv4", (84, 84, 3), 10, 10), TF32),
    Timed(Work("conv4-28, 50 clients, float32", "conv4", (28, 28, 1), 50, 10), tf32=False),
    Timed(Work("conv4-84, 50 clients, float32", "conv4", (84, 84, 3), 50, 10), tf32=False),
    Timed(Work("resnet12-32, 10 clients", "resnet12", (32, 32, 3), 10, 10), TF32),
    Timed(Work("resnet12-32, 10 clients, bf16", "resnet12", (32, 32, 3), 10, 10, bf16=True), TF32),
    Timed(Work("resnet12-84, 10 clients", "resnet12", (84, 84, 3), 10, 2), TF32),
    Timed(Work("resnet12-84, 10 clients, bf16", "resnet12", (84, 84, 3), 10, 2, bf16=True), TF32),
    Timed(Work("head-640, 50 clients", "mlp", (1, 1, 640), 50, 10), TF32,
          ("threads", "vectorised")),
)  # fmt: skip
MAKES: dict[str, Callable[[Host], Fleet]] = {
    "threads": Streams, "sequential": Sequential, "vectorised": lambda host: Vectorised(host, 25),
}  # fmt: skip


def synchronised(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def seconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """Return the median time of a run, after two to warm up."""
    found = []
    for i in range(2 + repeats):
        start = time.perf_counter()
        run()
        synchronised(device)
        if i > 1:
            found.append(time.perf_counter() - start)
    return sorted(found)[len(found) // 2]


def ordinary(bench: PreparedWork, device: str, repeats: int) -> float:
    """Return the seconds of a round of the ordinary simulator, in its faster memory layout.

    A copy of the module and torch's fused Adam for each client, its data on the GPU as floats. At
    most ten clients are timed; the others take as long.
    """
    n = min(10, bench.work.clients)
    found = []
    for layout in ("nchw", "channels_last") if len(bench.work.shape) == 3 else ("nchw",):
        form = torch.channels_last if layout == "channels_last" else torch.contiguous_format
        tasks = [
            [Task(t.x.to(device).to(memory_format=form) if t.x.ndim == 4 else t.x.to(device),
                  t.y.to(device), t.way, t.shot) for t in own]
            for own in bench.tasks[:n]
        ]  # fmt: skip
        module = build(bench.net)
        module.load_state_dict(named(bench.server.theta, bench.server.stats), strict=False)
        module = module.to(device).to(memory_format=form)

        def round_(module: Any = module, tasks: list[list[Task]] = tasks) -> None:
            states = []
            for own in tasks:
                local = copy.deepcopy(module).train()
                steps = torch.optim.Adam(local.parameters(), lr=1e-3, fused=device != "cpu")
                for task in own:
                    steps.zero_grad()
                    with torch.autocast("cuda", torch.bfloat16, enabled=bench.work.bf16):
                        loss = proto_loss(local, task)
                    loss.backward()
                    steps.step()
                states.append(local.state_dict())
            average(states)

        found.append(seconds(round_, device, repeats))
    return min(found) * bench.work.clients / n


def ceiling(device: str, *, tf32: bool, bf16: bool) -> float:
    """Return the FLOP/s of a large matrix product."""
    n = 8192 if device != "cpu" else 512
    dtype = torch.bfloat16 if bf16 else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    with RunOptions(device=device, threads=1, tf32=tf32).arithmetic():
        return 2 * n**3 / seconds(lambda: a @ b, device, 5)


def speed(book: Book, device: str, *, few: bool) -> None:
    """Time the rounds, on each fleet and in the ordinary simulator."""
    tops: dict[tuple[bool, bool], float] = {}
    for case in SPEEDS[:1] if few else SPEEDS:
        work = replace(case.work, clients=3, steps=2) if few else case.work
        if book.has("speed", work.name):
            continue
        bench, repeats = PreparedWork(work), 1 if few else 3
        kind = (case.tf32, work.bf16)
        if kind not in tops:
            tops[kind] = ceiling(device, tf32=case.tf32, bf16=work.bf16)
        options = RunOptions(device=device, threads=1, tf32=case.tf32)
        found: dict[str, Any] = {}
        with options.arithmetic():
            for fleet in case.fleets:
                try:
                    found[f"{fleet}, ms"] = round(1e3 * _round(bench, fleet, options, repeats), 1)
                except torch.OutOfMemoryError:
                    found[f"{fleet}, ms"] = "out of memory"
        with replace(options, deterministic=False).arithmetic():
            loose = _round(bench, "threads", options, repeats)
            plain = ordinary(bench, device, repeats)
        best = min(loose, found["threads, ms"] / 1e3)
        book.note("speed", work.name, **found, **{
            "threads, not deterministic, ms": round(1e3 * loose, 1),
            "ordinary, ms": round(1e3 * plain, 1),
            "times as fast": round(plain / (found["threads, ms"] / 1e3), 1),
            "share of the ceiling, %": round(100 * bench.flops / best / tops[kind], 1),
        })  # fmt: skip


def _round(bench: PreparedWork, fleet: str, options: RunOptions, repeats: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        store = PrivateStore(Path(folder))
        host = Host(bench.method, bench.dataset, bench.partition, store, bench.key, options.devices)
        guarded = Guard(MAKES[fleet](host))

        def run() -> None:
            clients = Clients(guarded, range(bench.work.clients), quorum=1.0, round=1)
            bench.method.round(bench.server, clients, bench.key)

        found = seconds(run, options.device, repeats)
    if options.device != "cpu":
        torch.cuda.empty_cache()
    return found


# The published setting.

CELLS = (
    ("fedfsl-fc100", "naive/iid-1"), ("fedfsl-fc100", "mi/iid-1"),
    ("fedfsl-fc100", "mi-adv/iid-1"), ("fedfsl-fc100", "fedavg-probe/iid-1"),
    ("fedfsl-fc100", "naive/iid-5"), ("fedfsl-fc100", "mi/iid-5"),
    ("fedfsl-fc100", "mi-adv/iid-5"), ("fedfsl-fc100", "fedavg-probe/iid-5"),
    ("f2l-fc100", "f2l/iid-1"), ("f2l-fc100", "f2l/iid-5"),
)  # fmt: skip


def cells(book: Book, device: str, data: Path | None, until: float, *, few: bool) -> None:
    """Train cells in the papers' setting while time is left."""
    if data is not None:
        gpu_data.install(data)
    for name, key in CELLS[:1] if few else CELLS:
        if book.has("cells", f"{name} {key}") or time.perf_counter() > until:
            continue
        (cell,) = index.load(name).cells("small" if few else "paper", [key])
        settings = trees.merged(cell.settings(0), {"run": {"device": device}})
        if few:
            settings = trees.merged(settings, {
                "data": {"variant": "fc100"}, "run": {"rounds": 1, "validate_every": 1},
                "test": {"episodes": 5, "validation_episodes": 2},
            })  # fmt: skip
        start = time.perf_counter()
        prepared = PreparedRun(Config.of(settings), None if data is None else str(data))
        with tempfile.TemporaryDirectory() as folder:
            run = Experiment(prepared, Path(folder))
            for record in run.run():
                late = time.perf_counter() > until
                if record.validation is not None or late:
                    seen = "" if record.validation is None else f"{record.validation.accuracy:.3f}"
                    print(f"  {name} {key} round {record.round}: {seen} after "
                          f"{time.perf_counter() - start:.0f} s", flush=True)  # fmt: skip
                if late:
                    break
            trained, score = time.perf_counter() - start, run.result()
            book.note("cells", f"{name} {key}", **{
                "accuracy": str(score), "published": cell.published,
                "chosen round": run.best_round, "trained rounds": run.round,
                "of rounds": prepared.config.run.rounds, "seconds of training": round(trained),
                "seconds in all": round(time.perf_counter() - start),
            })  # fmt: skip


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=["check", "speed", "cells"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    device = "cpu" if given.rehearse else "cuda:0"
    until = time.perf_counter() + 60 * given.minutes - 30
    torch.set_num_threads(1)
    book, few = Book(given.to), given.rehearse
    where = RunOptions(device=device).devices
    book.note("machine", "device", name="; ".join(described(where)), torch=torch.__version__)
    if "check" in given.parts:
        check(book, device, few=few)
    if "speed" in given.parts:
        speed(book, device, few=few)
    if "cells" in given.parts:
        cells(book, device, given.data, until, few=few)


if __name__ == "__main__":
    main()
