"""FSL-local: every client trains a model of its own; nothing is exchanged.

This baseline shows how accurate a client's model is without federation.

Source: Fan & Huang, Federated Few-Shot Learning with Adversarial Learning, section 5.4
(baseline FSL-local), and "Local" of Wang et al., KDD 2023. The learner is that of the
federated method to compare with: MAML for FedFSL, prototypes for FL-Proto.
Departures from the papers: test episode u goes to client u mod K; the papers give every episode to
every client (test_clients="all"), which costs K times as much and has the same expectation when K
divides the number of episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

from torch import Tensor

from fedshot.core.ranges import AtLeast1
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.learners.learner import EvalEpisode, Learner
from fedshot.learners.local_training import LocalEpisodes, local_sgd
from fedshot.learners.maml import InnerLoop, Maml
from fedshot.learners.proto import Proto
from fedshot.nn.optim import Optimizer
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import ClientModels, EpisodicMethod, Traits


@dataclass(frozen=True)
class FSLLocal(ClientModels[Tree], EpisodicMethod[Tree]):
    """Local training: each client trains its own model, and nothing is exchanged.

    Args:
        model: backbone, and a head for learner "maml".
        episode: shape of the training episodes.
        learner_name: the kind of model that each client trains, "maml" or "proto".
        inner: how a model adapts to a support set (learner "maml").
        local_steps: optimiser steps per local update.
        episodes_per_step: episodes whose gradients are averaged in a step.
        optimizer: the clients' optimiser, whose state is kept between local updates.
        test_clients: the clients that predict a test episode: "round_robin" is client u mod K for
            episode u, "all" is every client.
    """

    name: ClassVar[str] = "fsl_local"

    learner_name: Literal["maml", "proto"] = "maml"
    inner: InnerLoop = InnerLoop()
    local_steps: AtLeast1 = 10
    episodes_per_step: AtLeast1 = 1
    optimizer: Optimizer = Optimizer()
    test_clients: Literal["round_robin", "all"] = "round_robin"

    @property
    def learner(self) -> Learner:
        """The learner that each client trains."""
        if self.learner_name == "proto":
            return Proto(self.model)
        return Maml(self.model, self.inner, self.episode.labels)

    @classmethod
    def norm_policy(cls, options: Mapping[str, Any]) -> str:
        """Return the batch-norm policy at test: "running" for learner "proto", else "support"."""
        return "running" if options["learner_name"] == "proto" else "support"

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs."""
        maml = self.learner_name == "maml"
        return replace(
            super().traits,
            max_way=self.learner.max_way,
            adapts=maml,
            adds_examples=not maml,
            base_classes_only=maml and self.episode.labels == "global",
        )

    def init(self, key: Key) -> Tree:
        """Return `{}`: the server has no state."""
        del key
        return {}

    def init_client(self, client: int, key: Key) -> Tree:
        """Return a random model, drawn with the client's own key."""
        del client
        theta, stats = self.learner.init(key)
        return {"theta": theta, "stats": stats, "optimizer": self.optimizer.init(theta)}

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: LocalEpisodes) -> Reply:
        """Continue training the client's own model; send nothing."""
        del down
        theta, stats, state = private["theta"], private["stats"], private["optimizer"]
        new = local_sgd(self.learner.episode_loss, self.optimizer, theta, stats, drawn, state)
        kept = {"theta": new.params, "stats": new.stats, "optimizer": new.state}
        return Reply({}, kept, drawn.n_episodes, new.metrics)

    def round(self, server: Tree, clients: Clients, key: Key) -> tuple[Tree, Mapping[str, float]]:
        """Run one round: the sampled clients train, and the server stays as it is."""
        got = clients.exchange(self.train, {}, to=clients.sample(key), reduce={}, key=key)
        return server, got.metrics

    def predictor(self, down: Tree, private: Tree) -> Callable[[EvalEpisode], Tensor]:
        """Return the function that predicts with the client's own model."""
        del down
        return partial(self.learner.answer, private["theta"], private["stats"])
