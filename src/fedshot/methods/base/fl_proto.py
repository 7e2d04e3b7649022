"""FL-Proto: prototypical networks trained by federated averaging.

Each client minimises the ProtoNet loss of episodes of its own; the server averages the encoders.
At test a query gets the class of the nearest prototype.

Source: Wang et al., Federated Few-shot Learning, KDD 2023, section 4 (baseline FL-Proto); the loss
is Snell et al. 2017, eqs. (1)-(2); the averaging is McMahan et al. 2017, algorithm 1.
Symbols: theta the encoder; theta_k client k's after its local steps; |B_k| its episodes.
Departures from the paper: clients upload theta_k - theta, which averages to the same; the Adam
state starts afresh at every visit, because the weights it belongs to are overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.feature_cache import worth_caching
from fedshot.learners.learner import EvalEpisode
from fedshot.learners.local_training import LocalEpisodes, check_budget, local_sgd, sample_episodes
from fedshot.learners.proto import Proto
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.nn.prototypes import nearest_prototypes
from fedshot.protocol.averaging import average, changes
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Prediction, predict_at_server, predict_from_features


class FLProtoState(NamedTuple):
    """What the server remembers."""

    theta: Tree  # {"body": ...}
    stats: Tree  # running statistics of batch norm


@dataclass(frozen=True)
class FLProto:
    """Prototypical networks, averaged over clients.

    Args:
        model: backbone; a head plays no part.
        episode: shape of the training episodes.
        local_steps: optimiser steps per visit.
        episodes_per_step: episodes whose gradients are averaged in a step.
        optimizer: of the clients.
    """

    name: ClassVar[str] = "fl_proto"

    model: Model
    episode: EpisodeSpec
    local_steps: int = 10
    episodes_per_step: int = 1
    optimizer: Optimizer = Optimizer()

    def __post_init__(self) -> None:
        check_budget(self.local_steps, self.episodes_per_step)

    @staticmethod
    def norm_policy(options: Mapping[str, Any]) -> str:
        """Return the batch norm at test that suits prototypes: running ones."""
        del options
        return "running"

    @property
    def learner(self) -> Proto:
        """What the clients train."""
        return Proto(self.model)

    @property
    def n_episodes(self) -> int:
        """Episodes of one visit, |B_k|."""
        return self.local_steps * self.episodes_per_step

    @property
    def transductive(self) -> bool:
        """Whether predictions for one query depend on the others."""
        return self.model.norm_policy == "transductive"

    @property
    def max_way(self) -> int | None:
        """The most classes an episode may have; None for any number."""
        return self.learner.max_way

    @property
    def adds_examples(self) -> bool:
        """Whether an answer is made of the support's examples one by one: prototypes are."""
        return True

    def init(self, key: Key) -> FLProtoState:
        """Return a fresh encoder."""
        return FLProtoState(*self.learner.init(key))

    def init_client(self, client: int, key: Key) -> Tree:
        """Return `{}`: nothing stays with a client."""
        del client, key
        return {}

    def draw(self, data: ClientData, key: Key) -> LocalEpisodes:
        """Draw the local episodes."""
        return sample_episodes(data, self.episode, self.local_steps, self.episodes_per_step, key)

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: LocalEpisodes) -> Reply:
        """Take the local steps from theta; send the change."""
        theta, stats = down["theta"], down["stats"]
        new = local_sgd(self.learner.episode_loss, self.optimizer, theta, stats, drawn)
        up = changes({"theta": new.params, "stats": new.stats}, down)
        return Reply(up, private, drawn.n_episodes, new.metrics)

    def round(
        self, server: FLProtoState, clients: Clients, key: Key
    ) -> tuple[FLProtoState, Mapping[str, float]]:
        """theta <- theta + sum_k |B_k| (theta_k - theta) / sum_k |B_k|."""
        parts = server._asdict()
        new, got = average(clients, self.train, parts, key, max_weight=self.n_episodes)
        return FLProtoState(**new), got.metrics

    def evaluate(
        self, server: FLProtoState, clients: Clients, eval_episodes: Sequence[EvalEpisode], key: Key
    ) -> list[Prediction]:
        """Answer by the nearest prototype, with the server's encoder."""
        del key
        model, learner = (server.theta, server.stats), self.learner
        if self.model.norm_policy == "running" and worth_caching(eval_episodes):
            embed = partial(learner.embed, *model)
            return predict_from_features(embed, nearest_prototypes, eval_episodes, clients)
        return predict_at_server(partial(learner.answer, *model), eval_episodes, clients)
