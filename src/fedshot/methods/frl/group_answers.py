"""Test questions that a group of clients answers together, after learning from its supports."""

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
    local: FewRoundLearner, theta: Tree, told: Prototypes | None, h: Tensor, way: int
) -> Tensor:
    """Return logits [n, way] of the maps, or flat features, of queries."""
    if told is None:
        used = torch.ones(local.model.head.way if local.model.head else 0, dtype=torch.bool)
        return local.head_logits(theta, h, used.to(h.device))[:, :way]
    return local.logits(local.rows(h), told)[:, :way]


class GroupNorms:
    """The batch-norm statistics that belong to a group's one model; None where it has none.

    Policy "running": those of training. "group": of means and second moments, which each client
    finds on its own supports, the mean by numbers of supports: what a sum over clients can tell,
    and in a first layer the statistics of all supports together. Whoever holds an example, it is
    seen alike. "support" and "transductive" have none.
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
            self._last = theta, self._joined(theta)
        return self._last[1] or None

    def _joined(self, theta: Tree) -> Tree:
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
    """Put second moments in the place of variances, or with sign -1 variances back."""
    if "var" not in stats:
        return {name: _moments(part, sign) for name, part in stats.items()}
    var = (stats["var"] + sign * stats["mean"].square()).clamp_min(0)  # rounding may go below
    return {"mean": stats["mean"], "var": var}


def query_maps(
    local: FewRoundLearner, theta: Tree, norms: GroupNorms, shares: Sequence[EpisodeShare]
) -> list[Tensor]:
    """Return what the network makes of every client's queries, by the model's batch-norm policy.

    "group": by one set of statistics for all, see `GroupNorms`; "support": a client's queries go by
    the statistics of its own supports; "running": by those of training; "transductive": all
    clients' queries are one batch.
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
    """Let the group of each question learn from its supports, and its one model answer.

    A group that diverges answers with NaN, which the examiner counts as wrong.

    Args:
        local: how a client learns.
        stats: running statistics of batch norm.
        learn: `learn(group, eval_episode, key, norms)` gives what the group's rounds end in.
        questions: the questions; one that nobody has dealt is in the hand of one client.
        clients: their fleet spreads the questions over its cores.
        key: of this evaluation.
    """

    def answer(eval_episode: EvalEpisode, key: Key) -> Tensor:
        way = len(eval_episode.classes)
        shares = shares_of(eval_episode, local.slots(way))
        norms = GroupNorms(local, stats, shares)
        learnt = learn(Group.of_shares(shares), eval_episode, key, norms)
        with torch.no_grad():
            maps = query_maps(local, learnt.theta, norms, shares)
            parts = [predict(local, learnt.theta, learnt.told, h, way) for h in maps]
        return in_order(eval_episode, parts)

    return in_group(answer, eval_episodes, clients, key)


def in_group(
    answer: Callable[[EvalEpisode, Key], Tensor],
    eval_episodes: Sequence[EvalEpisode],
    clients: Clients,
    key: Key,
) -> list[Prediction]:
    """Answer each question by `answer(eval_episode, key)`, with a key of its own."""

    def one(u: int) -> Prediction:
        eval_episode = eval_episodes[u]
        try:
            logits = answer(eval_episode, key.at("question", u))
        except QuorumError:
            logits = torch.full((len(eval_episode.query_x), len(eval_episode.classes)), torch.nan)
        return Prediction(u, None, logits.detach().float().cpu())

    return clients.parallel_map(one, range(len(eval_episodes)))
