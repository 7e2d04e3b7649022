"""Cases: an episode of few-round learning beside its bare passes: what does the federation cost?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from case import Case, Options, Result
from timing import Contestant, interleave, rows, timed
from torch import Tensor

from fedshot.core.machine import arithmetic
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.resampled import Resampled
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.meter import Meter
from fedshot.fleets.private import PrivateStore
from fedshot.fleets.sequential import Sequential
from fedshot.fleets.wrapper import Wrapper
from fedshot.methods.frl.frl import FRL
from fedshot.nn.gradients import value_and_grad
from fedshot.nn.models.backbones import Conv4
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Arrival, Exchange

CLIENTS, ROUNDS, CLASSES, EACH = 10, 3, 64, 240
SPEC = EpisodeSpec(5, 60, 60)


class Noted(Wrapper):
    """A fleet that keeps what the clients are given."""

    def __init__(self, fleet: Sequential) -> None:
        super().__init__(fleet)
        self.host, self.updates = fleet.host, []  # type: ignore[var-annotated]

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        for client in exchange.to:
            drawn = exchange.work.draw(self.host.data(client), exchange.client_key(client))
            self.updates.append((exchange.work, exchange.message(client), drawn))
        return self.fleet.replies(exchange)


class RepeatedEpisode:
    """An episode that can be played over and over, and its parts."""

    def __init__(self, by: Any, variant: Any, refresh: bool, folder: Path) -> None:
        rng = np.random.Generator(np.random.Philox(0))
        x = rng.integers(0, 256, (CLASSES * EACH, 32, 32, 3), dtype=np.uint8)
        names = tuple(f"c{i}" for i in range(CLASSES))
        dataset = Dataset("noise", x, np.repeat(np.arange(CLASSES), EACH), names)
        self.model = Model(Conv4(32), None, (32, 32, 3), "support")
        base = tuple(range(CLASSES))
        self.method = FRL(
            self.model, SPEC, base, True, variant=variant, inner_rounds=ROUNDS, refresh=refresh
        )
        indices = np.arange(len(dataset))
        split = Resampled(CLIENTS, by).assign(dataset, indices, Key(0), SPEC)
        store = PrivateStore(folder / f"{by}-{variant}-{refresh}")
        self.fleet = Sequential(Host(self.method, dataset, split.train, store, Key(1)))
        self.server, self.t = self.method.init(Key(2)), 0
        noted = Noted(self.fleet)
        self._play(Guard(Meter(noted)), 0)  # type: ignore[arg-type]
        self.updates = noted.updates
        self.images = [d.support_x for _, _, d in self.updates[: CLIENTS * ROUNDS]]
        self.images += [d.query_x for _, _, d in self.updates[-CLIENTS:]]

    def _play(self, fleet: Guard, t: int) -> None:
        clients = Clients(fleet, range(CLIENTS), quorum=1.0, round=1)
        with arithmetic(1):
            self.method.round(self.server, clients, Key(3).at("round", t))

    def episode(self) -> None:
        """Play an episode as a run does: another one each time."""
        self.t += 1
        self._play(Guard(Meter(self.fleet)), self.t)

    def work(self) -> None:
        """Do what the clients of one episode do, and nothing else."""
        with arithmetic(1):
            for work, down, drawn in self.updates:
                work(down, {}, drawn)

    def bare(self, *, prototypes: bool) -> None:
        """Pass the same images forward and back, R + 1 times for each client.

        With `prototypes` also those passes that make new prototypes, which are forward alone.
        """
        phi = self.server.phi

        def loss(x: Tensor, w: Tree) -> tuple[Tensor, None]:
            return self.model.features(w, {}, x, Mode(norm="batch"))[0].square().mean(), None

        with arithmetic(1):
            for x in self.images:
                value_and_grad(partial(loss, x), phi)
            with torch.no_grad():
                for x in self.images[:CLIENTS] if prototypes else ():
                    loss(x, phi)


def few_rounds(by: str, variant: str, refresh: bool, options: Options) -> Result:
    """Measure an episode."""
    extra = f", and {CLIENTS} forward for new prototypes" if refresh else ""
    result = Result(
        f"an FRL episode ({variant}, {by}), Conv4-32 at 32x32x3, {CLIENTS} clients, R = {ROUNDS}, "
        f"5-way, 30 supports and 30 queries a client: {CLIENTS * (ROUNDS + 1)} passes forward and "
        f"back{extra}, 1 thread, one worker"
    )
    bench = RepeatedEpisode(by, variant, refresh, options.folder)
    everyone = [Contestant("bare passes", timed(partial(bench.bare, prototypes=False)))]
    if refresh:
        every = timed(partial(bench.bare, prototypes=True))
        everyone.append(Contestant("these, and forward for new prototypes", every))
    everyone += [
        Contestant("the clients' work alone", timed(bench.work)),
        Contestant("the episode, as a run plays it", timed(bench.episode)),
    ]
    interleave(everyone, options.repeats)
    result.rows = rows(everyone, everyone[0].name)
    work, whole = (min(one.seconds) for one in everyone[-2:])
    result.notes.append(
        f"federated bookkeeping: {100 * (whole - work) / whole:.0f} % of an episode"
    )
    return result


CASES = [
    Case("frl/gpal-iid", partial(few_rounds, "iid", "gpal", True)),
    Case("frl/gpal-iid-stale", partial(few_rounds, "iid", "gpal", False)),
    Case("frl/gpal-shards", partial(few_rounds, "shards", "gpal", True)),
]
