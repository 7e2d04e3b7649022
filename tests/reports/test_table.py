"""Figures of a comparison by hand, several seeds, and what is said of a method below the floor."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from scipy import stats

from fedshot.core.errors import CheckpointError, ConfigError
from fedshot.core.text import megabytes, printable
from fedshot.evaluation.episodic_test import Score
from fedshot.reports.run_files import Run, grouped
from fedshot.reports.significance import ComparisonRow, compare, describe
from fedshot.reports.summary import summary
from fedshot.reports.table import as_json, as_text, comparison, remark

MINUS = "\N{MINUS SIGN}"
T2 = float(stats.t.ppf(0.975, 2))  # of three episodes


def score(marks: tuple[float, ...], tasks: str = "t", **more: Any) -> dict[str, Any]:
    mean = sum(marks) / len(marks)
    variance = sum((m - mean) ** 2 for m in marks) / (len(marks) - 1)
    return {
        "accuracy": mean,
        "interval": T2 * math.sqrt(variance / len(marks)),
        "episodes": len(marks),
        "unanswered": 0,
        "diverged": 0,
        "tasks": tasks,
        "transductive": False,
        "clients": {},
        "worst_tenth": None,
        "confusion": {},
        "spread": None,
        "missing": [],
        "per_episode": list(marks),
    } | more


EMPTY = {"metrics": {}, "validation": None, "best_round": 0, "faults": [], "skipped": None}


def run(marks: tuple[float, ...], seed: int = 0, tasks: str = "t", **settings: Any) -> Run:
    return Run(
        label=f"run-{seed}",
        folder=Path(f"run-{seed}"),
        settings={"name": f"run-{seed}", "seed": seed, "run": {"rounds": 2}, **settings},
        records=[{"round": r, "seconds": 1.5} | EMPTY for r in range(3)],
        result={"test": score(marks, tasks), "bytes_down": 3_000_000 + seed, "bytes_up": 500_000},
        environment={},
    )


def test_one_seed_keeps_the_figures_of_its_test():
    row = ComparisonRow.of_runs("a", [run((0.2, 0.4, 0.6))])
    assert row.accuracy == pytest.approx(0.4)
    assert row.interval == pytest.approx(T2 * 0.2 / math.sqrt(3))
    assert (row.episodes, row.seeds, row.seconds) == (3, 1, 4.5)
    assert (row.bytes_down, row.bytes_up, row.note) == (3_000_000, 500_000, "")


def test_several_seeds_are_averaged_episode_by_episode_before_the_interval_is_taken():
    row = ComparisonRow.of_runs("a", [run((0.2, 0.4, 0.9), 0), run((0.4, 0.6, 0.5), 2)])
    # Means over seeds are 0.3, 0.5, 0.7: mean 0.5, standard deviation 0.2.
    assert row.accuracy == pytest.approx(0.5)
    assert row.interval == pytest.approx(T2 * 0.2 / math.sqrt(3))
    assert row.per_episode == pytest.approx((0.3, 0.5, 0.7))
    assert row.seeds == 2
    assert row.bytes_down == 3_000_001
    assert row.note == "std over seeds 0.00 points"


def test_the_note_gives_the_standard_deviation_over_seeds():
    row = ComparisonRow.of_runs("a", [run((0.4, 0.6), 0), run((0.6, 0.8), 1)])
    assert row.note == "std over seeds 14.14 points"  # of 0.5 and 0.7


def test_the_note_says_for_how_many_seeds_the_untrained_model_was_tested():
    runs = [run((0.4, 0.6), seed) for seed in range(3)]
    for one, round in zip(runs, (0, 2, 0), strict=True):
        assert one.result is not None
        one.result["round"] = round
    note = ComparisonRow.of_runs("a", runs).note
    assert note.startswith("round 0 (before training) for 2 of 3 seeds; ")
    assert ComparisonRow.of_runs("a", runs[:1]).note == "round 0 (before training)"
    assert ComparisonRow.of_runs("a", runs[1:2]).note == ""
    runs[0].settings["run"] = {"rounds": 0}  # no training was asked for
    assert ComparisonRow.of_runs("a", runs[:1]).note == ""


def test_the_order_of_seeds_does_not_matter():
    runs = [run((0.1, 0.5, 0.6), s) for s in range(3)]
    assert ComparisonRow.of_runs("a", runs) == ComparisonRow.of_runs("a", runs[::-1])


def test_seeds_whose_episodes_cannot_be_matched_take_the_mean_interval():
    lost = run((0.4, 0.6), 1)
    assert lost.result is not None
    lost.result["test"] |= {"unanswered": 1}
    whole = run((0.2, 0.4, 0.6), 0)
    row = ComparisonRow.of_runs("a", [whole, lost])
    halves = [whole.test["interval"], lost.test["interval"]]
    assert row.interval == pytest.approx(sum(halves) / 2)
    assert row.per_episode == ()
    assert "1 unanswered" in row.note


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "has no runs"),
        ([run((0.1, 0.2)), run((0.1, 0.2))], "seed 0 occurs twice"),
        ([run((0.1, 0.2)), run((0.1, 0.2), 1, "other")], "different test episodes"),
        ([run((0.1, 0.2)), run((0.1, 0.2), 1, data="b")], "data was 'not set', is 'b'"),
    ],
)
def test_runs_that_are_not_seeds_of_one_thing_are_refused(runs, message):
    with pytest.raises(ConfigError, match=message):
        ComparisonRow.of_runs("a", runs)


def test_a_score_and_its_dict_make_the_same_row():
    found = Score(0.5, 0.1, 2, 0, 0, "t", False, {}, None, (0.4, 0.6))
    one, other = ComparisonRow("a", found), ComparisonRow("a", found.to_json())
    for name in ("accuracy", "interval", "episodes", "tasks", "per_episode"):
        assert getattr(one, name) == getattr(other, name)


def test_rows_on_the_same_episodes_are_compared_episode_by_episode():
    better = ComparisonRow("a", score((0.30, 0.61, 0.90)))
    floor = ComparisonRow("floor", score((0.20, 0.50, 0.80)), baseline=True)
    verdict = compare(better, floor)
    assert verdict.paired
    assert verdict.outcome == "above"
    assert verdict.difference == pytest.approx(0.31 / 3)
    apart = compare(ComparisonRow("a", score((0.30, 0.61, 0.90), "other")), floor)
    assert not apart.paired
    assert apart.outcome == "unclear"
    # Each interval is t s; the degrees of freedom of two variances of 3 episodes are joined.
    a, b = (row.interval / T2 for row in (better, floor))
    freedom = (a**2 + b**2) ** 2 / (a**4 / 2 + b**4 / 2)
    assert apart.interval == pytest.approx(stats.t.ppf(0.975, freedom) * math.hypot(a, b))
    gains = (0.10, 0.11, 0.10)
    exact = stats.ttest_1samp(gains, 0).confidence_interval(0.95)
    assert verdict.interval == pytest.approx((exact.high - exact.low) / 2)


def test_rows_whose_test_is_unknown_are_not_compared_episode_by_episode():
    one, other = (ComparisonRow(name, score((0.3, 0.6, 0.9), tasks="")) for name in "ab")
    assert not compare(one, other).paired


def test_runs_by_two_files_of_a_method_are_two_things():
    mine, other = run((0.2, 0.4)), run((0.3, 0.5), 1)
    mine.environment["method_file"] = "mine.py aaaa"
    other.environment["method_file"] = "mine.py bbbb"
    with pytest.raises(ConfigError, match=r"was mine.py aaaa in one and mine.py bbbb in the other"):
        ComparisonRow.of_runs("a", [mine, other])
    assert len(grouped([mine, other])) == 2
    other.environment["method_file"] = "mine.py aaaa"
    assert len(grouped([mine, other])) == 1
    changed = {"after_round": 1, "environment": {"method_file": "mine.py bbbb"}}
    other.environment["resumed"] = [changed]
    assert len(grouped([mine, other])) == 2


def seeds(accuracies: tuple[float, ...], spread: float = 0.1) -> list[Run]:
    """Return runs that differ in their seed, with these accuracies over 40 episodes."""
    marks = [tuple(a + spread * (-1) ** u for u in range(40)) for a in accuracies]
    return [run(one, s, lr=str(spread)) for s, one in enumerate(marks)]


def test_a_lead_that_other_seeds_would_undo_is_no_lead():
    """Episode by episode a is above b by exactly 2 points; its seeds differ by as much as 20."""
    a, b = (
        ComparisonRow.of_runs("a", seeds((0.4, 0.5, 0.6))),
        ComparisonRow.of_runs("b", seeds((0.48, 0.49, 0.47))),
    )
    verdict = compare(a, b)
    assert (verdict.paired, verdict.seeds, verdict.outcome) == (True, True, "unclear")
    v = 0.1**2 / 3 + 0.01**2 / 3
    exact = stats.ttest_ind((0.4, 0.5, 0.6), (0.48, 0.49, 0.47), equal_var=False)
    low, high = exact.confidence_interval(0.95)
    assert verdict.interval == pytest.approx((high - low) / 2)  # Welch's; v is of seeds alone
    assert verdict.interval > 1.96 * math.sqrt(v)
    assert "The interval covers episodes and seeds, 3 and 3." in describe(a, verdict)
    close = compare(a, ComparisonRow.of_runs("c", seeds((0.4, 0.5, 0.6), 0.3)))
    assert close.outcome == "unclear"


def test_a_difference_of_single_seeds_is_one_of_these_training_runs():
    a, b = (
        ComparisonRow.of_runs("a", [run((0.5, 0.6, 0.7))]),
        ComparisonRow.of_runs("b", [run((0.3, 0.4, 0.52))]),
    )
    verdict = compare(a, b)
    assert (verdict.outcome, verdict.seeds) == ("above", False)
    assert "for these training runs; another seed may differ" in describe(a, verdict)
    assert "points, for these training runs; another seed may differ" in summary([a, b])
    floor = ComparisonRow("f", score((0.1, 0.2, 0.32)), baseline=True)
    assert "beats f, for these training runs; another seed may differ." in summary([a, floor])
    both = [
        ComparisonRow.of_runs(n, seeds(marks))
        for n, marks in (("a", (0.6, 0.61)), ("b", (0.3, 0.31)))
    ]
    assert compare(*both).outcome == "above"
    assert "another seed may differ" not in describe(both[0], compare(*both)) + summary(both)


def test_a_method_that_does_not_beat_the_best_floor_is_told_so():
    rows = [
        ComparisonRow("good", score((0.9, 0.92, 0.95)), note="kept"),
        ComparisonRow("even", score((0.3, 0.5, 0.9))),
        ComparisonRow("bad", score((0.1, 0.2, 0.33))),
        ComparisonRow("raw pixels", score((0.4, 0.5, 0.6)), baseline=True),
        ComparisonRow("chance", score((0.2, 0.2, 0.2)), baseline=True),
    ]
    text = as_text(rows, 160)
    assert "good: kept." in text
    assert "even: does not beat raw pixels" in text
    assert f"bad: below raw pixels ({MINUS}29.00 ± 4.30 points)." in text
    assert text.index("bad") < text.index("chance")
    outcomes = [
        r["against_baseline"] and r["against_baseline"]["outcome"]
        for r in json.loads(as_json(rows))
    ]
    assert outcomes == ["above", "unclear", "below", None, None]


def test_rows_of_other_episodes_are_marked():
    text = as_text(
        [ComparisonRow("a", score((0.1, 0.3))), ComparisonRow("b", score((0.1, 0.3), "u"))], 160
    )
    assert "other test episodes than a" in text


def test_rows_that_were_not_trained_alike_are_marked():
    few, attacked = {"rounds": 3}, {"name": "sign_flip", "fraction": 0.2}
    partition = [{"name": "iid", "clients": n} for n in (4, 5)]
    rows = [
        ComparisonRow.of_runs("a", [run((0.5, 0.7), run=few, partition=partition[0])]),
        ComparisonRow.of_runs("b", [run((0.5, 0.7), run=few, partition=partition[0])]),
        ComparisonRow.of_runs(
            "c", [run((0.5, 0.7), run={"rounds": 9}, partition=partition[1], attack=attacked)]
        ),
        ComparisonRow("d", score((0.5, 0.7))),
    ]
    assert [remark(row, rows) for row in rows] == ["", "", (
        "not trained like a: partition.clients 5 (not 4), run.rounds 9 (not 3) and attack.name "
        "sign_flip (not unset)"
    ), ""]  # fmt: skip


def test_the_table_shows_percent_and_megabytes():
    head, _, line, *_ = as_text([ComparisonRow.of_runs("m", [run((0.5, 0.6))])], 80).splitlines()
    assert "MB down" in head
    assert line.split() == ["m", "55.00", "±", "63.53", "2", "1", "3.00", "0.50", "4.50"]


def test_a_narrow_terminal_folds_numbers_and_cuts_none():
    rows = [ComparisonRow.of_runs("m", [run((0.5, 0.6))])]
    wide, narrow = (as_text(rows, width).split("─\n")[1].split("\n\n")[0] for width in (80, 36))
    assert narrow.count("\n") > wide.count("\n")
    assert sorted("".join(narrow.split())) == sorted("".join(wide.split()))


def test_markup_and_escape_sequences_in_a_label_are_shown_not_obeyed():
    out = io.StringIO()
    Console(file=out, width=140, force_terminal=True).print(
        comparison([ComparisonRow("[red]a[/red]\x1b[31m", score((0.5, 0.5)))])
    )
    assert "[red]a[/red]\ufffd[31m" in out.getvalue()


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0"),
        (1, "<0.01"),
        (3_328_000, "3.33"),
        (123_456_000, "123.5"),
        (999_960_000, "1,000"),
        (5_000_000_000, "5,000"),
    ],
)
def test_megabytes(amount, text):
    assert megabytes(amount) == text


def test_a_lone_surrogate_can_be_written():
    assert printable("a\udcff\n b").encode() == "a\ufffd b".encode()


def test_the_summary_says_plainly_that_the_floor_was_not_beaten():
    rows = [
        ComparisonRow("FL-Proto", score((0.1, 0.2, 0.4))),
        ComparisonRow("raw pixels", score((0.5, 0.6, 0.7)), baseline=True),
    ]
    text = summary(rows)
    assert f"FL-Proto ({MINUS}36.67 ± 14.34 points) does not beat raw pixels here." in text
    assert "a single seed does not show" in text


def test_the_summary_does_not_call_a_small_lead_a_lead():
    rows = [ComparisonRow("a", score((0.1, 0.5, 0.9))), ComparisonRow("b", score((0.2, 0.4, 0.8)))]
    assert "The lead of a over b" in summary(rows)
    assert "is not statistically significant" in summary(rows)
    assert summary([]) == "No method has a result yet."


def test_the_summary_calls_equal_accuracies_equal():
    text = summary([ComparisonRow(name, score((0.1, 0.5, 0.9))) for name in "ab"])
    assert "a and b have the same accuracy." in text
    assert "highest" not in text


def write_run(folder: Path, result: bool = True) -> Path:
    folder.mkdir()
    one = run((0.4, 0.6))
    (folder / "config.yaml").write_text(yaml.safe_dump(one.settings))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in one.records))
    if result:
        (folder / "result.json").write_text(json.dumps(one.result))
        (folder / "environment.json").write_text('{"python": "3.11"}')
    return folder


def test_a_run_is_read_as_it_was_written(tmp_path):
    found = Run.read(write_run(tmp_path / "r"))
    assert (found.label, found.seed, found.rounds, found.planned) == ("run-0", 0, 2, 2)
    assert found.environment == {"python": "3.11"}
    assert found.test["episodes"] == 2
    assert Run.read(tmp_path / "r", "mine").label == "mine"


def test_an_unfinished_run_is_read_but_has_no_row(tmp_path):
    folder = write_run(tmp_path / "r", result=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "se')  # cut short by a crash
    found = Run.read(folder)
    assert found.result is None
    assert found.rounds == 2
    with pytest.raises(CheckpointError, match="2 of 2 rounds are trained"):
        ComparisonRow.of_runs("a", [found])


@pytest.mark.parametrize("name", ["config.yaml", "result.json", "metrics.jsonl"])
def test_a_damaged_file_is_named(tmp_path, name):
    folder = write_run(tmp_path / "r")
    (folder / name).write_text("{: [\n")
    with pytest.raises(CheckpointError, match=name):
        Run.read(folder)
