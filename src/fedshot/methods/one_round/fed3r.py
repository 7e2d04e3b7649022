"""FED3R: ridge regression on the features of a fixed encoder, from sums in one round.

Source: Fani et al. 2024, Accelerating Heterogeneous Federated Learning with Closed-form
Classifiers (ICML): the weights of all classes are W = (A + lambda I)^-1 B, with A the sum of h h^T
and column c of B the sum of h over class c, both added up over the clients.
Symbols: A, B as above; lambda `ridge_lambda`; X the support features of new classes.
Departures from the paper: a plain sum replaces the recursion over new clients; random features,
fine-tuning, and options of the authors' code (an intercept, columns of W scaled to length 1) are
left out. Each new class adds its support features to A and a column to B, as
recursive ridge regression adds classes; base examples are then negative examples of new classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedshot.core.ranges import Above0
from fedshot.methods.one_round.feature_sums import FeatureSums, Labelled, OneRoundMethod


@dataclass(frozen=True)
class FED3R(OneRoundMethod):
    """Ridge regression on one-hot labels, from sums in one round.

    Args:
        ridge_lambda: lambda, the weight of the ridge penalty.
    """

    name: ClassVar[str] = "fed3r"

    ridge_lambda: Above0 = 1.0

    def classifier(self, total: FeatureSums) -> Callable[[Labelled, Tensor], Tensor]:
        """Return the function that computes the logits h^T (A + X^T X + lambda I)^-1 B."""
        d = total.sums.shape[1]
        identity = torch.eye(d, dtype=total.sums.dtype, device=total.sums.device)
        a = total.moment() + self.ridge_lambda * identity
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(a))

        def logits(labelled: Labelled, query: Tensor) -> Tensor:
            x, b = labelled.new(), labelled.sums()[0].T
            # The inverse of A + lambda I + X^T X, by Woodbury's identity, with [m, m] matrices.
            px = inverse @ x.T
            inner = torch.eye(len(x), dtype=x.dtype, device=x.device) + x @ px
            pb = inverse @ b
            weights: Tensor = pb - px @ torch.linalg.solve(inner, x @ pb)
            return query @ weights

        return logits
