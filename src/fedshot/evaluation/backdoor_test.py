"""The test of a backdoor: queries with the trigger, and a class whose supports have it."""

from __future__ import annotations

from collections.abc import Sequence

from fedshot.data.dataset import Dataset
from fedshot.evaluation.episodic_test import EpisodicTest, EvalEpisodes
from fedshot.fleets.poisoned_data import stamped
from fedshot.learners.learner import EvalEpisode, LazyEpisodes
from fedshot.protocol.method import Prediction


class TriggeredEpisodes(LazyEpisodes):
    """The first episodes of a test, with the trigger on the supports of class 0 and all queries.

    Args:
        eval_episodes: the episodes of the test.
        dataset: the dataset, which decides what the trigger is.
        most: largest number of episodes.
    """

    def __init__(self, eval_episodes: EvalEpisodes, dataset: Dataset, most: int) -> None:
        self._all, self._dataset = eval_episodes, dataset
        self._n = min(most, len(eval_episodes))
        owners = eval_episodes.owners
        self.owners = None if owners is None else owners[: self._n]

    def __len__(self) -> int:
        return self._n

    def _build(self, u: int) -> EvalEpisode:
        episode = self._all[u]
        x, at = episode.support_x.clone(), episode.support_y == 0
        x[at] = stamped(x[at], self._dataset)
        return episode._replace(support_x=x, query_x=stamped(episode.query_x, self._dataset))


def success_rate(predictions: Sequence[Prediction], episodic_test: EpisodicTest) -> float | None:
    """Return the share of the queries of other classes that are predicted to be of class 0.

    None if there are no such queries.
    """
    hits = total = 0
    for u, _, logits in predictions:
        others = episodic_test.labels(u) != 0
        hits += int((logits.argmax(-1)[others] == 0).sum())
        total += int(others.sum())
    return hits / total if total else None
