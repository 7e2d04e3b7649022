"""Predictions held near those of a reference model, as the FedFSL-MI methods hold them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from fedshot.core.errors import ConfigError, check_word
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import Episode
from fedshot.learners.local_training import check_not_negative
from fedshot.learners.maml import Maml
from fedshot.methods.fedfsl.leave_one_out import REFERENCES, Reference
from fedshot.methods.fedfsl.predictions import (
    PREDICTIONS,
    Predictions,
    SharedFeatures,
    reference_logits,
)
from fedshot.nn.losses import Clip, clipped_kl
from fedshot.nn.stacks import stacked

Reading = Literal["strict", "paper", "v1"]  # of the papers
CLIPS: dict[Reading, Clip] = {"strict": "coef", "paper": "log", "v1": "none"}


@dataclass(frozen=True)
class PredictionRegularizer:
    """The term gamma KL(p(reference) || p(w)) of an objective.

    Args:
        gamma: its weight.
        reference: which model the reference is: "global" or "exclusive".
        predictions: which predictions p(.) are.
        mode: decides the clip where none is said.
        clip: how the ratio of probabilities is bounded.
        epsilon: the ratio stays within 1 - epsilon and 1 + epsilon.

    Raises ConfigError, naming the option, for a value that cannot be.
    """

    gamma: float
    reference: Reference
    predictions: Predictions
    mode: Reading
    clip: Clip | None
    epsilon: float

    def __post_init__(self) -> None:
        check_not_negative(gamma=self.gamma)
        check_word("reference", self.reference, REFERENCES)
        check_word("predictions", self.predictions, PREDICTIONS)
        check_word("mode", self.mode, CLIPS)
        check_word("clip", self.clipping, CLIPS.values())
        if not 0 < self.epsilon < 1:
            raise ConfigError(f"epsilon is {self.epsilon}; expected a number between 0 and 1.")

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know of these options before a run."""
        if self.clipping != "log" or not self.gamma:
            return ()
        return (
            "clip 'log' reads the paper literally: where some classes of a row lie outside the "
            "band it pushes the client's predictions away from the reference, and where all do it "
            "has no gradient. Set method.clip to 'coef' for a bounded pull.",
        )

    @property
    def clipping(self) -> Clip:
        """How the ratio of probabilities is bounded."""
        return self.clip or CLIPS[self.mode]

    def told(
        self,
        learner: Maml,
        reference: Tree,
        stats: Tree,
        episode: Episode,
        seed: Tensor,
        looks: SharedFeatures | None = None,
    ) -> Tensor:
        """Return the logits of p(reference), a constant."""
        return reference_logits(learner, reference, stats, episode, seed, self.predictions, looks)

    def term(self, told: Tensor, mine: Tensor) -> Tensor:
        """Return gamma KL(p(reference) || p(w)), clipped, of the logits of both."""
        return self.gamma * clipped_kl(told, mine, self.clipping, self.epsilon)


class ReferenceLogits:
    """p(reference) of the episodes of a visit, each computed once, though several stages ask.

    It depends on the episode and the seed of its noise, which are the same in every stage; training
    normalises by the batch, so that running statistics do not matter. Under `vmap` it is computed
    anew: what one gradient made is not there any more in the next.

    `looks` are the reference's, for models that still have its body.
    """

    def __init__(self, regularizer: PredictionRegularizer, learner: Maml, reference: Tree) -> None:
        self.looks = SharedFeatures(learner, reference["body"])
        self._of = partial(regularizer.told, learner, reference, looks=self.looks)
        self._known: dict[tuple[int, int], tuple[Episode, Tensor]] = {}

    def __call__(self, stats: Tree, episode: Episode, seed: Tensor) -> Tensor:
        """Return the logits of p(reference), a constant."""
        if stacked():
            return self._of(stats, episode, seed)
        key = (id(episode), int(seed))  # the episode is kept, so nothing else gets its id
        if key not in self._known:
            self._known[key] = episode, self._of(stats, episode, seed)
        return self._known[key][1]
