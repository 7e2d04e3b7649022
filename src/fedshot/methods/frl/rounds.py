"""Messages and replies of the R rounds of federated learning inside an episode.

Park et al., algorithm 1, lines 5 to 21: the server sends theta_r and, from the second round on,
P_{r-1}; a client replies with its change of theta and with sums of features by class; the server
averages the changes and divides the sums. `fedshot.methods.frl.few_round_method` runs the rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.tree import Tree
from fedshot.methods.frl.client_share import EpisodeShare
from fedshot.methods.frl.group import Group
from fedshot.methods.frl.local_steps import FewRoundLearner, Prototypes
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply

Population: TypeAlias = Clients | Group
Norms: TypeAlias = Callable[[Tree], Tree | None]
"""Maps a model to the batch-norm statistics of all clients; None if each uses its own."""


class Round(NamedTuple):
    """What a round started from, and how the server combined its replies."""

    theta: Tree
    prototypes: Prototypes | None
    weight: float  # sum of the clients' weights
    divisor: Tensor  # [numbers], of the summed features
    accepted: tuple[int, ...]


class Adapted(NamedTuple):
    """Result of the rounds: theta_R, the global prototypes, and the rounds themselves."""

    theta: Tree
    prototypes: Prototypes | None
    trail: tuple[Round, ...]
    refreshed: Round | None  # the last exchange, for prototypes only
    loss: float  # of the supports in the last round, nats; NaN if it is not known


def update_reply(
    local: FewRoundLearner, down: Tree, private: Tree, share: EpisodeShare, *, equal: bool = False
) -> Reply:
    """Reply with the change of theta by the local steps; with `equal`, all clients weigh the same.

    Algorithm 1, lines 12 to 16.
    """
    learned = local.learn(down["theta"], share, down.get("prototypes"))
    up: dict[str, Tree] = {"theta": tree.sub(learned.theta, tree.detach(down["theta"]))}
    if not local.linear:
        up |= {"sums": learned.sums, "counts": learned.counts}
    metrics = {"support_loss": learned.loss, "support_accuracy": learned.accuracy}
    return Reply(up, private, 1 if equal else len(share.support_y), metrics)


def prototype_reply(
    local: FewRoundLearner, down: Tree, private: Tree, share: EpisodeShare
) -> Reply:
    """Reply with the feature sums that make prototypes, under the model in the message."""
    with torch.no_grad():
        sums, counts = local.prototype_sums(down["theta"], share, down.get("stats"))
    return Reply({"sums": sums, "counts": counts}, private, len(share.support_y))


def message(theta: Tree, prototypes: Prototypes | None, **parts: Tree) -> Tree:
    """Return the message of a round."""
    return {
        "theta": theta, **({} if prototypes is None else {"prototypes": prototypes}), **parts
    }  # fmt: skip
