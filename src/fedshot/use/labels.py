"""Check labels of any type, and encode them as numbers."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from fedshot.core.errors import InputError
from fedshot.data.sources.missing import is_missing
from fedshot.use.inputs import array_of

Labels: TypeAlias = np.ndarray[Any, Any]


def labels_of(y: Any, n: int, what: str = "label") -> Labels:
    """Return the labels of n examples as a 1-d array; `what` names one of them in errors.

    Raises InputError if their number is not n, if a label is missing (None, NaN, NaT, infinite or
    masked), or if labels are fractions.
    """
    # imported late: scikit-learn would slow down the start of every command
    from sklearn.utils import column_or_1d
    from sklearn.utils.multiclass import check_classification_targets

    if y is None:
        raise InputError(
            "the classifier requires y to be passed, but the target y is None: it learns from "
            "labelled examples."
        )
    if isinstance(y, Tensor):
        y = array_of(y, "the labels")
    if isinstance(y, list | tuple):  # tensors are compared by object, not by value
        y = [v.item() if isinstance(v, Tensor | np.ndarray) and v.ndim == 0 else v for v in y]
    found = _objects(y) if isinstance(y, list | tuple) else None
    if found is None:
        try:
            found = column_or_1d(y, warn=True)
        except ValueError as error:
            reason = str(error).rstrip(".")
            raise InputError(f"{reason}. Expected one {what} for each example.") from error
    if len(found) != n:
        raise InputError(
            f"there are {n} examples, and a {what} is given for {len(found)}; expected one for "
            "each. Found input variables with inconsistent numbers of samples."
        )
    if absent := _absent(y, found):
        first = absent[0]
        others = f", and {len(absent) - 1} more" if len(absent) > 1 else ""
        number = what == "label" and found.dtype.kind == "f"
        known = " Input y contains NaN or infinity." if number else ""
        raise InputError(
            f"the {what} of example {first} is missing ({found[first]!s}{others}); expected one "
            f"for each example. Leave out the examples that have no {what}.{known}"
        )
    if found.dtype.kind in "fc":
        try:
            check_classification_targets(found)
        except ValueError as error:
            if what != "label":
                raise InputError(
                    f"a {what} is a number with a fraction; expected names or whole numbers."
                ) from None
            raise InputError(f"{str(error).rstrip('.')}. Labels name classes.") from error
    return found


def _absent(y: Any, found: Labels) -> list[int]:
    """Return the indices of missing labels in `y`."""
    if isinstance(y, np.ma.MaskedArray):
        return np.flatnonzero(np.ma.getmaskarray(y)).tolist()
    if found.dtype.kind == "f":
        return np.flatnonzero(~np.isfinite(found)).tolist()
    if found.dtype.kind in "mM":
        return np.flatnonzero(np.isnat(found)).tolist()
    if found.dtype != object:
        return []
    return [i for i, label in enumerate(found.tolist()) if is_missing(label)]


def encoded(labels: Labels) -> tuple[Labels, Labels]:
    """Return (classes, index of each label's class).

    Classes are sorted or, if they cannot be compared, in the order of their first occurrence.
    """
    try:
        classes, codes = np.unique(labels, return_inverse=True)
        return classes, codes.reshape(-1)
    except TypeError:
        index: dict[Any, int] = {}
        codes = np.array([index.setdefault(label, len(index)) for label in labels])
        return _object_array(list(index)), codes


def _objects(y: Sequence[Any]) -> Labels | None:
    """Return an array of objects if numpy would convert the labels to another type; else None."""
    kinds = {
        str if isinstance(label, str) else float if isinstance(label, numbers.Number) else object
        for label in y
    }
    nested = any(isinstance(label, list | np.ndarray) for label in y)
    if nested or (len(kinds) < 2 and object not in kinds):
        return None
    return _object_array(y)


def _object_array(values: Sequence[Any]) -> Labels:
    found = np.empty(len(values), dtype=object)
    found[:] = list(values)
    return found
