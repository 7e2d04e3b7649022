"""Whose models a client is sent: a matrix of what each has gained by the models of the others.

Q [clients, clients] has minus infinity on its diagonal: nobody is sent its own model. Zhao et al.
2024 (pFedFSL) call it the affinity matrix, Zhang et al. 2021 (FedFomo) P.
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
    """Return float64 [clients, clients]: 0 between two clients, minus infinity to oneself."""
    q = torch.zeros(clients, clients, dtype=torch.float64)
    return q.fill_diagonal_(-torch.inf)


def top_m_by_affinity(
    q: Tensor, i: int, ids: Sequence[int], m: int, rng: np.random.Generator, *, explore: float = 0.0
) -> list[int]:
    """Return the m others of the highest Q_ij among `ids`, equals by chance.

    Their order is one of chance, too: it tells nothing of who they are.

    Args:
        q: the affinity matrix.
        i: the client that is sent models.
        ids: the clients that take part.
        m: how many; all others where they are fewer.
        rng: chance.
        explore: of each of the m, the probability that it is drawn by chance among those left.
    """
    others = rng.permutation(np.array([j for j in ids if j != i], dtype=np.int64))
    # A stable sort leaves equals in the order of chance.
    others = others[np.argsort(-q[i].numpy()[others], kind="stable")]
    if explore:
        best = min(m, len(others)) - int((rng.random(min(m, len(others))) < explore).sum())
        others = np.concatenate([others[:best], rng.permutation(others[best:])])
    return [int(j) for j in rng.permutation(others[:m])]


def check_others(m: int, clients: int) -> None:
    """Refuse more models of others than there are others."""
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
