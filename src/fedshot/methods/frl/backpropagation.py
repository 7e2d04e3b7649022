"""The exact derivative of an episode's loss by theta_0, back through its rounds of learning.

The chain rule of Park et al., section 3.2.2, without dropping second derivatives. Round r maps
(theta_r, P_{r-1}) to (theta_{r+1}, P_r) by sums over clients, so the way back is an exchange, too:
clients are sent the derivatives by what the server made of their replies, and send those by what
they were sent. R exchanges more, one for prototypes taken after the last, and second derivatives at
the clients: for small models.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.methods.frl.client_share import EpisodeShare
from fedshot.methods.frl.local_steps import FewRoundLearner, Prototypes
from fedshot.methods.frl.rounds import Adapted, Asked, Round, Work, message, told_metrics
from fedshot.protocol.exchange import Reply
from fedshot.protocol.reducers import Sum

_LARGEST = 2.0**20  # of a client's part in a derivative


def pull_update_reply(
    local: FewRoundLearner, down: Tree, private: Tree, share: EpisodeShare, *, equal: bool = False
) -> Reply:
    """Answer with the derivatives by theta_r and P_{r-1}, given those by the joined replies."""
    told, weight = told_metrics(down), 1 if equal else len(share.support_y)

    def fn(theta: Tree, means: Tensor) -> tuple[Tree, Tensor]:
        given = None if told is None else Prototypes(means, told.held)
        learnt = local.learn(theta, share, given, differentiable=True)
        return tree.sub(learnt.theta, theta), learnt.sums

    means = share.open.new_zeros(0, dtype=down["of_sums"].dtype) if told is None else told.means
    _, pull, *_ = torch.func.vjp(fn, down["theta"], means)
    of_theta, of_means = pull((tree.map(lambda a: a * weight, down["of_theta"]), down["of_sums"]))
    up = {"of_theta": of_theta} | ({} if told is None else {"of_means": of_means})
    return Reply(up, private, weight)


def pull_prototype_reply(
    local: FewRoundLearner, down: Tree, private: Tree, share: EpisodeShare
) -> Reply:
    """Answer with the derivative by theta_R, given that by the summed features."""
    _, pull, *_ = torch.func.vjp(lambda theta: local.census(theta, share)[0], down["theta"])
    return Reply({"of_theta": pull(down["of_sums"])[0]}, private, len(share.support_y))


def there(key: Key) -> Key:
    """Return the key of a client's work on the way there, given that of the work pulling it back.

    Client work called "pull_update" pulls back "update": it has to see the same dropout masks.

    >>> there(Key(0).at("step", 1, "work", "pull_update", "client", 3)).path
    ('step', 1, 'work', 'update', 'client', 3)
    """
    *front, work, client, number = key.path
    return Key(key.root, (*front, str(work).removeprefix("pull_"), client, number))


def through_rounds(
    asked: Asked,
    works: tuple[Work, Work],
    adapted: Adapted,
    of_theta: Tree,
    of_told: Tensor,
    key: Key,
) -> Tree:
    """Return the derivative by theta_0.

    Args:
        asked: who learnt.
        works: the method's client work that answers by `pull_update_reply` and
            `pull_prototype_reply`, drawn by the keys that `there` returns.
        adapted: what the rounds ended in.
        of_theta: derivative by theta_R.
        of_told: derivative by the means of the last global prototypes; [0, 0] for none.
        key: of the episode.
    """
    update, census = works
    last = adapted.census
    if last is not None:
        got = asked.exchange(
            census,
            {"theta": last.theta, "of_sums": _of_sums(of_told, last)},
            to=last.accepted,
            reduce={"of_theta": Sum(last.theta, _LARGEST)},
            key=key.at("step", len(adapted.trail)),
        )
        of_theta = tree.add(of_theta, got["of_theta"])
        of_told = torch.zeros_like(of_told)
    for r, past in reversed(list(enumerate(adapted.trail))):
        down = message(
            past.theta,
            past.told,
            of_theta=tree.map(partial(torch.mul, other=1 / past.weight), of_theta),
            of_sums=_of_sums(of_told, past),
        )
        reduce = {"of_theta": Sum(past.theta, _LARGEST)}
        if past.told is not None:
            reduce["of_means"] = Sum(past.told.means, _LARGEST)
        got = asked.exchange(update, down, to=past.accepted, reduce=reduce, key=key.at("step", r))
        of_theta = tree.add(of_theta, got["of_theta"])
        of_told = got["of_means"] if past.told is not None else of_told
    return of_theta


def _of_sums(of_told: Tensor, past: Round) -> Tensor:
    return of_told if not of_told.numel() else of_told / past.divisor[:, None]
