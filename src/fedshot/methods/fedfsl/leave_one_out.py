"""The average of the other clients' models, which each client computes for itself.

The server sends every client the mean sum_c b_c w_c / sum_c b_c, where w_c is client c's model and
b_c its weight. Client k has kept its own term b_k w_k and subtracts it, which leaves the average of
the others. This needs no second download and no storage of the clients' models on the server, and
secure summation of the uploads remains possible.

The server describes its mean by a "pool": the "total" of the weights, and the mean's "number" in
the sequence of all means. The client keeps a "share": its term, "sum", its "weight", and the
"number" of the mean that they belong to. With reference "global", clients keep no share and the
pool is `{}`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.tree import Tree

Reference = Literal["global", "exclusive"]


def first_pool(reference: Reference) -> Tree:
    """Return the pool before any mean: total 0, number 0; `{}` if `reference` is "global"."""
    if reference == "global":
        return {}
    return {"total": torch.zeros((), dtype=torch.float64), "number": torch.tensor(0)}


def next_pool(pool: Tree, total: float) -> Tree:
    """Return the pool of the next mean; `total` is the sum of its clients' weights."""
    if not pool:
        return {}
    return {"total": torch.full_like(pool["total"], total), "number": pool["number"] + 1}


def first_share(params: Tree) -> Tree:
    """Return a client's share before its first upload: weight 0, `params` as a placeholder."""
    zero = torch.zeros((), dtype=torch.float64)
    return {"sum": tree.map(Tensor.double, params), "weight": zero, "number": torch.tensor(-1)}


def next_share(share: Tree, params: Tree, weight: int | Tensor, pool: Tree) -> Tree:
    """Return the share that a client keeps when it uploads `params`.

    `pool` describes the last mean; the upload belongs to the next one. The client's term is in
    float64, in which the product of a float32 model and the weight is exact.
    """
    return {
        "sum": tree.map(lambda w: w.double() * weight, params),
        "weight": torch.zeros_like(share["weight"]) + weight,
        "number": pool["number"] + 1,
    }


def leave_one_out(mean: Tree, pool: Tree, share: Tree) -> Tree:
    """Return the other clients' average model, sum_{c != k} b_c w_c / sum_{c != k} b_c.

    It is the mean without client k's term b_k w_k, which `share` holds. If client k did not
    contribute to the mean, or no other client did, the result is the mean itself.
    """
    weight = torch.where(share["number"] == pool["number"], share["weight"], 0.0)
    rest = pool["total"] - weight
    apart = (weight > 0) & (rest > 0)

    def take(leaf: Tensor, own: Tensor) -> Tensor:
        left = (pool["total"] * leaf.double() - own) / torch.where(apart, rest, 1.0)
        return torch.where(apart, left.to(leaf.dtype), leaf)

    return tree.map(take, mean, share["sum"])
