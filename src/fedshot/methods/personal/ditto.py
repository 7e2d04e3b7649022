"""Ditto: a global model as in FedAvg, and a personal one at each client, held near it.

Source: Li et al. 2021, Ditto: Fair and Robust Federated Learning Through Personalization,
algorithm 1: beside its part in G, client k takes steps v_k <- v_k - eta (grad F_k(v_k) +
lambda (v_k - w^t)), which minimise
h_k(v_k; w^t) = F_k(v_k) + (lambda/2) ||v_k - w^t||^2, the paper's equation of Ditto.
Symbols: w^t the server's model at the start of the round; v_k personal models; lambda is
`lambda_prox`.
Departures from the paper: G is FedAvg weighted by examples; v_k starts as the server's model at
the client's first visit. The distance is over the weights; running statistics are the server's for
both models. At test an answer is one of the question's classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

from torch import Tensor

from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.classification import Batch, Batches, check_batches, draw_passes
from fedshot.learners.learner import EpisodeLoss, EvalEpisode
from fedshot.learners.local_training import check_not_negative, check_positive, local_sgd
from fedshot.methods.personal.base_class_method import AmongBaseClasses
from fedshot.methods.personal.personal_model import first_own, next_own, own_or_sent
from fedshot.nn.losses import proximal
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.averaging import average, changes
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Prediction, predict_all, predict_at_clients


class DittoState(NamedTuple):
    """What the server remembers."""

    theta: Tree  # {"body", "classifier"}
    stats: Tree  # running statistics of batch norm


@dataclass(frozen=True)
class Ditto(AmongBaseClasses[DittoState]):
    """A personal model at each client, held near the average of global ones.

    Args:
        model: backbone; a head plays no part.
        episode: only its `augment` plays a part: a client trains on all its samples.
        classes: the dataset's numbers of the base classes.
        lambda_prox: weight of the distance of a personal model; 0 is training alone.
        personal_steps: passes over the samples for the personal model; each is one step.
        local_steps: passes over the samples; each is one step.
        batch: with a number, a pass is a step for every so many samples.
        optimizer: of the clients, for both models.
    """

    name: ClassVar[str] = "ditto"

    model: Model
    episode: EpisodeSpec
    classes: tuple[int, ...]
    lambda_prox: float = 1.0
    personal_steps: int = 5
    local_steps: int = 5
    batch: int | None = None
    optimizer: Optimizer = Optimizer("sgd", 0.01)

    def __post_init__(self) -> None:
        check_batches(self.local_steps, 1 if self.batch is None else self.batch)
        check_positive(personal_steps=self.personal_steps)
        check_not_negative(lambda_prox=self.lambda_prox)
        _ = self.learner  # which checks the rest

    def init(self, key: Key) -> DittoState:
        """Return a fresh encoder and classifier."""
        return DittoState(*self.learner.init(key))

    def init_client(self, client: int, key: Key) -> Tree:
        """Return a model drawn by the client; its first visit puts the server's in the place."""
        del client
        return first_own(self.learner.init(key)[0])

    def draw(self, data: ClientData, key: Key) -> tuple[Batches, Batches]:
        """Draw the passes over the client's samples, for the global and for the personal model."""

        def passes(n: int, key: Key) -> Batches:
            return draw_passes(data, self.classes, n, self.batch, self.episode.augment, key)

        both = key.at("global"), key.at("personal")
        return passes(self.local_steps, both[0]), passes(self.personal_steps, both[1])

    def objective(
        self, anchor: Tree, theta: Tree, stats: Tree, batch: Batch, seed: Tensor
    ) -> EpisodeLoss:
        """Return h_k(theta; anchor)."""
        gradients = self.learner.episode_loss(theta, stats, batch, seed)
        if not self.lambda_prox:
            return gradients
        distance = proximal(theta, anchor)
        loss = gradients.loss + self.lambda_prox * distance
        return gradients._replace(loss=loss, extra={"proximal": distance})

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: tuple[Batches, Batches]) -> Reply:
        """Take part in the global model, and train one's own."""
        w, stats = down["theta"], down["stats"]
        new = local_sgd(self.learner.episode_loss, self.optimizer, w, stats, drawn[0])
        v = own_or_sent(private, w)
        own = local_sgd(partial(self.objective, w), self.optimizer, v, stats, drawn[1])
        up = changes({"theta": new.params, "stats": new.stats}, down)
        kept = next_own(private, own.params)
        return Reply(up, kept, drawn[0].n, {**own.metrics, "global_loss": new.metrics["loss"]})

    def round(
        self, server: DittoState, clients: Clients, key: Key
    ) -> tuple[DittoState, Mapping[str, float]]:
        """w <- w + sum_k n_k (w_k - w) / n."""
        new, got = average(clients, self.train, server._asdict(), key, max_weight=None)
        return DittoState(**new), got.metrics

    @client_work()
    def answer(self, down: Tree, private: Tree, drawn: Tree) -> Reply:
        """Answer with one's own model, or with the server's before there is one."""
        del drawn
        own, stats = own_or_sent(private, down["theta"]), down["stats"]
        answer = partial(self.learner.logits_among, own, stats, classes=self.classes)
        logits = predict_all(answer, down["questions"])
        return Reply({"logits": logits}, private, len(logits))

    def evaluate(
        self, server: DittoState, clients: Clients, eval_episodes: Sequence[EvalEpisode], key: Key
    ) -> list[Prediction]:
        """Let each client answer with its own model."""
        sent = server._asdict()
        return predict_at_clients(self.answer, clients, eval_episodes, key, down=lambda _: sent)
