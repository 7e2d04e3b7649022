"""Cases: what an exchange costs when the clients have nothing to do."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from case import Case, Options, Result, agree
from ours import FLEETS, N, taking
from plain import State
from timing import Contestant, interleave, timed
from torch import Tensor
from work import difference

from fedshot.core.machine import arithmetic
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.dataset import Dataset
from fedshot.data.partitions.partition import Partition
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.meter import Meter
from fedshot.fleets.private import PrivateStore
from fedshot.learners.learner import EvalEpisode
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Prediction
from fedshot.protocol.reducers import Mean

CLIENTS, PARAMETERS, MOST = (10, 100, 1000), (10**3, 10**5, 10**6, 10**7), 10**9
LEAVES = 10


@dataclass(frozen=True)
class Idle:
    """A method whose clients send back what came down."""

    name: ClassVar[str] = "idle"
    transductive: ClassVar[bool] = False
    max_way: ClassVar[None] = None

    parameters: int

    def init(self, key: Key) -> Tree:
        """Return tensors of equal size."""
        size = (LEAVES, self.parameters // LEAVES)
        drawn = torch.randn(size, generator=key.torch())
        return {f"w{i}": leaf.clone() for i, leaf in enumerate(drawn)}

    def init_client(self, client: int, key: Key) -> Tree:
        """Return nothing."""
        del client, key
        return {}

    @client_work()
    def echo(self, down: Tree, private: Tree, drawn: Tree) -> Reply:
        """Send back what came down."""
        del drawn
        return Reply({"theta": down["theta"]}, private, 1.0)

    def round(self, server: Tree, clients: Clients, key: Key) -> tuple[Tree, Mapping[str, float]]:
        """Exchange once."""
        got = clients.exchange(
            self.echo,
            {"theta": server},
            to=clients.sample(key),
            reduce={"theta": Mean(server, max_weight=1.0)},
            key=key,
        )
        return got["theta"], got.metrics

    def evaluate(
        self, server: Tree, clients: Clients, eval_episodes: Sequence[EvalEpisode], key: Key
    ) -> list[Prediction]:
        """Answer nothing."""
        del server, clients, eval_episodes, key
        return []


class Exchanged:
    """An exchange of everything with everybody."""

    def __init__(self, clients: int, parameters: int, fleet: str, folder: Path) -> None:
        self._method, self._clients, self._plan = Idle(parameters), clients, FLEETS[fleet]
        image = np.zeros((1, 1, 1, 1), np.uint8)
        data = Dataset("nothing", image, np.zeros(1, np.int64), ("none",))
        empty = Partition.of([np.zeros(0, np.int64)] * clients)
        host = Host(self._method, data, empty, PrivateStore(folder / "idle"), Key(0))
        self._fleet = Guard(Meter(self._plan.make(host)))
        self.server: State = self._method.init(Key(0))

    def __call__(self) -> State:
        clients = Clients(self._fleet, range(self._clients), quorum=1.0, round=1)
        with arithmetic(self._plan.threads):
            found: State = self._method.round(self.server, clients, Key(1))[0]
        return found


def summed(server: State, clients: int) -> State:
    """Return the mean of copies of a state dict, added up in place: the least a server can do."""
    torch.set_num_threads(N)
    total: dict[str, Tensor] = {name: torch.zeros_like(leaf) for name, leaf in server.items()}
    for _ in range(clients):
        for name, leaf in server.items():
            total[name] += leaf
    return {name: leaf / clients for name, leaf in total.items()}


def exchange(options: Options) -> Result:
    """Measure every number of clients with every number of parameters."""
    result = Result(
        "an exchange with no work: every client sends back what came down; guard, ledger and exact "
        "mean included, beside adding up state dicts in place without looking at them"
    )
    most = 10**7 if options.quick else MOST
    for clients, parameters in product(CLIENTS, PARAMETERS):
        if clients * parameters > most:
            result.left_out[f"{clients} clients x {parameters} parameters"] = (
                f"over {most:.0e} numbers in a round"
            )
            continue
        repeats = max(2, min(options.repeats, 10**9 // (clients * parameters)))
        whole = {f: Exchanged(clients, parameters, f, options.folder) for f in taking("none")}
        server = next(iter(whole.values())).server
        zero = {name: torch.zeros_like(leaf) for name, leaf in server.items()}
        found = difference(server, next(iter(whole.values()))(), zero)
        agree(result.checks, f"{clients} x {parameters}: the mean of equals", found, 1e-6)
        everyone = [Contestant(f"fedshot, {f}", timed(e)) for f, e in whole.items()]
        add = timed(partial(summed, server, clients))
        everyone.append(Contestant("in place", add))
        interleave(everyone, repeats)
        row: dict[str, object] = {"clients": clients, "parameters": parameters}
        for contestant in everyone:
            seconds = statistics.median(contestant.seconds)
            row[f"{contestant.name}, ms"] = float(f"{1e3 * seconds:.3g}")
        row["threads, us a client"] = float(f"{1e6 * min(everyone[0].seconds) / clients:.3g}")
        result.rows.append(row)
    return result


CASES = [Case("exchange/no-work", exchange)]
