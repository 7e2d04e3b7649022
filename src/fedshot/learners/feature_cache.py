"""Features of all examples of an episodic test, computed once per example.

A thousand episodes of 80 images mean 80,000 forward passes, but perhaps only 4,000 distinct images.
If batch norm uses running statistics and the encoder does not adapt, an image has the same features
in every episode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from fedshot.learners.learner import EvalEpisode

BLOCK = 100  # examples in one forward pass; fixed, since rounding may depend on it

ParallelMap = Callable[[Callable[[int], Tensor], Sequence[int]], list[Tensor]]


class EpisodeIndex(NamedTuple):
    """An evaluation episode as indices into the distinct examples of a `FeatureCache`."""

    support: Tensor  # int64 [way * shot]
    support_y: Tensor  # int64 [way * shot], 0..way-1
    query: Tensor  # int64 [queries]
    way: int


@runtime_checkable
class FeatureCache(Protocol):
    """Evaluation episodes that share examples; each distinct example is stored once."""

    def __len__(self) -> int:
        """Return the number of episodes."""
        ...

    @property
    def distinct(self) -> int:
        """The number of distinct examples."""
        ...

    def examples(self, first: int, last: int) -> Tensor:
        """Return the distinct examples with indices first .. last - 1, as model input."""
        ...

    def episode_index(self, u: int) -> EpisodeIndex:
        """Return episode u as indices into the distinct examples that `examples` returns."""
        ...


def features_of(
    cache: FeatureCache, embed: Callable[[Tensor], Tensor], parallel_map: ParallelMap
) -> Tensor:
    """Return the features [distinct, d] of all distinct examples.

    `parallel_map` computes them, one call of `embed` for each block of examples.
    """

    def block(i: int) -> Tensor:
        with torch.no_grad():
            return embed(cache.examples(i, min(i + BLOCK, cache.distinct)))

    return torch.cat(parallel_map(block, range(0, cache.distinct, BLOCK)))


def worth_caching(eval_episodes: Sequence[EvalEpisode]) -> TypeGuard[FeatureCache]:
    """Whether there are fewer distinct examples than examples in all episodes together."""
    if not isinstance(eval_episodes, FeatureCache) or not len(eval_episodes):
        return False
    first = eval_episodes.episode_index(0)
    return eval_episodes.distinct < len(eval_episodes) * (len(first.support) + len(first.query))
