"""FedAvg from a random start: a group of new clients learns from nothing, in a few rounds.

The floor of few-round learning: no preparation, so rounds of training do nothing, and at test the
clients of a question train a network with a fresh linear head by federated averaging for R rounds.

Source: Park et al., Few-Round Learning for Federated Learning, ICLR 2021 submission, section 4
(baseline FedAvg); McMahan et al. 2017, algorithm 1.
Symbols: theta_r the model of round r; alpha inner_lr; E local_steps.
Departures from the paper: E = 1 is one step on all of a client's supports; it may mean several on
batches. The paper does not say whether all questions start from the same draw: here they do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.learner import EvalEpisode
from fedshot.methods.frl.client_share import EpisodeShare
from fedshot.methods.frl.group import Group
from fedshot.methods.frl.group_answers import predict_by_group
from fedshot.methods.frl.local_steps import FewRoundLearner
from fedshot.methods.frl.rounds import Adapted, Asked, Norms, few_rounds, update_reply
from fedshot.methods.frl.schedule import check_rounds
from fedshot.nn.models.model import Model
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Method, Prediction, Traits


class FRLFedAvgState(NamedTuple):
    """What the server remembers: the draw that every question starts from."""

    theta: Tree  # {"body", "head"}


@dataclass(frozen=True)
class FRLFedAvg(Method[FRLFedAvgState]):
    """Federated averaging from a random start, on the supports of each question.

    Args:
        model: backbone, and a head as wide as the widest episode.
        episode: plays no part.
        test_rounds: R at test.
        inner_lr: step size of the clients.
        local_steps: E, passes of a client over its supports in a round.
        inner_batch: examples of a step; null for all supports, so that a pass is one step.
    """

    name: ClassVar[str] = "frl_fedavg"
    test_norm: ClassVar[str] = "group"

    model: Model
    episode: EpisodeSpec
    test_rounds: int = 3
    inner_lr: float = 0.1
    local_steps: int = 1
    inner_batch: int | None = None

    def __post_init__(self) -> None:
        check_rounds(self.test_rounds)
        if self.model.norm_policy == "running" and self.model.init(Key(0))[1]:
            raise ConfigError(
                "model.norm_policy is 'running', and frl_fedavg never trains running statistics: "
                "nothing is prepared. Set model.norm_policy to 'group'."
            )
        _ = self.local  # which checks the rest

    @property
    def local(self) -> FewRoundLearner:
        """How a client learns."""
        return FewRoundLearner(
            self.model, "linear", 0.0, self.inner_lr, self.local_steps, self.inner_batch
        )

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs."""
        return replace(super().traits, max_way=self.local.slots(0), adapts=True)

    def init(self, key: Key) -> FRLFedAvgState:
        """Return a random network."""
        return FRLFedAvgState(self.model.init(key)[0])

    @client_work()
    def update(self, down: Tree, private: Tree, drawn: EpisodeShare) -> Reply:
        """Take the local steps of a round of a test."""
        return update_reply(self.local, down, private, drawn)

    def round(
        self, server: FRLFedAvgState, clients: Asked, key: Key
    ) -> tuple[FRLFedAvgState, Mapping[str, float]]:
        """Do nothing."""
        del clients, key
        return server, {}

    def evaluate(
        self,
        server: FRLFedAvgState,
        clients: Clients,
        eval_episodes: Sequence[EvalEpisode],
        key: Key,
    ) -> list[Prediction]:
        """Let the group of each question train for R rounds, and its model answer."""

        def learn(group: Group, eval_episode: EvalEpisode, key: Key, norms: Norms) -> Adapted:
            del eval_episode, norms
            return few_rounds(
                group,
                group.ids,
                (self.update, None),
                self.local,
                server.theta,
                self.local.slots(0),
                self.test_rounds,
                key,
                refresh=False,
            )

        return predict_by_group(self.local, {}, learn, eval_episodes, clients, key)
