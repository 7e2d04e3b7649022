"""FedFomo: each client moves towards other clients' models that lower its validation loss.

Source: Zhang et al. 2021, Personalized Federated Learning with First Order Model Optimization:
w_n = (L_i(theta_i) - L_i(theta_n)) / ||theta_n - theta_i||, its positive part normalised
to a sum of 1, and theta_i <- theta_i + sum_n w_n (theta_n - theta_i); then local
training. The server sends each client the M models with the highest P_in, and adds w to P.
Symbols: theta_i the model that client i started its last local update from; theta_n the M models
and the result of that local update; L_i the loss on its validation samples, a share of its samples
that it never trains on; P the affinity matrix.
Departures from the authors' code: w is added to P as it is, negative values included; the code
divides it by the absolute value of its sum. The diagonal of P is minus infinity, so that the M
models never include the client's own. A client without validation samples continues from the model
that it trained. The server sends a client its own model back, as in `pfedfsl`. Predictions are
limited to the episode's classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.ranges import NotNegative, OpenShare, Share
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.learners.classification import Batch, Batches
from fedshot.learners.learner import EvalEpisode
from fedshot.learners.local_training import local_sgd
from fedshot.methods.personal.affinity import check_others, first_affinity, top_m_by_affinity
from fedshot.methods.personal.personal_model import (
    BankedModels,
    first_own,
    into_bank,
    next_own,
    own_or_sent,
)
from fedshot.nn.losses import cross_entropy
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import PerClient, Reply, client_work
from fedshot.protocol.reducers import Gather

_NO_DISTANCE = 1e-30  # models that are closer count as equal


class FedFomoState(NamedTuple):
    """The server's state without the clients' models, which the server keeps on disk."""

    start: Tree  # {"theta", "stats"}: the initial model of every client
    p: Tensor  # float64 [clients, clients], the affinity matrix
    rounds: Tensor  # int64 scalar: rounds so far


class FedFomoData(NamedTuple):
    """The data of a local update."""

    batches: Batches
    seen: Batch  # all training samples
    held: Batch  # validation samples, possibly none


@dataclass(frozen=True)
class FedFomo(BankedModels[FedFomoState]):
    """Personal models that move towards other clients' models, weighted by the gain of each.

    Args:
        clients: number of clients.
        m: number of other clients' models that a client receives, M.
        validation_share: fraction of each class's samples that a client uses for validation: the
            first ones in the order of the data, and at least one if the class has two or more.
            Batch norm treats them like the queries of a test: by default it uses the statistics
            of the training samples.
        distance: distance between two models, "l2" as in the paper, or "l1".
        epsilon: probability in round 1 that a model sent to a client is chosen at random.
        epsilon_decay: amount by which epsilon decreases in each round.
    """

    name: ClassVar[str] = "fedfomo"

    clients: int = field(kw_only=True)
    m: int = 5
    validation_share: OpenShare = 0.2
    distance: Literal["l2", "l1"] = "l2"
    epsilon: Share = 0.3
    epsilon_decay: NotNegative = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        check_others(self.m, self.clients)

    def init(self, key: Key) -> FedFomoState:
        """Return the common initial model of all clients, and the initial affinity matrix."""
        theta, stats = self.learner.init(key)
        start = {"theta": theta, "stats": stats}
        return FedFomoState(start, first_affinity(self.clients), torch.tensor(0))

    def init_client(self, client: int, key: Key) -> Tree:
        """Return a placeholder for the model from which the last local update started.

        The first local update replaces it with the model that the server sent.
        """
        del client
        theta, stats = self.learner.init(key)
        return first_own({"theta": theta, "stats": stats})

    def draw(self, data: ClientData, key: Key) -> FedFomoData:
        """Draw the batches of a local update, and return all training and validation samples."""
        train, held = self.split(data)
        batches = self.passes(train, self.local_steps, key)
        return FedFomoData(batches, self.all_samples(train), self.all_samples(held))

    def split(self, data: ClientData) -> tuple[ClientData, ClientData]:
        """Return the training and the validation samples, the same in every round."""
        labels = data.dataset.y[data.indices]
        held = np.zeros(data.n, dtype=bool)
        for c in data.classes:
            mine = np.flatnonzero(labels == c)
            n = max(1, round(self.validation_share * len(mine)))
            held[mine[: min(n, len(mine) - 1)]] = True
        return (
            ClientData(data.dataset, data.indices[~held]),
            ClientData(data.dataset, data.indices[held]),
        )

    def loss(self, model: Tree, drawn: FedFomoData) -> Tensor:
        """Return L_i, a model's cross-entropy on the validation samples, as a scalar.

        The samples are predicted like the queries of a test.
        """
        theta, seen, held = model["theta"], drawn.seen, drawn.held
        asked = EvalEpisode(seen.x, seen.y, held.x, torch.arange(len(self.classes)))
        _, h = self.learner.encode(theta, model["stats"], asked)
        with torch.no_grad():
            return cross_entropy(self.learner.head.logits(theta["classifier"], h), held.y)

    def weigh(self, before: Tree, models: Sequence[Tree], drawn: FedFomoData) -> Tensor:
        """Return the weights w_n, one for each of `models`; 0 for a model equal to `before`."""
        losses = torch.stack([self.loss(one, drawn) for one in models])
        gains = self.loss(before, drawn) - losses
        far = torch.stack([self.apart(one["theta"], before["theta"]) for one in models])
        return torch.where(far > 0, gains / far.clamp_min(_NO_DISTANCE), 0.0)

    def apart(self, a: Tree, b: Tree) -> Tensor:
        """Return the distance between the weights of two models, as a scalar."""
        gaps = [gap.abs() for gap in tree.leaves(tree.sub(a, b))]
        if self.distance == "l1":
            return torch.stack([gap.sum() for gap in gaps]).sum()
        return torch.stack([gap.square().sum() for gap in gaps]).sum().sqrt()

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: FedFomoData) -> Reply:
        """Move towards the better models, then train the result; upload it with the weights w."""
        own, models = down["own"], (down["own"], *down["models"])
        before = own_or_sent(private, own)
        if len(drawn.held.y):
            w = self.weigh(before, models, drawn)
            mixed = self.move(before, models, w)
        else:
            w, mixed = drawn.seen.x.new_zeros(len(models), dtype=self.model.torch_dtype), own
        new = local_sgd(
            self.learner.episode_loss, self.optimizer, mixed["theta"], mixed["stats"], drawn.batches
        )
        up = {"model": {"theta": new.params, "stats": new.stats}, "weights": w[1:]}
        metrics = {**new.metrics, "better": (w[1:] > 0).to(new.metrics["loss"].dtype).sum()}
        return Reply(up, next_own(private, mixed), drawn.batches.n, metrics)

    def move(self, before: Tree, models: Sequence[Tree], w: Tensor) -> Tree:
        """Return theta_i + sum_n w_n (theta_n - theta_i), with w's positive part normalised."""
        good = w.clamp_min(0)
        shares = good / good.sum().clamp_min(_NO_DISTANCE)
        moved = before
        for share, one in zip(shares, models, strict=True):
            step = tree.map(
                lambda there, here, s=share: s.to(here.dtype) * (there - here), one, before
            )
            moved = tree.add(moved, step)
        return moved

    def round(
        self, server: FedFomoState, clients: Clients, key: Key
    ) -> tuple[FedFomoState, Mapping[str, float]]:
        """Send every client M models; store the uploads, and add the weights to P."""
        cohort, explore = clients.sample(key), self.explore(int(server.rounds))
        sent = {
            i: top_m_by_affinity(
                server.p, i, clients.ids, self.m, key.at("choose", i).numpy(), explore=explore
            )
            for i in cohort
        }

        def model(i: int) -> Tree:
            return clients.recall(i, server.start)

        got = clients.exchange(
            self.train,
            PerClient(lambda i: {"models": tuple(map(model, sent[i])), "own": model(i)}),
            to=cohort,
            reduce={
                "model": Gather(server.start, put_away=into_bank(clients)),
                "weights": Gather(
                    lambda i: torch.empty(len(sent[i]), dtype=self.model.torch_dtype)
                ),
            },
            key=key,
        )
        p = server.p.clone()
        for i, w in got["weights"].items():
            p[i, sent[i]] += w.double()
        return server._replace(p=p, rounds=server.rounds + 1), got.metrics

    def explore(self, rounds: int) -> float:
        """Return the probability of exploration, epsilon, after `rounds` rounds."""
        return max(0.0, self.epsilon - self.epsilon_decay * rounds)
