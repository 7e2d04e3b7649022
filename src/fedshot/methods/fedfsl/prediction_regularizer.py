"""The term of FedFSL-MI that keeps predictions near those of a reference model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from fedshot.core import tree
from fedshot.core.ranges import NotNegative, OpenShare
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import Episode
from fedshot.methods.fedfsl.federated_maml import FederatedMaml
from fedshot.methods.fedfsl.leave_one_out import Reference
from fedshot.methods.fedfsl.predictions import (
    Predictions,
    SharedFeatures,
    paired_predictions,
)
from fedshot.nn.losses import Clip, clipped_kl
from fedshot.nn.stacks import stacked
from fedshot.protocol.method import Traits

Reading = Literal["strict", "paper", "v1"]  # which version of the papers to follow
CLIPS: dict[Reading, Clip] = {"strict": "coef", "paper": "log", "v1": "none"}

PAPER_CLIP = (
    "mode 'paper' clips the ratio inside the logarithm, as the paper prints it. If only some "
    "classes of a query are out of bounds, the term pushes the client's predictions away from the "
    "reference; if all are, it has no gradient. Set method.mode to 'strict' to avoid both."
)


@dataclass(frozen=True)
class RegularizedMaml(FederatedMaml):
    """Federated MAML with the term gamma KL(p(reference) || p(w)) in the objective.

    Args:
        gamma: weight of the divergence from the reference's predictions.
        reference: the model whose predictions are the reference: "global", the server's, or
            "exclusive", the average of the other clients' models.
        predictions: the predictions on the queries, p(.), in the divergence. "adapted_query": those
            after adapting to the supports; "unadapted_query": those before.
        mode: which version of the papers the method follows.
        epsilon: the clipped ratio stays within 1 - epsilon and 1 + epsilon.
    """

    gamma: NotNegative = 0.2
    reference: Reference = "global"
    predictions: Predictions = "adapted_query"
    mode: Reading = "strict"
    epsilon: OpenShare = 0.2

    @property
    def has_mi(self) -> bool:
        """Whether the objective has the KL term."""
        return self.gamma > 0

    @property
    def reference_kind(self) -> Reference:
        """The reference model of the KL term: "global" or "exclusive".

        "global" is w^t, and "exclusive" the average of the other clients' models. Without a KL
        term no reference model is used, and the value is "global".
        """
        return self.reference if self.has_mi else "global"

    @property
    def clip(self) -> Clip:
        """How `clipped_kl` bounds the ratio of probabilities; `mode` decides it."""
        return CLIPS[self.mode]

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs."""
        warnings = (PAPER_CLIP,) if self.clip == "log" and self.has_mi else ()
        return replace(super().traits, warnings=warnings)

    def reference_logits(
        self,
        reference: Tree,
        stats: Tree,
        episode: Episode,
        seed: Tensor,
        features: SharedFeatures | None = None,
    ) -> Tensor:
        """Return the logits of p(reference), [queries, way], without a gradient.

        The inner steps are first-order, because nothing differentiates them. This gives the same
        values up to rounding, for less work.
        """
        kind, inner = self.predictions, self.learner.inner
        steps = 0 if kind == "unadapted_query" else inner.steps
        still = replace(self.learner, inner=replace(inner, order="first", steps=steps))
        w = tree.detach(reference)
        body = w["body"] if features is None else reference["body"]  # cached by its identity
        (found,) = paired_predictions(
            still, body, [w["head"]], stats, episode, seed, (kind,), features
        )
        return found.p[kind].detach()

    def term(self, reference: Tensor, mine: Tensor) -> Tensor:
        """Return gamma KL(p(reference) || p(w)), clipped, a scalar, from both logits [n, way]."""
        return self.gamma * clipped_kl(reference, mine, self.clip, self.epsilon)


class ReferenceLogits:
    """Logits of p(reference), computed once per episode of a local update and then cached.

    They depend only on the episode and its dropout seed, which is the same in both stages of
    FedFSL-MI-Adv. Running statistics do not matter, because batch norm uses batch statistics in
    training. Under `vmap` nothing is cached, because tensors made inside one gradient are invalid
    in the next.

    `features` caches the reference body's features, for models that still share that body.
    """

    def __init__(self, method: RegularizedMaml, reference: Tree) -> None:
        self.features = SharedFeatures(method.learner, reference["body"])
        self._method, self._reference = method, reference
        self._known: dict[int, tuple[Episode, Tensor]] = {}

    def __call__(self, stats: Tree, episode: Episode, seed: Tensor) -> Tensor:
        """Return the logits of p(reference), [queries, way], without a gradient."""
        if stacked():
            return self._compute(stats, episode, seed)
        key = id(episode)  # the episode is stored, so its id stays unique
        if key not in self._known:
            self._known[key] = episode, self._compute(stats, episode, seed)
        return self._known[key][1]

    def _compute(self, stats: Tree, episode: Episode, seed: Tensor) -> Tensor:
        return self._method.reference_logits(self._reference, stats, episode, seed, self.features)
