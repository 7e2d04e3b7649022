"""Two switches for what published code does and no honest result may: off, marked where used."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedshot.cli import main
from fedshot.config.load import Config
from fedshot.config.schema import not_honest
from fedshot.core.errors import CheckpointError, ConfigError, DataError
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset
from fedshot.data.sources.digits import Digits
from fedshot.deploy.flower.data_files import kind_of
from fedshot.recipes.index import load, names
from fedshot.recipes.plan import marks
from fedshot.recipes.reading import read
from fedshot.reports import figures
from fedshot.reports.curves import Series
from fedshot.reports.run_files import Run
from fedshot.reports.significance import ComparisonRow, compare, describe
from fedshot.reports.summary import summary
from fedshot.runs import run_folder
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun
from fedshot.runs.trackers.tracking import Tracker, names_of
from fedshot.runs.trackers.tracking import _send as send
from fedshot.use.card import card_facts, card_text
from fedshot.use.trained import TrainedRun

from .runs import CHOOSING, OWN, SMALL, experiment, finished, merged, written

PEEK = {"run": {"choose": "best_on_test_classes", "validate_every": 1}}
FIRST = {"test": {"first_client_only": True}}
WILD = {"method": {"optimizer": {"lr": 0.3}}}
TOLD = [
    "NOT HONEST: the test classes chose the round",
    "NOT HONEST: only the first client's predictions were scored",
]


class Mine:
    """A source of a program's own: the digits, turned to negatives."""

    def load(self, data_dir: Path | None) -> Dataset:
        """Return them."""
        digits = Digits().load(data_dir)
        split = ClassSplit((0, 1, 2, 3, 4, 5), (), (6, 7, 8, 9))
        return replace(digits, name="negatives", x=255 - digits.pixels, standard=split)


def test_a_run_on_data_of_a_program_records_their_hash_and_asks_for_them_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shape = {"episode": {"way": 3}, "test": {"way": 3}, "run": {"rounds": 2}}
    config = Config.of(merged(SMALL, shape))
    dataset = Mine().load(None)
    folders = tmp_path / "source", tmp_path / "dataset"
    for folder, data in zip(folders, (Mine(), dataset), strict=True):
        first = Experiment(PreparedRun(replace(config, data=data)), folder)  # type: ignore[type-var]
        next(iter(first.run()))
        held = run_folder.written(folder)
        assert held["data"] == {"name": "memory", "dataset": "negatives", "digest": dataset.digest}
        for command in ("resume", "evaluate"):
            assert main.main([command, str(folder)]) == 2
            text = capsys.readouterr().err
            assert "'negatives' was passed in Python" in text
            assert "fedshot.train(data=dataset, out=folder, resume=True)" in text
    again = run_folder.configuration(folders[0]).with_data(dataset)
    assert [record.round for record in Experiment(PreparedRun(again), folders[0]).run()] == [1, 2]
    other = replace(dataset, x=255 - dataset.pixels)
    with pytest.raises(CheckpointError, match="or are in another order: their SHA-256 was"):
        Experiment(PreparedRun(again.with_data(other)), folders[0])


def test_copied_examples_are_told_before_round_1_and_on_the_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Noise of which each picture lies there four times: a test that is no test."""
    noise = np.random.default_rng(0).integers(0, 256, (60, 6, 6), dtype=np.uint8)
    x, y = np.tile(noise, (4, 1, 1)), np.tile(np.arange(60) % 6, 4)
    np.savez(tmp_path / "noise.npz", x=x, y=y)
    changes = {
        "data": {"name": "npz", "path": str(tmp_path / "noise.npz")},
        "split": {"base": ["0-2"], "novel": ["3-5"]},
        "partition": {"name": "iid", "clients": 2},
        "episode": {"way": 3},
        "run": {"rounds": 1, "cohort": None},
        "test": {"way": 3},
    }
    config = written(tmp_path, changes)
    assert main.main(["run", "--config", str(config), "--out", str(tmp_path)]) == 0
    said = (
        "noise: 240 of 240 examples are identical to another one: 240 to one of the same class, 0 "
        "to one of another class, 0 to one of another part"
    )
    told = capsys.readouterr().err
    assert said in told
    assert main.main(["report", str(tmp_path / "small")]) == 0
    assert said in (tmp_path / "small" / "report.html").read_text(encoding="utf-8")
    assert main.main(["data", "show", "--config", str(config), "--out", str(tmp_path / "p")]) == 0
    assert said.removeprefix("noise: ") in capsys.readouterr().out


def test_a_random_split_has_a_seed_of_its_own_or_that_of_the_test() -> None:
    def split(**changes: Any) -> ClassSplit:
        drawn = {"split": {"random": [5, 0, 5], **changes.get("split", {})}}
        made = PreparedRun(Config.of(merged(SMALL, drawn, {"test": changes.get("test", {})})))
        assert made.split is not None
        return made.split

    assert split() == split(test={"seed": 0}) == split(split={"seed": 0})
    other = split(split={"seed": 3})
    assert other != split()
    assert other == split(split={"seed": 3}, test={"seed": 8}) == split(test={"seed": 3})
    with pytest.raises(ConfigError, match=r"split\.seed is 3, but nothing is drawn"):
        Config.of({"split": {"seed": 3}})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"partition": {"name": "resampled", "clients": 2}}, "partition.name is 'resampled'"),
        (OWN, "the split has no novel classes"),
        ({"test": {"group": {"clients": 3}}}, "test.group.clients is 3"),
    ],
)
def test_groups_are_refused_where_support_and_queries_could_share_them(
    changes: dict[str, Any], said: str
) -> None:
    digits = Digits().load(None)
    tracks = replace(digits, groups=np.arange(len(digits)) // 3)
    config = Config.of(merged(SMALL, {"episode": {"shot": 4, "query": 4}}, changes))
    with pytest.raises(ConfigError, match=f"{re.escape(said)}.*then cannot be kept"):
        PreparedRun(config.with_data(tracks))
    plain = PreparedRun(Config.of(SMALL).with_data(tracks))
    with pytest.raises(DataError, match="digits has groups, which client files do not support"):
        kind_of(plain.dataset)


@pytest.mark.slow
def test_both_are_off_unless_a_recipe_is_about_them() -> None:
    assert not_honest(Config.of(SMALL).settings) == []
    for name in names():
        recipe = load(name)
        for cell in recipe.cells("paper") if recipe.rows else []:
            about = name == "f2l-official" and cell.column.key.startswith("code")
            assert bool(not_honest(cell.settings())) == about


def test_the_best_round_on_the_test_is_told_to_be_no_honest_choice(tmp_path: Path) -> None:
    made = finished(tmp_path / "run", CHOOSING, WILD, PEEK)
    looks = [r["validation"] for r in made.recorder.records()]
    found = made.result()
    assert {look["tasks"] for look in looks} == {found.tasks} == {made.prepared.test.digest}
    assert found.accuracy == max(look["accuracy"] for look in looks)
    told = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (told["chosen_by"], told["not_honest"]) == ("test classes", TOLD[:1])
    assert ComparisonRow.of_runs("a", [Run.read(tmp_path / "run")]).note.startswith(TOLD[0])
    assert TOLD[0] in made.prepared.notices()
    assert Run.read(tmp_path / "run").differs(Run.read(finished_honestly(tmp_path)))


def test_classes_in_no_part_of_the_split_are_named() -> None:
    fewer = {"split": {"validation": ["5", "6"], "novel": ["7", "9"]}}
    made = PreparedRun(Config.of(merged(SMALL, CHOOSING, fewer)))
    assert "digits: 1 class is in no part of the split: '8'" in made.notices()
    whole = PreparedRun(Config.of(merged(SMALL, CHOOSING))).notices()
    assert not any("part of the split" in text for text in whole)


def test_classes_that_no_episode_holds_and_users_that_no_partition_minds_are_named(
    tmp_path: Path,
) -> None:
    y = np.repeat(range(5), (20, 3, 20, 20, 20))
    x, users = np.zeros((len(y), 8, 8), np.uint8), np.arange(len(y)) % 2
    np.savez(tmp_path / "few.npz", x=x, y=y, users=users)
    data = {
        "data": {"name": "npz", "path": str(tmp_path / "few.npz")},
        "split": {"base": ["0-2"], "novel": ["3-4"]},
        "episode": {"way": 2, "shot": 1, "query": 4},
        "test": {"way": 2, "shot": 1, "query": 4, "episodes": 4},
        "partition": {"name": "iid", "clients": 2},
        "run": {"cohort": 2},
    }
    found = PreparedRun(Config.of(merged(SMALL, data))).notices()
    assert (
        "few: 1 class is in no training episode, which needs 5 examples of a class at one client: "
        "'1'"
    ) in found
    ignores = "few: partition 'iid' ignores the users; set partition.name to 'users'"
    assert any(text.startswith(ignores) for text in found)
    each = {"partition": {"name": "users", "clients": None}, "episode": {"query": 1}}
    found = PreparedRun(Config.of(merged(SMALL, data, each))).notices()
    assert not any("ignores" in text or "no training episode" in text for text in found)


def finished_honestly(tmp_path: Path) -> Path:
    made = finished(tmp_path / "honest", CHOOSING, WILD)
    made.result()
    told = json.loads((tmp_path / "honest" / "result.json").read_text())
    assert (told["chosen_by"], "not_honest" in told) == ("validation", False)
    assert TOLD[0] not in ComparisonRow.of_runs("a", [Run.read(tmp_path / "honest")]).note
    return tmp_path / "honest"


def test_scoring_the_first_client_alone_is_told(tmp_path: Path) -> None:
    made = finished(tmp_path / "run", CHOOSING, FIRST)
    assert set(made.result().clients) == {made.prepared.clients[0]}
    assert len(made.result().per_episode) == 20
    told = json.loads((tmp_path / "run" / "result.json").read_text())
    assert told["not_honest"] == TOLD[1:]


@pytest.mark.parametrize(
    ("test", "text"),
    [
        ({"first_client_only": True}, "test.first_client_only is true, and the split has no novel"),
        ({"pool": "clients"}, "test.pool is 'clients', and the split has no novel classes"),
        ({"group": {"clients": 2}}, "test.group.clients is 2, and the split has no novel classes"),
    ],
)
def test_options_of_novel_tests_are_refused_where_clients_are_tested_on_their_own(
    test: dict[str, Any], text: str
) -> None:
    own = {
        "split": {"base": ["0-9"]},
        "partition": {"name": "pathological", "clients": 4, "way": 3, "shot": 4},
        "episode": {"way": 2, "query": 1, "queries": "up_to"},
    }
    assert PreparedRun(Config.of(merged(SMALL, own))).own_tests
    with pytest.raises(ConfigError, match=text):
        PreparedRun(Config.of(merged(SMALL, own, {"test": test})))


def test_the_first_client_is_not_asked_what_is_of_others() -> None:
    with pytest.raises(ConfigError, match="would predict episodes from the examples of others"):
        Config.of(merged(SMALL, CHOOSING, FIRST, {"test": {"pool": "clients"}}))


def test_the_command_tells_it_beside_the_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "--out", str(tmp_path), "--run.rounds", "1", "--data", "digits"]
    words += ["--split.base", "0-4", "--split.novel", "5-9", "--episode.query", "5"]
    words += ["--model.backbone", "mlp", "--test.episodes", "4", "--test.query", "3"]
    words += ["--run.choose", "best_on_test_classes", "--test.first_client_only", "true"]
    assert main.main(words) == 0
    captured = capsys.readouterr()
    assert all(text in captured.out and text in captured.err for text in TOLD)
    assert "test (NOT HONEST: it chooses the round)" in captured.err
    assert "validation" not in captured.err


def test_pages_cards_and_trackers_tell_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proto = {"method": {"name": "fl_proto", "local_steps": 1, "optimizer": {"lr": 0.3}}}
    made = finished(tmp_path / "run", CHOOSING, proto, PEEK, FIRST)
    score = made.result()
    run = TrainedRun(tmp_path / "run")
    card = card_text(run, "encoder.safetensors", [], None, None)
    assert all(card.count(text) == 2 for text in TOLD)  # at the top, and beside the number
    assert "chosen by the test itself" in card
    assert "chose the round:" not in card
    for facts in (card_facts(run), {k: v for k, v in card_facts(run).items() if k == "test"}):
        assert all(text in str(facts) for text in TOLD)
    assert main_page(tmp_path, capsys).count(TOLD[0]) > 1
    read = Run.read(tmp_path / "run")
    row = ComparisonRow.of_runs("a", [read])
    other = replace(row, label="b")
    assert all(summary([row, other], [read]).count(text) >= 2 for text in TOLD)
    assert all(text in describe(row, compare(row, other)) for text in TOLD)
    series = Series.of_runs("a", [read])
    assert series is not None
    assert series.episodes == "peeked"
    shown = next(figures.curves([series], [row], {"a": 0}))
    assert "NOT HONEST: accuracy on the test itself" in shown.caption
    assert "validation" not in shown.title + shown.caption
    sink = Kept(tmp_path)
    tracker = Tracker(None, tmp_path / "run", made.config.settings, pytest.fail)
    tracker._sink = sink
    for record in made.recorder.records():
        send(sink, record, names_of(made.config.settings))
    tracker.result(score, made.best_round)
    accuracies = {name for name in sink.names if "accuracy" in name and "train" not in name}
    assert accuracies == {"NOT_HONEST/looks_at_test/accuracy", "NOT_HONEST/test/accuracy"}


def main_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the page of the run without its settings, which a reader may not come to."""
    assert main.main(["report", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    text = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    lead = text.partition('class="lead">')[2].partition("</p>")[0]
    assert TOLD[0] in lead
    return text.partition('id="settings"')[0]


class Kept:
    """A sink that keeps names, with nothing behind it."""

    def __init__(self, _: Path) -> None:
        self.last, self.names = -1, set[str]()

    def log(self, round: int, values: Mapping[str, float]) -> None:
        self.names |= set(values)

    end = log

    def close(self, *, done: bool) -> None: ...


def test_the_round_that_the_last_one_is_was_not_chosen_by_validation(tmp_path: Path) -> None:
    proto = {"method": {"name": "fl_proto", "local_steps": 1}, "run": {"choose": "last"}}
    finished(tmp_path / "run", CHOOSING, proto).result()
    card = card_text(TrainedRun(tmp_path / "run"), "encoder.safetensors", [], None, None)
    assert "- Round: the last one." in card
    assert "chosen by" not in card
    assert "NOT HONEST" not in card
    finished(tmp_path / "best", CHOOSING, proto, {"run": {"choose": "validation"}}).result()
    card = card_text(TrainedRun(tmp_path / "best"), "encoder.safetensors", [], None, None)
    assert "- Round: chosen by the validation classes." in card


def test_a_reproduced_table_tells_it() -> None:
    recipe: dict[str, Any] = {
        "title": "A test", "source": "nowhere", "kind": "table", "measure": "nothing",
        "settings": merged(SMALL, PEEK, FIRST), "columns": {"one": {"label": "1-shot"}},
        "rows": {"a": {"label": "A", "settings": {"method": SMALL["method"]}, "published": [1.0]}},
        "budgets": {"paper": {"exchanges": 1}, "small": {"exchanges": 1}},
    }  # fmt: skip
    recipe["settings"].pop("name")
    (cell,) = read("t", recipe).cells("paper")
    assert marks(cell)[:2] == TOLD


def test_tests_may_be_of_the_clients_own_novel_examples() -> None:
    """Episode u from what client u mod K holds of the novel classes; the same for every seed."""
    own = {
        "test": {"pool": "clients", "way": 2, "query": 3, "episodes": 24},
        "split": CHOOSING["split"],
    }
    made = PreparedRun(Config.of(merged(SMALL, own)))
    rows = [
        np.concatenate([made.test._tasks.support[u], made.test._tasks.query[u]]) for u in range(24)
    ]
    held = [set(np.concatenate(rows[k::6]).tolist()) for k in range(6)]
    assert sum(len(one) for one in held) == len(set.union(*held))
    assert set(made.dataset.y[sorted(set.union(*held))].tolist()) <= {7, 8, 9}
    shared = PreparedRun(Config.of(merged(SMALL, own, {"test": {"pool": "shared"}})))
    assert made.test.digest != shared.test.digest
    other = PreparedRun(Config.of(merged(SMALL, own, {"seed": 3})))
    assert other.test.digest == made.test.digest


def test_a_client_that_holds_too_little_for_tests_of_its_own_is_named() -> None:
    own = {"test": {"pool": "clients", "way": 5, "query": 40}}
    with pytest.raises(DataError, match=r"test.pool is 'clients'.*client \d has"):
        PreparedRun(
            Config.of(merged(SMALL, own, {"split": {"random": [4, 0, 6]}, "episode": {"way": 3}}))
        )


def test_tests_of_the_clients_own_are_of_those_that_take_part() -> None:
    """So a seed that leaves out another client sits another test, and is told so."""
    own = {
        "test": {"pool": "clients", "way": 2, "query": 1, "episodes": 24},
        "split": CHOOSING["split"],
        "partition": {"name": "dirichlet", "clients": 6, "alpha": 1.0},
        "episode": {"way": 5, "query": 5},
        "run": {"infeasible_clients": "leave_out", "cohort": 1},
    }
    found: dict[tuple[int, ...], set[str]] = {}
    for seed in range(8):
        made = PreparedRun(Config.of(merged(SMALL, own, {"seed": seed})))
        assert any("have different tests" in text for text in made.notices()) == bool(made.left_out)
        pools = [
            set(np.concatenate([made.test._tasks.support[u], made.test._tasks.query[u]]).tolist())
            for u in range(24)
        ]
        k = len(made.clients)  # question u is of client u mod K of those that take part
        assert all(not pools[u] & pools[v] for u in range(24) for v in range(u) if (u - v) % k)
        found.setdefault(tuple(made.clients), set()).add(made.test.digest)
    assert len(found) > 1
    assert all(len(digests) == 1 for digests in found.values())
    assert len(set.union(*found.values())) == len(found)


def test_an_experiment_with_one_test_for_each_client_runs(tmp_path: Path) -> None:
    own = {"test": {"pool": "clients", "way": 2, "query": 3}, "split": CHOOSING["split"]}
    found = experiment(tmp_path / "run", CHOOSING, own)
    for _ in found.run():
        pass
    assert len(found.result().clients) == 6
