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

from fedshot.core.ranges import AtLeast0, AtLeast1, NotNegative, OpenShare
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import Episode
from fedshot.learners.learner import EpisodeLoss
from fedshot.learners.maml import InnerLoop
from fedshot.methods.fedfsl.federated_maml import LossOf, OptimizerState, Weighing
from fedshot.methods.fedfsl.leave_one_out import Reference
from fedshot.methods.fedfsl.prediction_regularizer import Reading, RegularizedMaml
from fedshot.methods.fedfsl.predictions import Predictions, paired_predictions
from fedshot.nn.losses import accuracy, cross_entropy, kl
from fedshot.nn.optim import Optimizer
from fedshot.protocol.method import diagnostic


@dataclass(frozen=True)
class FedFSLMI(RegularizedMaml):
    """MAML with predictions regularized towards a reference model, averaged over clients.

    The other options are those of `FederatedMaml`.

    Args:
        gamma: weight of the divergence from the reference's predictions; 0 is FedFSL-naive.
        reference: the model whose predictions are the reference: "global", the server's, or
            "exclusive", the average of the other clients' models.
        predictions: the predictions on the queries, p(.), that are compared. "adapted_query": those
            after adapting to the supports; "unadapted_query": those before.
        mode: where the ratio of probabilities is clipped: "strict" in the gradient; "paper" inside
            the logarithm, as in the revised version; "v1" nowhere, as in the first version.
        epsilon: the clipped ratio stays within 1 - epsilon and 1 + epsilon.
    """

    name: ClassVar[str] = "fedfsl_mi"

    gamma: NotNegative = 0.2
    reference: Reference = "global"
    predictions: Predictions = "adapted_query"
    mode: Reading = "strict"
    epsilon: OpenShare = 0.2
    inner: InnerLoop = InnerLoop()
    local_steps: AtLeast1 = 10
    episodes_per_step: AtLeast1 = 1
    optimizer: Optimizer = Optimizer()
    common_questions: AtLeast0 = diagnostic(0)
    weigh_by: Weighing = "episodes"
    optimizer_state: OptimizerState = "reset"

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
