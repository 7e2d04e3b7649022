"""F2L: a server-model that all clients share, and a private client-model for each client.

The server-model is an encoder under a classifier of all base classes, trained by cross-entropy. The
client-model is a set Transformer and an N-way head on its features, meta-learned as in MAML. Each
model teaches the other: a mutual-information loss pulls the server-model's features towards the
client-model's, and the server-model's logits of the episode's classes are distilled into the
client-model. The server averages the server-models; client-models never leave their clients.

Source: Wang et al., Federated Few-shot Learning, KDD 2023, section 3, appendices B and C; mode
"official" follows the authors' published code.
Symbols: phi server-model, psi client-model; an episode (S, Q); a_ft = inner.lr. A local step is
psi~ = psi - a_ft grad CE(S; phi, psi), eq. (3); one optimiser step of phi on
(1 - l_MI) CE_base(S) + l_MI L_MI, eqs. (5) and (14); one of psi on (1 - l_KD) CE(Q; psi~) + l_KD
L_KD, eqs. (4) and (20); phi <- the mean of the clients' phi, eq. (2).

The steps of phi and psi use features from a single forward pass of the encoder, with phi as it was
before both steps. So batch norm normalises support and queries together and updates the running
statistics once. Dropout (DropBlock) in the encoder has one mask per episode; with separate passes
for fine-tuning, L_phi and L_psi it would have three. The client-model has two masks: one for
fine-tuning, and one for the pass that both losses share. If the encoder has no batch norm, it
encodes the queries separately and without a graph, because nothing differentiates their features.
The features are the same, and the queries need no backward pass.

The points that the paper leaves open are in `fedshot.methods.f2l.readings`. Departures: clients
upload phi_i - phi. Modes "strict" and "tuned" repair four points; mode "paper" does not. In
eq. (10), the softmax b of cosines is over the whole support, because L_MI as printed is zero with
one shot; and b has a temperature. The gradient of eq. (4) is first-order. The gradient of L_MI
reaches the server-model only through its own features, not through the client-model, whose input
these are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from fedshot.core.errors import ConfigError
from fedshot.core.ranges import Above0, AtLeast1, NotNegative
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.learners.classification import Classifier, base_numbers
from fedshot.learners.learner import EvalEpisode
from fedshot.learners.local_training import LocalEpisodes, mean_gradient, mean_metrics
from fedshot.learners.maml import InnerLoop
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
from fedshot.nn.optim import Optimizer, OptState
from fedshot.protocol.averaging import average, changes
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import (
    ClientModels,
    EpisodicMethod,
    Prediction,
    Traits,
    predict_at_clients,
    predict_at_server,
)
from fedshot.protocol.probe_predictions import embedded, predict_by_probe


class F2LState(NamedTuple):
    """The server's state."""

    phi: Tree  # {"body", "classifier"}
    stats: Tree  # running statistics of batch norm
    psi: Tree  # the averaged client-model if not `personal`, else {}


class F2LLocalState(NamedTuple):
    """The state of a client's local training: both models."""

    phi: Tree
    psi: Tree
    stats: Tree
    state: OptState  # of psi's optimiser


@dataclass(frozen=True)
class F2L(EpisodicMethod[F2LState], ClientModels[F2LState]):
    """A shared server-model and private client-models that teach each other.

    Args:
        model: backbone, and the client-model's linear head.
        episode: shape of the training episodes.
        classes: the base classes, as class indices of the dataset.
        mode: sets the options that are null: "strict" repairs some of the paper's equations,
            "tuned" also trains the client-model so that it learns, "paper" follows the equations to
            the letter, "official" follows the authors' code.
        lambda_mi: weight of the transfer from the client-model to the server-model; 0 for none.
        lambda_kd: weight of the distillation from the server-model to the client-model; 0 for none.
        personal: whether client-models stay with their clients; false averages them, too.
        weights: how L_MI or L_KD, with weight l, is added to the cross-entropy CE. "shared":
            (1 - l) CE + l L; "added": CE + l L.
        mi_loss: the loss L_MI. "confidences": eq. (13) of the paper; "shots": the contrastive loss
            of the authors' code, which compares each shot with the next.
        mi_denominator: the set over which b, the softmax of cosines in L_MI (eq. (10)), is
            normalised. "all": the whole support; "same_class": the support of the row's class.
        mi_tau: temperature of the softmax b in L_MI.
        mi_from: the client-model in L_MI. "tuned": after fine-tuning on the task; "psi": before.
        mi_gradient: how the gradient of L_MI reaches the server-model. "server": through the
            server-model's features in L_MI; "both": also through the client-model, whose input
            these features are.
        kd_targets: targets of the distillation. "softmax": probabilities of the task's classes;
            "sum": logits divided by their sum.
        server_rows: examples that the server-model learns to classify. "support": the support;
            "both": support and queries.
        client_phi: the server-model that the client-model's step uses. "old": before this local
            step; "new": after it, except in fine-tuning.
        classifier: classifier of the server-model: "linear", or the "mlp" of the authors' code.
        queries: what a query attends to in the client-model. "support_context": the support and
            itself; "query_set": all queries; "alone": only itself.
        head_start: the client-model's head before fine-tuning. "zero": a learned head, which is
            zero before training; "prototypes": a head computed from each task's prototypes.
        evaluated: the model that predicts at test. "client": the client-models; "server": a probe
            on features of the server-model.
        probe: the probe if `evaluated` is "server": "logistic", "mean" or "ridge", on features
            scaled to length 1.
        test_clients: the clients that predict a test episode: "round_robin" is client u mod K for
            episode u, "all" is every client.
        weighting: weight of a client in the mean: "uniform", or the number of its "examples".
        transformer: the client-model's encoder.
        inner: how the client-model adapts to a support set.
        local_steps: local steps per local update.
        episodes_per_step: episodes whose gradients are averaged in a step.
        optimizer: the server-model's optimiser, whose state is reset in every round.
        client_optimizer: the client-model's optimiser, whose state is kept; null values are those
            of `optimizer`, or in mode "official" those of the authors' code.
    """

    name: ClassVar[str] = "f2l"

    classes: tuple[int, ...]
    mode: F2LMode = "tuned"
    lambda_mi: NotNegative | None = None
    lambda_kd: NotNegative | None = None
    personal: bool = True
    weights: Literal["shared", "added"] | None = None
    mi_loss: Literal["confidences", "shots"] | None = None
    mi_denominator: Literal["all", "same_class"] | None = None
    mi_tau: Above0 | None = None
    mi_from: Literal["tuned", "psi"] | None = None
    mi_gradient: Literal["server", "both"] | None = None
    kd_targets: Literal["softmax", "sum"] | None = None
    server_rows: Literal["support", "both"] | None = None
    client_phi: Literal["old", "new"] | None = None
    classifier: Literal["linear", "mlp"] | None = None
    queries: Queries | None = None
    head_start: Literal["zero", "prototypes"] | None = None
    evaluated: Literal["client", "server"] | None = None
    probe: Probe | None = None
    test_clients: Literal["round_robin", "all"] = "round_robin"
    weighting: Literal["uniform", "examples"] | None = None
    transformer: SetTransformer = SetTransformer()
    inner: InnerChoice = InnerChoice()
    local_steps: AtLeast1 = 10
    episodes_per_step: AtLeast1 = 1
    optimizer: OptimizerChoice = OptimizerChoice()
    client_optimizer: OptimizerChoice = OptimizerChoice()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.model.head, LinearHead):
            raise ConfigError(
                "the client-model's classifier is one linear layer; set model.head to linear, and "
                "model.head.way to the largest number of classes in an episode."
            )
        if self.reading.mi_loss == "shots" and self.reading.lambda_mi and self.episode.shot < 2:
            raise ConfigError(
                "mi_loss is 'shots', which compares one shot with the next, but episode.shot is 1. "
                "Set episode.shot to 2 or more (the authors' code has 2 for images, 5 for texts), "
                "or mi_loss to 'confidences'."
            )
        self.transformer.check(self.model.out_features)
        _ = self.learner, self.client_model, self.client_steps  # their constructors check the rest

    @cached_property
    def _mode(self) -> F2LDefaults:
        return f2l_defaults(self.mode, text=self.model.table is not None)

    @cached_property
    def reading(self) -> F2LReading:
        """The chosen interpretation of the paper, from `mode` and the options."""
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
        """Both models, with their losses on an episode."""
        return TwoModels(self.learner, self.client_model, self.reading)

    @cached_property
    def server_steps(self) -> Optimizer:
        """The optimiser of the server-model, phi."""
        return self.optimizer.over(self._mode.server)

    @cached_property
    def client_steps(self) -> Optimizer:
        """The optimiser of the client-model, psi."""
        return self.client_optimizer.over(self._mode.client or self.server_steps)

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs.

        `max_way` is the width of the client-model's head, or None for a head made of prototypes. A
        probe on the server-model has no head, so it can be tested with any way.
        """
        reading, norm = self.reading, self.model.norm_policy
        at_client = reading.evaluated == "client"
        return Traits(
            max_way=None if reading.head_start == "prototypes" else self.client_model.way,
            any_test_way=not at_client,
            transductive=norm == "transductive" or (at_client and reading.queries == "query_set"),
            adapts=at_client,
            sends_changes=True,
            warnings=self._warnings,
        )

    @property
    def _warnings(self) -> tuple[str, ...]:
        learned = self.reading.evaluated == "client" and self.reading.head_start == "zero"
        known = self.episode.labels != "shuffled"
        if not learned or known or self.client_steps.name != "adam":
            return ()
        return (
            "the client-model's head starts at zero, and Adam hardly improves it, because each "
            "episode numbers its classes anew. Set method.head_start to 'prototypes', or train the "
            "head as the authors' code does: method.client_optimizer {name: sgd, lr: 0.001} and "
            "method.inner {adapts: head, lr: 0.1, steps: 5}.",
        )

    def init(self, key: Key) -> F2LState:
        """Return a random server-model, and a client-model unless `personal` is set."""
        phi, stats = self.learner.init(key)
        return F2LState(phi, stats, {} if self.personal else self._first_psi(key.at("psi")))

    def init_client(self, client: int, key: Key) -> Tree:
        """Return a random client-model and its optimiser's state; `{}` unless `personal` is set."""
        del client
        if not self.personal:
            return {}
        psi = self._first_psi(key.at("psi"))
        return {"psi": psi, "optimizer": self.client_steps.init(psi)}

    def draw(self, data: ClientData, key: Key) -> LocalEpisodes:
        """Sample the local episodes; their classes are indices of base classes."""
        drawn: LocalEpisodes = super().draw(data, key)
        steps = tuple(
            tuple(e._replace(classes=base_numbers(e.classes, self.classes)) for e in step)
            for step in drawn.steps
        )
        return drawn._replace(steps=steps)

    def local(
        self, at: F2LLocalState, local_episodes: LocalEpisodes
    ) -> tuple[F2LLocalState, dict[str, Tensor]]:
        """Take the local steps of algorithm 1. Return the new state and the mean metrics."""
        phi, psi, stats, state = at
        server_state, metrics = self.server_steps.init(phi), []
        noise = Mode(seed=local_episodes.seed)
        for s, step in enumerate(local_episodes.steps):
            both = {"phi": phi, "psi": psi}
            gradients = mean_gradient(self.models.episode_loss, both, stats, step, noise.layer(s))
            grads = gradients.grads["psi"]
            new, server_state = self.server_steps.update(gradients.grads["phi"], server_state, phi)
            if self.reading.client_phi == "new":
                client_loss = partial(self.models.client_loss_after, phi, new)
                grads = mean_gradient(client_loss, psi, stats, step, noise.layer(s)).grads
            psi, state = self.client_steps.update(grads, state, psi)
            phi, stats = new, gradients.stats
            metrics += gradients.metrics
        return F2LLocalState(phi, psi, stats, state), mean_metrics(metrics)

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: LocalEpisodes) -> Reply:
        """Take the local steps; upload the change of the server-model, keep the client-model."""
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
        """Run one round; phi <- phi + mean_i (phi_i - phi), eq. (2)."""
        parts = {"phi": server.phi, "stats": server.stats}
        parts |= {} if self.personal else {"psi": server.psi}
        max_weight = None if self.reading.weighting == "examples" else self.n_episodes
        new, got = average(clients, self.train, parts, key, max_weight=max_weight)
        return server._replace(**new), got.metrics

    def predictor(self, down: Tree, private: Tree) -> Callable[[EvalEpisode], Tensor]:
        """Return the function that fine-tunes a copy of the client-model and predicts an episode.

        Episodes have features of the server-model in place of examples.
        """
        del down
        return partial(self.client_model.answer, private["psi"])

    def evaluate(
        self, server: F2LState, clients: Clients, eval_episodes: Sequence[EvalEpisode], key: Key
    ) -> list[Prediction]:
        """Predict from features of the server's encoder, with client-models or with a probe."""
        phi, stats = server.phi, server.stats
        if self.reading.evaluated == "server":
            probe_options = FeatureProbe(self.reading.probe)
            return predict_by_probe(self.learner, phi, stats, probe_options, eval_episodes, clients)
        asked = embedded(self.learner, phi, stats, eval_episodes, clients)
        if self.personal:
            return predict_at_clients(self.answer, clients, asked, key, by=self.test_clients)
        return predict_at_server(partial(self.client_model.answer, server.psi), asked, clients)

    def _first_psi(self, key: Key) -> Tree:
        return self.client_model.init(key, self.model.torch_dtype)
