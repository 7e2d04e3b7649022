"""Fine-tuning by FedAvg: a classifier of the base classes first, then a few federated rounds.

Base clients train an encoder under a classifier over all base classes, by federated averaging. At
test the classifier is replaced by a fresh head, and the clients of a question fine-tune everything
for R rounds.

Source: Park et al., Few-Round Learning for Federated Learning, ICLR 2021 submission, section 4
(baseline fine-tuning via FedAvg); McMahan et al. 2017, algorithm 1.
Symbols: theta encoder and classifier; theta_r the model of round r; n_k examples of client k.
Departures from the paper: it does not say how the classifier is trained. Here a visit gives the
gradient of one batch, and the server takes an SGD step of FRL's alpha on their mean, with the decay
of FRL's: federated averaging of one local step. Another optimiser of the server is no such thing:
the first step of an Adam by each client would be a sign (that is prepare_by="clients"). Where
images are dealt anew for each episode (partition "redealt"), batches are of the whole pool, so the
preparation is IID.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.learner import EvalEpisode
from fedshot.methods.frl.client_share import EpisodeShare
from fedshot.methods.frl.group import Group
from fedshot.methods.frl.group_answers import predict_by_group
from fedshot.methods.frl.local_steps import FewRoundLearner, fresh_head
from fedshot.methods.frl.preparation import Prepared, Prepares, StepBy
from fedshot.methods.frl.rounds import Adapted, Norms, few_rounds, update_reply
from fedshot.methods.frl.schedule import check_rounds
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Prediction, Traits


@dataclass(frozen=True)
class FRLFinetune(Prepares):
    """A classifier of the base classes, fine-tuned by a group of clients in a few rounds.

    Args:
        model: backbone, and a head as wide as the widest test episode.
        episode: its `augment` is for the batches of the preparation.
        classes: the dataset's numbers of the base classes.
        test_rounds: R at test.
        inner_lr: step size of a question's clients.
        local_steps: E, passes of a client over its supports in a round of a test.
        inner_batch: examples of a step; null for all supports, so that a pass is one step.
        prepare_by: who takes the optimiser's step in the preparation: the "server", on the mean
            gradient, or each of the "clients", with a fresh optimiser at every visit.
        prepare_steps: steps per visit in the preparation; 1 by the server.
        batch: examples of such a step.
        optimizer: of the preparation.
        decay: such a step is multiplied by it after `decay_round` communication rounds.
        decay_round: 0 for never.
    """

    name: ClassVar[str] = "frl_finetune"
    test_norm: ClassVar[str] = "group"

    model: Model
    episode: EpisodeSpec
    classes: tuple[int, ...]
    test_rounds: int = 3
    inner_lr: float = 0.1
    local_steps: int = 1
    inner_batch: int | None = None
    prepare_by: StepBy = "server"
    prepare_steps: int = 1
    batch: int = 60
    optimizer: Optimizer = Optimizer("sgd", 0.1)
    decay: float = 0.1
    decay_round: int = 20000

    def __post_init__(self) -> None:
        check_rounds(self.test_rounds)
        _ = self.local, self.preparation  # which check the rest

    @property
    def local(self) -> FewRoundLearner:
        """How a client of a question learns."""
        return FewRoundLearner(
            self.model, "linear", 0.0, self.inner_lr, self.local_steps, self.inner_batch
        )

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs."""
        return replace(super().traits, max_way=self.local.slots(0), adapts=True)

    @client_work()
    def update(self, down: Tree, private: Tree, drawn: EpisodeShare) -> Reply:
        """Take the local steps of a round of a test."""
        return update_reply(self.local, down, private, drawn)

    def evaluate(
        self, server: Prepared, clients: Clients, eval_episodes: Sequence[EvalEpisode], key: Key
    ) -> list[Prediction]:
        """Let the group of each question fine-tune for R rounds, and its model answer."""
        server = self.tested(server)

        def learn(group: Group, eval_episode: EvalEpisode, key: Key, norms: Norms) -> Adapted:
            del eval_episode, norms
            head = fresh_head(self.model, server.theta["body"], key)
            return few_rounds(
                group,
                group.ids,
                (self.update, None),
                self.local,
                {"body": server.theta["body"], "head": head},
                self.local.slots(0),
                self.test_rounds,
                key,
                refresh=False,
            )

        return predict_by_group(self.local, server.stats, learn, eval_episodes, clients, key)
