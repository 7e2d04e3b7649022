"""SyntheticMethod: a method that nobody would publish, made of everything the protocol can carry.

Two exchanges a round, a private state that both change and that shapes what they send, messages
that differ from client to client, and parts under `Mean`, `Sum` (whole numbers and floats) and
`Gather` (of one shape, and of shapes that differ by client). What works for this one is not an
accident of FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.learners.learner import EvalEpisode
from fedshot.learners.local_training import LocalEpisodes, local_sgd, sample_episodes
from fedshot.learners.proto import Proto
from fedshot.nn.optim import Optimizer
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import PerClient, Reply, client_work
from fedshot.protocol.method import Method, Prediction, predict_at_server
from fedshot.protocol.reducers import Gather, Mean, Sum

SKETCH = 4


class Server(NamedTuple):
    """What the server remembers."""

    theta: Tree
    stats: Tree
    seen: Tensor  # int64 [classes], images counted so far
    picture: Tensor  # float64 [H, W, C], sum of the clients' mean images in the last round
    bank: Tensor  # float32 [clients, SKETCH], each client's last sketch


class Visit(NamedTuple):
    """What is drawn for the second exchange."""

    local_episodes: LocalEpisodes
    n: Tensor  # int64 scalar, the client's images


@dataclass(frozen=True)
class SyntheticMethod(Method[Server]):
    """Everything at once."""

    name: ClassVar[str] = "synthetic"

    clients: int
    classes: int
    optimizer: Optimizer = Optimizer()

    @property
    def learner(self) -> Proto:
        return Proto(self.model)

    def init(self, key: Key) -> Server:
        theta, stats = self.learner.init(key)
        seen = torch.zeros(self.classes, dtype=torch.int64)
        picture = torch.zeros(self.model.shape, dtype=torch.float64)
        return Server(theta, stats, seen, picture, torch.zeros(self.clients, SKETCH))

    def init_client(self, client: int, key: Key) -> Tree:
        theta, _ = self.learner.init(key)
        return {
            "diary": torch.randn(SKETCH, SKETCH, generator=key.at("diary").torch()),
            "visits": torch.zeros((), dtype=torch.int64),
            "optimizer": self.optimizer.init(theta),
        }

    def draw_batch(self, data: ClientData, key: Key) -> Tree:
        x, y = data.batch(8, key.numpy())
        return {"x": x, "y": y, "n": torch.tensor(data.n)}

    @client_work(draw="draw_batch")
    def count_images(self, down: Tree, private: Tree, drawn: Tree) -> Reply:
        """Count images; tell a sketch of the diary, and write the day's picture into it."""
        picture = drawn["x"].double().mean(0) / 255
        diary = 0.9 * private["diary"] + picture.mean().float() * down["shift"]
        classes = torch.arange(self.classes, device=drawn["y"].device)
        up = {
            "seen": (drawn["y"][:, None] == classes).sum(0),
            "picture": picture,
            "sketch": {"row": private["diary"].mean(1)},
        }
        kept = private | {"diary": diary, "visits": private["visits"] + 1}
        return Reply(up, kept, drawn["n"], {"brightness": picture.mean()})

    def draw_visit(self, data: ClientData, key: Key) -> Visit:
        steps = 1 + data.n // 16 % 2  # some clients do twice the work of others
        local_episodes = sample_episodes(data, self.episode, steps, 1, key)
        return Visit(local_episodes, torch.tensor(data.n))

    @client_work(draw="draw_visit")
    def train(self, down: Tree, private: Tree, drawn: Visit) -> Reply:
        """Train from theta with an optimiser of one's own; follow the hint as the diary likes."""
        theta, stats = down["theta"], down["stats"]
        new = local_sgd(
            self.learner.episode_loss,
            self.optimizer,
            theta,
            stats,
            drawn.local_episodes,
            private["optimizer"],
        )
        liking = 1 + 0.1 * torch.tanh(private["diary"].mean(0) @ down["hint"])
        up = {
            "delta": tree.map(lambda a, b: (a - b) * liking, new.params, theta),
            "stats": tree.sub(new.stats, stats),
            "steps": {"taken": torch.tensor(len(drawn.local_episodes.steps))},
            "tasks": torch.stack([e.classes for step in drawn.local_episodes.steps for e in step]),
        }
        kept = private | {"optimizer": new.state, "visits": private["visits"] + 1}
        return Reply(up, kept, drawn.n, new.metrics)

    def round(
        self, server: Server, clients: Clients, key: Key
    ) -> tuple[Server, Mapping[str, float]]:
        cohort = clients.sample(key)
        first = clients.exchange(
            self.count_images,
            {"shift": torch.tensor(0.5)},
            to=cohort,
            reduce={
                "seen": Sum(server.seen),
                "picture": Sum(server.picture),
                "sketch": Gather({"row": server.bank[0]}),
            },
            key=key,
        )
        rows = {c: part["row"] for c, part in first["sketch"].items()}

        def message(client: int) -> Tree:
            others = [row for c, row in rows.items() if c != client]
            return {
                "theta": server.theta,
                "stats": server.stats,
                "hint": torch.stack([*others, server.bank[client]]).mean(0),
            }

        second = clients.exchange(
            self.train,
            PerClient(message),
            to=cohort,
            reduce={
                "delta": Mean(server.theta),
                "stats": Mean(server.stats),
                "steps": Sum({"taken": torch.zeros((), dtype=torch.int64)}),
                "tasks": Gather(),
            },
            key=key,
        )
        new = Server(
            tree.add(server.theta, second["delta"]),
            tree.add(server.stats, second["stats"]),
            server.seen + first["seen"],
            first["picture"],
            server.bank.index_copy(0, torch.tensor(list(rows)), torch.stack(list(rows.values()))),
        )
        return new, first.metrics | second.metrics | {"steps": float(second["steps"]["taken"])}

    def evaluate(
        self, server: Server, clients: Clients, eval_episodes: Sequence[EvalEpisode], key: Key
    ) -> list[Prediction]:
        answer = partial(self.learner.answer, server.theta, server.stats)
        return predict_at_server(answer, eval_episodes, clients)
