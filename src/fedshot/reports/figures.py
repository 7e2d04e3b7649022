"""The report's figures with captions, or sentences on why a figure is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fedshot.core.text import joined, named_client, printable
from fedshot.evaluation.episodic_test import total_confusion
from fedshot.reports import charts
from fedshot.reports.curves import Series, metric_lines
from fedshot.reports.run_files import Groups, Run
from fedshot.reports.run_views import DataViews, Map, PartitionTable
from fedshot.reports.significance import ComparisonRow

_CAPTIONS = {
    "test": "Accuracy on the test episodes.",
    "validation": "Accuracy on validation episodes, which are not those of the table.",
    "peeked": "NOT HONEST: accuracy on the test itself after each validated round, by which the "
    "round was chosen. The table reports the best of these values.",
    "training": "Accuracy of the clients on their own training episodes, mean over the cohort of "
    "the round. These episodes contain classes that the clients train on, so the curve shows "
    "that training works, not how well the model does on the test; see the table for that.",
}
_WIDE = 20  # number of classes above which a figure takes the whole width


class FigureBlock(NamedTuple):
    """A figure of the page.

    Args:
        id: HTML id of the element that shows the figure.
        title: description of the figure for screen readers.
        caption: text below the figure.
        choices: (text of a button, plotly figure that the button shows). The first figure is shown
            initially; a single figure has no button.
        shape: "wide", or "square" for figures that should not be stretched.
    """

    id: str
    title: str
    caption: str
    choices: Sequence[tuple[str, Any]]
    shape: str = "wide"


def curves(
    curves: Sequence[Series], rows: Sequence[ComparisonRow], colours: Mapping[str, int]
) -> Iterator[FigureBlock]:
    """Yield a figure of accuracy curves for each kind of episodes that has curves.

    The kinds are the values of `Series.episodes`.
    """
    for kind, words in _CAPTIONS.items():
        some = [s for s in curves if s.episodes == kind and len(s.rounds) > 1]
        if not some:
            continue
        baselines = {r.label: r.accuracy for r in rows if r.baseline} if kind == "test" else {}
        known = [axis for axis in charts.AXES if all(getattr(s, axis) is not None for s in some)]
        names = joined([printable(s.label) for s in some])
        band = any(s.intervals is not None for s in some)
        yield FigureBlock(
            f"curves-{kind}",
            f"Accuracy on {charts.KINDS.get(kind, kind)} episodes: {names}",
            f"{words}{' Shaded: the 95 % interval over episodes.' if band else ''}",
            [(axis, charts.curves(some, baselines, axis, colours)) for axis in known],
        )


def training_metrics(groups: Groups, colours: Mapping[str, int]) -> Iterator[FigureBlock]:
    """Yield a figure of the metrics that methods report in training, with a button per metric."""
    found = metric_lines(groups)
    if found:
        names = sorted(found, key=lambda name: (name not in ("loss", "accuracy"), name != "loss"))
        yield FigureBlock(
            "metrics",
            f"Training metrics: {joined([printable(name) for name in names])}",
            "Means over the clients of a round, on training data. Each method defines its own "
            "metrics, so the losses of two methods may be different quantities.",
            [(name, charts.training_metric(found[name], name, colours)) for name in names],
        )


def spread(groups: Groups, colours: Mapping[str, int]) -> Iterator[FigureBlock | str]:
    """Yield a figure of each client's accuracy, and a sentence on methods without client scores."""
    clients, worst = {}, {}
    for label, runs in groups.items():
        tests = [run.result["test"] for run in runs if run.result]
        found = [(named_client(int(c), run.client_names), float(a)) for run in runs if run.result
                 for c, a in run.result["test"].get("clients", {}).items()]  # fmt: skip
        if found:
            clients[label] = found
            tenths = [t["worst_tenth"] for t in tests if t.get("worst_tenth") is not None]
            worst[label] = sum(tenths) / max(len(tenths), 1)
    if clients:
        yield FigureBlock(
            "spread",
            f"Accuracy of each client: {joined([printable(label) for label in clients])}",
            "Each dot is the mean accuracy of one client over the test episodes that it predicted, "
            "for all seeds together. The diamond is the mean of the worst tenth.",
            [("clients", charts.spread(clients, worst, colours))],
        )
    central = [printable(k) for k, runs in groups.items() if k not in clients and _tested(runs)]
    if central:
        yield (
            f"{joined(central)}: only the server's model was tested, so there are no accuracies of "
            "single clients."
        )


def _tested(runs: Sequence[Run]) -> bool:
    return any(run.result for run in runs)


def holdings(views: Mapping[str, DataViews]) -> Iterator[FigureBlock | str]:
    """Yield a figure of each client's examples per class, with a button for each partition.

    Methods with equal partitions share a button. Also yields sentences that say for which methods
    the figure is missing, and why.
    """
    alike: dict[PartitionTable, list[str]] = {}
    for label, view in views.items():
        if isinstance(view.holdings, PartitionTable):
            alike.setdefault(view.holdings, []).append(printable(label))
    if alike:
        yield FigureBlock(
            "holdings-plot",
            "How many training examples of each base class each client has",
            "Training examples of each base class at each client; blank: none.",
            [(joined(labels), charts.partition(held)) for held, labels in alike.items()],
            "wide" if any(len(held.classes) > _WIDE for held in alike) else "square",
        )
    yield from _missing({k: v.holdings for k, v in views.items() if isinstance(v.holdings, str)})


def confusion(groups: Groups) -> Iterator[FigureBlock | str]:
    """Yield a figure of confusion matrices, one for each method, summed over seeds.

    If runs were tested but no matrix was recorded, yields a sentence that says so.
    """
    choices = []
    for label, runs in groups.items():
        total = total_confusion((run.result or {}).get("test", {}) for run in runs)
        if total:
            choices.append((label, charts.confusion(total)))
    if choices:
        yield FigureBlock(
            "confusion-plot",
            "Share of the queries of each class that was predicted as each class",
            "Rows are the true classes of the test queries, columns the predicted classes; a row "
            "adds up to 100 %. An episode contains only some of the classes, so a class can be "
            "confused only with the others of its episodes. All seeds together.",
            choices,
            "square",
        )
    elif any(_tested(runs) for runs in groups.values()):
        yield "Not recorded: confusions are kept for tests of at most 30 classes."


def novel_classes(views: Mapping[str, DataViews]) -> Iterator[FigureBlock | str]:
    """Yield a figure of novel examples in feature space, with a button for each method's model.

    Also yields sentences that say for which methods the figure is missing, and why.
    """
    found = {label: view.map for label, view in views.items() if isinstance(view.map, Map)}
    if found:
        cut = next((m for m in found.values() if len(m.points) < m.classes), None)
        what = "Examples of classes that no client trained on"
        if any(one.users for one in found.values()):
            what = "Examples of users who took no part in training"
        some = f" {len(cut.points)} of the {cut.classes} novel classes are shown." if cut else ""
        yield FigureBlock(
            "map-plot",
            "Examples of novel classes by the features of the chosen round",
            f"{what}, projected from the features of the server's model at the chosen round (first "
            "seed). Neighbours have similar features. Two axes show only part of the variance, so "
            f"read accuracies from the table, not from this figure.{some}",
            [(label, charts.novel_classes(one)) for label, one in found.items()],
            "square",
        )
    yield from _missing({k: v.map for k, v in views.items() if isinstance(v.map, str)})


def _missing(reasons: Mapping[str, str]) -> Iterator[str]:
    alike: dict[str, list[str]] = {}
    for label, reason in reasons.items():
        alike.setdefault(reason, []).append(printable(label))
    for reason, labels in alike.items():
        yield f"Not shown for {joined(labels)}: {reason}"
