"""FedFSL-naive: MAML trained by federated averaging.

Each client minimises the loss of its queries after adapting to its supports, starting from the
server's weights; the server averages the weights. At test the averaged model adapts to the support.

Source: Fan & Huang, Federated Few-Shot Learning with Adversarial Learning, section 3 of the first
version; `fedshot.methods.fedfsl.federated_maml` has the equations, symbols and departures.
The paper allows one or several inner steps, and its equations have one (inner.steps=1). The default
here is five.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedshot.core.ranges import AtLeast0, AtLeast1
from fedshot.learners.maml import InnerLoop
from fedshot.methods.fedfsl.federated_maml import FederatedMaml, OptimizerState, Weighing
from fedshot.nn.optim import Optimizer
from fedshot.protocol.method import diagnostic


@dataclass(frozen=True)
class FedFSLNaive(FederatedMaml):
    """MAML, averaged over clients.

    The options are those of `FederatedMaml`.
    """

    name: ClassVar[str] = "fedfsl_naive"

    inner: InnerLoop = InnerLoop()
    local_steps: AtLeast1 = 10
    episodes_per_step: AtLeast1 = 1
    optimizer: Optimizer = Optimizer()
    common_questions: AtLeast0 = diagnostic(0)
    weigh_by: Weighing = "episodes"
    optimizer_state: OptimizerState = "reset"
