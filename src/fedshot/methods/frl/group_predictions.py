"""Predictions for test episodes by a group of clients that has learned from its supports."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import QuorumError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.learners.learner import EvalEpisode, test_modes
from fedshot.methods.frl.client_share import EpisodeShare, in_order, shares_of
from fedshot.methods.frl.group import Group
from fedshot.methods.frl.local_steps import FewRoundLearner, Prototypes
from fedshot.methods.frl.rounds import Adapted, Norms
from fedshot.nn.models.mode import Mode
from fedshot.protocol.clients import Clients
from fedshot.protocol.method import Prediction


def predict(
    local: FewRoundLearner, theta: Tree, prototypes: Prototypes | None, h: Tensor, way: int
) -> Tensor:
    """Return the logits [n, way] of queries from h, their feature maps or flat features.

    Without `prototypes` the head of theta computes them.
    """
    if prototypes is None:
        used = torch.ones(local.model.head.way if local.model.head else 0, dtype=torch.bool)
        return local.head_logits(theta, h, used.to(h.device))[:, :way]
    return local.logits(local.features(h), prototypes)[:, :way]


class GroupNorms:
    """Computes the batch-norm statistics that all clients of a group use.

    Under policy "running", they are the running statistics of training. Under "group", each client
    computes means and second moments on its supports; their average, weighted by the clients'
    numbers of supports, needs only sums over clients. For the network's first batch norm, it equals
    the statistics of all supports together. Under these two policies, predictions do not depend on
    which client has a query. Under others, each client uses its own statistics, and the result is
    None.
    """

    def __init__(self, local: FewRoundLearner, stats: Tree, shares: Sequence[EpisodeShare]) -> None:
        self._local, self._stats, self._shares = local, stats, shares
        self._last: tuple[Tree, Tree] | None = None

    def __call__(self, theta: Tree) -> Tree | None:
        """Return the statistics under the weights theta."""
        policy = self._local.model.norm_policy
        if policy != "group":
            return (self._stats or None) if policy == "running" else None
        if self._last is None or self._last[0] is not theta:
            self._last = theta, self._of_group(theta)
        return self._last[1] or None

    def _of_group(self, theta: Tree) -> Tree:
        support, _ = test_modes(self._local.model)
        total = sum(len(share.support_y) for share in self._shares)
        found: Tree | None = None
        for share in self._shares:
            n = len(share.support_y)
            if not n:
                continue
            with torch.no_grad():
                _, seen = self._local.maps(theta, {}, share.support_x, support)
            part = tree.map(lambda s, weight=n / total: weight * s, _moments(seen, 1))
            found = part if found is None else tree.add(found, part)
        return {} if found is None else _moments(found, -1)


def _moments(stats: Tree, sign: int) -> Tree:
    """Turn variances into second moments or, with sign -1, second moments into variances."""
    if "var" not in stats:
        return {name: _moments(part, sign) for name, part in stats.items()}
    var = (stats["var"] + sign * stats["mean"].square()).clamp_min(0)  # rounding may go below
    return {"mean": stats["mean"], "var": var}


def query_maps(
    local: FewRoundLearner, theta: Tree, norms: GroupNorms, shares: Sequence[EpisodeShare]
) -> list[Tensor]:
    """Return the network's output for each client's queries: one tensor per client.

    The model's batch-norm policy decides the statistics. "group": those of `GroupNorms` for all
    clients; "support": those of the client's own supports; "running": those of training;
    "transductive": all clients' queries are one batch.
    """
    if local.model.norm_policy == "transductive":
        both = torch.cat([share.query_x for share in shares])
        h, _ = local.maps(theta, {}, both, Mode(norm="batch"))
        return list(torch.split(h, [len(share.query_x) for share in shares]))
    support, query = test_modes(local.model)
    given = norms(theta) or {}
    found = []
    for share in shares:
        seen = given
        if local.model.norm_policy == "support":
            _, seen = local.maps(theta, {}, share.support_x, support)
        found.append(local.maps(theta, seen, share.query_x, query)[0])
    return found


def predict_by_group(
    local: FewRoundLearner,
    stats: Tree,
    learn: Callable[[Group, EvalEpisode, Key, Norms], Adapted],
    eval_episodes: Sequence[EvalEpisode],
    clients: Clients,
    key: Key,
) -> list[Prediction]:
    """Train one model for each test episode, on the supports of its group, and predict with it.

    Args:
        local: the learner of each client.
        stats: running statistics of batch norm.
        learn: `learn(group, eval_episode, key, norms)` returns the result of the group's rounds.
        eval_episodes: the episodes; an episode without a group is treated as that of one client.
        clients: their fleet spreads the episodes over its cores.
        key: key of this evaluation.
    """

    def answer(eval_episode: EvalEpisode, key: Key) -> Tensor:
        way = len(eval_episode.classes)
        shares = shares_of(eval_episode, local.slots(way))
        norms = GroupNorms(local, stats, shares)
        found = learn(Group.of_shares(shares), eval_episode, key, norms)
        with torch.no_grad():
            maps = query_maps(local, found.theta, norms, shares)
            parts = [predict(local, found.theta, found.prototypes, h, way) for h in maps]
        return in_order(eval_episode, parts)

    return in_group(answer, eval_episodes, clients, key)


def in_group(
    answer: Callable[[EvalEpisode, Key], Tensor],
    eval_episodes: Sequence[EvalEpisode],
    clients: Clients,
    key: Key,
) -> list[Prediction]:
    """Predict each test episode by `answer(eval_episode, key)`, with a key of its own.

    The logits of a group that diverges are NaN, which the test counts as wrong.
    """

    def one(u: int) -> Prediction:
        eval_episode = eval_episodes[u]
        try:
            logits = answer(eval_episode, key.at("question", u))
        except QuorumError:
            logits = torch.full((len(eval_episode.query_x), len(eval_episode.classes)), torch.nan)
        return Prediction(u, None, logits.detach().float().cpu())

    return clients.parallel_map(one, range(len(eval_episodes)))
