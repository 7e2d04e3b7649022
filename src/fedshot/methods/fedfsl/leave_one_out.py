"""The average of the other clients' models, which each client computes for itself.

The server sends every client the mean sum_c b_c w_c / sum_c b_c, where w_c is client c's model and
b_c its weight. Client k has kept its summand b_k w_k and subtracts it, which leaves the average of
the others. This needs no second download and no storage of the clients' models on the server, and
the uploads may still be summed securely.

The server describes its mean by a "pool": the sum of the weights, and how many means it has taken.
The client keeps a "share": its summand, its weight, and the number of the mean that they belong to.
With reference "global", clients keep no share and the pool is `{}`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.tree import Tree

Reference = Literal["global", "exclusive"]
REFERENCES = ("global", "exclusive")


def first_pool(reference: Reference) -> Tree:
    """Return the server's pool before the first mean, with weights that sum to 0."""
    if reference == "global":
        return {}
    return {"total": torch.zeros((), dtype=torch.float64), "number": torch.tensor(0)}


def next_pool(pool: Tree, total: float) -> Tree:
    """Return the pool of the next mean, whose weights sum to `total`."""
    if not pool:
        return {}
    return {"total": torch.full_like(pool["total"], total), "number": pool["number"] + 1}


def first_share(params: Tree) -> Tree:
    """Return a client's share before its first upload: weight 0, values without a meaning."""
    zero = torch.zeros((), dtype=torch.float64)
    return {"sum": tree.map(Tensor.double, params), "weight": zero, "number": torch.tensor(-1)}


def next_share(share: Tree, params: Tree, weight: int | Tensor, pool: Tree) -> Tree:
    """Return what a client keeps when it uploads `params`: summand, weight and number of the mean.

    `pool` describes the last mean; the upload belongs to the next one. The summand is in float64,
    where the product of a float32 model and the weight is exact.
    """
    return {
        "sum": tree.map(lambda w: w.double() * weight, params),
        "weight": torch.zeros_like(share["weight"]) + weight,
        "number": pool["number"] + 1,
    }


def leave_one_out(mean: Tree, pool: Tree, share: Tree) -> Tree:
    """Return the other clients' average model, sum_{c != k} b_c w_c / sum_{c != k} b_c.

    It subtracts the summand b_k w_k of client k, in `share`, from the mean. The result is the mean
    itself if client k did not contribute to it, or if nobody else did.
    """
    weight = torch.where(share["number"] == pool["number"], share["weight"], 0.0)
    rest = pool["total"] - weight
    apart = (weight > 0) & (rest > 0)

    def take(leaf: Tensor, own: Tensor) -> Tensor:
        left = (pool["total"] * leaf.double() - own) / torch.where(apart, rest, 1.0)
        return torch.where(apart, left.to(leaf.dtype), leaf)

    return tree.map(take, mean, share["sum"])
