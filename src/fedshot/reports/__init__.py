"""Tables, figures and pages made from runs."""

from fedshot.reports.affinity_plots import affinity_groups, affinity_picture
from fedshot.reports.curves import Series
from fedshot.reports.data_views import DataViews, data_views
from fedshot.reports.inspect import facts, pictures
from fedshot.reports.own_features import features_picture, own_features
from fedshot.reports.page import write_page
from fedshot.reports.partition_plots import class_histogram, partition_picture
from fedshot.reports.run_files import Groups, Run, grouped, ungrouped
from fedshot.reports.sheet import contact_sheet
from fedshot.reports.significance import ComparisonRow, Difference, baselines, compare, describe
from fedshot.reports.status import Status, as_table, runs_below
from fedshot.reports.summary import summary
from fedshot.reports.table import COLUMNS, as_json, as_text, cells, comparison, plain_text

__all__ = [
    "COLUMNS", "ComparisonRow", "DataViews", "Difference", "Groups", "Run", "Series", "Status",
    "affinity_groups", "affinity_picture", "as_json", "as_table", "as_text", "baselines", "cells",
    "class_histogram", "compare", "comparison", "contact_sheet", "data_views", "describe", "facts",
    "features_picture", "grouped", "own_features", "partition_picture", "pictures", "plain_text",
    "runs_below", "summary", "ungrouped", "write_page",
]  # fmt: skip
