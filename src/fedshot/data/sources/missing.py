"""Missing values, which must not become a class or a client of their own."""

from __future__ import annotations


def is_missing(value: object) -> bool:
    """Whether a value is None, or unequal to itself as NaN, NaT and pandas' NA are."""
    if value is None:
        return True
    try:
        return bool(value != value)  # noqa: PLR0124  (true for NaN)
    except TypeError:  # NA, whose comparisons have no truth value
        return True
    except ValueError:  # an array
        return False
