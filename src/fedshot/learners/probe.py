"""Probes: classifiers on frozen features of a support set.

Features are first scaled to length 1. `mean`: the cosine with the mean of each class. `logistic`:
scikit-learn's logistic regression (Tian et al. 2020, RFS). `ridge`: linear regression on one-hot
targets, W = X^T (X X^T + lambda I)^-1 Y (Bertinetto et al. 2019, R2-D2); for n support examples
this inverts an [n, n] matrix. `finetune`: gradient steps on a new linear head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (the usual name)
from torch import Tensor

from fedshot.core.ranges import Above0, AtLeast1, check_options
from fedshot.core.tree import Tree
from fedshot.nn.gradients import descend
from fedshot.nn.losses import cross_entropy
from fedshot.nn.masking import mask_logits
from fedshot.nn.prototypes import class_means, cosine_logits, members, unit_rows

Probe = Literal["mean", "logistic", "ridge"]

_LONGEST = 1000  # iterations of the logistic regression's solver


@dataclass(frozen=True)
class FeatureProbe:
    """Computes the logits of query features from labelled support features.

    Args:
        probe: "mean", "logistic", "ridge" or "finetune".
        logistic_c: C of the logistic regression: larger values regularise less.
        ridge_lambda: weight of the ridge penalty.
        finetune_lr: step size of the new head.
        finetune_steps: gradient steps on the whole support set.
    """

    probe: Literal["mean", "logistic", "ridge", "finetune"] = "mean"
    logistic_c: Above0 = 1.0
    ridge_lambda: Above0 = 1.0
    finetune_lr: Above0 = 0.1
    finetune_steps: AtLeast1 = 100

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def adds_examples(self) -> bool:
        """Whether the probe only needs sums over support examples, such as X^T X and X^T Y."""
        return self.probe in ("mean", "ridge")

    def __call__(self, support: Tensor, y: Tensor, query: Tensor, way: int) -> Tensor:
        """Return logits [queries, way]; support is [n, d], y int64 [n], query [queries, d].

        A class without support examples is never predicted.
        """
        held = members(y, way).any(1)
        if self.adds_examples:  # logits of a class do not depend on missing classes
            return mask_logits(self._logits(support, y, query, way), held)
        if bool(held.all()):
            return self._logits(support, y, query, way)
        known = (y >= 0) & (y < way)
        renumbered = (held.cumsum(0) - 1)[y[known]]
        found = self._logits(support[known], renumbered, query, int(held.sum()))
        logits = found.new_zeros(len(query), way).index_copy(1, held.nonzero()[:, 0], found)
        return mask_logits(logits, held)

    def _logits(self, support: Tensor, y: Tensor, query: Tensor, way: int) -> Tensor:
        support, query = unit_rows(support), unit_rows(query)
        if self.probe == "mean":
            return cosine_logits(query, class_means(support, y, way), 1.0)
        if self.probe == "ridge":
            return ridge(support, y, query, way, self.ridge_lambda)
        if self.probe == "logistic":
            return logistic(support, y, query, way, self.logistic_c)
        return finetuned(support, y, query, way, lr=self.finetune_lr, steps=self.finetune_steps)


def ridge(support: Tensor, y: Tensor, query: Tensor, way: int, weight: float) -> Tensor:
    """Return the logits q X^T (X X^T + weight I)^-1 Y of ridge regression, [queries, way].

    X are the support features [n, d], Y their one-hot labels, and q the query features
    [queries, d]. The computation is in float64.
    """
    x, q = support.double(), query.double()
    targets = (y[:, None] == torch.arange(way, device=y.device)).double()
    kernel = x @ x.T + weight * torch.eye(len(x), dtype=x.dtype, device=x.device)
    weights: Tensor = torch.linalg.solve(kernel, targets)  # one row for each support example
    return (q @ x.T @ weights).to(query.dtype)


def logistic(support: Tensor, y: Tensor, query: Tensor, way: int, c: float) -> Tensor:
    """Return the logits [queries, way] of scikit-learn's logistic regression, fitted in float64.

    Its L2 penalty has the weight 1/c. If any feature is not finite, all logits are NaN, which
    counts as a wrong prediction.
    """
    if way == 1:  # scikit-learn refuses it
        return query.new_zeros(len(query), 1)
    if not (support.isfinite().all() and query.isfinite().all()):  # scikit-learn refuses these, too
        return query.new_full((len(query), way), torch.nan)
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=c, max_iter=_LONGEST)
    model.fit(support.detach().double().cpu().numpy(), y.cpu().numpy())
    found = model.decision_function(query.detach().double().cpu().numpy())
    if way == 2:  # scikit-learn returns one column, the difference between the two classes
        found = np.stack([np.zeros_like(found), found], axis=1)
    return torch.from_numpy(found).to(query)


def finetuned(
    support: Tensor, y: Tensor, query: Tensor, way: int, *, lr: float, steps: int
) -> Tensor:
    """Return the logits [queries, way] of a linear head after gradient steps on the support set.

    The head starts at zero. The cross-entropy is convex, so with many steps the start hardly
    matters.
    """
    head = {"weight": support.new_zeros(way, support.shape[1]), "bias": support.new_zeros(way)}
    support = support.detach()

    def loss(w: Tree, step: int) -> Tensor:
        del step
        return cross_entropy(F.linear(support, w["weight"], w["bias"]), y)

    head = descend(loss, head, lr=lr, steps=steps, second_order=False)
    return F.linear(query, head["weight"], head["bias"])
