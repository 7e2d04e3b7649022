"""The affinity matrix, by which the server chooses the models that it sends to a client.

Q [clients, clients] sums what client i gained from the models of client j. Its diagonal is minus
infinity, so that no client gets its own model. Zhang et al. 2021 (FedFomo) call it P.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.tree import Tree


def first_affinity(clients: int) -> Tensor:
    """Return float64 [clients, clients]: 0, and minus infinity on the diagonal."""
    q = torch.zeros(clients, clients, dtype=torch.float64)
    return q.fill_diagonal_(-torch.inf)


def top_m_by_affinity(
    q: Tensor, i: int, ids: Sequence[int], m: int, rng: np.random.Generator, *, explore: float = 0.0
) -> list[int]:
    """Return the m clients j != i among `ids` with the highest Q_ij; ties are broken at random.

    They are returned in random order, so that the order does not identify them.

    Args:
        q: the affinity matrix.
        i: the client that receives the models.
        ids: the clients that take part.
        m: number of models; all others if there are fewer.
        rng: random numbers for the ties, the exploration and the order.
        explore: probability, for each of the m models, that it is chosen at random instead.
    """
    others = rng.permutation(np.array([j for j in ids if j != i], dtype=np.int64))
    # A stable sort leaves ties in their random order.
    others = others[np.argsort(-q[i].numpy()[others], kind="stable")]
    if explore:
        best = min(m, len(others)) - int((rng.random(min(m, len(others))) < explore).sum())
        others = np.concatenate([others[:best], rng.permutation(others[best:])])
    return [int(j) for j in rng.permutation(others[:m])]


def check_others(m: int, clients: int) -> None:
    """Raise ConfigError unless every client has m other clients."""
    if not 0 <= m < clients:
        raise ConfigError(
            f"m is {m}; of {clients} clients a client has {clients - 1} others. Lower m, or have "
            "more clients."
        )


def mixture(weights: Tensor, models: Sequence[Tree]) -> Tree:
    """Return sum_j weights_j models_j, leaf by leaf."""

    def mix(*leaves: Tensor) -> Tensor:
        each = [w.to(leaf.dtype) * leaf for w, leaf in zip(weights, leaves, strict=True)]
        return torch.stack(each).sum(0)

    return tree.map(mix, *models)
