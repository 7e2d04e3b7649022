"""Tables, figures and pages made from runs. Figures and pages need the extra `reports`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedshot.core.extras import require
from fedshot.reports.curves import Series
from fedshot.reports.run_files import Groups, Run, grouped, ungrouped
from fedshot.reports.significance import ComparisonRow, Difference, baselines, compare, describe
from fedshot.reports.status import Status, as_table, runs_below
from fedshot.reports.summary import summary
from fedshot.reports.table import COLUMNS, as_json, as_text, cells, comparison, plain_text

if TYPE_CHECKING:
    from fedshot.reports.inspect import facts, pictures
    from fedshot.reports.page import write_page
    from fedshot.reports.run_views import data_views

__all__ = [
    "COLUMNS", "ComparisonRow", "Difference", "Groups", "Run", "Series", "Status", "as_json",
    "as_table", "as_text", "baselines", "cells", "compare", "comparison", "data_views", "describe",
    "facts", "grouped", "pictures", "plain_text", "runs_below", "summary", "ungrouped",
    "write_page",
]  # fmt: skip

_WITH_THE_EXTRA = {
    "data_views": "run_views",
    "facts": "inspect",
    "pictures": "inspect",
    "write_page": "page",
}


def __getattr__(name: str) -> Any:
    """Import a function that needs the extra `reports` when it is first used."""
    if name not in _WITH_THE_EXTRA:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("reports", "a figure or page")
    return getattr(importlib.import_module(f"{__name__}.{_WITH_THE_EXTRA[name]}"), name)
