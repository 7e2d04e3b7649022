"""The average of the other clients' models, found by the client itself.

The mean that every client is sent is sum_c b_c w_c / sum_c b_c. A client that remembers its own
summand b_k w_k takes it out again and has the average of the others: no second download, no bank of
models on the server, and the uploads may be summed without anybody looking at one of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedshot import tree
from fedshot.tree import Tree


def first_pool() -> Tree:
    """Return what the server says of its mean before there is one."""
    return {"total": torch.zeros((), dtype=torch.float64), "number": torch.tensor(0)}


def next_pool(pool: Tree, total: float) -> Tree:
    """Return what the server says of the next mean, made with weights that sum to `total`."""
    return {"total": torch.full_like(pool["total"], total), "number": pool["number"] + 1}


def first_share(params: Tree) -> Tree:
    """Return the share of a client that is in no mean yet; of `params` only the form matters."""
    zero = torch.zeros((), dtype=torch.float64)
    return {"sum": _double(params), "weight": zero, "number": torch.tensor(-1)}


def next_share(share: Tree, params: Tree, weight: int, pool: Tree) -> Tree:
    """Return the share of a client that sends `params` for the mean after that of `pool`.

    In float64, so that nothing is lost by the weight.
    """
    return {
        "sum": tree.map(lambda w: w.double() * weight, params),
        "weight": torch.full_like(share["weight"], weight),
        "number": pool["number"] + 1,
    }


def others(mean: Tree, pool: Tree, share: Tree) -> Tree:
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
