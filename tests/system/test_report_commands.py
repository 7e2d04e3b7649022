"""`fedshot report` and `fedshot compare` on real runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedshot import reports
from fedshot.cli.main import main
from fedshot.config.load import Config
from fedshot.evaluation.episodic_test import score
from fedshot.evaluation.raw_baselines import pixel_logits
from fedshot.protocol.method import predict_at_server
from fedshot.reports import run_views
from fedshot.reports.run_views import Map, PartitionTable, data_views, holdings
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun

from .conftest import Trained
from .runs import CHOOSING, SMALL, experiment, finished, merged

PROTO: dict[str, Any] = {"method": {"name": "fl_proto", "local_steps": 1}, "name": "proto"}


def made(folder: Path, *changes: dict[str, Any]) -> Experiment:
    run = finished(folder, *changes)
    run.result()
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("runs")
    every: dict[str, tuple[dict[str, Any], ...]] = {
        "local": ({"name": "local"},),
        "proto-0": (PROTO, {"name": "proto-0"}),
        "proto-1": (PROTO, {"name": "proto-1", "seed": 1}),
        "other": (PROTO, {"name": "other", "test": {"seed": 5}}),
    }
    for name, changes in every.items():
        made(place / name, CHOOSING, *changes)
    return {name: place / name for name in every}


def words(*items: object) -> list[str]:
    return [str(item) for item in items]


def test_compare_pairs_the_same_episodes(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words("compare", runs["proto-0"], runs["local"], "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    [difference] = found["differences"]
    marks = [
        np.array(json.loads((runs[name] / "result.json").read_text())["test"]["per_episode"])
        for name in ("proto-0", "local")
    ]
    gains = marks[0] - marks[1]
    assert difference["paired"] is True
    assert difference["difference"] == pytest.approx(gains.mean())
    assert difference["interval"] == pytest.approx(
        stats.t.ppf(0.975, 19) * gains.std(ddof=1) / np.sqrt(20)
    )
    assert difference["covers_seeds"] is False
    assert main(words("compare", runs["proto-0"], runs["local"])) == 0
    out = capsys.readouterr().out
    shown = "No difference shown" in out
    assert shown == (abs(gains.mean()) <= difference["interval"])
    assert "Paired over the same 20 episodes." in out


def test_compare_averages_seeds_and_compares_them_when_alone(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words("compare", runs["proto-0"], runs["proto-1"], runs["local"], "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["label"], row["seeds"]) for row in found["rows"]][:2] == [
        ("proto", 2),
        ("local", 1),
    ]
    assert main(words("compare", runs["proto-0"], runs["proto-1"])) == 0
    assert "proto-1" in capsys.readouterr().out


def test_compare_tells_when_the_episodes_differ(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words("compare", runs["proto-0"], runs["other"])) == 0
    out = capsys.readouterr().out
    assert "They were evaluated on different test episodes" in out
    assert "Paired" not in out


def test_a_run_without_the_hash_of_its_data_is_compared_by_name(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs["other"], tmp_path / "other")
    (tmp_path / "other" / "data.json").unlink()
    for pair in ((runs["proto-0"], tmp_path / "other"), (tmp_path / "other", runs["proto-0"])):
        assert main(words("compare", *pair)) == 0
        told = capsys.readouterr()
        assert "different data" not in told.err
        assert "not ranked" not in told.out


def test_runs_on_different_data_are_told_before_the_table_and_not_ranked(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.arange(720 * 64, dtype=np.uint32).reshape(720, 8, 8, 1) % 251
    np.savez(tmp_path / "own.npz", x=x.astype(np.uint8), y=np.arange(720) % 12)
    own = {"data": {"name": "npz", "path": str(tmp_path / "own.npz")}, "name": "own"}
    made(tmp_path / "own", CHOOSING, PROTO, own)
    assert main(words("compare", runs["proto-0"], tmp_path / "own", runs["local"])) == 0
    told = capsys.readouterr()
    assert "different data: proto-0 on digits, own on own" in told.err
    assert "proto-0 and own are not ranked: their data differ." in told.out
    assert "proto-0 and local" in told.out or "proto-0 is" in told.out
    assert main(words("compare", runs["proto-0"], tmp_path / "own", "--json")) == 0
    [difference] = json.loads(capsys.readouterr().out)["differences"]
    assert (difference["not_ranked"], difference["outcome"]) == ("their data differ", None)


def test_a_run_against_its_copy_shows_no_difference(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path / "again", CHOOSING, PROTO, {"name": "again"})
    assert main(words("compare", runs["proto-0"], tmp_path / "again")) == 0
    out = capsys.readouterr().out
    assert "between proto-0 and again: the difference is +0.00 points in every" in out


def test_the_raw_pixels_stand_beside_every_result(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    held = json.loads((runs["local"] / "result.json").read_text())["baselines"]["raw pixels"]
    test = experiment(runs["local"], CHOOSING, {"name": "local"}).prepared.test
    assert (
        held["accuracy"]
        == score(predict_at_server(pixel_logits, test.eval_episodes), test).accuracy
    )
    assert main(words("compare", runs["proto-0"], runs["other"], "--json")) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [r["label"] for r in rows if r["baseline"]] == [
        "raw pixels (proto-0)",
        "raw pixels (other)",
    ]
    assert [r["against_baseline"]["baseline"] for r in rows[:2]] == [r["label"] for r in rows[2:]]
    assert main(words("evaluate", runs["local"])) == 0
    assert "\nraw pixels: " in capsys.readouterr().out


def test_what_cannot_be_compared_is_refused(
    runs: dict[str, Path], tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    for folders, said in (
        ([runs["local"]], "is given; expected two runs, or two cells of recipes."),
        ([tmp_path / "nothing"], "nothing does not exist. Name two runs"),
        ([runs["local"], runs["local"]], "is named twice"),
        ([runs["local"], tmp_path], "holds no run"),
    ):
        assert main(words("compare", *folders)) == 2
        assert said in capsys.readouterr().err
    assert main(words("compare", runs["local"], trained(tmp_path / "begun"))) == 2
    assert "has no result" in capsys.readouterr().err


CELLS = Path(__file__).parents[2] / "results" / "fedfsl-sent140" / "small-tune4"


def test_cells_of_a_recipe_are_compared_as_their_seeds_would_be(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files = [CELLS / f"{row}.noniid-5.json" for row in ("mi", "naive")]
    assert main(words("compare", *files, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    seeds = [json.loads(file.read_text(encoding="utf-8"))["seeds"].values() for file in files]
    by_seed = [[one["test"]["accuracy"] for one in every] for every in seeds]
    marks = [
        np.mean([[n / one["queries"] for n in one["right"]] for one in every], axis=0)
        for every in seeds
    ]
    gains = marks[0] - marks[1]
    [said] = found["differences"]
    assert (said["of"], said["to"]) == ("mi/noniid-5", "naive/noniid-5")
    assert (said["paired"], said["covers_seeds"]) == (True, True)
    assert said["difference"] == pytest.approx(np.mean(by_seed[0]) - np.mean(by_seed[1]))
    parts = [gains.var(ddof=1) / len(gains)] + [np.var(s, ddof=1) / len(s) for s in by_seed]
    freedom = sum(parts) ** 2 / sum(
        v**2 / f for v, f in zip(parts, (len(gains) - 1, 2, 2), strict=True)
    )
    half = stats.t.ppf(0.975, freedom) * np.sqrt(sum(parts))
    assert said["interval"] == pytest.approx(half)
    other = CELLS.parent.parent / "fedfsl-fc100" / "small" / "naive.iid-1.json"
    assert main(words("compare", files[0], other)) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "fedfsl-sent140 small-tune4 mi/noniid-5" in out
    assert main(words("compare", files[0], runs["local"])) == 2
    assert "Name only folders of runs, or only files of recipes' cells." in capsys.readouterr().err


def test_report_writes_one_page_of_runs(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "deep" / "page.html"
    names = ("local", "proto-0", "proto-1")
    before = {name: sorted(p.name for p in runs[name].rglob("*")) for name in names}
    assert main(words("report", *(runs[name] for name in names), "--to", page)) == 0
    assert capsys.readouterr().out == f"{page}\n"
    text = page.read_text(encoding="utf-8")
    for place in ("curves-validation", "spread", "holdings-plot", "confusion-plot", "map-plot"):
        assert f'id="{place}"' in text
    assert "<h1>local and proto</h1>" in text
    assert "Not shown for local: the server has no single encoder" in text
    assert {name: sorted(p.name for p in runs[name].rglob("*")) for name in names} == before
    assert len(text) < 2_500_000


def test_report_of_one_run_goes_into_its_folder_and_needs_no_data(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words("report", runs["other"], "--without-data")) == 0
    out, err = capsys.readouterr()
    assert out == f"{runs['other'] / 'report.html'}\n"
    assert err == ""
    text = (runs["other"] / "report.html").read_text(encoding="utf-8")
    assert "holdings-plot" not in text
    assert "curves-validation" in text


def test_holdings_count_every_training_example_once(runs: dict[str, Path]) -> None:
    found = data_views(runs["proto-0"])
    assert isinstance(found.holdings, PartitionTable)
    assert found.holdings.classes == ("0", "1", "2", "3", "4")
    assert (found.holdings.total, len(found.holdings.table)) == (6, 6)
    assert sum(map(sum, found.holdings.table)) == 901  # digits 0 to 4 of scikit-learn's


def test_the_map_keeps_the_distances_that_two_axes_can(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    two = {"model": {"backbone": {"name": "mlp", "hidden": [2]}}}
    flat = data_views(made(tmp_path / "two", CHOOSING, PROTO, two).folder).map
    assert isinstance(flat, Map)
    assert flat.shares is None
    assert set(flat.points) == {"7", "8", "9"}
    wide = data_views(runs["proto-0"]).map
    assert isinstance(wide, Map)
    assert wide.shares is not None
    assert 0 < wide.shares[1] <= wide.shares[0] < 1
    every = np.concatenate([np.array(points) for points in wide.points.values()])
    np.testing.assert_allclose(every.mean(axis=0), 0, atol=1e-3)
    spread = (every**2).sum(axis=0)
    assert spread[1] / spread[0] == pytest.approx(wide.shares[1] / wide.shares[0], rel=1e-2)
    assert np.dot(every[:, 0], every[:, 1]) == pytest.approx(0, abs=1e-2 * spread[1])
    assert data_views(runs["proto-0"]).map == wide


@pytest.mark.parametrize(
    ("method", "drawn"),
    [("f2l", True), ("fedmeta", True), ("pfedfsl", False), ("fsl_local", False)],
)
def test_only_a_trained_encoder_of_the_server_is_drawn(
    tmp_path: Path, method: str, drawn: bool
) -> None:
    options = {"name": method} | ({"learned_steps": True} if method == "fedmeta" else {})
    run = finished(tmp_path / "run", {"method": options, "run": {"rounds": 1}})
    found = data_views(run.folder).map
    assert isinstance(found, Map) == drawn, found
    if not drawn:
        assert "no single encoder" in str(found)


def test_a_state_that_is_a_mapping_is_drawn_with_its_running_statistics(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", {"method": {"name": "fedavg_probe"}, "run": {"rounds": 1}})
    assert run.prepared.method.model.norm_policy == "running"
    found = run_views._mapped(run.prepared, run.server)
    assert isinstance(found, Map)
    assert run_views._mapped(run.prepared, run.server._asdict()) == found


def test_without_its_data_a_run_says_what_is_missing(tmp_path: Path) -> None:
    data = tmp_path / "words.jsonl"
    rows = [{"text": "good bad", "label": f"c{i % 4}", "who": f"secret{i // 4 % 8}"}
            for i in range(160)]  # fmt: skip
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    vectors = tmp_path / "vectors.txt"
    vectors.write_text("good 1 2\nbad 3 4\n")
    texts: dict[str, Any] = {
        "data": {"name": "texts", "path": str(data), "vectors": str(vectors), "dim": 2,
                 "user": "who"},
        "split": {"base": ["c0", "c1"], "novel": ["c2", "c3"]},
        "partition": {"name": "users"},
        "episode": {"way": 2, "shot": 1, "query": 2},
        "model": {"backbone": {"name": "gru", "hidden": 4}},
        "method": {"name": "fl_proto", "local_steps": 1},
        "test": {"episodes": 5, "way": 2, "query": 3},
        "run": {"rounds": 1, "cohort": None},
    }  # fmt: skip
    base = {k: v for k, v in SMALL.items() if k not in ("partition", "model")}
    run = Experiment(PreparedRun(Config.of(merged(base, texts))), tmp_path / "texts")
    assert [record.round for record in run.run()] == [0, 1]
    run.result()
    assert isinstance(holdings(run.prepared), PartitionTable)
    assert main(words("report", run.folder)) == 0
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert "secret" not in page  # users are numbers
    assert 'id="map-plot"' in page
    data.unlink()
    found = data_views(run.folder)
    assert "words.jsonl" in str(found.map)
    assert found.map == found.holdings


def test_runs_of_unlike_seeds_stay_apart(runs: dict[str, Path]) -> None:
    read = [reports.Run.read(folder) for folder in runs.values()]
    assert {label: len(group) for label, group in reports.grouped(read).items()} == {
        "local": 1, "proto": 2, "other": 1,
    }  # fmt: skip
    assert list(reports.ungrouped(read)) == ["local", "proto-0", "proto-1", "other"]
