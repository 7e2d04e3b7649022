"""Embed test episodes with the server's encoder, and predict them with a probe on the features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fedshot.core.tree import Tree
from fedshot.learners.classification import Classifier
from fedshot.learners.feature_cache import FeatureCache, features_of, worth_caching
from fedshot.learners.learner import EvalEpisode, LazyEpisodes
from fedshot.learners.probe import FeatureProbe
from fedshot.protocol.clients import Clients
from fedshot.protocol.method import Prediction, predict_at_server, predict_from_features


def predict_by_probe(
    learner: Classifier,
    params: Tree,
    stats: Tree,
    probe_options: FeatureProbe,
    eval_episodes: Sequence[EvalEpisode],
    clients: Clients,
) -> list[Prediction]:
    """Predict every episode with a probe on the encoder's features, not with the classifier.

    Under running statistics, each distinct example is embedded once.
    """
    if learner.model.norm_policy == "running" and worth_caching(eval_episodes):
        embed = partial(learner.embed, params, stats)
        return predict_from_features(embed, probe_options, eval_episodes, clients)

    def answer(eval_episode: EvalEpisode) -> Tensor:
        support, query = learner.encode(params, stats, eval_episode)
        return probe_options(support, eval_episode.support_y, query, len(eval_episode.classes))

    return predict_at_server(answer, eval_episodes, clients)


def embedded(
    learner: Classifier,
    params: Tree,
    stats: Tree,
    eval_episodes: Sequence[EvalEpisode],
    clients: Clients,
) -> Sequence[EvalEpisode]:
    """Return the episodes with features of the server's encoder in place of examples.

    A client that has the encoder would compute the same features. Under running statistics, each
    distinct example is embedded once, and `classes` are 0 to way - 1. The episodes' owners, if any,
    are kept.
    """
    n, owners = len(eval_episodes), getattr(eval_episodes, "owners", None)
    if learner.model.norm_policy == "running" and worth_caching(eval_episodes):
        h = features_of(eval_episodes, partial(learner.embed, params, stats), clients.parallel_map)
        return _Embedded(n, owners, partial(_of_rows, eval_episodes, h))

    def one(u: int) -> EvalEpisode:
        support, query = learner.encode(params, stats, eval_episodes[u])
        return eval_episodes[u]._replace(support_x=support, query_x=query)

    return _Embedded(n, owners, clients.parallel_map(one, range(n)).__getitem__)


def _of_rows(cache: FeatureCache, h: Tensor, u: int) -> EvalEpisode:
    """Return episode u with features in place of examples, from the features h of all examples."""
    index = cache.episode_index(u)
    return EvalEpisode(h[index.support], index.support_y, h[index.query], torch.arange(index.way))


class _Embedded(LazyEpisodes):
    """Episodes that are computed when accessed, with the client that owns each, if any."""

    def __init__(
        self, n: int, owners: tuple[int, ...] | None, make: Callable[[int], EvalEpisode]
    ) -> None:
        self._n, self._make, self.owners = n, make, owners

    def __len__(self) -> int:
        return self._n

    def _build(self, u: int) -> EvalEpisode:
        return self._make(u)
