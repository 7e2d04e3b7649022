"""Detects missing values, which must not become a class or a client."""

from __future__ import annotations


def is_missing(value: object) -> bool:
    """Whether a value is None, NaN, NaT or pandas' NA."""
    if value is None:
        return True
    try:
        return bool(value != value)  # noqa: PLR0124  (true for NaN)
    except TypeError:  # NA, whose comparisons have no truth value
        return True
    except ValueError:  # an array
        return False
