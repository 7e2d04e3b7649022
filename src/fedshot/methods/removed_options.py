"""Options that methods of this package no longer have.

Run folders and results of earlier versions list every option. A removed one at the value that
always holds today changes nothing and is dropped; any other value is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedshot.core.errors import ConfigError

REMOVED: dict[str, dict[str, Any]] = {
    "f2l": {"kd_squared": None, "test_head": None},
    "fedfsl_mi": {"clip": None},
    "fedfsl_mi_adv": {
        "clip": None, "alternation": None, "second_head": "fresh", "noise": 0.01,
        "discrepancy": "kl",
    },
    "frl": {
        "through_prototypes": True, "own_sample": "included", "meta_step": "server",
        "head": "learned", "distance": "plain", "one_class": "meta",
    },
    "frl_frozen": {"distance": "plain"},
    "pfedfsl": {"noise": 0.0},
}  # fmt: skip
"""By method and option: the value that always holds; None where `mode` decides."""


def without_removed(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a method without removed ones.

    Raises ConfigError for a removed option with a value that no longer exists.
    """
    removed = REMOVED.get(method, {})
    for option in removed.keys() & options.keys():
        if options[option] != removed[option]:
            holds = "mode decides" if removed[option] is None else f"{removed[option]!r} holds"
            raise ConfigError(
                f"method.{option} is {options[option]!r}, and {method} no longer has this option: "
                f"{holds}. Remove it; a run that was started with it needs the version of fedshot "
                "that started it."
            )
    return {option: value for option, value in options.items() if option not in removed}
