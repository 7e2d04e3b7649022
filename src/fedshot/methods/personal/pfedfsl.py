"""pFedFSL: every client mixes the models that do well on its own samples, and trains the mixture.

A client receives m models of other clients. It averages these and its own, with weights that depend
on their loss on its samples. It trains the average and uploads the result with the weights. The
server adds the weights to an affinity matrix, from which it chooses the models that it sends to the
client in later rounds.

Source: Zhao et al., Personalized Federated Few-Shot Learning, IEEE TNNLS 35(2), 2024: algorithm 1
and eqs. (1) to (8), which are reconstructed here from the paper's prose. With n_1 .. n_m the models
received, n_{m+1} = i, and L the loss of eq. (5):
(1) w_j = exp(-L(theta_{n_j}; D_i)) / sum_l exp(-L(theta_{n_l}; D_i));
(2) theta~_i = sum_j w_j theta_{n_j};
(3) p(y = l | x), a softmax of minus average distances: `fedshot.learners.average_distance`;
(4), (5) L = mean of -log p(y | x) over D_i;  (6) L + iota ||theta||_1;
(7) theta_i = theta~_i - eta grad, repeated for the local epochs;
(8) Q_ij <- Q_ij + w_j - w_i for the models received, after the first R rounds.
Symbols: D_i the samples of client i; theta_i its model; Q the affinity matrix, with minus infinity
on its diagonal, so that no client gets its own model; R `delay`.

The docs page lists the points that the paper leaves open, and those that `mode` decides. Departure:
a client keeps no model, because the server stores it. The server sends it back with the others, as
a tree that the communication log counts separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedshot.core.errors import ConfigError
from fedshot.core.ranges import Above0, AtLeast0, NotNegative
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.learners.average_distance import AverageDistance, OwnSample
from fedshot.learners.classification import Batch, Batches
from fedshot.learners.learner import EpisodeLoss, EvalEpisode
from fedshot.learners.local_training import local_sgd
from fedshot.methods.personal.affinity import (
    check_others,
    first_affinity,
    mixture,
    top_m_by_affinity,
)
from fedshot.methods.personal.base_class_method import OwnClassesMethod
from fedshot.methods.personal.personal_model import into_bank
from fedshot.methods.personal.sparse import (
    SoftThreshold,
    l1_norm,
    pack,
    packing_flaw,
    share_below,
    unpack,
)
from fedshot.nn.optim import Steps
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import PerClient, Reply, client_work
from fedshot.protocol.method import ClientModels, Traits
from fedshot.protocol.reducers import Gather

_NEAR_ZERO = 1e-3  # bound of weights that a subgradient of the penalty has made small


class PFedFSLState(NamedTuple):
    """The server's state without the clients' models, which the server keeps on disk."""

    start: Tree  # {"theta", "stats"}: initial model; with start "own" only its shapes count
    seed: Tensor  # int64 scalar: draws the initial models with start "own"
    q: Tensor  # float64 [clients, clients], the affinity matrix
    rounds: Tensor  # int64 scalar: rounds so far


class PFedFSLData(NamedTuple):
    """The data of a local update."""

    batches: Batches
    whole: Batch  # D_i


@dataclass(frozen=True)
class PFedFSL(ClientModels[PFedFSLState], OwnClassesMethod[PFedFSLState]):
    """A personal model for each client, mixed from models that do well on its samples.

    Args:
        clients: number of clients.
        mode: sets the options that are null. "paper", as the paper's text says: own_sample "with",
            weigh_by "loss", start "own". "strict": own_sample "without", weigh_by
            "leave_one_out", start "common".
        m: number of other clients' models that a client receives; 0 for no federation (-nF).
        iota: weight of the l1 penalty; 0 for none (-nR).
        delay: rounds before the first update of the affinity matrix, R.
        choose: which models are sent: those with the highest "affinity", or "random" ones (-nS).
        affinity: what eq. (8) adds: the "difference" w_j - w_i, or the "positive" part of it.
        temperature: temperature of the softmax in eq. (1).
        own_sample: in training, whether a sample's average distance to its own class includes the
            sample itself, at a distance of 0 ("with"), or not ("without").
        weigh_by: in the loss L of eq. (1), which weights the models, whether a sample's average
            distance to its own class includes the sample itself ("loss") or not ("leave_one_out").
        alone: how to treat the only sample of a class where a sample itself is not included.
            "include" sets its distance to its class to 0; "drop" leaves it out of the mean loss.
        l1: how the l1 penalty acts. "subgradient": as a term of the loss, which makes weights
            small; "proximal": as soft thresholding after each step, which makes them zero. Zeros
            are then not sent.
        penalise_norms: whether the penalty includes the weights of batch norm.
        start: initial models: one "common" model, or each client's "own".
    """

    name: ClassVar[str] = "pfedfsl"

    clients: int = field(kw_only=True)
    mode: Literal["strict", "paper"] = "strict"
    m: int = 5
    iota: NotNegative = 5e-4
    delay: AtLeast0 = 25
    choose: Literal["affinity", "random"] = "affinity"
    affinity: Literal["difference", "positive"] = "difference"
    temperature: Above0 = 1.0
    own_sample: OwnSample | None = None
    weigh_by: Literal["loss", "leave_one_out"] | None = None
    alone: Literal["include", "drop"] = "include"
    l1: Literal["subgradient", "proximal"] = "subgradient"
    penalise_norms: bool = False
    start: Literal["common", "own"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_others(self.m, self.clients)
        if self.l1 == "proximal" and self.optimizer.name != "sgd":
            raise ConfigError(
                f"l1 is 'proximal', whose threshold is for steps of SGD, but optimizer.name is "
                f"{self.optimizer.name!r}. Set it to 'sgd', or l1 to 'subgradient'."
            )
        _ = self.learner, self.weighting_learner  # their constructors check the rest

    @property
    def learner(self) -> AverageDistance:
        """The learner that clients train."""
        own = self.own_sample or ("without" if self.mode == "strict" else "with")
        return AverageDistance(self.model, len(self.classes), own, self.alone)

    @property
    def weighing(self) -> str:
        """The loss that gives the weights of eq. (1): `weigh_by`, or the default of `mode`."""
        return self.weigh_by or ("leave_one_out" if self.mode == "strict" else "loss")

    @property
    def weighting_learner(self) -> AverageDistance:
        """The classifier whose loss is L in eq. (1), which gives the weights of the mixture."""
        own: OwnSample = "without" if self.weighing == "leave_one_out" else "with"
        return AverageDistance(self.model, len(self.classes), own, self.alone)

    @property
    def starting(self) -> str:
        """Whether the initial models are "common" or each client's "own"."""
        return self.start or ("common" if self.mode == "strict" else "own")

    @property
    def packs(self) -> bool:
        """Whether models are sent without their zeros."""
        return self.l1 == "proximal" and self.iota > 0

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs."""
        reason = (
            "with method.l1 'proximal', zeros are not sent, so uploads differ in size from client "
            "to client. Set method.l1 to 'subgradient'"
        )
        unstackable = reason if self.packs else ""
        return replace(
            super().traits,
            stores_client_models=True,
            gathers=("train", "model"),
            unstackable=unstackable,
        )

    def init(self, key: Key) -> PFedFSLState:
        """Return the initial model, and the initial affinity matrix."""
        theta, stats = self.learner.init(key)
        q = first_affinity(self.clients)
        return PFedFSLState({"theta": theta, "stats": stats}, key.tensor(), q, torch.tensor(0))

    def draw(self, data: ClientData, key: Key) -> PFedFSLData:
        """Draw the batches of a local update, and return all of the client's samples, too."""
        return PFedFSLData(self.passes(data, self.local_steps, key), self.all_samples(data))

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: PFedFSLData) -> Reply:
        """Weight, mix and train the models: eqs. (1) to (7)."""
        models = [self._unpacked(sent) for sent in (*down["models"], down["own"])]
        weights, mixed = self.fuse(models, drawn.whole)
        start, stats = mixed["theta"], mixed["stats"]
        new = local_sgd(self.objective, self.steps, start, stats, drawn.batches)
        metrics = {
            **new.metrics,
            "own_weight": weights[-1],
            "near_zero": share_below(new.params, _NEAR_ZERO),
            "zeros": share_below(new.params, 0.0),
        }
        up = {"model": self._packed({"theta": new.params, "stats": new.stats}), "weights": weights}
        return Reply(up, private, drawn.batches.n, metrics)

    def fuse(self, models: Sequence[Tree], whole: Batch) -> tuple[Tensor, Tree]:
        """Return the weights of eq. (1), one per model, and the mixture of eq. (2).

        The last of `models` is the client's own.
        """
        losses = [self.weighting_learner.loss(one["theta"], one["stats"], whole) for one in models]
        weights = (-torch.stack(losses) / self.temperature).softmax(0)
        return weights, mixture(weights, models)

    def objective(self, theta: Tree, stats: Tree, batch: Batch, seed: Tensor) -> EpisodeLoss:
        """Return L + iota ||theta||_1, eq. (6), or L alone if `l1` is "proximal".

        In that case, soft thresholding after each step applies the penalty.
        """
        gradients = self.learner.episode_loss(theta, stats, batch, seed)
        if not self.iota or self.l1 == "proximal":
            return gradients
        penalty = self.iota * l1_norm(theta, norms=self.penalise_norms)
        return gradients._replace(loss=gradients.loss + penalty, extra={"penalty": penalty})

    @property
    def steps(self) -> Steps:
        """The optimiser of the local steps."""
        if not self.packs:
            return self.optimizer
        return SoftThreshold(self.optimizer, self.iota, self.penalise_norms)

    def neighbours(self, server: PFedFSLState, ids: Sequence[int], i: int, key: Key) -> list[int]:
        """Return the clients whose models client i receives, as `choose` says, in random order."""
        explore = 1.0 if self.choose == "random" else 0.0
        rng = key.at("choose", i).numpy()
        return top_m_by_affinity(server.q, i, ids, self.m, rng, explore=explore)

    def round(
        self, server: PFedFSLState, clients: Clients, key: Key
    ) -> tuple[PFedFSLState, Mapping[str, float]]:
        """Send every client its neighbours' models; store the uploads, and update Q, eq. (8)."""
        cohort = clients.sample(key)
        sent = {i: self.neighbours(server, clients.ids, i, key) for i in cohort}
        put_away = into_bank(clients, self._unpacked)

        def model(i: int) -> Tree:
            return self.message(server, clients, i)["model"]

        got = clients.exchange(
            self.train,
            PerClient(lambda i: {"models": tuple(map(model, sent[i])), "own": model(i)}),
            to=cohort,
            reduce={
                "model": self._gather_models(put_away),
                "weights": Gather(
                    lambda i: torch.empty(len(sent[i]) + 1, dtype=self.model.torch_dtype)
                ),
            },
            key=key,
        )
        q, t = server.q.clone(), server.rounds + 1
        if int(t) > self.delay:
            for i, w in got["weights"].items():
                q[i, sent[i]] += self.gain(w.double())
        return server._replace(q=q, rounds=t), got.metrics

    def gain(self, w: Tensor) -> Tensor:
        """Return the terms that eq. (8) adds to the affinities of the m models received, [m]."""
        difference = w[:-1] - w[-1]
        return difference.clamp_min(0) if self.affinity == "positive" else difference

    def predictor(self, down: Tree, private: Tree) -> Callable[[EvalEpisode], Tensor]:
        """Return the function that predicts by average distances to the client's samples."""
        del private
        model = self._unpacked(down["model"])
        return partial(self.learner.answer, model["theta"], model["stats"])

    def message(self, server: PFedFSLState, clients: Clients, client: int) -> dict[str, Tree]:
        """Return the client's own model, with which it predicts at test."""
        return {"model": self._packed(self.stored_model(server, clients, client))}

    def stored_model(self, server: PFedFSLState, clients: Clients, i: int) -> Tree:
        """Return the model that the server stores for client i, {"theta", "stats"}."""
        first = server.start
        if self.starting == "own":
            theta, stats = self.learner.init(Key(int(server.seed)).at("client", i))
            first = {"theta": theta, "stats": stats}
        return clients.recall(i, first)

    def _packed(self, model: Tree) -> Tree:
        return pack(model) if self.packs else model

    def _unpacked(self, model: Tree) -> Tree:
        return unpack(model, self._like) if self.packs else model

    def _gather_models(self, put_away: Callable[[int, Tree], Tree]) -> Gather:
        if not self.packs:
            return Gather(self._like, put_away=put_away)
        return Gather(put_away=put_away, flaw=lambda part: packing_flaw(part, self._like))

    @cached_property
    def _like(self) -> Tree:
        """A model with the structure and shapes of all models."""
        theta, stats = self.learner.init(Key(0))
        return {"theta": theta, "stats": stats}
