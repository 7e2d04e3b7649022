"""Few-round learning through the command line: episodes dealt anew, tests in groups of clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedshot.cli.main import main
from fedshot.core import tree
from fedshot.fleets.host import Host
from system.runs import SMALL, experiment, finished, last_hash, merged

GROUPS: dict[str, Any] = {
    "split": {"base": ["0-5"], "validation": ["6", "7"], "novel": ["8", "9"]},
    "partition": {"name": "resampled", "clients": 4, "by": "shards"},
    "episode": {"way": 2, "shot": 12, "query": 12},
    "model": {"backbone": {"name": "mlp", "hidden": [8]}, "head": {"name": "linear", "way": 2}},
    "method": {"name": "frl", "inner_rounds": 2, "optimizer": {"name": "sgd"}},
    "run": {"rounds": 2, "cohort": None, "validate_every": 1},
    "test": {"way": 2, "shot": 12, "query": 12, "episodes": 4, "validation_episodes": 3,
             "group": {"clients": 4, "by": "shards"}},
}  # fmt: skip


def settings_file(folder: Path, **changes: Any) -> str:

    settings = merged(SMALL, GROUPS, changes, {"name": "run"})
    (folder / "run.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    return str(folder / "run.yaml")


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_start_is_tested_after_another_number_of_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--config", settings_file(tmp_path), "--out", str(tmp_path), "--json"]) == 0
    capsys.readouterr()
    folder = str(tmp_path / "run")
    found = []
    for rounds in ([], ["--rounds", "2"], ["--rounds", "0"]):
        assert main(["evaluate", folder, *rounds, "--json"]) == 0
        found.append(told(capsys))
    assert found[0] == found[1]
    assert {one["result"]["tasks"] for one in found} == {found[0]["result"]["tasks"]}
    for text, message in (
        ("-1", "--rounds is -1; expected a whole number of at least 0"),
        ("x", "--rounds is"),
    ):
        assert main(["evaluate", folder, "--rounds", text]) == 2
        assert message in capsys.readouterr().err


def test_a_cohort_below_the_clients_of_a_deal_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The images of the others would be lost; a method without episodes loses nothing."""
    path = settings_file(tmp_path, run={"cohort": 3})
    assert main(["run", "--config", path, "--out", str(tmp_path), "--json"]) == 2
    assert "run.cohort is 3, but partition 'resampled' divides" in capsys.readouterr().err
    path = settings_file(tmp_path, run={"cohort": 3}, method={"name": "fl_proto"})
    assert main(["run", "--config", path, "--out", str(tmp_path), "--json"]) == 0


def test_a_method_without_rounds_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = settings_file(tmp_path, method={"name": "frl_frozen", "batch": 8})
    assert main(["run", "--config", path, "--out", str(tmp_path), "--quiet"]) == 0
    assert main(["evaluate", str(tmp_path / "run"), "--rounds", "1"]) == 2
    assert "frl_frozen does not train during the test" in capsys.readouterr().err


@pytest.mark.slow
def test_all_methods_of_a_table_sit_the_same_groups(tmp_path: Path) -> None:
    digests = set()
    for name, options in {
        "frl": {},
        "frl_personal": {},
        "frl_finetune": {"batch": 8},
        "frl_one_shot": {"batch": 8, "candidates": 8, "keep": 4},
        "frl_fedavg": {},
        "frl_frozen": {"batch": 8},
        "fl_proto": {"local_steps": 1},
    }.items():
        made = experiment(tmp_path / name, GROUPS, {"method": {"name": name, **options}})
        digests.add(made.prepared.test.digest)
        score = made.evaluate_untrained(made.prepared.test)
        assert score.episodes == 4
        assert not score.diverged
    assert len(digests) == 1


def test_workers_do_not_change_a_bit(tmp_path: Path) -> None:
    runs = [
        finished(tmp_path / str(workers), GROUPS, {"run": {"workers": workers}})
        for workers in (1, 3)
    ]
    assert len({tree.digest(run.server) for run in runs}) == 1
    assert len({run.result().per_episode for run in runs}) == 1


def test_a_stopped_run_goes_on_with_the_same_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = {"run": {"workers": 1}}
    whole = finished(tmp_path / "whole", GROUPS, alone)
    calls, serve = [0], Host.serve

    def dies(self: Host, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 21:  # in the second round
            raise KeyboardInterrupt
        return serve(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Host, "serve", dies)
        with pytest.raises(KeyboardInterrupt):
            finished(tmp_path / "part", GROUPS, alone)
    assert experiment(tmp_path / "part", GROUPS, alone).round == 1
    again = finished(tmp_path / "part", GROUPS, alone)
    assert last_hash(again.folder) == last_hash(whole.folder)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"partition": {"clients": 30}}, "an episode has 48 images"),
        ({"episode": {"shot": 1, "query": 15}}, "a client may get images but no support"),
        ({"test": {"group": {"clients": 0, "spare": 3}}}, "spare is 3 and clients is 0"),
        ({"test": {"shot": 400}}, "cannot fill the test"),
        (
            {
                "method": {"name": "frl_one_shot", "candidates": 20},
                "split": {"validation": []},
                "test": {"group": {"clients": 6, "spare": 1}},
            },
            "candidates is 20, but a test episode has 7 clients",
        ),
    ],
)
def test_what_cannot_be_dealt_is_refused_before_round_1(
    change: dict[str, Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = settings_file(tmp_path, **change)
    assert main(["run", "--config", path, "--out", str(tmp_path)]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
