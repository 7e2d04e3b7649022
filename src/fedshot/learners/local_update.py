"""The weight of a local update in the mean, and the optimiser's state between local updates.

FedFSL specifies neither. McMahan et al. 2017 weight clients by examples, n_k; FedFSL's |B_k| counts
episodes. The server's parameters replace the client's at every local update, so by default the
optimiser starts with fresh moments; "kept" moments stay with the client.
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
Moments = Literal["fresh", "kept"]

_PART = "optimizer"


def check_local_update(weigh_by: str, moments: str) -> None:
    """Raise ConfigError for unknown values."""
    check_word("weigh_by", weigh_by, ("episodes", "examples"))
    check_word("moments", moments, ("fresh", "kept"))


def weight_of(local_episodes: LocalEpisodes, by: Weighing) -> int | Tensor:
    """Return the weight of a local update: |B_k| or n_k."""
    return local_episodes.n_episodes if by == "episodes" else local_episodes.n


def max_weight_of(n_episodes: int, by: Weighing) -> int | None:
    """Return the largest possible weight; None if the weight is the number of examples."""
    return n_episodes if by == "episodes" else None


def first_moments(moments: Moments, optimizer: Optimizer, params: Tree) -> dict[str, Any]:
    """Return a client's state before its first local update; only the shapes of `params` matter."""
    return {_PART: optimizer.init(params)} if moments == "kept" else {}


def moments_of(private: Mapping[str, Any]) -> OptState | None:
    """Return the saved optimiser state, or None to start fresh."""
    found: OptState | None = private.get(_PART)
    return found


def keep_moments(private: Mapping[str, Any], state: OptState) -> Tree:
    """Return a client's state after a local update."""
    return {**private, _PART: state} if _PART in private else private
