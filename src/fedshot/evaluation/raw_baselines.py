"""Baselines without training: class means of the input, and a linear model of word counts.

They predict the same test episodes as the method, with the support sets as their only training
data. They are reported with every result, since a method far above chance may still be worse than
a baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedshot.data.dataset import Dataset
from fedshot.data.tokens import FIRST_WORD, Tokens
from fedshot.evaluation.episodic_test import EpisodicTest, Score, score
from fedshot.learners.learner import EvalEpisode
from fedshot.learners.probe import logistic
from fedshot.nn.prototypes import class_means, nearest_prototypes
from fedshot.protocol.method import predict_at_server

PIXELS, WORDS, TF_IDF = "raw pixels", "mean word vectors", "TF-IDF, logistic regression"
FEATURES = "given features"


def raw_baselines(dataset: Dataset, episodic_test: EpisodicTest) -> dict[str, Score]:
    """Return name -> score on a test, for each baseline of the dataset's kind.

    For images it is "raw pixels", and for features "given features". For texts there are two: "mean
    word vectors" and "TF-IDF, logistic regression". If an episode is split among a group of
    clients, the baselines use the support examples of all of them.
    """
    baselines: Mapping[str, Callable[[EvalEpisode], Tensor]] = {PIXELS: pixel_logits}
    if isinstance(dataset.x, Tokens):
        table = torch.from_numpy(dataset.x.table)
        baselines = {WORDS: lambda e: word_vector_logits(e, table), TF_IDF: tf_idf_logits}
    elif dataset.kind == "features":
        baselines = {FEATURES: feature_logits}
    return {
        name: score(predict_at_server(logits, episodic_test.eval_episodes), episodic_test)
        for name, logits in baselines.items()
    }


def pixel_logits(eval_episode: EvalEpisode) -> Tensor:
    """Return logits [queries, way]: negative squared distances to the class means, in pixels."""
    support, query = eval_episode.support_x.double() / 255, eval_episode.query_x.double() / 255
    return feature_logits(eval_episode._replace(support_x=support, query_x=query))


def feature_logits(eval_episode: EvalEpisode) -> Tensor:
    """Return logits [queries, way]: negative squared distances to the class means of the input."""
    support = eval_episode.support_x.flatten(1).double()
    query = eval_episode.query_x.flatten(1).double()
    means = class_means(support, eval_episode.support_y, len(eval_episode.classes))
    # `nearest_prototypes` would allocate a number for every query, class and pixel.
    return -torch.cdist(query, means, compute_mode="donot_use_mm_for_euclid_dist").square()


def word_vector_logits(eval_episode: EvalEpisode, table: Tensor) -> Tensor:
    """Return logits [queries, way]: negative squared distances to the class means of the texts.

    A text is represented by the mean of its words' vectors, which are rows of `table` [V, d]. An
    empty text is represented by zeros.
    """

    def mean(ids: Tensor) -> Tensor:
        words = (ids > 0).sum(1, keepdim=True).clamp(min=1)
        return table[ids.long()].double().sum(1) / words  # the vector of padding is zero

    support, query = mean(eval_episode.support_x), mean(eval_episode.query_x)
    return nearest_prototypes(support, eval_episode.support_y, query, len(eval_episode.classes))


def tf_idf_logits(eval_episode: EvalEpisode) -> Tensor:
    """Return logits [queries, way] of a logistic regression on scikit-learn's TF-IDF features.

    Vocabulary, document frequencies and weights come from the support set alone. Words without a
    vector are ignored, as in the networks.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    support, query, way = eval_episode.support_x, eval_episode.query_x, len(eval_episode.classes)
    if not bool((support >= FIRST_WORD).any()):
        return torch.zeros(len(query), way, dtype=torch.float64)
    weigh = TfidfVectorizer(analyzer=lambda ids: [i for i in ids.tolist() if i >= FIRST_WORD])
    of_support = torch.from_numpy(weigh.fit_transform(support).toarray())
    of_query = torch.from_numpy(weigh.transform(query).toarray())
    return logistic(of_support, eval_episode.support_y, of_query, way, 1.0)
