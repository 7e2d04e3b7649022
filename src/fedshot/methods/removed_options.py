"""Options that earlier versions of the package's methods had and that were removed.

Run folders and results of earlier versions list every option of a method. A removed option is
dropped if it has the value that now always applies; another value is an error.
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
"""Removed options of each method, with the value that now always applies; None: set by `mode`."""


def without_removed(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method's options without the removed ones.

    Raises ConfigError if a removed option has another value than the one that now always applies.
    """
    removed = REMOVED.get(method, {})
    for option in removed.keys() & options.keys():
        if options[option] != removed[option]:
            now = removed[option]
            rule = "`mode` now decides it" if now is None else f"its value is now always {now!r}"
            raise ConfigError(
                f"method.{option} is {options[option]!r}, and {method} no longer has this option: "
                f"{rule}. Remove it. To continue a run that was started with it, use the version "
                "of fedshot that started the run."
            )
    return {option: value for option, value in options.items() if option not in removed}
