"""Frozen encoder, federated prototypes: the control that few-round learning is to be held against.

Base clients train an encoder under a classifier over all base classes, by federated averaging. At
test nothing is trained: the clients of a question send sums of features, once, and queries get the
class of the nearest mean.

Source: ours, because the distance-based rows of Park et al., Few-Round Learning for Federated
Learning, ICLR 2021 submission, hardly depend on the rounds of the test (Tables 3 and A.1 against
Table 1). Prototypes are those of Snell et al. 2017; sums of features are exact whatever client
holds what.
Symbols: theta encoder and classifier; n_k examples of client k.
Departures from the paper: it has no such row. The preparation is that of `frl_finetune`, to
the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.learner import EvalEpisode
from fedshot.methods.frl.client_share import EpisodeShare
from fedshot.methods.frl.group import Group
from fedshot.methods.frl.group_answers import predict_by_group
from fedshot.methods.frl.local_steps import FewRoundLearner
from fedshot.methods.frl.preparation import Prepared, Prepares, StepBy
from fedshot.methods.frl.rounds import Adapted, Norms, few_rounds, prototype_reply
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Prediction


@dataclass(frozen=True)
class FRLFrozen(Prepares):
    """A frozen encoder and the class means of a group of clients, in one exchange.

    Args:
        model: backbone; a head plays no part.
        episode: its `augment` is for the batches of the preparation.
        classes: the dataset's numbers of the base classes.
        distance: from the means: squared and "plain", its "mean" over the features, or that of
            "unit" features.
        prepare_by: who takes the optimiser's step in the preparation: the "server", on the mean
            gradient, or each of the "clients", with a fresh optimiser at every visit.
        prepare_steps: steps per visit in the preparation; 1 by the server.
        batch: examples of such a step.
        optimizer: of the preparation.
        decay: such a step is multiplied by it after `decay_round` communication rounds.
        decay_round: 0 for never.
    """

    name: ClassVar[str] = "frl_frozen"

    model: Model
    episode: EpisodeSpec
    classes: tuple[int, ...]
    distance: Literal["plain", "mean", "unit"] = "plain"
    prepare_by: StepBy = "server"
    prepare_steps: int = 1
    batch: int = 60
    optimizer: Optimizer = Optimizer("sgd", 0.1)
    decay: float = 0.1
    decay_round: int = 20000

    def __post_init__(self) -> None:
        _ = self.local, self.preparation  # which check the rest

    @property
    def local(self) -> FewRoundLearner:
        """How a client of a question learns."""
        return FewRoundLearner(self.model, "proto", distance=self.distance)

    @client_work()
    def census(self, down: Tree, private: Tree, drawn: EpisodeShare) -> Reply:
        """Send the sums of features, at a test."""
        return prototype_reply(self.local, down, private, drawn)

    def evaluate(
        self, server: Prepared, clients: Clients, eval_episodes: Sequence[EvalEpisode], key: Key
    ) -> list[Prediction]:
        """Let the group of each question join its prototypes; the nearest one answers."""
        server = self.tested(server)

        def learn(group: Group, eval_episode: EvalEpisode, key: Key, norms: Norms) -> Adapted:
            return few_rounds(
                group,
                group.ids,
                (None, self.census),
                self.local,
                {"body": server.theta["body"]},
                len(eval_episode.classes),
                0,
                key,
                refresh=True,
                norms=norms,
            )

        return predict_by_group(self.local, server.stats, learn, eval_episodes, clients, key)
