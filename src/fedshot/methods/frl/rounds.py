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
    """The data of a round for its backward pass: the message, and how replies were combined."""

    theta: Tree
    prototypes: Prototypes | None
    weight: float  # sum of the clients' weights
    divisor: Tensor  # [classes], of the summed features
    accepted: tuple[int, ...]


class Adapted(NamedTuple):
    """The result of R rounds: theta_R, the global prototypes, and a record of the rounds."""

    theta: Tree
    prototypes: Prototypes | None
    trail: tuple[Round, ...]
    refreshed: Round | None  # the last exchange, for prototypes only
    loss: float  # of the supports in the last round, nats; NaN if it is not known


def update_reply(
    local: FewRoundLearner, down: Tree, private: Tree, share: EpisodeShare, *, equal: bool = False
) -> Reply:
    """Take the local steps and return the reply: the change of theta, and sums for prototypes.

    Algorithm 1, lines 12 to 16. The reply's weight is the number of supports, or 1 if `equal`.
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
    """Return the reply with the sums for prototypes, computed with the model in the message."""
    with torch.no_grad():
        sums, counts = local.prototype_sums(down["theta"], share, down.get("stats"))
    return Reply({"sums": sums, "counts": counts}, private, len(share.support_y))


def message(theta: Tree, prototypes: Prototypes | None, **parts: Tree) -> Tree:
    """Return the message that the server sends in a round; `parts` are added to it."""
    return {
        "theta": theta, **({} if prototypes is None else {"prototypes": prototypes}), **parts
    }  # fmt: skip
