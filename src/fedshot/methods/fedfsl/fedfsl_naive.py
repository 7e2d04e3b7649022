"""FedFSL-naive: MAML trained by federated averaging.

Each client minimises the loss of its queries after adapting to its supports, starting from the
server's weights; the server averages the weights. At test the averaged model adapts to the support.

Source: Fan & Huang, Federated Few-Shot Learning with Adversarial Learning, section 3 of the first
version; `fedshot.methods.fedfsl.federated_maml` has the equations, symbols and departures.
The paper allows one or several inner steps and writes one, inner.steps=1; the default is five.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedshot.learners.maml import InnerLoop
from fedshot.methods.fedfsl.federated_maml import FederatedMaml, OptimizerState, Weighing
from fedshot.nn.optim import Optimizer
from fedshot.protocol.method import diagnostic


@dataclass(frozen=True)
class FedFSLNaive(FederatedMaml):
    """MAML, averaged over clients.

    Args:
        model: backbone and head; the head is as wide as the widest episode.
        episode: shape of the training episodes.
        inner: how a model adapts to a support set.
        local_steps: optimiser steps per local update.
        episodes_per_step: episodes whose gradients are averaged in a step.
        optimizer: the clients' optimiser for the outer steps.
        common_questions: synthetic episodes on which each client uploads its predictions in every
            round, to report their `divergence`; 0 for none. It does not affect training.
        weigh_by: weight of a client in the mean: its "episodes", |B_k|, or its "examples", n_k.
        optimizer_state: "reset" the client's optimiser in every round, or "keep" its state.
    """

    name: ClassVar[str] = "fedfsl_naive"

    inner: InnerLoop = InnerLoop()
    local_steps: int = 10
    episodes_per_step: int = 1
    optimizer: Optimizer = Optimizer()
    common_questions: int = diagnostic(0)
    weigh_by: Weighing = "episodes"
    optimizer_state: OptimizerState = "reset"
