"""The affinity matrix, by which the server chooses the models that it sends to a client.

Entry Q_ij of the matrix Q [clients, clients] sums the gains of client i from models of client j.
The diagonal is minus infinity, so that no client gets its own model. Zhang et al. 2021 (FedFomo)
call the matrix P.
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
    """Return the initial matrix, float64 [clients, clients]: 0, but minus infinity at Q_ii."""
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
        m: number of models to choose; if fewer other clients take part, all of them are returned.
        rng: source of random numbers for the ties, the exploration and the order.
        explore: probability that a model is chosen at random instead, for each of the m models.
    """
    others = rng.permutation(np.array([j for j in ids if j != i], dtype=np.int64))
    # A stable sort leaves ties in their random order.
    others = others[np.argsort(-q[i].numpy()[others], kind="stable")]
    if explore:
        best = min(m, len(others)) - int((rng.random(min(m, len(others))) < explore).sum())
        others = np.concatenate([others[:best], rng.permutation(others[best:])])
    return [int(j) for j in rng.permutation(others[:m])]


def check_others(m: int, clients: int) -> None:
    """Raise ConfigError unless there are m other clients, i.e. more than m clients."""
    if not 0 <= m < clients:
        raise ConfigError(
            f"m is {m}; expected 0 to {clients - 1}, the number of other clients for each of the "
            f"{clients} clients. Lower m, or use more clients."
        )


def mixture(weights: Tensor, models: Sequence[Tree]) -> Tree:
    """Return sum_j weights_j models_j, leaf by leaf."""

    def mix(*leaves: Tensor) -> Tensor:
        each = [w.to(leaf.dtype) * leaf for w, leaf in zip(weights, leaves, strict=True)]
        return torch.stack(each).sum(0)

    return tree.map(mix, *models)
