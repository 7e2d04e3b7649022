"""What the terminal says of lost or rejected replies."""

from __future__ import annotations

from pathlib import Path

from fedshot.api.fault_report import FaultReport
from fedshot.runs.recorder import Record

FOLDER = Path("runs/x")


def fault(client: int, reason: str = "node b: KeyError: 'fc'", kind: str = "lost"):
    return {"client": client, "kind": kind, "reason": reason}


def said(fault_report: FaultReport, records: list[Record]) -> list[str]:
    return [text for record in records for text in fault_report.heard(record)]


def test_a_client_that_never_answers_is_named_at_growing_distances_and_at_the_end():
    fault_report = FaultReport(FOLDER)
    rounds = [Record(r, faults=(fault(4),) if r else ()) for r in range(121)]
    assert [line.split(":")[0] for line in said(fault_report, rounds)] == [
        "round 1", "round 10", "round 100",
    ]  # fmt: skip
    assert fault_report.closing() == (
        "120 lost or rejected replies, in 120 of 120 rounds: client 4 in 120 (lost, node b: "
        "KeyError: 'fc'). See runs/x/metrics.jsonl."
    )


def test_a_client_with_several_faults_in_a_round_is_named_once_with_the_last():
    lines = said(
        fault_report := FaultReport(FOLDER), [Record(3, faults=(fault(1, "a"), fault(1, "b")))]
    )
    assert lines == ["round 3: lost or rejected reply of client 1: lost, b"]
    assert "2 lost or rejected replies, in 1 of 1 round: client 1 in 1 (lost, b)" in str(
        fault_report.closing()
    )


def test_nothing_is_said_where_every_reply_counted():
    fault_report = FaultReport(FOLDER)
    assert said(fault_report, [Record(0), Record(1), Record(2)]) == []
    assert fault_report.closing() is None


def test_a_fleet_that_fails_by_chance_does_not_flood_the_terminal():
    fault_report = FaultReport(FOLDER)
    lines = said(fault_report, [Record(1, faults=tuple(fault(c) for c in range(500)))])
    assert len(lines) == 10
    assert lines[-1].endswith("Further faults are only in runs/x/metrics.jsonl")
    assert "and 497 other clients" in str(fault_report.closing())


def test_skipped_rounds_are_counted():
    fault_report = FaultReport(FOLDER)
    said(fault_report, [Record(1), Record(2, skipped="too few"), Record(3)])
    assert fault_report.closing() == (
        "0 lost or rejected replies, in 0 of 3 rounds; 1 round skipped. See runs/x/metrics.jsonl."
    )


def test_words_of_a_stranger_stay_on_one_short_line():
    reason = "first\nround 9/9 all is well\x1b[2J" + "x" * 5000
    (line,) = said(FaultReport(FOLDER), [Record(1, faults=(fault(0, reason, "refused"),))])
    assert "\n" not in line
    assert "\x1b" not in line
    assert len(line) < 400
