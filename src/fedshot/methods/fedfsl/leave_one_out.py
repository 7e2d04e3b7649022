"""The average of the other clients' models, found by the client itself.

The mean that every client is sent is sum_c b_c w_c / sum_c b_c. A client that remembers its own
summand b_k w_k takes it out again and has the average of the others: no second download, no bank of
models on the server, and the uploads may be summed without anybody looking at one of them.

The server says of its mean what it is made of, its "pool"; the client keeps its "share". Where the
mean itself is the reference, "global", there is neither: the pool is `{}`, and nothing is sent or
kept.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.learners.learner import Learner

Reference = Literal["global", "exclusive"]
REFERENCES = ("global", "exclusive")


# At the server
def first_pool(reference: Reference) -> Tree:
    """Return what the server says of its mean before there is one."""
    if reference == "global":
        return {}
    return {"total": torch.zeros((), dtype=torch.float64), "number": torch.tensor(0)}


def next_pool(pool: Tree, total: float) -> Tree:
    """Return what the server says of the next mean, made with weights that sum to `total`."""
    if not pool:
        return {}
    return {"total": torch.full_like(pool["total"], total), "number": pool["number"] + 1}


def pool_message(pool: Tree, clients: int) -> dict[str, Tree]:
    """Return the pool as a part of the message to one of `clients` clients.

    Raises ConfigError when there is one client alone, which has no others.
    """
    if pool and clients == 1:
        raise ConfigError(
            "method.reference is 'exclusive', the average of the other clients' models, and "
            "there is one client. Set it to 'global', or have more clients."
        )
    return {"pool": pool} if pool else {}


# At a client: `down` is the message, with the mean as its part "w", and `private` what is kept
def init_share(reference: Reference, learner: Learner, key: Key) -> dict[str, Tree]:
    """Return what a client that is in no mean yet keeps of its share."""
    return {} if reference == "global" else {"share": first_share(learner.init(key)[0])}


def reference_model(down: Tree, private: Tree) -> Tree:
    """Return the model that predictions stay near: the mean, or that of the others."""
    return leave_one_out(down["w"], down["pool"], private["share"]) if "pool" in down else down["w"]


def keep_share(down: Tree, private: Tree, params: Tree, weight: int | Tensor) -> Tree:
    """Return what a client keeps that sends `params`, with this weight, for the next mean."""
    if "pool" not in down:
        return private
    return {**private, "share": next_share(private["share"], params, weight, down["pool"])}


# The arithmetic
def first_share(params: Tree) -> Tree:
    """Return the share of a client that is in no mean yet; of `params` only the form matters."""
    zero = torch.zeros((), dtype=torch.float64)
    return {"sum": _double(params), "weight": zero, "number": torch.tensor(-1)}


def next_share(share: Tree, params: Tree, weight: int | Tensor, pool: Tree) -> Tree:
    """Return the share of a client that sends `params` for the mean after that of `pool`.

    In float64, so that nothing is lost by the weight.
    """
    return {
        "sum": tree.map(lambda w: w.double() * weight, params),
        "weight": torch.zeros_like(share["weight"]) + weight,
        "number": pool["number"] + 1,
    }


def leave_one_out(mean: Tree, pool: Tree, share: Tree) -> Tree:
    """Return sum_{c != k} b_c w_c / sum_{c != k} b_c, by taking b_k w_k out of the mean.

    A client that is not part of the mean gets the mean, which is that of the others; so does a
    client that made it alone.
    """
    weight = torch.where(share["number"] == pool["number"], share["weight"], 0.0)
    rest = pool["total"] - weight
    apart = (weight > 0) & (rest > 0)

    def take(leaf: Tensor, own: Tensor) -> Tensor:
        left = (pool["total"] * leaf.double() - own) / torch.where(apart, rest, 1.0)
        return torch.where(apart, left.to(leaf.dtype), leaf)

    return tree.map(take, mean, share["sum"])


def _double(params: Tree) -> Tree:
    return tree.map(Tensor.double, params)
