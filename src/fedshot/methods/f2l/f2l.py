"""F2L: a server-model that all clients share, and a client-model that each keeps to itself.

The server-model is an encoder under a classifier of all base classes, trained by cross-entropy. The
client-model is a set Transformer and an N-way head on its features, meta-learned as in MAML. Each
teaches the other: what a client-model makes of its support goes into the server-model by mutual
information, and the server-model's view of the episode's classes into the client-model by
distillation. The server averages the server-models; client-models never leave their clients.

Source: Wang et al., Federated Few-shot Learning, KDD 2023, section 3, appendices B and C; mode
"official" is what the authors' published code does.
Symbols: phi server-model, psi client-model; an episode (S, Q); a_ft = inner.lr. A local step is
psi~ = psi - a_ft grad CE(S; phi, psi), eq. (3); one optimiser step of phi on
(1 - l_MI) CE_base(S) + l_MI L_MI, eqs. (5) and (14); one of psi on (1 - l_KD) CE(Q; psi~) + l_KD
L_KD, eqs. (4) and (20); phi <- the mean of the clients' phi, eq. (2).

Both steps see the features of one pass of the encoder, under the phi before the step. So batch norm
normalises support and queries together and moves the running statistics once; and dropout
(DropBlock) in the encoder has one mask an episode, where a pass for each of the three uses would
draw three. The client-model has two: of the fine-tuning, and of the pass that both losses share.
Without batch norm, queries pass by themselves and without a graph, since nobody differentiates
them: the same features, and with 15 queries a class no backward pass for 15 texts of 16 at one
shot, for 3 of 4 at five.

What the paper leaves open is in `fedshot.methods.f2l.readings.F2LReading`. Departures: clients
upload phi_i - phi. "strict" alone takes b over the whole support, since a 1-shot L_MI as printed
is zero for any features, a temperature of b, the gradient of eq. (4) in first order, and that of
L_MI through the server-model's own features alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from fedshot.core.errors import ConfigError, check_word
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.classification import Classifier, base_numbers
from fedshot.learners.learner import EvalEpisode, InnerLoop
from fedshot.learners.local_training import (
    LocalEpisodes,
    check_budget,
    mean_gradient,
    mean_metrics,
    sample_episodes,
)
from fedshot.learners.probe import FeatureProbe, Probe
from fedshot.methods.f2l.client_model import ClientModel
from fedshot.methods.f2l.readings import (
    F2LDefaults,
    F2LMode,
    F2LReading,
    InnerChoice,
    OptimizerChoice,
    chosen,
    f2l_defaults,
)
from fedshot.methods.f2l.set_transformer import Queries, SetTransformer
from fedshot.methods.f2l.two_models import TwoModels
from fedshot.nn.heads import LinearHead
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer, OptState
from fedshot.protocol.averaging import average, changes
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Prediction, predict_all, predict_at_clients, predict_at_server
from fedshot.protocol.probe_answers import embedded, predict_by_probe


class F2LState(NamedTuple):
    """What the server remembers."""

    phi: Tree  # {"body", "classifier"}
    stats: Tree  # running statistics of batch norm
    psi: Tree  # {}, or the one client-model that is averaged, too, without `personal`


class F2LLocalState(NamedTuple):
    """Where local training stands."""

    phi: Tree
    psi: Tree
    stats: Tree
    state: OptState  # of psi's optimiser


@dataclass(frozen=True)
class F2L:
    """A shared server-model and private client-models that teach each other.

    What is null is as `mode` says; `fedshot.methods.f2l.readings.F2LReading` tells what the words
    mean.

    Args:
        model: backbone, and the client-model's linear head.
        episode: shape of the training episodes.
        classes: the dataset's numbers of the base classes.
        mode: "strict"; "paper", its equations to the letter; "official", the authors' code.
        lambda_mi: weight of the transfer to the server-model; 0 goes without.
        lambda_kd: weight of the distillation to the client-model; 0 goes without.
        personal: client-models stay with their clients; false averages them, too.
        weights: of cross-entropy and added term: "shared" or "added".
        mi_loss: "confidences" or "shots".
        mi_denominator: "all" or "same_class".
        mi_tau: temperature of the transfer.
        mi_from: "tuned" or "psi".
        mi_gradient: "server" or "both".
        kd_targets: "softmax" or "sum".
        kd_squared: whether the distillation is multiplied by the temperature squared.
        server_rows: "support" or "both".
        client_phi: "old" or "new".
        classifier: "linear" or "mlp".
        queries: "support_context", "query_set" or "alone".
        head_start: "zero" or "prototypes".
        test_head: "trained" or "fresh".
        evaluated: "client" or "server".
        probe: "logistic", "mean" or "ridge", on features of length 1.
        answer_by: at test, "turns" gives question u to client u mod K, "all" to every client.
        weighting: "uniform" or "examples".
        transformer: the client-model's encoder.
        inner: how the client-model adapts.
        local_steps: local steps per visit.
        episodes_per_step: episodes whose gradients are averaged in a step.
        optimizer: of the server-model; its state starts afresh at every visit.
        client_optimizer: of the client-model; its state stays with it. What is null is as of
            `optimizer`, in mode "official" SGD of the code's own step size.
    """

    name: ClassVar[str] = "f2l"

    model: Model
    episode: EpisodeSpec
    classes: tuple[int, ...]
    mode: F2LMode = "strict"
    lambda_mi: float | None = None
    lambda_kd: float | None = None
    personal: bool = True
    weights: Literal["shared", "added"] | None = None
    mi_loss: Literal["confidences", "shots"] | None = None
    mi_denominator: Literal["all", "same_class"] | None = None
    mi_tau: float | None = None
    mi_from: Literal["tuned", "psi"] | None = None
    mi_gradient: Literal["server", "both"] | None = None
    kd_targets: Literal["softmax", "sum"] | None = None
    kd_squared: bool | None = None
    server_rows: Literal["support", "both"] | None = None
    client_phi: Literal["old", "new"] | None = None
    classifier: Literal["linear", "mlp"] | None = None
    queries: Queries | None = None
    head_start: Literal["zero", "prototypes"] | None = None
    test_head: Literal["trained", "fresh"] | None = None
    evaluated: Literal["client", "server"] | None = None
    probe: Probe | None = None
    answer_by: Literal["turns", "all"] = "turns"
    weighting: Literal["uniform", "examples"] | None = None
    transformer: SetTransformer = SetTransformer()
    inner: InnerChoice = InnerChoice()
    local_steps: int = 10
    episodes_per_step: int = 1
    optimizer: OptimizerChoice = OptimizerChoice()
    client_optimizer: OptimizerChoice = OptimizerChoice()

    def __post_init__(self) -> None:
        check_budget(self.local_steps, self.episodes_per_step)
        check_word("answer_by", self.answer_by, ("turns", "all"))
        if not isinstance(self.model.head, LinearHead):
            raise ConfigError(
                "the client-model's classifier is one linear layer; set model.head to linear, "
                "with model.head.way the most classes of an episode."
            )
        if self.reading.mi_loss == "shots" and self.reading.lambda_mi and self.episode.shot < 2:
            raise ConfigError(
                "mi_loss is 'shots', which compares one shot with the next, and episode.shot is 1. "
                "Set episode.shot to 2 or more (the authors' code has 2 for images, 5 for texts), "
                "or mi_loss to 'confidences'."
            )
        self.transformer.check(self.model.out_features)
        _ = self.learner, self.client_model, self.client_steps  # which check the rest

    @staticmethod
    def norm_policy(options: Mapping[str, Any]) -> str:
        """Return the batch norm at test that suits features of a classifier: running ones."""
        del options
        return "running"

    @cached_property
    def _mode(self) -> F2LDefaults:
        return f2l_defaults(self.mode, text=self.model.table is not None)

    @cached_property
    def reading(self) -> F2LReading:
        """Every choice made."""
        return chosen(self._mode.reading, self)

    @cached_property
    def learner(self) -> Classifier:
        """The server-model."""
        return Classifier(self.model, len(self.classes), self.reading.classifier)

    @cached_property
    def client_model(self) -> ClientModel:
        """The client-model."""
        assert self.model.head is not None
        inner: InnerLoop = chosen(self._mode.inner, self.inner)
        return ClientModel(
            self.transformer,
            self.model.head.way,
            self.model.out_features,
            inner,
            self.reading.queries,
            self.reading.head_start,
        )

    @cached_property
    def models(self) -> TwoModels:
        """Both, and what they make of an episode."""
        return TwoModels(self.learner, self.client_model, self.reading)

    @cached_property
    def server_steps(self) -> Optimizer:
        """What moves phi."""
        return self.optimizer.over(self._mode.server)

    @cached_property
    def client_steps(self) -> Optimizer:
        """What moves psi."""
        return self.client_optimizer.over(self._mode.client or self.server_steps)

    @property
    def n_episodes(self) -> int:
        """Episodes of one visit."""
        return self.local_steps * self.episodes_per_step

    @property
    def transductive(self) -> bool:
        """Whether predictions for one query depend on the others."""
        together = self.reading.evaluated == "client" and self.reading.queries == "query_set"
        return together or self.model.norm_policy == "transductive"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know of these options before a run."""
        learned = self.reading.evaluated == "client" and self.reading.head_start == "zero"
        known = self.episode.labels != "shuffled"
        if not learned or known or self.client_steps.name != "adam":
            return ()
        return (
            "a head of the client-model that Adam learns from zero hardly learns, because episodes "
            "number their classes anew. Set method.head_start to 'prototypes', or learn it as the "
            "authors' code does: method.client_optimizer {name: sgd, lr: 0.001} and method.inner "
            "{adapts: head, lr: 0.1, steps: 5}.",
        )

    @property
    def max_way(self) -> int | None:
        """The width of the client-model's head; None where it is made of prototypes."""
        return None if self.reading.head_start == "prototypes" else self.client_model.way

    @property
    def max_test_way(self) -> int | None:
        """The most classes of a test episode: a probe on the server-model has no head."""
        return None if self.reading.evaluated == "server" else self.max_way

    def init(self, key: Key) -> F2LState:
        """Return a fresh server-model."""
        phi, stats = self.learner.init(key)
        return F2LState(phi, stats, {} if self.personal else self._first_psi(key.at("psi")))

    def init_client(self, client: int, key: Key) -> Tree:
        """Return a client's first client-model, drawn by itself, and its optimiser's state."""
        del client
        if not self.personal:
            return {}
        psi = self._first_psi(key.at("psi"))
        return {"psi": psi, "optimizer": self.client_steps.init(psi)}

    def draw(self, data: ClientData, key: Key) -> LocalEpisodes:
        """Draw the local episodes; their classes are told as numbers of base classes."""
        local_episodes = sample_episodes(
            data, self.episode, self.local_steps, self.episodes_per_step, key
        )
        steps = tuple(
            tuple(e._replace(classes=base_numbers(e.classes, self.classes)) for e in step)
            for step in local_episodes.steps
        )
        return local_episodes._replace(steps=steps)

    def local(
        self, at: F2LLocalState, local_episodes: LocalEpisodes
    ) -> tuple[F2LLocalState, dict[str, Tensor]]:
        """Take the local steps of algorithm 1; also return the means of what they report."""
        phi, psi, stats, state = at
        server_state, told = self.server_steps.init(phi), []
        noise = Mode(seed=local_episodes.seed)
        for s, step in enumerate(local_episodes.steps):
            both = {"phi": phi, "psi": psi}
            gradients = mean_gradient(self.models.episode_loss, both, stats, step, noise.layer(s))
            grads = gradients.grads["psi"]
            new, server_state = self.server_steps.update(gradients.grads["phi"], server_state, phi)
            if self.reading.client_phi == "new":
                look = partial(self.models.second_look, phi, new)
                grads = mean_gradient(look, psi, stats, step, noise.layer(s)).grads
            psi, state = self.client_steps.update(grads, state, psi)
            phi, stats = new, gradients.stats
            told += gradients.told
        return F2LLocalState(phi, psi, stats, state), mean_metrics(told)

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: LocalEpisodes) -> Reply:
        """Take the local steps; send the change of the server-model, keep the client-model."""
        psi = private["psi"] if self.personal else down["psi"]
        state = private["optimizer"] if self.personal else self.client_steps.init(psi)
        new, metrics = self.local(F2LLocalState(down["phi"], psi, down["stats"], state), drawn)
        moved = {"phi": new.phi, "stats": new.stats}
        moved |= {} if self.personal else {"psi": new.psi}
        kept = {"psi": new.psi, "optimizer": new.state} if self.personal else {}
        weight = drawn.n if self.reading.weighting == "examples" else drawn.n_episodes
        return Reply(changes(moved, down), kept, weight, metrics)

    def round(
        self, server: F2LState, clients: Clients, key: Key
    ) -> tuple[F2LState, Mapping[str, float]]:
        """phi <- phi + mean_i (phi_i - phi), eq. (2)."""
        parts = {"phi": server.phi, "stats": server.stats}
        parts |= {} if self.personal else {"psi": server.psi}
        max_weight = None if self.reading.weighting == "examples" else self.n_episodes
        new, got = average(clients, self.train, parts, key, max_weight=max_weight)
        return server._replace(**new), got.metrics

    @client_work()
    def answer(self, down: Tree, private: Tree, drawn: Tree) -> Reply:
        """Answer the questions sent, by a client-model that is fine-tuned for each and then lost.

        They come as features of the server-model, which is frozen meanwhile.
        """
        del drawn
        logits = predict_all(partial(self._answer, private["psi"]), down["questions"])
        return Reply({"logits": logits}, private, len(logits))

    def evaluate(
        self, server: F2LState, clients: Clients, eval_episodes: Sequence[EvalEpisode], key: Key
    ) -> list[Prediction]:
        """Let the client-models answer on features of the server's encoder; or a probe on them."""
        phi, stats = server.phi, server.stats
        if self.reading.evaluated == "server":
            probe_options = FeatureProbe(self.reading.probe)
            return predict_by_probe(self.learner, phi, stats, probe_options, eval_episodes, clients)
        asked = embedded(self.learner, phi, stats, eval_episodes, clients)
        if self.personal:
            return predict_at_clients(self.answer, clients, asked, key, by=self.answer_by)
        return predict_at_server(partial(self._answer, server.psi), asked, clients)

    def _first_psi(self, key: Key) -> Tree:
        return self.client_model.init(key, self.model.torch_dtype)

    def _answer(self, psi: Tree, eval_episode: EvalEpisode) -> Tensor:
        fresh = self.reading.test_head == "fresh"
        return self.client_model.answer(psi, eval_episode, fresh_head=fresh)
