"""FedCGS: linear discriminant analysis with the clients' common covariance, in one round.

Source: Guan et al. 2025, Capture Global Feature Statistics for One-Shot Federated Learning (AAAI):
clients upload the sums of their features by class and the sums of products of features. From these
the server computes the class means and the shared covariance. They define a Gaussian classifier,
the linear discriminant of the pooled data. The shrinkage is that of Chen et al. 2010, Shrinkage
Algorithms for MMSE Covariance Estimation (OAS).
Symbols: n_c the number of examples of class c and mu_c their mean; the covariance within classes is
Sigma = sum_c sum_(h of c) (h - mu_c)(h - mu_c)^T / n.
Departures from the paper: Sigma is the covariance within classes, where the authors' code takes
that of all features; all classes are equally likely; features are scaled to length 1 by default.
Sigma is shrunk towards a multiple of the identity, because with fewer examples than features it has
no inverse. A new class has the mean of its support set, and the covariance of the base classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedshot.core.ranges import PositiveShare
from fedshot.methods.one_round.feature_sums import (
    FeatureSums,
    Labelled,
    OneRoundMethod,
    without_negative,
)

_ROUNDING = 1e-8  # fraction of the squared features below which a covariance is rounding error


@dataclass(frozen=True)
class FedCGS(OneRoundMethod):
    """Linear discriminant analysis (shared covariance), from sums in one round.

    Args:
        shrinkage: s in (1 - s) Sigma + s tr(Sigma) / d I, above 0 and at most 1; null: the OAS
            estimate, which needs no tuning.
    """

    name: ClassVar[str] = "fedcgs"

    shrinkage: PositiveShare | None = None

    def classifier(self, total: FeatureSums) -> Callable[[Labelled, Tensor], Tensor]:
        """Return the function of the logits h^T Sigma^-1 mu_c - mu_c^T Sigma^-1 mu_c / 2.

        The largest logit of a query is subtracted from all of its logits.
        """
        factor = torch.linalg.cholesky(self.covariance(total))

        def logits(labelled: Labelled, query: Tensor) -> Tensor:
            # With Sigma = L L^T, both terms are products of L^-1 h and L^-1 mu_c.
            means = torch.linalg.solve_triangular(factor, labelled.means().T, upper=False)
            h = torch.linalg.solve_triangular(factor, query.T, upper=False)
            found: Tensor = h.T @ means - means.square().sum(0) / 2
            return found - found.amax(1, keepdim=True)  # small numbers survive a cast to float32

        return logits

    def covariance(self, total: FeatureSums) -> Tensor:
        """Return the shrunk covariance within classes, [d, d].

        It is the identity if no class has two different examples.
        """
        n, d = int(total.counts.sum()), total.sums.shape[1]
        identity = torch.eye(d, dtype=total.sums.dtype, device=total.sums.device)
        counts = total.counts.to(total.sums.dtype).clamp_min(1.0)
        between = (total.sums / counts[:, None]).T @ total.sums
        moment = total.moment()
        sigma = without_negative(moment - between) / max(1, n)
        scale = float(sigma.trace()) / d
        if not scale * d * n > _ROUNDING * float(moment.trace()):
            return identity
        s = _oas(sigma, n) if self.shrinkage is None else self.shrinkage
        return (1 - s) * sigma + s * scale * identity


def _oas(sigma: Tensor, n: int) -> float:
    """Return the oracle-approximating shrinkage (OAS) for a covariance [d, d] of n examples.

    It lies in [0, 1]. As in scikit-learn, the terms of Chen et al. that vanish for large d are left
    out.
    """
    d = len(sigma)
    squares = float(sigma.square().sum()) / d**2  # tr(Sigma^2) / d^2
    mean = (float(sigma.trace()) / d) ** 2
    below = (n + 1) * (squares - mean / d)
    return 1.0 if below <= 0 else min(1.0, (squares + mean) / below)
