"""Learners: how one model trains on the episodes or batches of one client."""

from fedshot.learners.classification import Classifier
from fedshot.learners.learner import EpisodeLoss, EvalEpisode, Learner
from fedshot.learners.local_training import LocalEpisodes, local_sgd, sample_episodes
from fedshot.learners.maml import InnerLoop, Maml
from fedshot.learners.proto import Proto

__all__ = [
    "Classifier",
    "EpisodeLoss",
    "EvalEpisode",
    "InnerLoop",
    "Learner",
    "LocalEpisodes",
    "Maml",
    "Proto",
    "local_sgd",
    "sample_episodes",
]
