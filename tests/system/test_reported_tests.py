"""What pages, cards and commands say of a test is what the test asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshot.cli.main import main
from fedshot.reports.run_files import Run
from fedshot.reports.run_views import Map, PartitionTable, data_views
from fedshot.reports.significance import ComparisonRow
from fedshot.reports.summary import summary
from fedshot.runs.experiment import Experiment
from fedshot.runs.test_protocol import TestProtocol, alike
from fedshot.use.card import card_facts, card_text
from fedshot.use.trained import TrainedRun

from .runs import CHOOSING, finished

OWN: dict[str, Any] = {
    "split": {"base": ["0-9"]},
    "partition": {"name": "pathological", "clients": 6, "way": 3, "shot": 4},
    "episode": {"way": 2, "shot": 1, "query": 1, "queries": "up_to"},
    "run": {"rounds": 1},
}
PROTO: dict[str, Any] = {"method": {"name": "fl_proto", "local_steps": 1}, "run": {"rounds": 1}}
FALSE = ("no client trained on", "novel", "Novel", "never trained on", "5-way", "1-shot")


def own(folder: Path, method: str = "fedavg") -> Experiment:
    made = finished(folder, OWN, {"method": {"name": method}})
    made.result()
    return made


def card(folder: Path) -> str:
    run = TrainedRun(folder)
    return "\n".join(
        [card_text(run, "encoder.safetensors", [], None, None), card_facts(run)["test"]]
    )


def test_the_result_says_whose_classes_were_asked_for_and_in_which_shape(tmp_path: Path) -> None:
    own(tmp_path / "own")
    told = json.loads((tmp_path / "own" / "result.json").read_text())
    assert (told["own"], told["split"], told["shape"]) == (
        True, "classes", {"way": [2, 4], "shot": None},
    )  # fmt: skip
    found = Run.read(tmp_path / "own")
    text = summary([ComparisonRow.of_runs("a", [found])], [found])
    assert "Intervals are over clients" in text
    wide = {"test": {"way": [2, 3]}, "split": {"validation": [], "novel": ["7-9"]}}
    made = finished(tmp_path / "wide", CHOOSING, PROTO, wide)
    made.result()
    told = json.loads((tmp_path / "wide" / "result.json").read_text())
    assert (told["own"], told["shape"]) == (False, {"way": [2, 3], "shot": 1})
    assert "2- to 3-way 1-shot" in card(tmp_path / "wide")
    assert "(2, 3)" not in card(tmp_path / "wide")


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "ditto", "per_fedavg"])
def test_clients_tested_on_their_own_classes_are_told_to_be(
    tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = own(tmp_path / "run", method)
    assert main(["report", str(run.folder)]) == 0
    capsys.readouterr()
    page = (run.folder / "report.html").read_text(encoding="utf-8").partition("</main>")[0]
    lead = page.partition('class="lead">')[2].partition("</p>")[0].replace("&nbsp;", " ")
    assert "on 6 clients, tested on images of the clients' own classes" in lead.replace(
        "&#39;", "'"
    )
    assert "(2- to 4-way)" in lead
    assert not [words for words in FALSE if words in lead]
    seen = data_views(run.folder)
    assert isinstance(seen.holdings, PartitionTable)
    assert str(seen.map).startswith("there are no novel classes: clients are tested on images")
    assert "Not shown for small: there are no novel classes" in page
    text = card(run.folder)
    assert "6 clients, tested on images of the clients' own classes" in text
    assert not [words for words in FALSE if words in text]


def test_words_for_users_for_ranges_and_for_what_is_not_known() -> None:
    test = {"way": [3, 7], "shot": 1}
    users = TestProtocol.of({"split": {"users": [0.6, 0.2, 0.2]}, "test": test}, {"own": False})
    assert users.on(9) == (
        "9 3- to 7-way 1-shot test episodes of examples of users who took no part in training"
    )
    novel = TestProtocol.of({"test": {"way": 5, "shot": 1}}, {"own": False})
    assert novel.on(1000) == (
        "1,000 5-way 1-shot test episodes of classes that no client trained on"
    )
    assert alike([users, novel]).on(3) == "3 test episodes"
    assert TestProtocol.of({}).on(2) == "2 test episodes"


def test_a_model_that_diverged_has_no_map_and_a_page_says_so(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", CHOOSING, PROTO)
    run.result()
    for round in run.checkpoints.rounds():
        server, notes = run.checkpoints.read(round, run.server)
        server.theta["body"]["linear1"]["bias"][0] = torch.inf
        run.checkpoints.write(round, server, notes)
    assert str(data_views(run.folder).map) == "the features are not finite: training diverged"
    assert main(["report", str(run.folder)]) == 0
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert "the features are not finite: training diverged" in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU takes over where no GPU is")
def test_a_run_of_a_gpu_is_looked_at_without_one(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", CHOOSING, PROTO)
    run.result()
    expected = data_views(run.folder)
    assert isinstance(expected.map, Map)
    config = run.folder / "config.yaml"
    config.write_text(config.read_text().replace("device: cpu", "device: cuda"))
    for round in run.checkpoints.rounds():
        server, notes = run.checkpoints.read(round, run.server)
        notes["config"]["run"]["device"] = "cuda"
        run.checkpoints.write(round, server, notes)
    assert data_views(run.folder) == expected
