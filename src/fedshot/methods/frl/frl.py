"""FRL: a start from which a group of new clients learns one model in a few rounds.

Every episode is a small federation: K clients learn its classes together for R rounds, by steps on
their supports; then they send the gradient of their queries' loss at theta_R, and the server takes
a step with its start phi. At test a group of clients with new classes does the same R rounds, and
their one model answers all queries.

Source: Park et al., Few-Round Learning for Federated Learning, ICLR 2021 submission (not the
NeurIPS 2021 version), algorithm 1, eqs. (1) to (4); see `fedshot.methods.frl.local_steps` for the
equations and `fedshot.methods.frl.rounds` for the rounds. mode="official" goes by the behaviour of
the authors' later code.
Symbols: phi the start, theta_r the model of round r; P_r the global prototypes; lambda_k the share
of client k in all supports, rho_k in all examples; alpha inner_lr, beta optimizer.lr.

What the paper leaves open, and departures: the losses are cross-entropies, with the true class in
the sum, in mode="paper" too. Adam is the server's, on sum_k rho_k g_k. Prototypes are means over
all supports of a class, and are made anew with theta_R before they answer: one exchange more, of
which `mode="paper"` knows nothing. GPAL averages over positions in every mode, so that gamma weighs
a map; eq. (3) has their sum, whose weight, which the paper does not give, is gamma over their
number. A class of the episode has a row
of prototypes at every client, zero where it holds none of it, so that a sum suffices. Clients hold
nothing between exchanges, so theta_R travels twice where prototypes are made anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import ConfigError, check_word
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.learner import EvalEpisode
from fedshot.methods.frl.backpropagation import (
    pull_prototype_reply,
    pull_update_reply,
    there,
    through_rounds,
)
from fedshot.methods.frl.client_share import PARTS, EpisodeShare, Part, draw_share
from fedshot.methods.frl.group import Group
from fedshot.methods.frl.group_answers import predict_by_group
from fedshot.methods.frl.local_steps import (
    FewRoundLearner,
    Prototypes,
    Variant,
    check_slots,
    fresh_head,
    learning_mode,
)
from fedshot.methods.frl.rounds import (
    Adapted,
    Asked,
    Norms,
    few_rounds,
    message,
    own_norms,
    prototype_reply,
    told_metrics,
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
from fedshot.protocol.reducers import LIGHTEST, Mean

ModeName = Literal["strict", "paper", "official"]

# What holds where an option is null, by mode.
_BY_MODE: dict[str, dict[str, Any]] = {
    "strict": {"prototypes": "exact", "refresh": True, "positions": "mean",
               "query_prototypes": "global", "uploaded": "before", "weights": "examples"},
    "paper": {"prototypes": "shrunk", "refresh": False, "positions": "mean",
              "query_prototypes": "global", "uploaded": "last", "weights": "examples"},
    "official": {"prototypes": "unweighted", "refresh": False, "positions": "pooled",
                 "query_prototypes": "local", "uploaded": "after", "weights": "equal"},
}  # fmt: skip
_GAMMA = 0.2


class FRLState(NamedTuple):
    """What the server remembers."""

    phi: Tree  # {"body"}, with "head" under "linear"
    outer: OptState
    stats: Tree  # running statistics of batch norm
    exchanges: Tensor  # int64 scalar: communication rounds so far, R + 1 an episode


@dataclass(frozen=True)
class FRL(Method[FRLState]):
    """A start that R rounds of federated learning adapt to new classes.

    Args:
        model: backbone, and for variant "linear" a head as wide as the widest episode.
        episode: shape of an episode: its classes, and the images of each that all clients hold
            together; where clients hold what they hold, shot to query is how they divide it.
        classes: the dataset's numbers of the base classes.
        redealt: whether images are dealt anew for each episode.
        variant: "linear" learns a head; "proto" compares with prototypes; "gpal" does, and holds
            local models near the global prototypes (L_aux).
        mode: what holds where an option is null. "strict": prototypes "exact", refresh, positions
            "mean", query_prototypes "global", uploaded "before", weights "examples". "paper" as
            printed: prototypes "shrunk", no refresh, uploaded "last", else the same.
            "official", as the authors' later code: "unweighted", no refresh, "pooled", "local",
            "after", "equal".
        inner_rounds: R in training.
        test_rounds: R at test; null for that of training.
        inner_lr: alpha.
        local_steps: E, passes of a client over its supports in a round.
        inner_batch: examples of a step; null for all supports, so that a pass is one step.
        gamma: weight of L_aux per map, whatever the mode; null for 0.2. A sum over positions with
            weight g, as eq. (3) is printed, is gamma of g times their number (25 of a 5x5 map).
        loss: "softmax", or "literal", which leaves the true class out of the sum: without a bound.
        prototypes: global ones are "exact" means over all supports, "shrunk" by the share of the
            clients that lack the class, or the "unweighted" mean of those that hold it.
        refresh: make prototypes anew with theta_R; else queries meet P_{R-1}.
        through_prototypes: whether gradients pass through a client's own prototypes.
        own_sample: "included" in its own prototype in the local loss, or "left_out".
        positions: L_aux is the "mean" over positions of the last map, or of the "pooled" map alone;
            null for "pooled" with a backbone that gives no map: all but conv4
            without `features`.
        meta_step: the "server" takes Adam's step on the averaged gradient, or each client a first
            step of a fresh one, "local", and the server averages those.
        query_prototypes: in the meta-step queries meet the "global" prototypes, or their client's
            own, "local", under "gpal" plus gamma times the loss by the global ones.
        query_classes: the meta-step's loss is over "all" classes or those that a client "held".
        head: "learned", or "fresh" for every episode.
        distance: squared and "plain"; its "mean" over the features; "unit" features.
        one_class: a client with one class takes part in the "meta" step, or is left out: "skip".
        uploaded: prototypes are of the model "before" the local steps, before the "last" of them,
            or "after" them.
        weights: of the clients' models and gradients: their "examples", or all "equal".
        order: "first": the gradient at theta_R counts as that at phi; "exact": back through the
            rounds, for small models.
        optimizer: of the server.
        decay: the optimiser's step is multiplied by it after `decay_round` communication rounds,
            counted R + 1 an episode.
        decay_round: 0 for never.
    """

    name: ClassVar[str] = "frl"

    model: Model
    episode: EpisodeSpec
    classes: tuple[int, ...]
    redealt: bool = False
    variant: Variant = "gpal"
    mode: ModeName = "strict"
    inner_rounds: int = 3
    test_rounds: int | None = None
    inner_lr: float = 0.1
    local_steps: int = 1
    inner_batch: int | None = None
    gamma: float | None = None
    loss: Literal["softmax", "literal"] = "softmax"
    prototypes: Literal["exact", "shrunk", "unweighted"] | None = None
    refresh: bool | None = None
    through_prototypes: bool = True
    own_sample: Literal["included", "left_out"] = "included"
    positions: Literal["mean", "pooled"] | None = None
    meta_step: Literal["server", "local"] = "server"
    query_prototypes: Literal["global", "local"] | None = None
    query_classes: Literal["all", "held"] = "all"
    head: Literal["learned", "fresh"] = "learned"
    distance: Literal["plain", "mean", "unit"] = "plain"
    one_class: Literal["meta", "skip"] = "meta"
    uploaded: Literal["before", "last", "after"] | None = None
    weights: Literal["examples", "equal"] | None = None
    order: Literal["first", "exact"] = "first"
    optimizer: Optimizer = Optimizer("adam", 0.01)
    decay: float = 0.1
    decay_round: int = 20000

    def __post_init__(self) -> None:
        check_word("mode", self.mode, tuple(_BY_MODE))
        for name, words in (
            ("meta_step", ("server", "local")),
            ("query_classes", ("all", "held")),
            ("head", ("learned", "fresh")),
            ("one_class", ("meta", "skip")),
            ("order", ("first", "exact")),
        ):
            check_word(name, getattr(self, name), words)
        check_word("query_prototypes", self._of("query_prototypes"), ("global", "local"))
        check_word("weights", self._of("weights"), ("examples", "equal"))
        if self.variant == "gpal" and self.positions == "mean" and not self._has_map:
            raise ConfigError(
                f"positions is {self.positions!r}, and {type(self.model.backbone).__name__} gives "
                "features without a map. Set positions to 'pooled', or model.backbone to conv4."
            )
        check_slots(self.local, self.numbers)
        check_rounds(self.inner_rounds, self.test_rounds)
        if self.meta_step == "local" and self.optimizer.weight_decay:
            raise ConfigError(
                "meta_step is 'local' with a weight decay: clients take their step without knowing "
                "phi. Set optimizer.weight_decay to 0, or meta_step to 'server'."
            )
        if self.meta_step == "local" and self.order == "exact":
            raise ConfigError(
                "order is 'exact' with meta_step 'local': the way back through the rounds begins "
                "at the gradient by theta_R, and clients would send steps in its place. Set "
                "meta_step to 'server', or order to 'first'."
            )
        check_decay(self.decay, self.decay_round)

    def _of(self, option: str) -> Any:
        """Return an option that a mode decides where it is null."""
        value = getattr(self, option)
        return _BY_MODE[self.mode][option] if value is None else value

    @property
    def _has_map(self) -> bool:
        backbone = self.model.backbone
        return hasattr(backbone, "positions") and not getattr(backbone, "features", 0)

    @classmethod
    def norm_policy(cls, options: Mapping[str, Any]) -> str:
        """Return the batch norm at test: the group's, or that of all queries as in the code."""
        return "transductive" if options["mode"] == "official" else "group"

    @staticmethod
    def retired(method: Mapping[str, Any]) -> str:
        """Return what to set in place of a value that older versions took, "" for none.

        Args:
            method: the options of the method that are set.
        """
        if method.get("positions") != "sum":
            return ""
        return (
            "method.positions is 'sum', which older versions took. Set it to 'mean', and multiply "
            "method.gamma by the number of positions of the last map: 4 at 32 px, 25 at 84 px."
        )

    @staticmethod
    def changed_meaning(settings: Mapping[str, Any]) -> str:
        """Return which settings of an older run mean something else today, "" for none.

        Args:
            settings: the whole tree.
        """
        method, backbone = settings["method"], settings["model"]["backbone"]
        has_map = backbone["name"] == "conv4" and not backbone.get("features")
        summed = method["mode"] == "paper" and method["positions"] is None and has_map
        if method["variant"] != "gpal" or not summed or method["gamma"] is None:
            return ""
        return (
            f"method.gamma {method['gamma']} under mode 'paper' weighed each position of the last "
            "map when this run was started, and weighs the whole map now. For a new run with the "
            "weight that it had, multiply gamma by the number of positions: 4 at 32 px, 25 at 84 px"
        )

    @property
    def _gamma(self) -> float:
        """The weight of a loss by the global prototypes."""
        return _GAMMA if self.gamma is None else self.gamma

    @property
    def local(self) -> FewRoundLearner:
        """How a client learns."""
        return FewRoundLearner(
            self.model,
            self.variant,
            self._gamma,
            self.inner_lr,
            self.local_steps,
            self.inner_batch,
            self.loss,
            self.own_sample,
            self.through_prototypes,
            self._of("positions") if self._has_map else self.positions or "pooled",
            self.distance,
            self._of("prototypes"),
            self._of("uploaded"),
        )

    @property
    def slots(self) -> int:
        """How many numbers an episode of training has for classes."""
        return self.local.slots(self.numbers)

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

    @property
    def training(self) -> FRL:
        """All of the options that the rounds depend on."""
        model = self.model
        if model.norm_policy != "running":  # which alone keeps statistics; the others are a test's
            model = replace(model, norm_policy="group")
        return replace(self, test_rounds=None, model=model)

    def init(self, key: Key) -> FRLState:
        """Return a fresh start."""
        params, stats = self.model.init(key)
        phi = self.local.params(params)
        return FRLState(phi, self.optimizer.init(phi), stats, torch.tensor(0))

    def draw(self, data: ClientData, key: Key, needed: Sequence[Part] = PARTS) -> EpisodeShare:
        """Draw a client's supports and queries, the same in every exchange of an episode."""
        return draw_share(data, self.episode, self.classes, self.slots, key, needed)

    def draw_supports(self, data: ClientData, key: Key) -> EpisodeShare:
        """Draw the same, and read the supports alone."""
        return self.draw(data, key, ["support"])

    def draw_queries(self, data: ClientData, key: Key) -> EpisodeShare:
        """Draw the same, and read the queries alone, where the supports are not asked again."""
        again = self._of("query_prototypes") == "local" and not self.local.linear
        return self.draw(data, key, PARTS if again else ["query"])

    def redraw(self, data: ClientData, key: Key) -> EpisodeShare:
        """Draw what a client has drawn on the way there, noise included, for the way back."""
        return self.draw_supports(data, there(key))

    @client_work(draw="draw_supports")
    def update(self, down: Tree, private: Tree, drawn: EpisodeShare) -> Reply:
        """Take the local steps of a round from theta_r; send the change, and P_r's sums."""
        equal = self._of("weights") == "equal"
        return update_reply(self.local, down, private, drawn, equal=equal)

    @client_work(draw="draw_supports")
    def census(self, down: Tree, private: Tree, drawn: EpisodeShare) -> Reply:
        """Send the sums of prototypes under theta_R."""
        return prototype_reply(self.local, down, private, drawn)

    @client_work(draw="redraw")
    def pull_update(self, down: Tree, private: Tree, drawn: EpisodeShare) -> Reply:
        """Send the derivatives back through a round."""
        equal = self._of("weights") == "equal"
        return pull_update_reply(self.local, down, private, drawn, equal=equal)

    @client_work(draw="redraw")
    def pull_census(self, down: Tree, private: Tree, drawn: EpisodeShare) -> Reply:
        """Send the derivative back through the prototypes of theta_R."""
        return pull_prototype_reply(self.local, down, private, drawn)

    @client_work(draw="draw_queries")
    def meta_gradient(self, down: Tree, private: Tree, drawn: EpisodeShare) -> Reply:
        """Send g_k, the gradient at theta_R of the queries' loss by P, line 24."""
        told, stats = told_metrics(down), down.get("stats", {})
        points = {"theta": down["theta"]} | ({} if told is None else {"means": told.means})
        loss, (hits, seen), grads = value_and_grad(
            lambda at: self.query_loss(at, told, stats, drawn), points
        )
        g, metrics = grads["theta"], {"loss": loss, "accuracy": hits}
        if self.meta_step == "local":
            new, _ = self.optimizer.update(g, self.optimizer.init(g), tree.zeros_like(g))
            g = new
        equal = self._of("weights") == "equal"
        weight: Tensor | int = 1 if equal else len(drawn.support_y) + len(drawn.query_y)
        up = {"gradient": g}
        if stats:
            up |= changes({"stats": tree.detach(seen)}, down)
        if self.order == "exact" and told is not None:
            up |= {"of_told": grads["means"]}
        if self.one_class == "skip":
            y = torch.cat([drawn.support_y, drawn.query_y])
            several = (y != y[0]).any()
            up = tree.map(lambda leaf: torch.where(several, leaf, torch.zeros_like(leaf)), up)
            weight = torch.where(several, float(weight), LIGHTEST)
        return Reply(up, private, weight, metrics)

    def query_loss(
        self, at: Mapping[str, Tree], told: Prototypes | None, stats: Tree, share: EpisodeShare
    ) -> tuple[Tensor, tuple[Tensor, Tree]]:
        """Return L_local on the queries, and (accuracy, statistics after their pass)."""
        local, theta, y = self.local, at["theta"], share.query_y
        mode = learning_mode(share).layer(-2)
        g, stats = local.maps(theta, stats, share.query_x, mode)
        if told is None:
            logits = local.head_logits(theta, g, share.open)
            return cross_entropy(logits, y), (accuracy(logits.detach(), y), stats)
        told = told._replace(means=at["means"])
        if self.query_classes == "held":
            numbers = torch.arange(len(told.held), device=y.device)
            told = told._replace(held=told.held & (numbers[:, None] == y).any(1))
        loss, hits = local.query_loss(g, y, told)
        if self._of("query_prototypes") == "local":
            support, _ = local.maps(theta, {}, share.support_x, learning_mode(share).layer(-3))
            own, _ = local.prototypes_of(local.rows(support), share.support_y, len(told.held))
            own = own if self.through_prototypes else tree.detach(own)
            by_own, _ = local.query_loss(g, y, own)
            loss = by_own + self._gamma * loss if self.variant == "gpal" else by_own
        return loss, (hits, stats)

    def start(self, phi: Tree, key: Key) -> Tree:
        """Return theta_0: phi, with a head of its own where episodes have fresh ones."""
        if self.head == "learned" or not self.local.linear:
            return phi
        return {**phi, "head": fresh_head(self.model, phi, key)}

    def learn(
        self,
        asked: Asked,
        server: FRLState,
        numbers: int,
        rounds: int,
        key: Key,
        norms: Norms = own_norms,
    ) -> Adapted:
        """Let the clients of an episode learn, lines 4 to 21."""
        return few_rounds(
            asked,
            asked.sample(key),
            (self.update, self.census),
            self.local,
            self.start(server.phi, key),
            numbers,
            rounds,
            key,
            refresh=self._of("refresh"),
            norms=norms,
        )

    def round(
        self, server: FRLState, clients: Asked, key: Key
    ) -> tuple[FRLState, Mapping[str, float]]:
        """Play one episode; phi <- phi - beta Adam(sum_k rho_k g_k), lines 22 to 26."""
        learnt = self.learn(clients, server, self.slots, self.inner_rounds, key)
        stats = {"stats": server.stats} if server.stats else {}
        reduce = {"gradient": Mean(server.phi, OF_EXAMPLES)}
        reduce |= {name: Mean(part, OF_EXAMPLES) for name, part in stats.items()}
        if self.order == "exact" and learnt.told is not None:
            reduce["of_told"] = Mean(learnt.told.means, OF_EXAMPLES)
        got = clients.exchange(
            self.meta_gradient,
            message(learnt.theta, learnt.told, **stats),
            to=clients.sample(key),
            reduce=reduce,
            key=key.at("step", self.inner_rounds + 1),
        )
        g = got["gradient"]
        if self.order == "exact":
            of_told = got["of_told"] if learnt.told is not None else torch.zeros(0, 0).to(_like(g))
            works = (self.pull_update, self.pull_census)
            g = through_rounds(clients, works, learnt, g, of_told, key)
        phi, outer = self._step(server, g)
        stats = tree.add(server.stats, got["stats"]) if server.stats else {}
        metrics = dict(got.metrics) | ({"support_loss": learnt.loss} if learnt.trail else {})
        exchanges = server.exchanges + self.inner_rounds + 1
        return FRLState(phi, outer, stats, exchanges), metrics

    def _step(self, server: FRLState, g: Tree) -> tuple[Tree, OptState]:
        slower = slowed(self.decay, self.decay_round, server.exchanges)
        if self.meta_step == "local":  # g is the mean of the clients' steps
            return tree.map(lambda w, s: w + slower * s, server.phi, g), server.outer
        optimizer = replace(self.optimizer, lr=self.optimizer.lr * slower)
        return optimizer.update(g, server.outer, server.phi)

    def evaluate(
        self, server: FRLState, clients: Clients, eval_episodes: Sequence[EvalEpisode], key: Key
    ) -> list[Prediction]:
        """Let the group of each question learn for R rounds, and its model answer."""
        rounds = self.inner_rounds if self.test_rounds is None else self.test_rounds

        def learn(group: Group, eval_episode: EvalEpisode, key: Key, norms: Norms) -> Adapted:
            numbers = self.local.slots(len(eval_episode.classes))
            return self.learn(group, server, numbers, rounds, key, norms)

        return predict_by_group(self.local, server.stats, learn, eval_episodes, clients, key)


def _like(g: Tree) -> Tensor:
    return tree.leaves(g)[0]
