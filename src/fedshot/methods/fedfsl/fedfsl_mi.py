"""FedFSL-MI: MAML under federated averaging, with predictions regularized towards the server's.

Each client minimises the loss of its queries after adapting to its supports, plus the divergence of
its predictions from those of the model that the server sent; the server averages the weights.

Source: Fan & Huang, Federated Few-Shot Learning with Adversarial Learning. Local objective
L_k(w_k) + gamma L_MI, L_MI = 1/|B_k| sum_T KL(p(w^t) || p(w_k)): eqs. (11) and (12) of the revised
version, (12) and (13) of the first. The first version defines the reference as the average w_-k of
the other clients, eq. (11), but then uses w^t. The rest is in
`fedshot.methods.fedfsl.federated_maml`.
Symbols: p(w) softmax over the episode's classes; epsilon the bound of |p(w^t)/p(w_k) - 1|.

Choices where the papers leave a point open: p(.) is taken on the queries, after both models have
adapted to the same support with the same dropout masks, because a head that has not adapted cannot
know labels that are shuffled in each episode. The divergence is averaged over the queries. The
reference and its adaptation are constants; gradients pass through the client's inner steps. The
revised version clips p(w^t)/p(w_k) "in (11)" to [1 - epsilon, 1 + epsilon]: see
`fedshot.nn.losses.clipped_kl`.
Departures: the default clip acts on the gradient of (11), not inside it. With
reference="exclusive" the client subtracts its own model from the mean that it is sent, where the
paper's server computes and sends K models: see `fedshot.methods.fedfsl.leave_one_out`. A client
that did not contribute to w^t, because it was not in the last cohort, has w^t itself as reference.
A client keeps |B_k| w_k in float64, which takes the memory of two float32 models.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import Episode
from fedshot.learners.learner import EpisodeLoss
from fedshot.methods.fedfsl.federated_maml import LossOf
from fedshot.methods.fedfsl.prediction_regularizer import RegularizedMaml
from fedshot.methods.fedfsl.predictions import paired_predictions
from fedshot.nn.losses import accuracy, cross_entropy, kl


@dataclass(frozen=True)
class FedFSLMI(RegularizedMaml):
    """MAML with predictions regularized towards a reference model, averaged over clients.

    The other options are those of `FederatedMaml` and `RegularizedMaml`.

    Args:
        gamma: weight of the divergence from the reference's predictions; 0 is FedFSL-naive.
        mode: where the ratio of probabilities is clipped: "strict" in the gradient; "paper" inside
            the logarithm, as in the revised version; "v1" nowhere, as in the first version.
    """

    name: ClassVar[str] = "fedfsl_mi"

    def objective(
        self, reference: Tree, w: Tree, stats: Tree, episode: Episode, seed: Tensor
    ) -> EpisodeLoss:
        """Return l_T(w) + gamma KL(p(reference) || p(w)), eqs. (5), (11) and (12)."""
        p_reference = self.reference_logits(reference, stats, episode, seed)
        (mine,) = paired_predictions(
            self.learner, w["body"], [w["head"]], stats, episode, seed, (self.predictions,)
        )
        p = mine.p[self.predictions]
        loss = cross_entropy(mine.query, episode.query_y) + self.term(p_reference, p)
        found = accuracy(mine.query.detach(), episode.query_y)
        return EpisodeLoss(loss, mine.stats, found, {"mi": kl(p_reference, p.detach())})

    def local_objective(self, down: Tree, private: Tree) -> LossOf:
        """Return the function with which a client computes its loss on an episode."""
        if not self.has_mi:
            return self.learner.episode_loss
        return partial(self.objective, self.reference_model(down, private))
