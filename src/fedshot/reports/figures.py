"""The parts of the page that are figures: what each shows, and what is said where there is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fedshot.core.text import joined, printable
from fedshot.reports import charts
from fedshot.reports.curves import Series
from fedshot.reports.curves import reported as told
from fedshot.reports.data_views import DataViews, Map, PartitionTable
from fedshot.reports.markup import e, figure
from fedshot.reports.run_files import Groups, Run
from fedshot.reports.significance import ComparisonRow

_CURVES = {
    "test": "Accuracy on the test episodes.",
    "validation": "Accuracy on validation episodes, which are not those that the table reports on.",
    "peeked": "NOT HONEST: accuracy on the test itself, round by round, by which the round was "
    "chosen. The number in the table is the best of these looks.",
    "training": "Accuracy of the clients on their own training episodes, mean over the round's "
    "cohort, of classes that they train on. It shows that training runs, not what the test asks; "
    "for that, see the table.",
}

_MANY = 20  # classes that want the whole width


def curves(
    curves: Sequence[Series], rows: Sequence[ComparisonRow], places: Mapping[str, int]
) -> Iterator[str]:
    """Yield the curves, those on one kind of episodes in one figure."""
    shown = [series for series in curves if len(series.rounds) > 1]
    for kind, words in _CURVES.items():
        some = [series for series in shown if series.episodes == kind]
        if not some:
            continue
        floors = {r.label: r.accuracy for r in rows if r.floor} if kind == "test" else {}
        known = [axis for axis in charts.AXES if all(getattr(s, axis) is not None for s in some)]
        names = joined([printable(s.label) for s in some])
        band = any(s.intervals is not None for s in some)
        yield figure(
            f"curves-{kind}",
            f"Accuracy on {charts.KINDS.get(kind, kind)} episodes: {names}",
            f"{words}{' Shaded: the 95 % interval over episodes.' if band else ''}",
            [(axis, charts.curves(some, floors, axis, places)) for axis in known],
        )


def reported(groups: Groups, places: Mapping[str, int]) -> Iterator[str]:
    """Yield what methods report of their training, one metric at a time."""
    found = told(groups)
    if found:
        names = sorted(found, key=lambda name: (name not in ("loss", "accuracy"), name != "loss"))
        yield figure(
            "metrics",
            f"What the methods report: {joined([printable(name) for name in names])}",
            "Means over the clients of a round, of what they train on and not of the test. What a "
            "name stands for is the method's: losses of two methods can be of different things.",
            [(name, charts.reported(found[name], name, places)) for name in names],
        )


def spread(groups: Groups, places: Mapping[str, int]) -> Iterator[str]:
    """Yield the accuracy of each client, and who has none."""
    clients, worst = {}, {}
    for label, runs in groups.items():
        tests = [run.result["test"] for run in runs if run.result]
        found = [float(a) for test in tests for a in test.get("clients", {}).values()]
        if found:
            clients[label] = found
            tenths = [t["worst_tenth"] for t in tests if t.get("worst_tenth") is not None]
            worst[label] = sum(tenths) / max(len(tenths), 1)
    if clients:
        names = joined([printable(label) for label in clients])
        yield figure(
            "spread",
            f"Accuracy of each client: {names}",
            "Each dot is a client's mean accuracy over the test episodes that it answered; seeds "
            "are put together. The diamond is the mean of the worst tenth.",
            [("clients", charts.spread(clients, worst, places))],
        )
    alone = [label for label in groups if label not in clients and _tested(groups[label])]
    if alone:
        names = joined([printable(label) for label in alone])
        yield (
            f"<p>{e(names)}: the server's one model answered the test for everybody, so there is "
            "no accuracy of single clients.</p>"
        )


def _tested(runs: Sequence[Run]) -> bool:
    return any(run.result for run in runs)


def holdings(looks: Mapping[str, DataViews]) -> Iterator[str]:
    """Yield who holds what; partitions that are alike once."""
    found = {
        k: seen.holdings for k, seen in looks.items() if isinstance(seen.holdings, PartitionTable)
    }
    alike: dict[PartitionTable, list[str]] = {}
    for label, held in found.items():
        alike.setdefault(held, []).append(printable(label))
    if alike:
        choices = [
            (joined(labels) if len(alike) > 1 else "", charts.who_holds(held))
            for held, labels in alike.items()
        ]
        yield figure(
            "holdings-plot",
            "How many examples of each base class each client holds",
            "Training examples of each base class at each client; blank: none.",
            choices,
            "wide" if any(len(held.classes) > _MANY for held in alike) else "square",
        )
    yield from _missing({k: v.holdings for k, v in looks.items() if isinstance(v.holdings, str)})


def confusion(groups: Groups) -> Iterator[str]:
    """Yield what was taken for what, seeds added up."""
    choices = []
    for label, runs in groups.items():
        counts = _sum([run.result["test"].get("confusion", {}) for run in runs if run.result])
        if counts:
            choices.append((label, charts.confusion(counts)))
    if choices:
        yield figure(
            "confusion-plot",
            "Which share of the queries of each class was taken for which class",
            "Test queries of each class (rows), and the share of them that was taken for each "
            "class (columns). An episode asks for some of the classes only, so a class is told "
            "apart from those it met. Seeds are put together.",
            choices,
            "square",
        )
    elif any(_tested(runs) for runs in groups.values()):
        yield ("<p>Not recorded: confusions are kept for tests of at most 30 classes.</p>")


def _sum(seeds: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    total: dict[str, dict[str, int]] = {}
    for counts in seeds:
        for y, row in counts.items():
            mine = total.setdefault(y, {})
            for said, n in row.items():
                mine[said] = mine.get(said, 0) + n
    return total


def novel(looks: Mapping[str, DataViews]) -> Iterator[str]:
    """Yield where each model puts the novel classes."""
    found = {label: seen.map for label, seen in looks.items() if isinstance(seen.map, Map)}
    if found:
        choices = [(label, charts.new_classes(seen)) for label, seen in found.items()]
        cut = next((m for m in found.values() if len(m.points) < m.classes), None)
        users = any(seen.users for seen in found.values())
        what = (
            "Examples of users who took no part in training"
            if users
            else ("Examples of classes that no client trained on")
        )
        some = f" {len(cut.points)} of the {cut.classes} novel classes are shown." if cut else ""
        yield figure(
            "map-plot",
            "Examples of novel classes by the features of the chosen round",
            f"{what}, placed by the features of the server's model at the chosen "
            "round (first seed): neighbours look alike to it. Two axes leave much out; "
            f"the accuracy is in the table, not here.{some}",
            choices,
            "square",
        )
    yield from _missing({k: v.map for k, v in looks.items() if isinstance(v.map, str)})


def _missing(reasons: Mapping[str, str]) -> Iterator[str]:
    alike: dict[str, list[str]] = {}
    for label, reason in reasons.items():
        alike.setdefault(reason, []).append(printable(label))
    for reason, labels in alike.items():
        yield f'<p class="small">Not shown for {e(joined(labels))}: {e(reason)}</p>'
