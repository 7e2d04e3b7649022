"""Personalised meta-training, then a few federated rounds: the comparison in FRL's appendix C.

Each client adapts the initialisation to its own supports and uploads the gradient of its own
queries' loss at the adapted model; an episode has no inner rounds. At test the clients of a group
nevertheless learn together for R rounds.

Source: Park et al., Few-Round Learning for Federated Learning, ICLR 2021 submission, appendix C,
after Chen et al. 2018 and Lin et al. 2020; the client's step is first-order, as FRL's is.
Symbols: phi the initialisation; S_k, Q_k supports and queries of client k; alpha inner_lr.
Departures from the paper: Adam runs at the server, on sum_k rho_k g_k, as in `frl`. With variant
"proto" the queries are compared with prototypes that the adapted model computes from the client's
own supports; the paper does not say which prototypes it uses. At test prototypes are recomputed
with theta_R, as in `frl`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fedshot.core import tree
from fedshot.core.ranges import AtLeast0
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.methods.frl.client_share import EpisodeShare
from fedshot.methods.frl.few_round_method import FRLState, MetaTrained
from fedshot.methods.frl.local_steps import learning_mode
from fedshot.methods.frl.rounds import Population
from fedshot.nn.gradients import value_and_grad
from fedshot.protocol.averaging import OF_EXAMPLES, changes
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.reducers import Mean


@dataclass(frozen=True)
class FRLPersonal(MetaTrained):
    """An initialisation that clients adapt separately in training, and together at test.

    The other options are those of `MetaTrained`.

    Args:
        episode: shape of an episode, as in the method `frl`.
        variant: "linear" trains a linear head, "proto" predicts by the nearest prototype.
        test_rounds: number of rounds at test, R.
        local_steps: passes of a client over its supports, in training and in each round at test, E.
        refresh: whether to recompute prototypes with theta_R at test; if not, queries are compared
            with P_{R-1}.
    """

    name: ClassVar[str] = "frl_personal"

    variant: Literal["linear", "proto"] = "proto"
    test_rounds: AtLeast0 = 3
    refresh: bool = True

    @property
    def refreshes(self) -> bool:
        """Whether one more exchange, after the R rounds, recomputes the prototypes with theta_R."""
        return self.refresh

    @client_work(draw="draw")
    def meta_gradient(self, down: Tree, private: Tree, drawn: EpisodeShare) -> Reply:
        """Upload the gradient of the queries' loss after adapting phi to the client's supports."""
        local, y, stats = self.local, drawn.query_y, down["stats"]
        adapted = local.learn(down["phi"], drawn, None).theta
        mode = learning_mode(drawn)

        def loss(w: Tree) -> tuple[Tensor, tuple[Tensor, Tree]]:
            h, seen = local.maps(w, stats, drawn.query_x, mode.layer(-2))
            if local.linear:
                value, found = local.head_loss(w, h, y, drawn.open)
            else:
                own = local.own_prototypes(w, drawn, mode.layer(-3))
                value, found = local.query_loss(h, y, own)
            return value, (found, seen)

        value, (found, seen), g = value_and_grad(loss, adapted)
        up = {"gradient": g, **changes({"stats": tree.detach(seen)}, down)}
        weight = len(drawn.support_y) + len(y)
        return Reply(up, private, weight, {"loss": value, "accuracy": found})

    def round(
        self, server: FRLState, clients: Population, key: Key
    ) -> tuple[FRLState, Mapping[str, float]]:
        """Run one episode; phi <- phi - beta Adam(sum_k rho_k g_k)."""
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
        return self.step(server, got["gradient"], got["stats"], 1), got.metrics
