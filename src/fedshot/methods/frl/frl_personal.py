"""Personalised meta-training, then a few federated rounds: what FRL is compared with in appendix C.

Each client adapts the start to its own supports and sends the gradient of its own queries' loss at
where it got; no rounds are played inside an episode. At test the clients of a question learn
together for R rounds nevertheless.

Source: Park et al., Few-Round Learning for Federated Learning, ICLR 2021 submission, appendix C,
after Chen et al. 2018 and Lin et al. 2020; the client's step is first-order, as FRL's is.
Symbols: phi the start; S_k, Q_k supports and queries of client k; alpha inner_lr.
Departures from the paper: Adam is the server's, on sum_k rho_k g_k, as in `frl`. Under "proto" the
queries meet prototypes of the client's own supports, made by the adapted model; the paper does not
say. At test prototypes are made anew with theta_R, as in `frl`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import check_word
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.learner import EvalEpisode
from fedshot.methods.frl.client_share import EpisodeShare, draw_share
from fedshot.methods.frl.group import Group
from fedshot.methods.frl.group_answers import predict_by_group
from fedshot.methods.frl.local_steps import FewRoundLearner, check_slots, learning_mode
from fedshot.methods.frl.rounds import (
    Adapted,
    Asked,
    Norms,
    few_rounds,
    prototype_reply,
    update_reply,
)
from fedshot.methods.frl.schedule import check_decay, check_rounds, slowed
from fedshot.nn.gradients import value_and_grad
from fedshot.nn.losses import accuracy, cross_entropy
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer, OptState
from fedshot.protocol.averaging import OF_EXAMPLES, changes
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Method, Prediction, Traits
from fedshot.protocol.reducers import Mean


class FRLPersonalState(NamedTuple):
    """What the server remembers."""

    phi: Tree  # {"body"}, with "head" under "linear"
    outer: OptState
    stats: Tree  # running statistics of batch norm
    exchanges: Tensor  # int64 scalar: communication rounds so far, one an episode


@dataclass(frozen=True)
class FRLPersonal(Method[FRLPersonalState]):
    """A start that adapts to each client by itself; at test, a few federated rounds from it.

    Args:
        model: backbone, and for variant "linear" a head as wide as the widest episode.
        episode: shape of an episode, as in `frl`.
        classes: the dataset's numbers of the base classes.
        redealt: whether images are dealt anew for each episode.
        variant: "linear" learns a head, "proto" compares with prototypes.
        test_rounds: R at test.
        inner_lr: alpha.
        local_steps: E, passes of a client over its supports, in training and in a test's round.
        inner_batch: examples of a step; null for all supports, so that a pass is one step.
        refresh: at test, make prototypes anew with theta_R; else queries meet P_{R-1}.
        optimizer: of the server.
        decay: the optimiser's step is multiplied by it after `decay_round` communication rounds.
        decay_round: 0 for never.
    """

    name: ClassVar[str] = "frl_personal"
    test_norm: ClassVar[str] = "group"

    model: Model
    episode: EpisodeSpec
    classes: tuple[int, ...]
    redealt: bool = False
    variant: Literal["linear", "proto"] = "proto"
    test_rounds: int = 3
    inner_lr: float = 0.1
    local_steps: int = 1
    inner_batch: int | None = None
    refresh: bool = True
    optimizer: Optimizer = Optimizer("adam", 0.01)
    decay: float = 0.1
    decay_round: int = 20000

    def __post_init__(self) -> None:
        check_word("variant", self.variant, ("linear", "proto"))
        check_slots(self.local, self.numbers)
        check_rounds(self.test_rounds)
        check_decay(self.decay, self.decay_round)

    @property
    def local(self) -> FewRoundLearner:
        """How a client learns."""
        return FewRoundLearner(
            self.model, self.variant, 0.0, self.inner_lr, self.local_steps, self.inner_batch
        )

    @property
    def numbers(self) -> int:
        """How many classes an episode of training may have."""
        return self.episode.max_way if self.redealt else len(self.classes)

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs."""
        return replace(
            super().traits, max_way=self.local.slots(0) or None, adapts=True, redealt=self.redealt
        )

    def init(self, key: Key) -> FRLPersonalState:
        """Return a fresh start."""
        params, stats = self.model.init(key)
        phi = self.local.params(params)
        return FRLPersonalState(phi, self.optimizer.init(phi), stats, torch.tensor(0))

    def draw(self, data: ClientData, key: Key) -> EpisodeShare:
        """Draw a client's supports and queries."""
        return draw_share(data, self.episode, self.classes, self.local.slots(self.numbers), key)

    @client_work(draw="draw")
    def meta_gradient(self, down: Tree, private: Tree, drawn: EpisodeShare) -> Reply:
        """Adapt to the own supports; send the gradient of the own queries' loss there."""
        local, y, stats = self.local, drawn.query_y, down["stats"]
        adapted = local.learn(down["phi"], drawn, None).theta
        mode = learning_mode(drawn)

        def loss(w: Tree) -> tuple[Tensor, tuple[Tensor, Tree]]:
            h, seen = local.maps(w, stats, drawn.query_x, mode.layer(-2))
            if local.linear:
                logits = local.head_logits(w, h, drawn.open)
                return cross_entropy(logits, y), (accuracy(logits.detach(), y), seen)
            support, _ = local.maps(w, {}, drawn.support_x, mode.layer(-3))
            own, _ = local.prototypes_of(local.rows(support), drawn.support_y, len(drawn.open))
            value, hits = local.query_loss(h, y, own)
            return value, (hits, seen)

        value, (hits, seen), g = value_and_grad(loss, adapted)
        up = {"gradient": g, **changes({"stats": tree.detach(seen)}, down)}
        weight = len(drawn.support_y) + len(y)
        return Reply(up, private, weight, {"loss": value, "accuracy": hits})

    @client_work(draw="draw")
    def update(self, down: Tree, private: Tree, drawn: EpisodeShare) -> Reply:
        """Take the local steps of a round of a test."""
        return update_reply(self.local, down, private, drawn)

    @client_work(draw="draw")
    def census(self, down: Tree, private: Tree, drawn: EpisodeShare) -> Reply:
        """Send the sums of prototypes under theta_R, at a test."""
        return prototype_reply(self.local, down, private, drawn)

    def round(
        self, server: FRLPersonalState, clients: Asked, key: Key
    ) -> tuple[FRLPersonalState, Mapping[str, float]]:
        """phi <- phi - beta Adam(sum_k rho_k g_k)."""
        got = clients.exchange(
            self.meta_gradient,
            {"phi": server.phi, "stats": server.stats},
            to=clients.sample(key),
            reduce={
                "gradient": Mean(server.phi, OF_EXAMPLES),
                "stats": Mean(server.stats, OF_EXAMPLES),
            },
            key=key.at("step", 0),
        )
        factor = slowed(self.decay, self.decay_round, server.exchanges)
        optimizer = replace(self.optimizer, lr=self.optimizer.lr * factor)
        phi, outer = optimizer.update(got["gradient"], server.outer, server.phi)
        stats = tree.add(server.stats, got["stats"])
        return FRLPersonalState(phi, outer, stats, server.exchanges + 1), got.metrics

    def evaluate(
        self,
        server: FRLPersonalState,
        clients: Clients,
        eval_episodes: Sequence[EvalEpisode],
        key: Key,
    ) -> list[Prediction]:
        """Let the group of each question learn for R rounds, and its model answer."""

        def learn(group: Group, eval_episode: EvalEpisode, key: Key, norms: Norms) -> Adapted:
            return few_rounds(
                group,
                group.ids,
                (self.update, self.census),
                self.local,
                server.phi,
                self.local.slots(len(eval_episode.classes)),
                self.test_rounds,
                key,
                refresh=self.refresh,
                norms=norms,
            )

        return predict_by_group(self.local, server.stats, learn, eval_episodes, clients, key)
