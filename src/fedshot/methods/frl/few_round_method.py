"""Base classes of few-round learning: rounds inside an episode, and tests on groups of clients.

Source: Park et al., Few-Round Learning for Federated Learning, ICLR 2021 submission, algorithm 1.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.ranges import AtLeast0, AtLeast1, NotNegative, PositiveShare, check_options
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.learners.learner import EvalEpisode
from fedshot.methods.frl.client_share import PARTS, EpisodeShare, Part, draw_share
from fedshot.methods.frl.group import Group
from fedshot.methods.frl.group_predictions import predict_by_group
from fedshot.methods.frl.local_steps import FewRoundLearner, Prototypes, Variant
from fedshot.methods.frl.rounds import (
    Adapted,
    Norms,
    Population,
    Round,
    message,
    prototype_reply,
    update_reply,
)
from fedshot.nn.optim import Optimizer, OptState
from fedshot.protocol.averaging import OF_EXAMPLES, OF_FEATURES
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Outcome, Reply, client_work
from fedshot.protocol.method import Method, Prediction, Traits
from fedshot.protocol.reducers import Mean, Sum

S = TypeVar("S", bound=Tree)


class FewRoundMethod(Method[S]):
    """A method that is tested on groups of clients; each group trains one model for R rounds."""

    test_norm: ClassVar[str] = "group"

    variant: Variant = "linear"
    inner_lr: NotNegative
    local_steps: AtLeast1
    inner_batch: AtLeast1 | None
    test_rounds: AtLeast0 | None

    @property
    def local(self) -> FewRoundLearner:
        """The learner of each client."""
        return FewRoundLearner(
            self.model, self.variant, 0.0, self.inner_lr, self.local_steps, self.inner_batch
        )

    @property
    def rounds_at_test(self) -> int:
        """Number of rounds at test, R."""
        assert self.test_rounds is not None
        return self.test_rounds

    @property
    def refreshes(self) -> bool:
        """Whether one more exchange, after the R rounds, recomputes the prototypes with theta_R."""
        return False

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs."""
        return replace(super().traits, max_way=self.local.slots(0) or None, adapts=True)

    @client_work()
    def update(self, down: Tree, private: Tree, drawn: EpisodeShare) -> Reply:
        """Take the local steps of a round, starting from theta_r."""
        return update_reply(self.local, down, private, drawn)

    @client_work()
    def census(self, down: Tree, private: Tree, drawn: EpisodeShare) -> Reply:
        """Upload the sum of features of each class, computed with theta_R."""
        return prototype_reply(self.local, down, private, drawn)

    def learn(
        self,
        population: Population,
        theta: Tree,
        numbers: int,
        rounds: int,
        key: Key,
        norms: Norms = lambda _: None,
    ) -> Adapted:
        """Let clients train together for `rounds` rounds, lines 4 to 21 of algorithm 1.

        With 0 rounds, there is still one exchange if the method needs prototypes.

        Args:
            population: the clients, or the group of a test episode; `key` samples the cohort.
            theta: initial model, theta_0.
            numbers: number of possible labels; the episode's classes have labels 0 to way - 1.
            rounds: number of rounds, R.
            key: key of the episode.
            norms: maps the model to the batch-norm statistics for recomputing prototypes, or None.
        """
        local, to, prototypes, trail = self.local, population.sample(key), None, []
        sums = {}
        if not local.linear:
            like = tree.leaves(theta)[0].new_zeros(numbers, local.d)
            sums = {"sums": Sum(like, OF_FEATURES), "counts": Sum(like[:, 0], OF_FEATURES)}

        def combined(got: Outcome) -> tuple[Prototypes | None, Tensor]:
            if local.linear:
                return None, torch.zeros(numbers)
            return local.global_prototypes(got["sums"], got["counts"])

        loss = float("nan")
        for r in range(rounds):
            reduce = {"theta": Mean(theta, OF_EXAMPLES)} | sums
            down = message(theta, prototypes)
            got = population.exchange(
                self.update, down, to=to, reduce=reduce, key=key.at("step", r)
            )
            new, divisor = combined(got)
            trail.append(Round(theta, prototypes, got.weight, divisor, got.accepted))
            theta, prototypes = tree.add(theta, got["theta"]), new
            loss = got.metrics.get("support_loss", loss)
        refreshed = None
        if not local.linear and (self.refreshes or not rounds):
            stats = norms(theta)
            down = {"theta": theta} | ({} if stats is None else {"stats": stats})
            got = population.exchange(
                self.census, down, to=to, reduce=sums, key=key.at("step", rounds)
            )
            prototypes, divisor = combined(got)
            refreshed = Round(theta, None, got.weight, divisor, got.accepted)
        return Adapted(theta, prototypes, tuple(trail), refreshed, loss)

    @abstractmethod
    def test_start(self, server: S, key: Key) -> Tree:
        """Return theta_0, the model from which a test episode starts."""

    def test_stats(self, server: S) -> Tree:
        """Return the running statistics of batch norm for tests."""
        stats: Tree = server.stats
        return stats

    def evaluate(
        self, server: S, clients: Clients, eval_episodes: Sequence[EvalEpisode], key: Key
    ) -> list[Prediction]:
        """Train one model for each test episode, in its group, for R rounds; predict with it."""

        def learn(group: Group, eval_episode: EvalEpisode, key: Key, norms: Norms) -> Adapted:
            numbers = self.local.slots(len(eval_episode.classes))
            theta = self.test_start(server, key)
            return self.learn(group, theta, numbers, self.rounds_at_test, key, norms)

        stats = self.test_stats(server)
        return predict_by_group(self.local, stats, learn, eval_episodes, clients, key)


class FRLState(NamedTuple):
    """The server's state."""

    phi: Tree  # {"body"}, with "head" under "linear"
    outer: OptState
    stats: Tree  # running statistics of batch norm
    exchanges: Tensor  # int64 scalar: communication rounds so far


@dataclass(frozen=True)
class MetaTrained(FewRoundMethod[FRLState]):
    """A method that meta-trains an initialisation, phi, with the gradients of query losses.

    Args:
        model: backbone, and for variant "linear" a head with an output for each class of an
            episode.
        classes: the base classes, as class indices of the dataset.
        resampled: whether images are reassigned to the clients for each episode.
        inner_lr: step size of the clients, alpha.
        local_steps: passes of a client over its supports in each round, E.
        inner_batch: examples per step; null for all supports of a client, in one step per pass.
        optimizer: the server's optimiser.
        decay: factor that multiplies the server's step size after `decay_round` communication
            rounds.
        decay_round: communication rounds before the decay; 0 for no decay.
    """

    classes: tuple[int, ...]
    resampled: bool = False
    inner_lr: NotNegative = 0.1
    local_steps: AtLeast1 = 1
    inner_batch: AtLeast1 | None = None
    optimizer: Optimizer = Optimizer("adam", 0.01)
    decay: PositiveShare = 0.1
    decay_round: AtLeast0 = 20000

    def __post_init__(self) -> None:
        check_options(self)
        if self.slots < self.numbers:
            raise ConfigError(
                f"model.head.way is {self.slots}, but an episode may have {self.numbers} classes: "
                "its way if images are reassigned in each episode (partition 'resampled'), else "
                f"all base classes. Set model.head.way to {self.numbers}."
            )

    @property
    def numbers(self) -> int:
        """Largest number of classes of a training episode."""
        return self.episode.max_way if self.resampled else len(self.classes)

    @property
    def slots(self) -> int:
        """Number of labels: the width of the head, or without a head the number of classes."""
        return self.local.slots(self.numbers)

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs."""
        return replace(super().traits, resampled=self.resampled)

    def init(self, key: Key) -> FRLState:
        """Return a random initialisation phi."""
        params, stats = self.model.init(key)
        phi = params if self.local.linear else {"body": params["body"]}
        return FRLState(phi, self.optimizer.init(phi), stats, torch.tensor(0))

    def draw(self, data: ClientData, key: Key, needed: Sequence[Part] = PARTS) -> EpisodeShare:
        """Draw a client's supports and queries, which all exchanges of an episode share."""
        return draw_share(data, self.episode, self.classes, self.slots, key, needed)

    def step(self, server: FRLState, g: Tree, stats: Tree, exchanges: int) -> FRLState:
        """Return the state after an optimiser step with gradient `g`.

        `stats` is the change of the running statistics, and `exchanges` the number of exchanges to
        add to the state's count.
        """
        optimizer = decayed(self.optimizer, self.decay, self.decay_round, server.exchanges)
        phi, outer = optimizer.update(g, server.outer, server.phi)
        stats = tree.add(server.stats, stats) if server.stats else {}
        return FRLState(phi, outer, stats, server.exchanges + exchanges)

    def test_start(self, server: FRLState, key: Key) -> Tree:
        """Return theta_0, the model from which a test episode starts: phi."""
        del key
        return server.phi


def decay_factor(decay: float, decay_round: int, exchanges: Tensor) -> float:
    """Return the factor that multiplies the step size after `exchanges` communication rounds."""
    return decay if decay_round and int(exchanges) >= decay_round else 1.0


def decayed(optimizer: Optimizer, decay: float, decay_round: int, exchanges: Tensor) -> Optimizer:
    """Return the optimiser with its step size after `exchanges` communication rounds."""
    return replace(optimizer, lr=optimizer.lr * decay_factor(decay, decay_round, exchanges))
