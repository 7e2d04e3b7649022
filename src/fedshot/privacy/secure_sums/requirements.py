"""What a run needs for secure sums. This module works without the extra `secure`."""

from __future__ import annotations

from fedshot.core.errors import ConfigError
from fedshot.core.extras import require
from fedshot.privacy.secure_sums.neighbourhoods import MIN_CLIENTS
from fedshot.protocol.method import Method


def check_run(method: Method[object], cohort: int) -> None:
    """Raise ConfigError unless the method can use secure sums with cohorts of `cohort` clients."""
    require("secure", "run.secure_sums")
    if method.traits.gathers is not None:
        raise needs_each(method.name, *method.traits.gathers)
    if cohort < MIN_CLIENTS:
        raise ConfigError(
            f"run.secure_sums is true, and {cohort} clients take part in a round; a sum over fewer "
            f"than {MIN_CLIENTS} hides none of them. Raise run.cohort or partition.clients, or set "
            "run.secure_sums to false."
        )


def needs_each(method: str, exchange: str, part: str) -> ConfigError:
    """Return the error for a part of which a method needs each client's, not only the sum."""
    return ConfigError(
        f"run.secure_sums is true, and method {method!r} needs the part {part!r} of each client in "
        f"its exchange {exchange!r}, not only a sum. Set run.secure_sums to false, or choose "
        "another method or option."
    )
