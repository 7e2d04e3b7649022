"""FedNCM: nearest class mean on the features of a fixed encoder, from sums in one round.

Source: Legate et al. 2023, Guiding the Last Layer in Federated Learning with Pre-Trained Models
(NeurIPS): each client uploads the sums and counts of its classes, and the server divides them.
Centring, and features of length 1, are those of Wang et al. 2019, SimpleShot (CL2N).
Symbols: mu_c the mean of class c, mu the mean of all training examples.
Departures from the papers: FedNCM's second stage, training of the whole model, is left out.
SimpleShot centres before it scales to length 1; here features are scaled first, so that one round
suffices. The mean of a new class is that of its support set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedshot.methods.one_round.feature_sums import FeatureSums, Labelled, OneRoundMethod
from fedshot.nn.prototypes import cosine_logits


@dataclass(frozen=True)
class FedNCM(OneRoundMethod):
    """Nearest class mean by cosine similarity, from class sums in one round.

    Args:
        center: whether to subtract the mean of all training features from means and queries.
    """

    name: ClassVar[str] = "fedncm"
    needs_products: ClassVar[bool] = False

    center: bool = True

    def classifier(self, total: FeatureSums) -> Callable[[Labelled, Tensor], Tensor]:
        """Return the function that computes the logits cos(h - mu, mu_c - mu)."""
        center = total.sums.sum(0) / total.counts.sum().clamp_min(1)
        if not self.center:
            center = center.new_zeros(())

        def logits(labelled: Labelled, query: Tensor) -> Tensor:
            return cosine_logits(query - center, labelled.means() - center, 1.0)

        return logits
