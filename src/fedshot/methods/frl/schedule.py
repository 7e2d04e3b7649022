"""The decay of the server's step size, and checks of options that count rounds."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedshot.core.errors import ConfigError
from fedshot.nn.optim import Optimizer


def check_rounds(*rounds: int | None) -> None:
    """Raise ConfigError for a negative number of rounds."""
    for count in rounds:
        if count is not None and count < 0:
            raise ConfigError(f"the number of rounds is {count}; expected a whole number from 0.")


def check_decay(decay: float, decay_round: int) -> None:
    """Raise ConfigError unless `decay` is in (0, 1] and `decay_round` is 0 or more."""
    if not 0 < decay <= 1 or decay_round < 0:
        raise ConfigError(
            f"decay is {decay} after round {decay_round}; expected a factor in (0, 1] and a round "
            "from 0."
        )


def decay_factor(decay: float, decay_round: int, exchanges: Tensor) -> float:
    """Return the factor that multiplies the step size after `exchanges` communication rounds."""
    return decay if decay_round and int(exchanges) >= decay_round else 1.0


def decayed(optimizer: Optimizer, decay: float, decay_round: int, exchanges: Tensor) -> Optimizer:
    """Return the optimiser with its step size after `exchanges` communication rounds."""
    return replace(optimizer, lr=optimizer.lr * decay_factor(decay, decay_round, exchanges))
