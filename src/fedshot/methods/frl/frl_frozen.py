"""A frozen encoder with federated prototypes: the control for few-round learning.

Base clients pre-train an encoder under a classifier over all base classes, by federated averaging.
At test nothing is trained: the clients of a group upload sums of features, once, and a query is
assigned to the class of the nearest mean.

Source: ours. The baseline was added because the results of the distance-based methods
of Park et al., Few-Round Learning for Federated Learning, ICLR 2021 submission, hardly depend on
the number of rounds at test (compare Tables 3 and A.1 with Table 1). Prototypes are those of Snell
et al. 2017. They are exact means, however the examples are distributed over the clients.
Symbols: theta encoder and classifier; n_k examples of client k.
Departures from the paper: it has no such baseline. Pre-training is bit for bit that of
`frl_finetune`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.methods.frl.local_steps import FewRoundLearner
from fedshot.methods.frl.preparation import Prepared, Pretrained
from fedshot.protocol.method import Traits


@dataclass(frozen=True)
class FRLFrozen(Pretrained):
    """A frozen encoder and the class means of a group of clients, in one exchange.

    The other options are those of `Pretrained`.

    Args:
        model: the encoder; its head, if it has one, is not used.
    """

    name: ClassVar[str] = "frl_frozen"
    test_norm: ClassVar[str] = "running"

    @property
    def local(self) -> FewRoundLearner:
        """The learner of each client in a group, which only computes prototypes."""
        return FewRoundLearner(self.model, "proto")

    @property
    def rounds_at_test(self) -> int:
        """Number of rounds at test, R: 0, which leaves one exchange for prototypes."""
        return 0

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs."""
        return replace(super().traits, adapts=False)

    def test_start(self, server: Prepared, key: Key) -> Tree:
        """Return the model of a test episode: the encoder."""
        del key
        return {"body": server.theta["body"]}
