"""FRL: meta-trains an initialisation from which new clients learn one model in a few rounds.

Every episode is a small federation: K clients learn its classes together for R rounds, by steps on
their supports; then they upload the gradient of their queries' loss at theta_R, and the server
takes a step from its initialisation phi. At test a group of clients with new classes runs the same
R rounds, and the resulting model predicts all queries.

Source: Park et al., Few-Round Learning for Federated Learning, ICLR 2021 submission (not the
NeurIPS 2021 version), algorithm 1, eqs. (1) to (4); see `fedshot.methods.frl.local_steps` for the
equations. mode="official" follows the behaviour of the authors' later code.
Symbols: phi the initialisation, theta_r the model of round r; P_r the global prototypes; lambda_k
the share of client k in all supports, rho_k in all examples; alpha inner_lr, beta optimizer.lr.

Open points of the paper, and departures: the losses are cross-entropies, with the true class in
the sum, in mode="paper" too. Adam runs at the server, on sum_k rho_k g_k. Prototypes are means over
all supports of a class. With `refresh` they are recomputed with theta_R before they predict, in one
more exchange. In every mode L_aux is a mean over the positions of the last feature map, with weight
gamma. Eq. (3) is a sum over positions, whose weight the paper does not give; here the weight of
each position is gamma divided by their number.
Clients upload a row of prototypes for each class of the episode, zero for classes they do not have,
so that a sum suffices. Clients keep nothing between exchanges, so theta_R is sent twice where
prototypes are recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.ranges import AtLeast0, NotNegative
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.methods.frl.backpropagation import (
    forward_key,
    pull_prototype_reply,
    pull_update_reply,
    through_rounds,
)
from fedshot.methods.frl.client_share import PARTS, EpisodeShare
from fedshot.methods.frl.few_round_method import FRLState, MetaTrained
from fedshot.methods.frl.local_steps import FewRoundLearner, Prototypes, Variant, learning_mode
from fedshot.methods.frl.rounds import Population, message, prototype_reply, update_reply
from fedshot.nn.gradients import value_and_grad
from fedshot.protocol.averaging import OF_EXAMPLES, changes
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.reducers import Mean

ModeName = Literal["strict", "paper", "official"]

# Values of options that are null, by mode.
_BY_MODE: dict[str, dict[str, Any]] = {
    "strict": {"prototypes": "exact", "refresh": True, "positions": "mean",
               "query_prototypes": "global", "uploaded": "before", "weights": "examples"},
    "paper": {"prototypes": "shrunk", "refresh": False, "positions": "mean",
              "query_prototypes": "global", "uploaded": "last", "weights": "examples"},
    "official": {"prototypes": "unweighted", "refresh": False, "positions": "pooled",
                 "query_prototypes": "local", "uploaded": "after", "weights": "equal"},
}  # fmt: skip
_GAMMA = 0.2


@dataclass(frozen=True)
class FRL(MetaTrained):
    """An initialisation from which clients learn new classes in R federated rounds.

    The other options are those of `MetaTrained`.

    Args:
        episode: shape of an episode: its classes, and the images of each at all clients together.
            Clients that keep their own images divide them in its ratio of shot to query.
        variant: "linear" trains a linear head; "proto" predicts by the nearest prototype; "gpal" is
            "proto" with L_aux, a loss that pulls features towards the global prototypes.
        mode: sets the options that are null. "strict": prototypes "exact", refresh true, positions
            "mean", query_prototypes "global", uploaded "before", weights "examples". "paper", as
            printed: the same, but prototypes "shrunk", refresh false, uploaded "last". "official",
            as the authors' later code: prototypes "unweighted", refresh false, positions "pooled",
            query_prototypes "local", uploaded "after", weights "equal".
        inner_rounds: number of rounds in training, R.
        test_rounds: number of rounds at test, R; null for `inner_rounds`.
        gamma: weight of L_aux, a mean over the positions of a feature map; null: 0.2 in every mode.
            To give the sum of eq. (3) a weight g, set g times the number of positions (25 for a
            5x5 map).
        loss: loss of a query or support, from its distances to the prototypes. "softmax": the
            cross-entropy; "literal": as printed, with the true class left out of the sum, so that
            there is no lower bound.
        prototypes: the global prototype of a class. "exact": the mean of all its supports.
            "shrunk": the mean of all clients' prototypes, weighted by the clients' supports, with 0
            for a client without the class. "unweighted": the plain mean of the prototypes of the
            clients that have the class.
        refresh: whether to recompute prototypes with theta_R; if not, queries are compared with
            P_{R-1}.
        positions: features in L_aux. "mean": L_aux is a mean over the positions of the last feature
            map; "pooled": it compares only the average-pooled map. null: the default of `mode`.
            Only conv4 with model.backbone.features 0 has such a map; for all others null means
            "pooled".
        query_prototypes: prototypes in the meta-step's loss of the queries. "global": the global
            ones; "local": those of the query's client. Under variant "gpal", "local" adds gamma
            times the loss under the global ones.
        query_classes: classes in the meta-step's loss. "all": all classes of the episode; "held":
            only the classes of the client's own queries.
        uploaded: the model with which clients compute the prototypes that they upload. "before":
            before the local steps; "last": before the last of these steps, or with `inner_batch`
            before the last pass over the supports; "after": after the local steps.
        weights: weights of the clients' models and gradients. "examples": the clients' numbers of
            examples; "equal": all the same.
        order: gradient with respect to the initialisation, phi. "first": approximated by the
            gradient at theta_R; "exact": computed back through the rounds, for small models.
        decay: factor that multiplies the server's step size after `decay_round` communication
            rounds; an episode counts as R + 1.
    """

    name: ClassVar[str] = "frl"

    variant: Variant = "gpal"
    mode: ModeName = "strict"
    inner_rounds: AtLeast0 = 3
    test_rounds: AtLeast0 | None = None
    gamma: NotNegative | None = None
    loss: Literal["softmax", "literal"] = "softmax"
    prototypes: Literal["exact", "shrunk", "unweighted"] | None = None
    refresh: bool | None = None
    positions: Literal["mean", "pooled"] | None = None
    query_prototypes: Literal["global", "local"] | None = None
    query_classes: Literal["all", "held"] = "all"
    uploaded: Literal["before", "last", "after"] | None = None
    weights: Literal["examples", "equal"] | None = None
    order: Literal["first", "exact"] = "first"

    def __post_init__(self) -> None:
        if self.variant == "gpal" and self.positions == "mean" and not self._has_map:
            raise ConfigError(
                f"positions is {self.positions!r}, but {type(self.model.backbone).__name__} has no "
                "feature map. Set positions to 'pooled', or model.backbone to conv4."
            )
        super().__post_init__()

    def _of(self, option: str) -> Any:
        """Return the value of an option, or the mode's value if the option is null."""
        value = getattr(self, option)
        return _BY_MODE[self.mode][option] if value is None else value

    @property
    def _has_map(self) -> bool:
        backbone = self.model.backbone
        return hasattr(backbone, "positions") and not getattr(backbone, "features", 0)

    @classmethod
    def norm_policy(cls, options: Mapping[str, Any]) -> str:
        """Return the batch-norm policy at test: "transductive" in mode "official", else "group"."""
        return "transductive" if options["mode"] == "official" else "group"

    @property
    def local(self) -> FewRoundLearner:
        """The learner of each client."""
        return FewRoundLearner(
            self.model,
            self.variant,
            _GAMMA if self.gamma is None else self.gamma,
            self.inner_lr,
            self.local_steps,
            self.inner_batch,
            self.loss,
            self._of("positions") if self._has_map else self.positions or "pooled",
            self._of("prototypes"),
            self._of("uploaded"),
        )

    @property
    def rounds_at_test(self) -> int:
        """Number of rounds at test, R."""
        return self.inner_rounds if self.test_rounds is None else self.test_rounds

    @property
    def refreshes(self) -> bool:
        """Whether one more exchange, after the R rounds, recomputes the prototypes with theta_R."""
        return bool(self._of("refresh"))

    @property
    def training(self) -> FRL:
        """A copy in which options that only affect the test have fixed values."""
        model = self.model
        if model.norm_policy != "running":  # the other policies only matter at test
            model = replace(model, norm_policy="group")
        return replace(self, test_rounds=None, model=model)

    def draw_supports(self, data: ClientData, key: Key) -> EpisodeShare:
        """Draw a client's share of an episode; images or texts are read for its supports only."""
        return self.draw(data, key, ["support"])

    def draw_queries(self, data: ClientData, key: Key) -> EpisodeShare:
        """Draw a client's share of an episode, and read the images or texts of its queries.

        Those of its supports are read only if prototypes of the client are needed.
        """
        both = self._of("query_prototypes") == "local" and not self.local.linear
        return self.draw(data, key, PARTS if both else ["query"])

    def redraw(self, data: ClientData, key: Key) -> EpisodeShare:
        """Draw a client's share of an episode again for a backward pass, with the same seed."""
        return self.draw_supports(data, forward_key(key))

    @client_work(draw="draw_supports")
    def update(self, down: Tree, private: Tree, drawn: EpisodeShare) -> Reply:
        """Take a round's local steps from theta_r; upload theta's change, and the sums for P_r."""
        equal = self._of("weights") == "equal"
        return update_reply(self.local, down, private, drawn, equal=equal)

    @client_work(draw="draw_supports")
    def census(self, down: Tree, private: Tree, drawn: EpisodeShare) -> Reply:
        """Upload the sum of features of each class, computed with theta_R."""
        return prototype_reply(self.local, down, private, drawn)

    @client_work(draw="redraw")
    def pull_update(self, down: Tree, private: Tree, drawn: EpisodeShare) -> Reply:
        """Upload the derivatives of the episode's loss, back through a round."""
        equal = self._of("weights") == "equal"
        return pull_update_reply(self.local, down, private, drawn, equal=equal)

    @client_work(draw="redraw")
    def pull_census(self, down: Tree, private: Tree, drawn: EpisodeShare) -> Reply:
        """Upload the loss's derivative with respect to theta_R, through the prototypes."""
        return pull_prototype_reply(self.local, down, private, drawn)

    @client_work(draw="draw_queries")
    def meta_gradient(self, down: Tree, private: Tree, drawn: EpisodeShare) -> Reply:
        """Upload g_k, the gradient at theta_R of the queries' loss under the prototypes P."""
        prototypes: Prototypes | None = down.get("prototypes")
        stats = down.get("stats", {})
        points = {"theta": down["theta"]}
        points |= {} if prototypes is None else {"means": prototypes.means}
        loss, (found, seen), grads = value_and_grad(
            lambda at: self.query_loss(at, prototypes, stats, drawn), points
        )
        up = {"gradient": grads["theta"]}
        if stats:
            up |= changes({"stats": tree.detach(seen)}, down)
        if self.order == "exact" and prototypes is not None:
            up |= {"of_told": grads["means"]}
        n = len(drawn.support_y) + len(drawn.query_y)
        weight = 1 if self._of("weights") == "equal" else n
        return Reply(up, private, weight, {"loss": loss, "accuracy": found})

    def query_loss(
        self,
        at: Mapping[str, Tree],
        prototypes: Prototypes | None,
        stats: Tree,
        share: EpisodeShare,
    ) -> tuple[Tensor, tuple[Tensor, Tree]]:
        """Return the queries' loss, and (accuracy, running statistics after the forward pass).

        `at` has theta_R, "theta", and for prototypes their "means", which replace those in
        `prototypes`: the loss is differentiated with respect to `at`.
        """
        local, theta, y = self.local, at["theta"], share.query_y
        mode = learning_mode(share)
        g, stats = local.maps(theta, stats, share.query_x, mode.layer(-2))
        if prototypes is None:
            loss, found = local.head_loss(theta, g, y, share.open)
            return loss, (found, stats)
        prototypes = prototypes._replace(means=at["means"])
        if self.query_classes == "held":
            numbers = torch.arange(len(prototypes.held), device=y.device)
            held = prototypes.held & (numbers[:, None] == y).any(1)
            prototypes = prototypes._replace(held=held)
        loss, found = local.query_loss(g, y, prototypes)
        if self._of("query_prototypes") == "local":
            by_own, _ = local.query_loss(g, y, local.own_prototypes(theta, share, mode.layer(-3)))
            loss = by_own + local.gamma * loss if self.variant == "gpal" else by_own
        return loss, (found, stats)

    def round(
        self, server: FRLState, clients: Population, key: Key
    ) -> tuple[FRLState, Mapping[str, float]]:
        """Run one episode; phi <- phi - beta Adam(sum_k rho_k g_k), algorithm 1, lines 22 to 26."""
        learned = self.learn(clients, server.phi, self.slots, self.inner_rounds, key)
        stats = {"stats": server.stats} if server.stats else {}
        reduce = {"gradient": Mean(server.phi, OF_EXAMPLES)}
        reduce |= {name: Mean(part, OF_EXAMPLES) for name, part in stats.items()}
        if self.order == "exact" and learned.prototypes is not None:
            reduce["of_told"] = Mean(learned.prototypes.means, OF_EXAMPLES, by_class=True)
        got = clients.exchange(
            self.meta_gradient,
            message(learned.theta, learned.prototypes, **stats),
            to=clients.sample(key),
            reduce=reduce,
            key=key.at("step", self.inner_rounds + 1),
        )
        g = got["gradient"]
        if self.order == "exact":
            none = tree.leaves(g)[0].new_zeros(0, 0)
            of_prototypes = none if learned.prototypes is None else got["of_told"]
            works = (self.pull_update, self.pull_census)
            g = through_rounds(clients, works, learned, g, of_prototypes, key)
        moved = got["stats"] if server.stats else {}
        known = {} if math.isnan(learned.loss) else {"support_loss": learned.loss}
        return self.step(server, g, moved, self.inner_rounds + 1), {**got.metrics, **known}
