"""Cases: the meta-gradient of MAML against learn2learn and `higher`."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import payloads
import torch
from case import Case, Options, Result, agree
from children import Child, PeerError
from nets import build
from ours import N
from plain import State
from timing import Contestant, interleave, rows, timed
from torch import Tensor
from work import PreparedWork, Work, difference, distance, named

from fedshot.core import tree
from fedshot.core.machine import arithmetic
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData, Episode
from fedshot.learners.maml import InnerLoop, Maml
from fedshot.nn.gradients import value_and_grad
from fedshot.nn.heads import LinearHead
from fedshot.nn.models.backbones import Conv4
from fedshot.nn.models.model import Model

PEERS = {"learn2learn": "peer_learn2learn.py", "higher": "peer_higher.py"}
STEPS, LR = 5, 0.01
EXACT, ROUNDED = 1e-8, 5e-2


@dataclass(frozen=True)
class Meta:
    """A number of tasks at 5-way, and their images."""

    work: Work
    tasks: int = 10


METAS = (
    Meta(Work("28px-1shot", "conv4", (28, 28, 1), clients=1, steps=10)),
    Meta(Work("32px-5shot", "conv4", (32, 32, 3), clients=1, steps=10, shot=5)),
)


class Ours:
    """The mean gradient of the query losses through fedshot's learner."""

    def __init__(self, meta: Meta, order: Any, dtype: Any) -> None:
        head, inner = LinearHead(5), InnerLoop(LR, STEPS, order=order)
        self.model = Model(Conv4(32), head, meta.work.shape, "transductive", dtype)
        self.learner = Maml(self.model, inner)
        self.params, self.stats = self.learner.init(Key(0))
        bench = PreparedWork(meta.work)
        data, rng = ClientData(bench.dataset, bench.partition[0]), Key(2).numpy()
        self.episodes = [data.episode(bench.episode, rng) for _ in range(meta.tasks)]
        self.seed = Key(3).tensor()
        self._cores = ThreadPoolExecutor(N)

    def __call__(self, tasks: int | None = None) -> State:
        """Return the mean gradient over the first tasks, one after the other on all cores."""
        episodes = self.episodes[:tasks]
        with arithmetic(N):
            return self._mean(map(self._gradient, episodes), len(episodes))

    def parallel_map(self) -> State:
        """Return the mean gradient, a task on each core at a time, as fleets spread clients."""

        def alone(episode: Episode) -> Tree:
            with arithmetic(1):
                return self._gradient(episode)

        return self._mean(self._cores.map(alone, self.episodes), len(self.episodes))

    def _mean(self, gradients: Iterable[Tree], n: int) -> State:
        return named(tree.map(partial(torch.mul, other=1 / n), reduce(tree.add, gradients)))

    def _gradient(self, episode: Episode) -> Tree:
        def loss(w: Tree) -> tuple[Tensor, None]:
            return self.learner.episode_loss(w, self.stats, episode, self.seed).loss, None

        return value_and_grad(loss, self.params)[2]


def save(meta: Meta, ours: Ours, folder: Path) -> None:
    """Write the tasks for the peers, in float64."""
    height, _, channels = meta.work.shape
    net = {"net": "conv4", "channels": channels, "size": height, "width": 32, "way": 5}
    module = build(net | {"running": False}).double()
    module.load_state_dict(named(ours.params))
    prepare = ours.model.prepare
    tasks = [(prepare(e.support_x), e.support_y, prepare(e.query_x), e.query_y)
             for e in ours.episodes]  # fmt: skip
    spec = {"net": net | {"running": False}, "state": module.state_dict(), "tasks": tasks}
    payloads.write(folder / "maml.safetensors", spec | {"lr": LR, "steps": STEPS})


def maml(meta: Meta, order: str, options: Options) -> Result:
    """Measure one meta-gradient."""
    meta = Meta(meta.work, 2) if options.quick else meta
    work = meta.work
    result = Result(
        f"{order}-order MAML, Conv4-32 with a linear head, {'x'.join(map(str, work.shape))}, "
        f"{meta.tasks} tasks of 5-way {work.shot}-shot, {STEPS} inner steps, {N} threads"
    )
    mine, exact = Ours(meta, order, "float32"), Ours(meta, order, "float64")
    folder = options.folder / f"maml-{order}-{work.name}"
    folder.mkdir()
    save(meta, exact, folder)
    everyone = [
        Contestant("fedshot", timed(mine), N),
        Contestant("fedshot, a task on each core", timed(mine.parallel_map), N),
    ]
    zero = {name: torch.zeros_like(leaf) for name, leaf in named(mine.params).items()}
    truth, rounded = exact(2), mine()
    agree(result.checks, "fedshot's two", distance(mine.parallel_map(), rounded, zero), ROUNDED)
    with ExitStack() as children:
        for peer, script in PEERS.items():
            try:
                child = children.enter_context(Child(script, folder, str(N)))
                for layout in ("nchw", "channels_last"):
                    name, path = f"{order}-{layout}", folder / f"{peer}.safetensors"
                    of = f"fedshot and {peer} ({layout})"
                    found = difference(truth, child.check(f"{name}-float64", path), zero)
                    agree(result.checks, f"{of}, gradient in float64", found, EXACT)
                    found = distance(rounded, child.check(f"{name}-float32", path), zero)
                    agree(result.checks, f"{of}, gradient in float32", found, ROUNDED)
                    run = child.go(f"{name}-float32")
                    everyone.append(Contestant(f"{peer}, {layout}", run, N))
                result.notes.append(str(child.facts["version"]))
            except PeerError as error:
                result.left_out[peer] = str(error)
        interleave(everyone, options.repeats)
    result.rows = rows(everyone, "fedshot")
    return result


CASES = [
    Case(f"maml/{order}-{meta.work.name}", partial(maml, meta, order))
    for meta in METAS
    for order in ("first", "second")
]
