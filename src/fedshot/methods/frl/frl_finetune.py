"""Fine-tuning by FedAvg: a classifier of the base classes first, then a few federated rounds.

Base clients pre-train an encoder under a classifier over all base classes, by federated averaging.
At test a fresh head replaces the classifier, and the clients of a group fine-tune the whole model
for R rounds.

Source: Park et al., Few-Round Learning for Federated Learning, ICLR 2021 submission, section 4
(baseline fine-tuning via FedAvg); McMahan et al. 2017, algorithm 1.
Symbols: theta encoder and classifier; theta_r the model of round r; n_k examples of client k.
Departures from the paper: it does not say how the classifier is trained. Here a client uploads the
gradient of one batch, and the server takes an SGD step on the mean gradient, with FRL's step size
alpha and its decay. This is federated averaging of one local SGD step. With other optimisers the
server's step is not the average of the clients' steps: a client's first step of Adam depends only
on the gradient's signs. With prepare_by="clients" the clients take the steps. If images are
reassigned for each episode (partition "resampled"), batches come from the whole pool, so they are
IID.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedshot.core.ranges import AtLeast0, AtLeast1, NotNegative
from fedshot.methods.frl.preparation import Pretrained


@dataclass(frozen=True)
class FRLFinetune(Pretrained):
    """A classifier of the base classes, fine-tuned by a group of clients in a few rounds.

    The options are those of `Pretrained`.
    """

    name: ClassVar[str] = "frl_finetune"

    test_rounds: AtLeast0 = 3
    inner_lr: NotNegative = 0.1
    local_steps: AtLeast1 = 1
    inner_batch: AtLeast1 | None = None
