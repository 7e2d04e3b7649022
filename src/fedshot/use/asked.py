"""One support set and any number of queries, as the questions that a method answers.

Long lists of queries are cut into questions of one support set. They know which of their examples
are the same, so an encoder that can embeds the support once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from fedshot.learners.feature_cache import EpisodeIndex
from fedshot.learners.learner import EvalEpisode
from fedshot.use.inputs import padded

CHUNK = 256  # queries of one question, so that memory does not grow with their number


class Asked(Sequence[EvalEpisode]):
    """Questions with one support set.

    Args:
        support: examples, uint8 [n, H, W, C] or int32 [n, L].
        codes: their class numbers, int64 [n], 0..way-1.
        query: examples of the same kind.
        classes: how they are numbered for the method, int64 [way].
        device: where the model is.
        whole: keep the queries together, as a model needs that looks at all of them.
    """

    def __init__(
        self,
        support: Tensor,
        codes: Tensor,
        query: Tensor,
        classes: Tensor,
        device: str = "cpu",
        *,
        whole: bool = False,
    ) -> None:
        self._n = len(support)
        both = torch.cat([support, query]) if support.ndim > 2 else padded([*support, *query])
        self._x = both.to(device)
        self._codes, self._classes = codes.to(device), classes.to(device)
        self._chunk = max(1, len(query)) if whole else CHUNK

    def __len__(self) -> int:
        return math.ceil((len(self._x) - self._n) / self._chunk)

    @overload
    def __getitem__(self, u: int) -> EvalEpisode: ...
    @overload
    def __getitem__(self, u: slice) -> list[EvalEpisode]: ...
    def __getitem__(self, u: int | slice) -> EvalEpisode | list[EvalEpisode]:
        if isinstance(u, slice):
            return [self[i] for i in range(*u.indices(len(self)))]
        if not 0 <= u < len(self):
            raise IndexError(u)
        first, last = self._span(u)
        query = self._x[first:last]
        return EvalEpisode(self._x[: self._n], self._codes, query, self._classes)

    @property
    def distinct(self) -> int:
        """How many examples there are, the support's counted once."""
        return len(self._x)

    def examples(self, first: int, last: int) -> Tensor:
        """Return the examples at the places first .. last - 1, the support's first."""
        return self._x[first:last]

    def episode_index(self, u: int) -> EpisodeIndex:
        """Return where the examples of question u are."""
        first, last = self._span(u)
        device = self._x.device
        query = torch.arange(first, last, device=device)
        return EpisodeIndex(
            torch.arange(self._n, device=device), self._codes, query, len(self._classes)
        )

    def _span(self, u: int) -> tuple[int, int]:
        first = self._n + u * self._chunk
        return first, min(first + self._chunk, len(self._x))
