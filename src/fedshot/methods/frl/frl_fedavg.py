"""FedAvg from random weights: a group of new clients learns from scratch, in a few rounds.

This is the lower bound for few-round learning. There is no pre-training, so rounds of training do
nothing. At test the clients of a group train a network with a fresh linear head by federated
averaging for R rounds.

Source: Park et al., Few-Round Learning for Federated Learning, ICLR 2021 submission, section 4
(baseline FedAvg); McMahan et al. 2017, algorithm 1.
Symbols: theta_r the model of round r; alpha inner_lr; E local_steps.
Departures from the paper: E = 1 is one step on all of a client's supports; the paper may mean
several steps on batches. It does not say whether all test episodes start from the same weights:
here they do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from fedshot.core.errors import ConfigError
from fedshot.core.ranges import AtLeast0, AtLeast1, NotNegative, check_options
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.methods.frl.few_round_method import FewRoundMethod
from fedshot.methods.frl.rounds import Population


class FRLFedAvgState(NamedTuple):
    """The server's state: the random weights from which every test episode starts."""

    theta: Tree  # {"body", "head"}


@dataclass(frozen=True)
class FRLFedAvg(FewRoundMethod[FRLFedAvgState]):
    """Federated averaging from random weights, on the supports of each test episode.

    Args:
        model: backbone, and a head with an output for each class of an episode.
        episode: not used.
        test_rounds: number of rounds at test, R.
        inner_lr: step size of the clients.
        local_steps: passes of a client over its supports in each round, E.
        inner_batch: examples per step; null for all supports of a client, in one step per pass.
    """

    name: ClassVar[str] = "frl_fedavg"

    test_rounds: AtLeast0 = 3
    inner_lr: NotNegative = 0.1
    local_steps: AtLeast1 = 1
    inner_batch: AtLeast1 | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.model.norm_policy == "running" and self.model.init(Key(0))[1]:
            raise ConfigError(
                "model.norm_policy is 'running', but frl_fedavg never trains running statistics. "
                "Set model.norm_policy to 'group'."
            )
        _ = self.local  # which checks the rest

    def init(self, key: Key) -> FRLFedAvgState:
        """Return a random network."""
        return FRLFedAvgState(self.model.init(key)[0])

    def round(
        self, server: FRLFedAvgState, clients: Population, key: Key
    ) -> tuple[FRLFedAvgState, Mapping[str, float]]:
        """Return the state unchanged, without metrics: the method trains only at test."""
        del clients, key
        return server, {}

    def test_start(self, server: FRLFedAvgState, key: Key) -> Tree:
        """Return theta_0, the model from which a test episode starts."""
        del key
        return server.theta

    def test_stats(self, server: FRLFedAvgState) -> Tree:
        """Return `{}`: there are no running statistics."""
        del server
        return {}
