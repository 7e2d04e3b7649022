"""HeurFedAMP: each client's model stays near a mixture of all models, weighted by similarity.

Source: Huang et al. 2021, Personalized Cross-Silo Federated Learning on Non-IID Data, FedAMP,
algorithm 1, with the heuristic weights xi in place of the derivative of the paper's function A:
u_i = xi_ii w_i + sum_{j != i} xi_ij w_j,
xi_ij = (1 - xi_ii) exp(sigma cos(w_i, w_j)) / sum_{h != i} exp(sigma cos(w_i, w_h));
client i minimises F_i(w) + (lambda / 2 alpha) ||w - u_i||^2.
Symbols: w_i client i's model; u_i the mixture that the server makes for it; lambda/alpha
`lambda_prox`; xi_ii `self_weight`; sigma as in the paper.
Departures from the paper: the local problem is solved approximately, by a few steps from w_i; xi_ii
is 1/n by default, because the paper tunes it. The cosine covers the weights, not the running
statistics. The server sends a client its own model together with the mixture, so that the client
keeps no private state. Predictions are limited to the episode's classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.ranges import NotNegative, Share
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.learners.classification import Batches
from fedshot.learners.local_training import local_sgd
from fedshot.methods.personal.affinity import mixture
from fedshot.methods.personal.personal_model import BankedModels, into_bank
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import PerClient, Reply, client_work
from fedshot.protocol.reducers import Gather

_HELD = 2**28  # bytes of models that the server keeps in memory for a round


class HeurFedAMPState(NamedTuple):
    """The server's state without the clients' models, which the server keeps on disk."""

    start: Tree  # {"theta", "stats"}: the initial model of every client


@dataclass(frozen=True)
class HeurFedAMP(BankedModels[HeurFedAMPState]):
    """Personal models, each kept near a mixture of the models that are similar to it.

    Args:
        lambda_prox: weight of the distance to the mixture, lambda/alpha.
        sigma: sharpness of the weights: larger values prefer more similar models.
        self_weight: weight of a client's own model in its mixture, xi_ii; null for 1/n.
    """

    name: ClassVar[str] = "heur_fedamp"

    lambda_prox: NotNegative = 15.0
    sigma: NotNegative = 10.0
    self_weight: Share | None = None

    def init(self, key: Key) -> HeurFedAMPState:
        """Return the common initial model of all clients."""
        theta, stats = self.learner.init(key)
        return HeurFedAMPState({"theta": theta, "stats": stats})

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: Batches) -> Reply:
        """Train the client's model near the mixture; upload the model."""
        own, u = down["own"], down["mixture"]
        episode_loss = partial(self.proximal_loss, self.lambda_prox, u)
        new = local_sgd(episode_loss, self.optimizer, own["theta"], own["stats"], drawn)
        up = {"model": {"theta": new.params, "stats": new.stats}}
        return Reply(up, private, drawn.n, new.metrics)

    def attention(self, own: Tree, others: Iterable[Tree]) -> Tensor:
        """Return the mixture weights xi_i, float64 [others + 1]; the last is xi_ii, for `own`."""
        mine = tree.flat(own["theta"]).double()
        vectors = (tree.flat(one["theta"]).double() for one in others)
        cosines = [torch.cosine_similarity(mine, one, dim=0) for one in vectors]
        n = len(cosines) + 1
        xi = 1 / n if self.self_weight is None else self.self_weight
        if not cosines:
            return torch.ones(1, dtype=torch.float64)
        rest = (1 - xi) * (self.sigma * torch.stack(cosines)).softmax(0)
        return torch.cat([rest, rest.new_tensor([xi])])

    def mix(self, i: int, ids: Sequence[int], model: Callable[[int], Tree]) -> Tree:
        """Return the mixture u_i, a tree like theta.

        Models are read one by one, so that only two are in memory at a time.
        """
        others = [j for j in ids if j != i]
        xi = self.attention(model(i), (model(j) for j in others))
        u = mixture(xi[-1:], [model(i)["theta"]])
        for weight, j in zip(xi, others, strict=False):
            u = tree.add(u, mixture(weight[None], [model(j)["theta"]]))
        return u

    def round(
        self, server: HeurFedAMPState, clients: Clients, key: Key
    ) -> tuple[HeurFedAMPState, Mapping[str, float]]:
        """Send every client its mixture; store the models that come back."""
        cohort, ids = clients.sample(key), sorted(clients.ids)

        def read(i: int) -> Tree:
            return clients.recall(i, server.start)

        model: Callable[[int], Tree] = read
        if (
            len(ids) * tree.nbytes(server.start) <= _HELD
        ):  # read each model once, not once per client
            model = {i: read(i) for i in ids}.__getitem__

        got = clients.exchange(
            self.train,
            PerClient(lambda i: {"mixture": self.mix(i, ids, model), "own": model(i)}),
            to=cohort,
            reduce={"model": Gather(server.start, put_away=into_bank(clients))},
            key=key,
        )
        return server, got.metrics
