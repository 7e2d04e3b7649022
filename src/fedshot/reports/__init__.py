"""Tables, figures and pages made from runs."""

from fedshot.reports.affinity import affinity_groups, affinity_picture
from fedshot.reports.inspect import facts, pictures
from fedshot.reports.own_features import features_picture, own_features
from fedshot.reports.page import write_page
from fedshot.reports.plots import (
    Series,
    accuracy_curve,
    class_histogram,
    contact_sheet,
    partition_picture,
)
from fedshot.reports.runs import Run
from fedshot.reports.summary import summary
from fedshot.reports.table import as_json, as_text, comparison
from fedshot.reports.verdict import Row, Verdict, compare

__all__ = [
    "Row",
    "Run",
    "Series",
    "Verdict",
    "accuracy_curve",
    "affinity_groups",
    "affinity_picture",
    "as_json",
    "as_text",
    "class_histogram",
    "compare",
    "comparison",
    "contact_sheet",
    "facts",
    "features_picture",
    "own_features",
    "partition_picture",
    "pictures",
    "summary",
    "write_page",
]
