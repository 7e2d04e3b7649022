"""Divide any number of queries into episodes that share a support set, for a method to predict."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedshot.core.devices import CPU
from fedshot.learners.feature_cache import EpisodeIndex
from fedshot.learners.learner import EvalEpisode, LazyEpisodes
from fedshot.use.inputs import joined

CHUNK = 256  # maximum number of queries of an episode, which bounds the memory


class QueryEpisodes(LazyEpisodes):
    """Episodes that share a support set, each with a part of the queries.

    All examples are indexed, the support first, so that an encoder embeds the support only once.

    Args:
        support: examples, uint8 [n, H, W, C], int32 [n, L] or float [n, d].
        codes: labels of the support, int64 [n], 0..way-1.
        query: examples of the same shape and type as the support.
        classes: the class number that the method receives for each label, int64 [way].
        device: device of the model.
        whole: keep all queries in one episode, for transductive methods.
    """

    def __init__(
        self,
        support: Tensor,
        codes: Tensor,
        query: Tensor,
        classes: Tensor,
        device: torch.device = CPU,
        *,
        whole: bool = False,
    ) -> None:
        self._n = len(support)
        self._x = joined(support, query).to(device)
        self._codes, self._classes = codes.to(device), classes.to(device)
        self._chunk = max(1, len(query)) if whole else CHUNK

    def __len__(self) -> int:
        return math.ceil((len(self._x) - self._n) / self._chunk)

    def _build(self, u: int) -> EvalEpisode:
        first, last = self._span(u)
        return EvalEpisode(self._x[: self._n], self._codes, self._x[first:last], self._classes)

    @property
    def distinct(self) -> int:
        """Number of distinct examples: the shared support, and all queries."""
        return len(self._x)

    def examples(self, first: int, last: int) -> Tensor:
        """Return the examples with the indices first .. last - 1."""
        return self._x[first:last]

    def episode_index(self, u: int) -> EpisodeIndex:
        """Return episode u as indices into the distinct examples that `examples` returns."""
        places = torch.arange(len(self._x), device=self._x.device)
        first, last = self._span(u)
        return EpisodeIndex(places[: self._n], self._codes, places[first:last], len(self._classes))

    def _span(self, u: int) -> tuple[int, int]:
        first = self._n + u * self._chunk
        return first, min(first + self._chunk, len(self._x))
