"""How one model learns from episodes or batches on one machine."""

from fedshot.learners.classification import Classifier
from fedshot.learners.learner import InnerLoop, Learner, Lesson, Maml, Proto, Question
from fedshot.learners.local_training import Lessons, draw_lessons, local_sgd

__all__ = [
    "Classifier",
    "InnerLoop",
    "Learner",
    "Lesson",
    "Lessons",
    "Maml",
    "Proto",
    "Question",
    "draw_lessons",
    "local_sgd",
]
