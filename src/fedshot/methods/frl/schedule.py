"""The decay of the server's step size, and checks of options that count rounds."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedshot.nn.optim import Optimizer


def decay_factor(decay: float, decay_round: int, exchanges: Tensor) -> float:
    """Return the factor that multiplies the step size after `exchanges` communication rounds."""
    return decay if decay_round and int(exchanges) >= decay_round else 1.0


def decayed(optimizer: Optimizer, decay: float, decay_round: int, exchanges: Tensor) -> Optimizer:
    """Return the optimiser with its step size after `exchanges` communication rounds."""
    return replace(optimizer, lr=optimizer.lr * decay_factor(decay, decay_round, exchanges))
