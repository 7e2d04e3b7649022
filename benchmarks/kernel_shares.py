"""Measure how much of a whole training round each C kernel saves.

    python benchmarks/kernel_shares.py --data-dir FOLDER                every kernel, every setting
    python benchmarks/kernel_shares.py --data-dir FOLDER --only Adam    kernels with that name

A setting is a row of a recipe on its own data, with one client and one local step where it can be.
Rounds with and without a kernel alternate in one process and one thread. Their CPU seconds are
compared, the least of many rounds each, because other load on the machine only adds to them. The
share of a kernel is (without - with) / without. The output is a Markdown table.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from fedshot.config.load import Config
from fedshot.core.machine import arithmetic, keep_freed_memory
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.meter import Meter
from fedshot.fleets.private import PrivateStore
from fedshot.nn import gradients
from fedshot.nn.gradients import value_and_grad
from fedshot.nn.kernels import adam, layer_gradients, lstm, proto_loss, stem, tensors, winograd
from fedshot.nn.models import backbones, layers, recurrence
from fedshot.protocol import reducers
from fedshot.protocol.clients import Clients
from fedshot.recipes import index, provenance
from fedshot.runs.experiment import fleet_for
from fedshot.runs.prepare import PreparedRun

ALONE = {"run.cohort": 1, "run.workers": 1}
STEP = ALONE | {"method.local_steps": 1}
FEW = {
    "run.workers": 1,
    "method.inner_rounds": 1,
    "episode.shot": 20,
    "episode.query": 20,
    "test.shot": 20,
    "test.query": 20,
}
MLP = {"model.backbone": {"name": "mlp", "hidden": [64, 64], "dropout": 0.1}}


class Setting(NamedTuple):
    """A cell of a recipe, with some options replaced."""

    recipe: str
    cell: str
    budget: str
    options: dict[str, Any]


SETTINGS = {
    "FL-Proto, Conv4-64, CIFAR-FS": Setting("cifar-fs", "fl-proto/iid-1", "small", STEP),
    "FL-Proto, Conv4-32, miniImageNet": Setting("f2l-mini", "fl-proto/iid-1", "small", STEP),
    "FL-Proto, ResNet-12, FC100": Setting("f2l-fc100", "fl-proto/iid-1", "paper", STEP),
    "FedFSL-MI-Adv, Conv4-32, miniImageNet": Setting("fedfsl-mini", "mi-adv/iid-1", "small", STEP),
    "FedFSL-naive, second order, Conv4-64, CIFAR-FS": Setting(
        "cifar-fs", "naive/iid-1", "small", STEP | {"method.inner.adapts": "all"}
    ),
    "F2L, Conv4-32, miniImageNet": Setting("f2l-mini", "f2l/iid-1", "small", STEP),
    "F2L, BiLSTM, HuffPost": Setting("f2l-huffpost", "f2l/iid-1", "small", STEP),
    "FL-Proto, BiLSTM, HuffPost": Setting("f2l-huffpost", "fl-proto/iid-1", "small", STEP),
    "FL-Proto, BiLSTM, 20 Newsgroups": Setting("f2l-20news", "fl-proto/iid-1", "small", STEP),
    "FedFSL-naive, GRU, Sentiment140": Setting("fedfsl-sent140", "naive/*", "small", STEP),
    "FRL, Conv4-32, miniImageNet": Setting("frl-table1", "gpal/*", "small", FEW),
    "FedAvg, Conv4-32, MNIST": Setting("pfedfsl-table1", "fedavg/mnist-*", "small", STEP),
    "pFedFSL, Conv4-32, MNIST": Setting("pfedfsl-table1", "pfedfsl/mnist-*", "small", STEP),
    "FL-Proto, MLP, digits": Setting("digits", "fl-proto/iid-1", "small", ALONE | MLP),
    "FL-Proto, MLP, digits, vectorised": Setting(
        "digits", "fl-proto/iid-1", "small", {"run.workers": 1, "run.fleet": "vectorised"} | MLP
    ),
}

OFF = SimpleNamespace(fits=lambda *_: False, plain_floats=lambda *_: False, library=lambda: None)
TWICE = ContextVar("whether a gradient is differentiated again", default=False)
ONCE = SimpleNamespace(fits=lambda x: not TWICE.get() and tensors.fits(x))
# What replaces what, to turn a kernel off.
KERNELS: dict[str, list[tuple[Any, str, Any]]] = {
    "stem": [(stem, "fits", OFF.fits)],
    "fused (norm, pool, ReLU)": [(backbones, "tensors", OFF)],
    "fused, second derivatives": [(backbones, "tensors", ONCE)],
    "winograd": [(winograd, "fits", OFF.fits)],
    "products and tiles": [(winograd, "ours", OFF.fits), (winograd, "faster", OFF.fits)],
    "LSTM or GRU": [(recurrence, "plain_floats", OFF.plain_floats)],
    "repeated words": [(m, "repeats", lambda _: None) for m in (lstm, layer_gradients)],
    "loss of prototypes": [(proto_loss, "plain_floats", OFF.plain_floats)],
    "Adam": [(adam, "_compiled", lambda *_: None)],
    "sums of updates, largest value": [(reducers, "tensors", OFF)],
    "dropout masks": [(layers, "kernel_build", OFF)],
}


class Round:
    """The first round of a setting, over and over from the same state."""

    def __init__(self, setting: Setting, data_dir: str | None, folder: Path) -> None:
        cell = index.load(setting.recipe).cells(setting.budget, [setting.cell])[0]
        run = PreparedRun(Config.of(cell.settings(chosen=setting.options)), data_dir)
        store = PrivateStore(folder)
        host = Host(run.method, run.dataset, run.client_split.train, store, run.key.at("clients"))
        self.fleet = Guard(Meter(fleet_for(host, run.config.run, 1)))
        self.run, self.server = run, run.method.init(run.key.at("init"))

    def __call__(self) -> float:
        """Return the CPU seconds of a round."""
        clients = Clients(
            self.fleet, self.run.clients, cohort=self.run.config.run.cohort, quorum=1.0, round=1
        )
        with arithmetic(1):
            start = time.process_time()
            self.run.method.round(self.server, clients, self.run.key.at("round", 0))
            return time.process_time() - start


def noted(fn: Any, params: Any, *, differentiable: bool = False) -> Any:
    """As `value_and_grad`, and note in TWICE that the gradient is differentiated again."""
    before = TWICE.set(differentiable or TWICE.get())
    try:
        return value_and_grad(fn, params, differentiable=differentiable)
    finally:
        TWICE.reset(before)


@contextmanager
def off(kernel: str) -> Iterator[list[mock.MagicMock]]:
    """Turn a kernel off; yield mocks that note whether it was asked for."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(mock.patch.object(place, name, mock.MagicMock(wraps=other)))
            for place, name, other in KERNELS.get(kernel, ())
        ]


def shares(round: Round, kernels: list[str], budget: float) -> Iterator[list[str]]:
    """Yield a line of the table for each kernel that the round asks for, in about `budget` s."""
    asked, once = [], round()
    for kernel in kernels:
        with off(kernel) as mocks:
            once = min(once, round())
        asked += [kernel] * any(mock.mock_calls for mock in mocks)
    seconds: dict[str, list[float]] = {kernel: [] for kernel in ("", *asked)}
    for _ in range(max(9, min(199, int(budget / once / len(seconds))))):
        for kernel, own in seconds.items():
            with off(kernel):
                own.append(round())
    base = min(seconds.pop(""))
    for kernel, own in seconds.items():
        yield [kernel, f"{base:.3g}", f"{min(own):.3g}", f"{1 - base / min(own):.0%}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", metavar="FOLDER", help="folder of the data sets' files")
    parser.add_argument("--only", default="", metavar="TEXT", help="kernels with this in the name")
    parser.add_argument("--setting", default="", metavar="TEXT", help="settings likewise")
    parser.add_argument("--seconds", type=float, default=60.0, help="per setting, about")
    options = parser.parse_args()
    gradients.value_and_grad = noted  # which the inner steps of MAML call
    keep_freed_memory()  # as every run of fedshot does
    kernels = [kernel for kernel in KERNELS if options.only in kernel]
    print(*provenance.kinds([{"machine": provenance.machine()}]))
    print("| setting | kernel | round with, s | round without, s | share |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for name, setting in SETTINGS.items():
        if options.setting in name:
            with tempfile.TemporaryDirectory() as folder:
                round = Round(setting, options.data_dir, Path(folder))
                for line in shares(round, kernels, options.seconds):
                    print("|", " | ".join([name, *line]), "|", flush=True)


if __name__ == "__main__":
    main()
