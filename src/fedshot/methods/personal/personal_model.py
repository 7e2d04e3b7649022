"""A client's own model, beside the one that it is sent."""

from __future__ import annotations

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.tree import Tree
from fedshot.learners.learner import EvalEpisode


def first_own(model: Tree) -> Tree:
    """Return what a client keeps that has never been asked; it has drawn `model` by itself."""
    return {"model": model, "visits": torch.tensor(0)}


def own_or_sent(private: Tree, sent: Tree) -> Tree:
    """Return a client's own model, once it has one: on its first visit it starts from the sent."""
    begun = private["visits"] > 0
    return tree.map(lambda mine, new: torch.where(begun, mine, new), private["model"], sent)


def next_own(private: Tree, model: Tree) -> Tree:
    """Return what a client keeps after a visit."""
    return {"model": model, "visits": private["visits"] + 1}


def base_labels(eval_episode: EvalEpisode, known: Tensor) -> Tensor:
    """Return the places of a support's labels among the base classes, whose numbers rise."""
    return torch.searchsorted(known, eval_episode.classes)[eval_episode.support_y]
