"""Runs with dishonest clients: what is recorded, resumed, tested and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedshot.api.fault_report import FaultReport
from fedshot.core.errors import CheckpointError, ConfigError
from fedshot.core.locks import Lock
from fedshot.recipes import cell_worker, provenance
from fedshot.reports.run_files import Run
from fedshot.reports.trust_views import trust_views
from fedshot.runs import trust
from fedshot.runs.recorder import Record

from .runs import CHOOSING, OWN, experiment, finished, last_hash, stopped

PROTO: dict[str, Any] = {
    "method": {"name": "fl_proto", "local_steps": 1}, "run": {"rounds": 3, "cohort": 6},
    "attack": {"name": "sign_flip", "clients": [1], "from_round": 2, "factor": 20},
    "aggregate": {"name": "krum"},
}  # fmt: skip


def test_every_round_has_a_line_and_a_resumed_run_has_the_same(tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole", PROTO)
    lines = trust.read(whole.folder)
    assert "attack.name is 'sign_flip'; dishonest from round 2 on: client 1" in whole.notices()
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert [line["liars"] for line in lines] == [[], [1], [1]]
    (part,) = lines[2]["parts"]
    assert (part["exchange"], part["work"], part["part"]) == (0, "train", "theta")
    assert part["clients"]["1"][0] > 5 * part["clients"]["0"][0]  # the liar's norm
    assert part["clients"]["1"][2] == 0  # Krum chose another
    assert sum(row[2] for row in part["clients"].values()) == 1

    begun = stopped(tmp_path / "halves", 2, PROTO)
    trust.append(begun.folder, 9, [], [])  # as if killed in a round after the last checkpoint
    rest = finished(tmp_path / "halves", PROTO)
    assert last_hash(rest.folder) == last_hash(whole.folder)
    assert trust.read(rest.folder) == lines


def test_more_dishonest_clients_than_an_aggregation_is_made_for_are_announced(
    tmp_path: Path,
) -> None:
    attack = PROTO["attack"] | {"clients": [0, 1, 2]}
    found = experiment(tmp_path, PROTO | {"attack": attack}).notices()
    assert found[-1] == (
        "3 of 6 clients are dishonest; with aggregate.fraction 0.2 the aggregation is made for 1."
    )
    assert "made for" not in " ".join(experiment(tmp_path / "one", PROTO).notices())


def test_a_process_that_lost_the_folder_adds_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(lock: Lock) -> None:
        raise CheckpointError("lost")

    begun = experiment(tmp_path, PROTO)
    rounds = begun.run()
    last = next(rounds).round
    monkeypatch.setattr(Lock, "check", lost)
    with pytest.raises(CheckpointError, match="lost"):
        list(rounds)
    assert [line["round"] for line in trust.read(tmp_path)] == list(range(1, last + 1))


def test_a_run_without_attack_and_aggregator_records_no_trust(tmp_path: Path) -> None:
    done = finished(tmp_path, {"method": {"name": "fl_proto"}, "run": {"rounds": 1}})
    assert not (done.folder / trust.FILE).exists()
    assert not {"attack", "aggregate"} & done.config.settings.keys()


def test_a_backdoor_is_tested_and_an_attack_is_named_in_the_result(tmp_path: Path) -> None:
    change = {**PROTO, "attack": {"name": "backdoor", "fraction": 0.5}, "aggregate": "mean"}
    done = finished(tmp_path, CHOOSING, change)
    before = done.meter.to_json()
    done.result()
    found = json.loads((tmp_path / "result.json").read_text())["attack"]
    assert len(found["liars"]) == 3
    assert 0 <= found["backdoor"] <= 1
    assert done.meter.to_json() == before
    provenance.note(tmp_path, -1, provenance.here("fl_proto"))
    assert cell_worker._train(done, None)["attack"] == found  # a recipe's table shows it


def test_the_report_shows_the_liar_beside_the_honest_twin(tmp_path: Path) -> None:
    attacked = finished(tmp_path / "attacked", CHOOSING, PROTO)
    honest = finished(tmp_path / "honest", CHOOSING, {**PROTO, "attack": "none"})
    for run in (attacked, honest):
        run.result()
    runs = [Run.read(run.folder, label=run.folder.name) for run in (attacked, honest)]
    found = trust_views({run.label: [run] for run in runs})
    (_, attack, rule, _, without, *_), other = found.outcomes
    assert (attack, rule) == ("sign_flip", "krum")
    assert without == other[3] != "\N{EN DASH}"
    _, summary, rows = found.clients[0]
    assert summary == "3 rounds; dishonest by configuration: 1"
    assert rows[0][:2] == ("1", "yes")
    assert [row[1] for row in rows[1:]] == ["no"] * 5
    names = [label for label, _ in found.figures[0].choices]
    assert names == ["norm of 'theta'", "cosine of 'theta'"]


def test_private_models_are_scored_without_the_liars(tmp_path: Path) -> None:
    change = {
        "method": {"name": "ditto", "local_steps": 1},
        "run": {"rounds": 1, "cohort": 8},
        "attack": {"name": "sign_flip", "clients": [0]},
    }
    done = finished(tmp_path, OWN, change)
    done.result()
    run = Run.read(done.folder)
    clients = run.test["clients"]
    worst = min(a for c, a in clients.items() if c != "0")
    (row,) = trust_views({"x": [run]}).outcomes
    assert row[-1] == f"{100 * worst:.1f} %"


def test_an_extreme_client_is_reported_at_its_first_round() -> None:
    report = FaultReport(Path("runs/x"))
    text = "part 'theta' has norm 90, 45 times the median of the cohort"
    said = [list(report.heard(Record(r, extreme={4: text}))) for r in (1, 2)]
    assert said == [[f"round 1: extreme influence of client 4: {text}"], []]
    assert "extreme" not in Record(1, extreme={4: text}).to_json()


def test_poisoned_data_are_refused_where_images_are_dealt_anew(tmp_path: Path) -> None:
    change = {
        "method": {"name": "frl", "inner_rounds": 1}, "run": {"cohort": None},
        "partition": {"name": "resampled", "clients": 2}, "attack": "label_flip",
        "episode": {"way": 2, "shot": 4, "query": 4},
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"attack\.name is 'label_flip', which changes what a"):
        experiment(tmp_path, change)
