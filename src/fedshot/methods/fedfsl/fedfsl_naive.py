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

from fedshot.methods.fedfsl.federated_maml import FederatedMaml


@dataclass(frozen=True)
class FedFSLNaive(FederatedMaml):
    """MAML, averaged over clients.

    The options are those of `FederatedMaml`.
    """

    name: ClassVar[str] = "fedfsl_naive"
