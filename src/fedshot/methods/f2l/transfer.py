"""Losses by which F2L's two models teach each other: mutual information and distillation.

Source: Wang et al., Federated Few-shot Learning, KDD 2023, sections 3.2 and 3.3.
Symbols: i, j rows of a task's support, D of them; C(j) those of the class of row j; h_phi, h_psi
features of server- and client-model; p_psi, z_psi the client-model's probabilities and logits over
the task's N classes; z_phi the server-model's logits of the same N classes; T_i temperature.

The first line of eq. (13) lacks the minus sign of its second line; the code follows the second.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedshot.nn.losses import cross_entropy
from fedshot.nn.prototypes import unit_rows

Denominator = Literal["all", "same_class"]
_LARGEST = 20.0  # above this exponent, sigmoid(exp(.)) is 1 in float64


def confidences(z_psi: Tensor, y: Tensor) -> Tensor:
    """Return the matrix a_ij = p_psi^i(y_j) / sum_{k in C(j)} p_psi^k(y_j), [D, D], eq. (9).

    Entries are 0 for i and j of different classes; columns sum to 1. `z_psi` is [D, N], `y` int64
    [D]. The matrix is computed as a softmax over logarithms, so that it is defined even for a class
    whose probabilities all underflow.
    """
    own = z_psi.log_softmax(-1).gather(1, y[:, None])
    return own.expand(-1, len(y)).masked_fill(~_same(y), -torch.inf).softmax(0)


def log_likelihoods(
    h_phi: Tensor, h_psi: Tensor, y: Tensor, tau: float, denominator: Denominator
) -> Tensor:
    """Return log b_ij, [D, D], where b_ij = p(h_psi^j | h_phi^i), a softmax of cosines / tau.

    This is eq. (10). "same_class" normalises over C(i), as printed, with -inf in other columns;
    "all" normalises over the whole support, as the sum in the derivation of eq. (8) does.
    """
    scores = unit_rows(h_phi) @ unit_rows(h_psi).T / tau
    if denominator == "same_class":
        scores = scores.masked_fill(~_same(y), -torch.inf)
    return scores.log_softmax(1)


def transfer_loss(
    h_phi: Tensor,
    h_psi: Tensor,
    z_psi: Tensor,
    y: Tensor,
    *,
    tau: float,
    denominator: Denominator,
) -> Tensor:
    """Return L_MI = -1/D sum_j sum_{i in C(j)} a_ij log b_ij in nats, eq. (13).

    With one shot, "same_class" has b = 1, and the loss is zero whatever the features are.
    """
    log_b = log_likelihoods(h_phi, h_psi, y, tau, denominator)
    log_b = log_b.masked_fill(~_same(y), 0.0)  # where a is 0 and log b may be -inf
    return -(confidences(z_psi, y) * log_b).sum() / len(y)


def contrastive_term(h_phi: Tensor, h_psi: Tensor, y: Tensor, way: int, tau: float) -> Tensor:
    """Return the loss that the authors' code has in place of L_MI: InfoNCE over classes.

    For each class c and shot j, the anchor is the server-model's feature of shot j + 1 of c. It is
    compared with the client-model's features of shot j of every class, and the one of c is the
    positive. Every class has the same number of shots, at least two.
    """
    order = y.argsort(stable=True)
    server, client = (unit_rows(h)[order].view(way, -1, h.shape[1]) for h in (h_phi, h_psi))
    scores = torch.einsum("cjd,ejd->jce", server[:, 1:], client[:, :-1]) / tau
    target = torch.arange(way, device=y.device).expand(len(scores), way)
    return cross_entropy(scores.flatten(0, 1), target.flatten())


def temperatures(z_phi: Tensor, y: Tensor) -> Tensor:
    """Return T_i = sigmoid(exp(max_{c != y_i} z_phi^i(c) - z_phi^i(y_i))) [n], eq. (19).

    They lie between 1/2, where the server-model is confident and right, and 1. No gradient flows
    through them.
    """
    z = z_phi.detach()
    right = z.gather(1, y[:, None])
    others = z.masked_fill(y[:, None] == torch.arange(z.shape[1], device=y.device), -torch.inf)
    return (others.amax(1) - right[:, 0]).clamp(max=_LARGEST).exp().sigmoid()


def distillation_loss(z_phi: Tensor, z_psi: Tensor, y: Tensor) -> Tensor:
    """Return L_KD = -1/|Q| sum_i sum_c q_phi^i(c) log q_psi^i(c), eqs. (16) to (18).

    q_phi and q_psi are softmaxes over the task's classes at temperature T_i; q_phi is a constant.
    """
    t = temperatures(z_phi, y)[:, None]
    q_phi = (z_phi.detach() / t).softmax(1)
    return -(q_phi * (z_psi / t).log_softmax(1)).sum(1).mean()


def share_targets_loss(z_phi: Tensor, z_psi: Tensor) -> Tensor:
    """Return the loss that the authors' code has in place of L_KD.

    The targets are the server-model's logits divided by their sum. They are not probabilities,
    because logits may be negative. They are not constants either, so the loss trains the
    server-model, too.
    """
    return -(z_phi / z_phi.sum(1, keepdim=True) * z_psi.log_softmax(1)).sum(1).mean()


def _same(y: Tensor) -> Tensor:
    """Return bool [D, D]: whether rows i and j are of the same class."""
    return y[:, None] == y[None]
