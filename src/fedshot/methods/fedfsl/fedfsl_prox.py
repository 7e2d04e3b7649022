"""FedFSL-prox: MAML under federated averaging, with a proximal term.

Each client minimises the loss of its queries after adapting to its supports, plus the squared
distance to the weights that the server sent; the server averages the weights.

Source: Fan & Huang, Federated Few-Shot Learning with Adversarial Learning, section 5.4 of the first
version (baseline FedFSL-prox), which adds the term of Li et al. 2020, FedProx, algorithm 2, to
eq. (7): L_k(w) + (mu/2) ||w - w^t||^2. The rest is in `fedshot.methods.fedfsl.federated_maml`.
Departures from the paper: it gives no mu and does not say which weights the distance covers; here
it covers backbone and head, not the running statistics. The inner steps ignore the term.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from fedshot.core.ranges import NotNegative
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import Episode
from fedshot.learners.learner import EpisodeLoss
from fedshot.methods.fedfsl.federated_maml import FederatedMaml, LossOf
from fedshot.nn.losses import proximal


@dataclass(frozen=True)
class FedFSLProx(FederatedMaml):
    """MAML with a proximal term, averaged over clients.

    The other options are those of `FederatedMaml`.

    Args:
        mu: weight of the proximal term; 0 is FedFSL-naive.
    """

    name: ClassVar[str] = "fedfsl_prox"

    mu: NotNegative = 0.01

    def objective(
        self, anchor: Tree, w: Tree, stats: Tree, episode: Episode, seed: Tensor
    ) -> EpisodeLoss:
        """Return l_T(w) + (mu/2) ||w - anchor||^2."""
        task = self.learner.episode_loss(w, stats, episode, seed)
        distance = proximal(w, anchor)
        return task._replace(loss=task.loss + self.mu * distance, extra={"proximal": distance})

    def local_objective(self, down: Tree, private: Tree) -> LossOf:
        """Return the function with which a client computes its loss on an episode."""
        del private
        return partial(self.objective, down["w"]) if self.mu else self.learner.episode_loss
