"""How many rounds, and when the server's steps become smaller."""

from __future__ import annotations

from torch import Tensor

from fedshot.core.errors import ConfigError


def check_rounds(*rounds: int | None) -> None:
    """Refuse a number of rounds below 0."""
    for count in rounds:
        if count is not None and count < 0:
            raise ConfigError(f"the number of rounds is {count}; expected a whole number from 0.")


def check_decay(decay: float, decay_round: int) -> None:
    """Refuse a factor or a round of the decay that cannot be."""
    if not 0 < decay <= 1 or decay_round < 0:
        raise ConfigError(
            f"decay is {decay} after round {decay_round}; expected a factor in (0, 1] and a round "
            "from 0."
        )


def slowed(decay: float, decay_round: int, exchanges: Tensor) -> float:
    """Return what a step is multiplied by after so many communication rounds."""
    return decay if decay_round and int(exchanges) >= decay_round else 1.0
