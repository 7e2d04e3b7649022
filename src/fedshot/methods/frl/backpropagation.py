"""The exact gradient of an episode's loss with respect to theta_0, back through its rounds.

This is the chain rule of Park et al., section 3.2.2, with second derivatives kept. Round r maps
(theta_r, P_{r-1}) to (theta_{r+1}, P_r) by sums over clients, so its backward pass is an exchange,
too: the server sends the derivatives with respect to the combined replies, and clients reply with
the derivatives with respect to the message of round r. This costs R more exchanges, one more for
refreshed prototypes, and second derivatives at the clients, so it suits small models only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.methods.frl.client_share import EpisodeShare
from fedshot.methods.frl.local_steps import FewRoundLearner, Prototypes
from fedshot.methods.frl.rounds import Adapted, Population, Round, message
from fedshot.protocol.exchange import Reply
from fedshot.protocol.reducers import Sum

_LARGEST = 2.0**20  # largest value in a client's upload of derivatives


def pull_update_reply(
    local: FewRoundLearner, down: Tree, private: Tree, share: EpisodeShare, *, equal: bool = False
) -> Reply:
    """Reply with the client's term of the loss's derivatives with respect to theta_r and P_{r-1}.

    `down` is the message of round r with the derivatives with respect to the combined replies:
    "of_theta" for the change of theta, "of_sums" for the summed features.
    """
    prototypes: Prototypes | None = down.get("prototypes")
    weight = 1 if equal else len(share.support_y)

    def fn(theta: Tree, means: Tensor) -> tuple[Tree, Tensor]:
        given = None if prototypes is None else prototypes._replace(means=means)
        learned = local.learn(theta, share, given, differentiable=True)
        return tree.sub(learned.theta, theta), learned.sums

    none = share.open.new_zeros(0, dtype=down["of_sums"].dtype)
    means = none if prototypes is None else prototypes.means
    _, pull, *_ = torch.func.vjp(fn, down["theta"], means)
    of_theta, of_means = pull((tree.map(lambda a: a * weight, down["of_theta"]), down["of_sums"]))
    up = {"of_theta": of_theta} | ({} if prototypes is None else {"of_means": of_means})
    return Reply(up, private, weight)


def pull_prototype_reply(
    local: FewRoundLearner, down: Tree, private: Tree, share: EpisodeShare
) -> Reply:
    """Reply with the client's term of the loss's derivative with respect to theta_R.

    `down` has theta_R, "theta", and the derivative with respect to the summed features, "of_sums".
    """
    _, pull, *_ = torch.func.vjp(lambda theta: local.prototype_sums(theta, share)[0], down["theta"])
    return Reply({"of_theta": pull(down["of_sums"])[0]}, private, len(share.support_y))


def forward_key(key: Key) -> Key:
    """Return the key of a client function in the forward pass, given that of its backward pass.

    For example, the client function "pull_update" is the backward pass of "update". It draws the
    same dropout masks, so it needs the key of "update".

    >>> forward_key(Key(0).at("step", 1, "work", "pull_update", "client", 3)).path
    ('step', 1, 'work', 'update', 'client', 3)
    """
    *front, work, client, number = key.path
    return Key(key.root, (*front, str(work).removeprefix("pull_"), client, number))


def through_rounds(
    population: Population,
    works: tuple[Callable[..., Reply], Callable[..., Reply]],
    adapted: Adapted,
    of_theta: Tree,
    of_prototypes: Tensor,
    key: Key,
) -> Tree:
    """Return the derivative of an episode's loss with respect to theta_0.

    Args:
        population: the clients of the episode.
        works: the client functions that reply with `pull_update_reply` and `pull_prototype_reply`;
            they draw their data with `forward_key`.
        adapted: the result of the rounds.
        of_theta: derivative with respect to theta_R.
        of_prototypes: derivative with respect to the last global prototypes; an empty tensor [0, 0]
            if there are none.
        key: key of the episode.
    """
    update, prototype_sums = works
    last = adapted.refreshed
    if last is not None:
        got = population.exchange(
            prototype_sums,
            {"theta": last.theta, "of_sums": _of_sums(of_prototypes, last)},
            to=last.accepted,
            reduce={"of_theta": Sum(last.theta, _LARGEST)},
            key=key.at("step", len(adapted.trail)),
        )
        of_theta = tree.add(of_theta, got["of_theta"])
        of_prototypes = torch.zeros_like(of_prototypes)
    for r, past in reversed(list(enumerate(adapted.trail))):
        down = message(
            past.theta,
            past.prototypes,
            of_theta=tree.map(partial(torch.mul, other=1 / past.weight), of_theta),
            of_sums=_of_sums(of_prototypes, past),
        )
        reduce = {"of_theta": Sum(past.theta, _LARGEST)}
        if past.prototypes is not None:
            reduce["of_means"] = Sum(past.prototypes.means, _LARGEST)
        got = population.exchange(
            update, down, to=past.accepted, reduce=reduce, key=key.at("step", r)
        )
        of_theta = tree.add(of_theta, got["of_theta"])
        of_prototypes = got["of_means"] if past.prototypes is not None else of_prototypes
    return of_theta


def _of_sums(of_prototypes: Tensor, past: Round) -> Tensor:
    return of_prototypes / past.divisor[:, None] if of_prototypes.numel() else of_prototypes
