"""FedProto: clients exchange class prototypes instead of weights; each keeps its own model.

Source: Tan et al. 2022, FedProto: Federated Prototype Learning across Heterogeneous Clients,
algorithm 1. A client's prototypes C_i^(j) are means of features, eq. (3). The server's are means
over the clients, weighted by their numbers of examples, eq. (6). Client i minimises
L_S(D_i) + lambda sum_j ||C_i^(j) - C^(j)||; the prediction is the class of the server's nearest
prototype.
Symbols: C^(j) the server's prototype of class j; L_S the cross-entropy of a client's classifier;
lambda `lambda_proto`.
Departures from the paper: eq. (6) divides by the number of clients once more, which would shrink
prototypes; this division is left out. In the loss, a client's prototypes are those of the current
batch. All encoders start from the same weights, because prototypes of different encoders are not
comparable. At test, a class without a prototype at the server has the mean of the support set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedshot.core.ranges import NotNegative
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.learners.classification import Batch, Batches
from fedshot.learners.learner import EpisodeLoss, EvalEpisode, episode_features
from fedshot.learners.local_training import local_sgd
from fedshot.methods.personal.personal_model import PersonalModels
from fedshot.nn.losses import accuracy, cross_entropy
from fedshot.nn.models.mode import Mode
from fedshot.nn.prototypes import class_means
from fedshot.protocol.averaging import OF_FEATURES
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Traits
from fedshot.protocol.reducers import Sum


class FedProtoState(NamedTuple):
    """The server's state."""

    prototypes: Tensor  # [classes, features]
    known: Tensor  # bool [classes]: whether there is a prototype


class FedProtoData(NamedTuple):
    """The data of a local update."""

    batches: Batches
    whole: Batch  # D_i


@dataclass(frozen=True)
class FedProto(PersonalModels[FedProtoState]):
    """A personal model at each client, whose features stay near common prototypes.

    Args:
        lambda_proto: weight of the distance to the server's prototypes; 0 for local training.
        weighting: weight of a client in the prototype of a class: its number of "examples" of the
            class, as in the paper, or the same weight for all "clients" that have the class.
    """

    name: ClassVar[str] = "fedproto"

    lambda_proto: NotNegative = 1.0
    weighting: Literal["examples", "clients"] = "examples"

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs."""
        return replace(super().traits, sends_changes=False)

    def init(self, key: Key) -> FedProtoState:
        """Return a state without prototypes."""
        del key
        shape = (len(self.classes), self.model.out_features)
        prototypes = torch.zeros(shape, dtype=self.model.torch_dtype)
        return FedProtoState(prototypes, torch.zeros(shape[0], dtype=torch.bool))

    def init_client(self, client: int, key: Key) -> Tree:
        """Return the initial encoder, the same at all clients of a run, and a random classifier."""
        del client
        body, stats = self.learner.init(Key(key.root).at("fedproto"))
        classifier = self.learner.init(key)[0]["classifier"]
        return {"theta": {"body": body["body"], "classifier": classifier}, "stats": stats}

    def draw(self, data: ClientData, key: Key) -> FedProtoData:
        """Draw the batches of a local update, and return all of the client's samples, too."""
        return FedProtoData(self.passes(data, self.local_steps, key), self.all_samples(data))

    def objective(
        self, server: Tree, theta: Tree, stats: Tree, batch: Batch, seed: Tensor
    ) -> EpisodeLoss:
        """Return L_S + lambda sum_j ||C_i^(j) - C^(j)||."""
        h, stats = self.model.features(theta, stats, batch.x, Mode(True, "batch", seed=seed))
        logits = self.learner.head.logits(theta["classifier"], h)
        loss, right = cross_entropy(logits, batch.y), accuracy(logits.detach(), batch.y)
        if not self.lambda_proto:
            return EpisodeLoss(loss, stats, right)
        shared = (self.counts(batch.y) > 0) & server["known"]
        gaps = class_means(h, batch.y, len(self.classes)) - server["prototypes"]
        # The slope of the root is infinite at 0, so it is taken of 1 where the gap does not count.
        squares = gaps.square().sum(1)
        counts = shared & (squares > 0)
        far = torch.where(counts, torch.where(counts, squares, 1.0).sqrt(), 0.0).sum()
        return EpisodeLoss(loss + self.lambda_proto * far, stats, right, {"distance": far})

    def counts(self, y: Tensor) -> Tensor:
        """Return the number of examples of each class, int64 [classes]."""
        return (y[:, None] == torch.arange(len(self.classes), device=y.device)).sum(0)

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: FedProtoData) -> Reply:
        """Train the client's model; upload weighted class means, and the weights of the classes."""
        theta, stats, whole = private["theta"], private["stats"], drawn.whole
        episode_loss = partial(self.objective, down)
        new = local_sgd(episode_loss, self.optimizer, theta, stats, drawn.batches)
        mode = Mode(norm="given" if self.model.norm_policy == "running" else "batch")
        h, _ = self.model.features(new.params, new.stats, whole.x, mode)
        means, n = class_means(h, whole.y, len(self.classes)), self.counts(whole.y)
        share = n if self.weighting == "examples" else (n > 0).to(n.dtype)
        up = {"sums": share[:, None].to(means.dtype) * means, "counts": share}
        return Reply(up, {"theta": new.params, "stats": new.stats}, drawn.batches.n, new.metrics)

    def round(
        self, server: FedProtoState, clients: Clients, key: Key
    ) -> tuple[FedProtoState, Mapping[str, float]]:
        """Run one round; C^(j) <- sum_i |D_ij| C_i^(j) / sum_i |D_ij| for the classes received."""
        got = clients.exchange(
            self.train,
            server._asdict(),
            to=clients.sample(key),
            reduce={
                "sums": Sum(server.prototypes, OF_FEATURES),
                "counts": Sum(torch.zeros(len(self.classes), dtype=torch.int64), OF_FEATURES),
            },
            key=key,
        )
        n = got["counts"][:, None].to(server.prototypes.dtype)
        means = torch.where(n > 0, got["sums"] / n.clamp_min(1.0), server.prototypes)
        return FedProtoState(means, server.known | (got["counts"] > 0)), got.metrics

    def predictor(self, down: Tree, private: Tree) -> Callable[[EvalEpisode], Tensor]:
        """Return the function that predicts the nearest prototype under the client's encoder."""
        return partial(self.nearest, down, private)

    def nearest(self, server: Tree, own: Tree, eval_episode: EvalEpisode) -> Tensor:
        """Return the logits [queries, way]: minus the distances to the classes' prototypes."""
        with torch.no_grad():
            support, query = episode_features(self.model, own["theta"], own["stats"], eval_episode)
            mine = class_means(support, eval_episode.support_y, len(eval_episode.classes))
            at = torch.searchsorted(
                torch.tensor(sorted(self.classes), device=query.device), eval_episode.classes
            )
            there = server["known"][at][:, None]
            prototypes = torch.where(there, server["prototypes"][at], mine)
            return -torch.cdist(query, prototypes)
