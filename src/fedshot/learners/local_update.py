"""What a visit counts for in the mean, and what the optimiser remembers until the next one.

FedFSL leaves both open. McMahan et al. 2017 weigh by examples, n_k; FedFSL's |B_k| are episodes.
The weights that an optimiser's moments belong to are overwritten by the server's at each visit, so
by default its state is "reset"; a client may "keep" it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from fedshot.core.errors import check_word
from fedshot.core.tree import Tree
from fedshot.learners.local_training import LocalEpisodes
from fedshot.nn.optim import Optimizer, OptState

Weighing = Literal["episodes", "examples"]
OptimizerState = Literal["reset", "keep"]

_PART = "optimizer"


def check_local_update(weigh_by: str, optimizer_state: str) -> None:
    """Refuse words that mean nothing."""
    check_word("weigh_by", weigh_by, ("episodes", "examples"))
    check_word("optimizer_state", optimizer_state, ("reset", "keep"))


def weight_of(local_episodes: LocalEpisodes, by: Weighing) -> int | Tensor:
    """Return what a visit counts for: |B_k| or n_k."""
    return local_episodes.n_episodes if by == "episodes" else local_episodes.n


def max_weight_of(n_episodes: int, by: Weighing) -> int | None:
    """Return the largest |B_k|; None where the weight is a number of examples."""
    return n_episodes if by == "episodes" else None


def first_moments(
    optimizer_state: OptimizerState, optimizer: Optimizer, params: Tree
) -> dict[str, Any]:
    """Return what a client keeps before its first visit; of `params` only the form matters."""
    return {_PART: optimizer.init(params)} if optimizer_state == "keep" else {}


def moments_of(private: Mapping[str, Any]) -> OptState | None:
    """Return what the optimiser goes on from; None for afresh."""
    found: OptState | None = private.get(_PART)
    return found


def keep_moments(private: Mapping[str, Any], state: OptState) -> Tree:
    """Return what a client keeps after a visit."""
    return {**private, _PART: state} if _PART in private else private
