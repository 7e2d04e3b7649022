"""What is measured: the same networks, data and episodes for fedshot and for its peers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from plain import State, Task
from torch import Tensor

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.episode import ClientData, Episode
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import Partition
from fedshot.data.tokens import Tokens
from fedshot.methods.base.fl_proto import FLProto
from fedshot.nn.models.backbones import MLP, Backbone, Conv4
from fedshot.nn.models.cost import step_flops
from fedshot.nn.models.model import Model
from fedshot.nn.models.recurrent import GRU
from fedshot.nn.models.resnet import ResNet12
from fedshot.nn.optim import Optimizer
from fedshot.protocol.method import ModelState

CLASSES, SPARE, WORDS = 10, 4, 1000
WIDTHS = (64, 160, 320, 640)
BACKBONES: dict[str, Backbone] = {
    "conv4": Conv4(width=32),
    "resnet12": ResNet12(widths=WIDTHS, dropblock=0.0),
    "gru": GRU(hidden=128),
    "mlp": MLP(hidden=(64, 64)),
}


@dataclass(frozen=True)
class Work:
    """A round of FL-Proto: every client takes part.

    Args:
        name: what it is called in the results.
        net: a key of `BACKBONES`.
        shape: of an image (height, width, channels) or of a text (words, length of a vector).
        clients: how many there are.
        steps: optimiser steps of each, of one 5-way episode.
    """

    name: str
    net: str
    shape: tuple[int, ...]
    clients: int
    steps: int
    shot: int = 1
    query: int = 15
    dtype: Literal["float32", "float64"] = "float32"
    optimizer: Optimizer = Optimizer()
    bf16: bool = False

    @property
    def images(self) -> int:
        """Images, or texts, of a step."""
        return 5 * (self.shot + self.query)

    @property
    def what(self) -> str:
        """Say it in words."""
        size = "x".join(map(str, self.shape))
        return (
            f"{self.net}, {size}, {self.clients} clients x {self.steps} steps of a 5-way "
            f"{self.shot}-shot episode with {self.query} queries a class"
        )

    def quick(self) -> Work:
        """Return next to no work of the same kind."""
        return replace(self, clients=2, steps=1)

    def small(self) -> Work:
        """Return a little of the same in float64, for the comparison of updates."""
        steps = 1 if self.net == "resnet12" else min(self.steps, 3)
        return replace(self, clients=2, steps=steps, query=2, dtype="float64")

    def gradient(self) -> Work:
        """Return one plain gradient step of two clients, for the comparison in float32."""
        step = Optimizer("sgd", lr=1.0)
        return replace(self, clients=2, steps=1, optimizer=step)


class PreparedWork:
    """A work with its data, its method and the state that every repetition starts from."""

    def __init__(self, work: Work) -> None:
        self.work, self.key = work, Key(1)
        self.dataset, self.partition = _dataset(work), _partition(work)
        held = self.dataset.x
        table = torch.from_numpy(held.table) if isinstance(held, Tokens) else None
        self.model = Model(
            BACKBONES[work.net], None, work.shape, dtype=work.dtype, bf16=work.bf16, table=table
        )
        self.episode = EpisodeSpec(5, work.shot, work.query)
        self.method = FLProto(self.model, self.episode, work.steps, optimizer=work.optimizer)
        self.server: ModelState = self.method.init(Key(0))

    @property
    def flops(self) -> int:
        """Arithmetic of the round; 0 where it is not counted."""
        return step_flops(self.model, self.work.images) * self.work.steps * self.work.clients

    def episodes(self, client: int) -> list[Episode]:
        """Return the episodes that a client draws in the round (the check of updates says so)."""
        key = self.key.at("work", "train", "client", client)
        local_episodes = self.method.draw(ClientData(self.dataset, self.partition[client]), key)
        return [episode for (episode,) in local_episodes.steps]

    def draw(self) -> None:
        """Draw everybody's episodes."""
        for client in range(self.work.clients):
            self.episodes(client)

    @cached_property
    def tasks(self) -> list[list[Task]]:
        """All episodes of the round as the peers take them."""
        return [[self.task(e) for e in self.episodes(c)] for c in range(self.work.clients)]

    def task(self, episode: Episode) -> Task:
        """Return an episode as floats (or word numbers) ready to use."""
        assert (episode.support_y.diff() >= 0).all()
        both = torch.cat([episode.support_x, episode.query_x])
        x = both.long() if self.dataset.is_text else self.model.prepare(both)
        return Task(x, episode.query_y, 5, self.work.shot)

    @property
    def net(self) -> dict[str, Any]:
        """The spec of the same network for `nets.build`."""
        size, channels = self.work.shape[0], self.work.shape[-1]
        return {
            "conv4": {"net": "conv4", "channels": channels, "size": size, "width": 32},
            "resnet12": {"net": "resnet12", "channels": channels, "widths": WIDTHS},
            "gru": {"net": "gru", "hidden": 128},
            "mlp": {"net": "mlp", "n_in": channels, "hidden": 64},
        }[self.work.net]

    @property
    def table(self) -> Tensor | None:
        """Word vectors, for texts."""
        table = self.model.table
        return None if table is None else table.to(self.model.torch_dtype)


def named(params: Tree, stats: Tree = {}) -> State:  # noqa: B006  (never changed)
    """Return parameters and statistics under the names of `nets`' state dicts."""
    gru = {"input": "ih", "state": "hh"}
    found = {}
    for path, leaf in tree.items(params):
        parts = [part for part in path.split("/") if part != "body"]
        if parts[0] == "forward":
            parts = ["gru", f"{parts[2]}_{gru[parts[1]]}_l0"]
        found[".".join(parts)] = leaf.clone()
    for path, leaf in tree.items(stats):
        found[path.replace("/", ".running_").replace("running_norm", "norm")] = leaf.clone()
    return found


def difference(ours: State, theirs: State, before: State) -> float:
    """Return the largest relative difference of two updates, over all tensors.

    Of each tensor the largest difference, over its largest change. What hardly changes (a bias in
    front of a batch norm has a gradient of zero, and rounding makes it something) is left out, and
    so is what only one of them has (counters).
    """
    changes = {name: ours[name].double() - before[name].double() for name in ours}
    largest = max(float(change.abs().max()) for change in changes.values())
    worst = 0.0
    for name, change in changes.items():
        scale = float(change.abs().max())
        if scale > 1e-6 * largest:
            other = theirs[name].double() - before[name].double()
            worst = max(worst, float((change - other).abs().max()) / scale)
    return worst


def distance(ours: State, theirs: State, before: State) -> float:
    """Return the relative distance of two updates as one long vector, for float32.

    Rounding decides now and then which pixel of a pool is the largest, or on which side of 0 a ReLU
    is; a gradient then takes another way. In one tensor that is a few per cent of the largest
    element, in the whole hardly anything; an error would be.
    """
    apart = length = 0.0
    for name, leaf in ours.items():
        change = leaf.double() - before[name].double()
        other = theirs[name].double() - before[name].double()
        apart += float((change - other).square().sum())
        length += float(change.square().sum())
    return (apart / length) ** 0.5


def _dataset(work: Work) -> Dataset:
    rng = np.random.default_rng(0)
    each = (work.shot + work.query + SPARE) * work.clients
    y = np.repeat(np.arange(CLASSES), each).astype(np.int64)
    names = tuple(f"class {c}" for c in range(CLASSES))
    if work.net == "gru":
        length, dim = work.shape
        ids = 2 + y[:, None] * 50 + rng.integers(0, 500, (len(y), length))
        table = rng.normal(0, 0.3, (WORDS, dim)).astype(np.float32)
        table[0] = 0
        offsets = np.arange(len(y) + 1, dtype=np.int64) * length
        return Dataset("words", Tokens(ids.ravel().astype(np.int32), offsets, table, length),
                       y, names)  # fmt: skip
    # Faint patterns: a task that is solved has gradients of 1e-40, which take time of their own.
    x = rng.integers(0, 240, (len(y), *work.shape), dtype=np.uint8)
    h, w, c = work.shape
    coarse = rng.integers(0, 16, (CLASSES, -(-h // 7), -(-w // 7), c), dtype=np.uint8)
    x += coarse.repeat(7, axis=1).repeat(7, axis=2)[:, :h, :w][y]
    return Dataset("images", x, y, names)


def _partition(work: Work) -> Partition:
    each = work.shot + work.query + SPARE
    rows = np.arange(CLASSES * each * work.clients, dtype=np.int64)
    by_client = rows.reshape(CLASSES, work.clients, each).transpose(1, 0, 2)
    return Partition.of([own.ravel() for own in by_client])
