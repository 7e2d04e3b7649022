"""The examples of a whole test, each once: for encoders whose features do not depend on company.

A thousand episodes of 80 images are 80,000 forward passes of perhaps 4,000 images. Where batch norm
goes by running statistics, and nothing adapts, an image has one row of features in all of them.
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
    """A question as places in the gallery."""

    support: Tensor  # int64 [way * shot]
    support_y: Tensor  # int64 [way * shot], 0..way-1
    query: Tensor  # int64 [queries]
    way: int


@runtime_checkable
class FeatureCache(Protocol):
    """Questions that know which of their examples are the same."""

    def __len__(self) -> int:
        """Return the number of questions."""
        ...

    @property
    def distinct(self) -> int:
        """How many examples there are, each counted once."""
        ...

    def examples(self, first: int, last: int) -> Tensor:
        """Return the examples at the places first .. last - 1, as a model takes them."""
        ...

    def sheet(self, u: int) -> EpisodeIndex:
        """Return where the examples of question u are."""
        ...


def features_of(
    cache: FeatureCache, embed: Callable[[Tensor], Tensor], parallel_map: ParallelMap
) -> Tensor:
    """Return the features [distinct, d] of every example, embedded once, block by block."""

    def block(i: int) -> Tensor:
        with torch.no_grad():
            return embed(cache.examples(i, min(i + BLOCK, cache.distinct)))

    return torch.cat(parallel_map(block, range(0, cache.distinct, BLOCK)))


def worth_caching(eval_episodes: Sequence[EvalEpisode]) -> TypeGuard[FeatureCache]:
    """Whether embedding every example once is less than embedding each question's."""
    if not isinstance(eval_episodes, FeatureCache) or not len(eval_episodes):
        return False
    sheet = eval_episodes.sheet(0)
    return eval_episodes.distinct < len(eval_episodes) * (len(sheet.support) + len(sheet.query))
