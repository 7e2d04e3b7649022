"""FSL-local: every client trains a model of its own; nothing is exchanged.

The floor of every federated table: what does a client reach alone?

Source: Fan & Huang, Federated Few-Shot Learning with Adversarial Learning, section 5.4
(baseline FSL-local), and "Local" of Wang et al., KDD 2023. The learner is the one that the
federated method of the table uses: MAML for FedFSL, prototypes for FL-Proto.
Departures from the papers: test question u goes to client u mod K; the papers give every question
to every client (answer_by="all"), which costs K times as much and has the same expectation when K
divides the number of questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from fedshot.core.errors import check_word
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.learner import EvalEpisode, Learner
from fedshot.learners.local_training import LocalEpisodes, check_budget, local_sgd, sample_episodes
from fedshot.learners.maml import InnerLoop, Maml
from fedshot.learners.proto import Proto
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Prediction, predict_all, predict_at_clients


@dataclass(frozen=True)
class FSLLocal:
    """Each client alone.

    Args:
        model: backbone, and a head for learner "maml".
        episode: shape of the training episodes.
        learner_name: what each client trains, "maml" or "proto".
        inner: how a model adapts to a support set (learner "maml").
        local_steps: optimiser steps per visit.
        episodes_per_step: episodes whose gradients are averaged in a step.
        optimizer: its state stays with the model from visit to visit.
        answer_by: at test, "turns" gives question u to client u mod K, "all" to every client.
    """

    name: ClassVar[str] = "fsl_local"

    model: Model
    episode: EpisodeSpec
    learner_name: Literal["maml", "proto"] = "maml"
    inner: InnerLoop = InnerLoop()
    local_steps: int = 10
    episodes_per_step: int = 1
    optimizer: Optimizer = Optimizer()
    answer_by: Literal["turns", "all"] = "turns"

    def __post_init__(self) -> None:
        check_budget(self.local_steps, self.episodes_per_step)
        check_word("learner_name", self.learner_name, ("maml", "proto"))
        check_word("answer_by", self.answer_by, ("turns", "all"))

    @staticmethod
    def norm_policy(options: Mapping[str, Any]) -> str:
        """Return the batch norm at test that suits the learner."""
        return "running" if options["learner_name"] == "proto" else "support"

    @property
    def learner(self) -> Learner:
        """What each client trains."""
        if self.learner_name == "proto":
            return Proto(self.model)
        return Maml(self.model, self.inner, self.episode.labels)

    @property
    def transductive(self) -> bool:
        """Whether predictions for one query depend on the others."""
        return self.model.norm_policy == "transductive"

    @property
    def knows_base_alone(self) -> bool:
        """Whether its head has an output for each class of the dataset, and none for others."""
        return self.episode.labels == "global" and self.learner_name == "maml"

    @property
    def max_way(self) -> int | None:
        """The most classes an episode may have; None for any number."""
        return self.learner.max_way

    @property
    def adds_examples(self) -> bool:
        """Whether an answer is made of the support's examples one by one: prototypes are."""
        return self.learner_name == "proto"

    def init(self, key: Key) -> Tree:
        """Return `{}`: the server remembers nothing."""
        del key
        return {}

    def init_client(self, client: int, key: Key) -> Tree:
        """Return a client's first model, drawn by itself."""
        del client
        theta, stats = self.learner.init(key)
        return {"theta": theta, "stats": stats, "optimizer": self.optimizer.init(theta)}

    def draw(self, data: ClientData, key: Key) -> LocalEpisodes:
        """Draw the local episodes."""
        return sample_episodes(data, self.episode, self.local_steps, self.episodes_per_step, key)

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: LocalEpisodes) -> Reply:
        """Train the client's own model a little further; send nothing."""
        del down
        theta, stats, state, metrics = local_sgd(
            self.learner.episode_loss,
            self.optimizer,
            private["theta"],
            private["stats"],
            drawn,
            private["optimizer"],
        )
        kept = {"theta": theta, "stats": stats, "optimizer": state}
        return Reply({}, kept, drawn.n_episodes, metrics)

    def round(self, server: Tree, clients: Clients, key: Key) -> tuple[Tree, Mapping[str, float]]:
        """Let the sampled clients train."""
        got = clients.exchange(self.train, {}, to=clients.sample(key), reduce={}, key=key)
        return server, got.metrics

    @client_work()
    def answer(self, down: Tree, private: Tree, drawn: Tree) -> Reply:
        """Answer the questions sent, with the client's own model."""
        del drawn
        answer = partial(self.learner.answer, private["theta"], private["stats"])
        logits = predict_all(answer, down["questions"])
        return Reply({"logits": logits}, private, len(logits))

    def evaluate(
        self, server: Tree, clients: Clients, eval_episodes: Sequence[EvalEpisode], key: Key
    ) -> list[Prediction]:
        """Let the clients' own models answer."""
        del server
        return predict_at_clients(self.answer, clients, eval_episodes, key, by=self.answer_by)
