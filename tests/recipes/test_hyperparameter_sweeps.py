"""`fedshot sweep`: grids, draws and proposals, ranked by validation accuracy."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedshot.cli.main import main
from fedshot.core.errors import CheckpointError, ConfigError, QuorumError
from fedshot.core.seeds import Key
from fedshot.recipes import cell_worker, optuna_search, sweep_runner, sweep_tables, trials
from fedshot.recipes.jobs import Event, Job
from fedshot.recipes.sweep_runner import Sweep, space_of
from fedshot.runs.experiment import Experiment
from fedshot.runs.run_folder import RESULT

LR, STEPS = "method.optimizer.lr", "method.local_steps"
BASE: dict[str, Any] = {
    "data": {"name": "digits"},
    "split": {"base": ["0-5"], "validation": ["6-7"], "novel": ["8-9"]},
    "partition": {"name": "iid", "clients": 2},
    "episode": {"way": 2, "query": 2},
    "model": {"backbone": {"name": "mlp", "hidden": [8]}},
    "method": {"name": "fl_proto", "local_steps": 1},
    "run": {"rounds": 2, "validate_every": 2},
    "test": {"way": 2, "query": 2, "episodes": 10, "validation_episodes": 10},
}
GRID = ("method.optimizer.lr=1e-3,1e-2",)


def swept(folder: Path, *words: str, base: Any = BASE, **others: Any) -> Sweep:
    return Sweep(folder, base, dict(map(space_of, words or GRID)), **{"seeds": 2, **others})


def told(value: float, **others: Any) -> dict[str, Any]:
    return {"validation": [[0, 0.99, 0.1], [2, value, 0.1]], "round": 2, "seconds": 1.0} | others


class FakeJobs:
    """Workers that report the accuracy that `score` gives for the job, or why it failed."""

    def __init__(self, score: Callable[[Job], Any]) -> None:
        self.score, self.done = score, list[Job]()

    def __call__(self, jobs: Sequence[Job], most: int | None = None) -> Iterator[Event]:
        for job in jobs:
            found = self.score(job)
            self.done.append(job)
            if isinstance(found, str):
                yield Event(job, "failed", {"reason": found})
            else:
                yield Event(job, "done", found if isinstance(found, dict) else told(found))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Job], Any]], FakeJobs]:
    def install(score: Callable[[Job], Any]) -> FakeJobs:
        made = FakeJobs(score)
        monkeypatch.setattr(trials, "Jobs", made)
        monkeypatch.setattr(sweep_runner, "Jobs", made)
        return made

    return install


def lr_of(job: Job) -> float:
    return float(job.settings["method"]["optimizer"]["lr"])


def finished(made: Sweep) -> Sweep:
    list(made.run())
    return made


def options(sweep: Sweep) -> list[dict[str, Any]]:
    return [point.options for point in sweep.points.values()]


@pytest.mark.parametrize(
    ("word", "space"),
    [
        ("method.optimizer.lr=1e-3,0.3", (LR, {"choice": [0.001, 0.3]})),
        ("method.optimizer.lr=log:1e-4,1e-2", (LR, {"log": [0.0001, 0.01]})),
        ("model.backbone.dropout=uniform:0,1", ("model.backbone.dropout", {"linear": [0, 1]})),
        ("method.local_steps=int:1,8", (STEPS, {"int": [1, 8]})),
        ("method=fl_proto,fedmeta", ("method.name", {"choice": ["fl_proto", "fedmeta"]})),
        ("model.backbone.hidden=[8],[8, 4]", ("model.backbone.hidden", {"choice": [[8], [8, 4]]})),
    ],
)  # fmt: skip
def test_a_space_is_read_from_its_text(word: str, space: Any) -> None:
    assert space_of(word) == space


def test_a_grid_has_every_combination_once(tmp_path: Path) -> None:
    made = swept(tmp_path, *GRID, "method.local_steps=1,2,2")
    assert options(made) == [{LR: lr, STEPS: n} for lr in (0.001, 0.01) for n in (1, 2)]


def test_a_point_has_its_values_as_they_are_and_the_default_method(tmp_path: Path) -> None:
    base = {key: value for key, value in BASE.items() if key != "method"}
    space = {"model.encoder.path": {"choice": ["\U0001f600", "1e-3"]}}
    made = Sweep(tmp_path, base, space, seeds=1)
    found = [made.settings(point) for point in made.points.values()]
    assert [one["model"]["encoder"]["path"] for one in found] == ["\U0001f600", "1e-3"]
    assert {one["method"]["name"] for one in found} == {"fl_proto"}


def test_random_points_are_drawn_by_their_number_and_option(tmp_path: Path) -> None:
    words = (f"{LR}=log:1e-4,1e-2", f"{STEPS}=int:3,8", "model.backbone.hidden=[4],[8],[16]")
    five = options(swept(tmp_path, *words, random=5))
    for i, point in enumerate(five, 1):
        u = {path: float(Key(0).at("tune", i, path).numpy().random()) for path in point}
        assert point[LR] == float(f"{1e-4 * 100 ** u[LR]:.3g}")
        assert point[STEPS] == 3 + int(6 * u[STEPS])
        assert (
            point["model.backbone.hidden"] == [[4], [8], [16]][int(3 * u["model.backbone.hidden"])]
        )
    assert options(swept(tmp_path, *words, random=9))[:5] == five
    drawn = {one[STEPS] for one in trials.draws({STEPS: {"int": [3, 8]}}, 60)}
    assert drawn == {3, 4, 5, 6, 7, 8}


def test_points_are_ranked_by_validation_and_the_first_alone_is_tested(
    tmp_path: Path, fake: Callable[..., FakeJobs]
) -> None:
    # Seed 0 prefers 0.001, the mean over seeds 0.01; round 0 has the same accuracy everywhere.
    scores = {(0.001, 0): 0.9, (0.001, 1): 0.2, (0.01, 0): 0.6, (0.01, 1): 0.7}
    workers = fake(lambda job: scores[lr_of(job), job.settings["seed"]])
    made = finished(swept(tmp_path))
    assert [point.options[LR] for point in made.ranking] == [0.01, 0.001]
    tested = [(lr_of(job), job.settings["seed"]) for job in workers.done if job.do == "train"]
    assert tested == [(0.01, 0), (0.01, 1)]
    first, second = sweep_tables.rows(made)
    assert (first["chosen"], second["chosen"]) == (True, False)
    assert first["validation"] == pytest.approx(0.65)
    assert first["deviation"] == pytest.approx(0.05 * 2**0.5)
    assert second["test"] is None


def test_points_of_equal_accuracy_are_ordered_by_their_options(
    tmp_path: Path, fake: Callable[..., FakeJobs]
) -> None:
    fake(lambda _: 0.5)
    words = [f"{LR}=0.03,0.02,0.01", f"{LR}=0.01,0.02,0.03"]
    one, two = (finished(swept(tmp_path / word[-1], word)) for word in words)
    assert one.chosen is not None
    assert two.chosen is not None
    assert one.chosen.options == two.chosen.options


def test_the_same_command_continues_and_a_larger_grid_adds_points(
    tmp_path: Path, fake: Callable[..., FakeJobs]
) -> None:
    workers = fake(lambda job: "out of memory" if lr_of(job) > 0.005 else 0.5)
    broken = finished(swept(tmp_path))
    assert broken.chosen is None, "a point may still be the best"
    assert not [job for job in workers.done if job.do == "train"]
    assert "failed: seed 1: out of memory" in sweep_tables.rows(broken)[1]["state"]
    workers = fake(lr_of)
    finished(swept(tmp_path))
    assert {lr_of(job) for job in workers.done if job.do == "tune"} == {0.01}
    workers = fake(lr_of)
    more = finished(swept(tmp_path, f"{LR}=1e-2,0.1", f"{STEPS}=1"))
    assert {lr_of(job) for job in workers.done if job.do == "tune"} == {0.01, 0.1}
    assert len(more.points) == 4
    assert len(sweep_tables.rows(more)) == 4


def test_all_points_of_a_folder_have_as_many_seeds(
    tmp_path: Path, fake: Callable[..., FakeJobs]
) -> None:
    fake(lr_of)
    finished(swept(tmp_path))
    fewer = finished(swept(tmp_path, f"{LR}=0.1", seeds=1))
    assert [len(point.trials) for point in fewer.points.values()] == [2, 2, 2]
    more = finished(swept(tmp_path, f"{LR}=0.1", seeds=3))
    assert [len(point.trials) for point in more.points.values()] == [3, 3, 3]


def test_another_base_configuration_is_refused(
    tmp_path: Path, fake: Callable[..., FakeJobs]
) -> None:
    fake(lr_of)
    finished(swept(tmp_path))
    changed = BASE | {"run": {"rounds": 3, "validate_every": 2}}
    with pytest.raises(ConfigError, match=r"another base configuration: run.rounds was 2, is 3"):
        swept(tmp_path, base=changed)
    swept(tmp_path, base=BASE | {"name": "other", "test": {**BASE["test"], "shot": 1}})


def test_a_point_that_diverges_is_not_chosen(tmp_path: Path, fake: Callable[..., FakeJobs]) -> None:
    fake(lambda job: told(0.9, diverged="round 2") if lr_of(job) > 0.005 else 0.5)
    made = finished(swept(tmp_path))
    assert made.chosen is not None
    assert made.chosen.options == {LR: 0.001}
    assert sweep_tables.rows(made)[1]["state"] == "diverged: round 2"


def test_options_of_the_same_name_are_told_apart(
    tmp_path: Path, fake: Callable[..., FakeJobs]
) -> None:
    fake(lr_of)
    made = swept(tmp_path, f"{LR}=0.1", "model.backbone.lr=0.2", f"{STEPS}=3")
    (point,) = made.points.values()
    assert made.label(point) == f"{LR} 0.1, model.backbone.lr 0.2, local_steps 3"
    assert made.named(made._job(point, 1, "train")) == f"test {made.label(point)}, seed 1"


def test_seeds_may_be_validated_in_different_rounds(
    tmp_path: Path, fake: Callable[..., FakeJobs]
) -> None:
    """A round that no client answers has no validation."""
    curves = [[[0, 0.2, 0.1], [1, 0.4, 0.1], [2, 0.6, 0.1]], [[0, 0.4, 0.1], [2, 0.8, 0.3]]]
    fake(lambda job: told(0.5, validation=curves[job.settings["seed"]]))
    made = finished(swept(tmp_path, f"{LR}=0.1"))
    (curve,) = sweep_tables._curves(made)
    assert curve.rounds == [0, 2]
    assert curve.accuracies == pytest.approx([0.3, 0.7])
    assert curve.intervals == pytest.approx([0.1, 0.2])


def test_a_trial_without_validation_counts_as_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unanswered(*_: object) -> None:
        raise QuorumError("no client answers")

    monkeypatch.setattr(Experiment, "_evaluate", unanswered)
    base = BASE | {"run": {"rounds": 1, "below_quorum": "skip"}}
    made = swept(tmp_path, f"{LR}=0.1", base=base)
    order = made._job(next(iter(made.points.values())), 0, "tune").order()
    found = cell_worker.execute(order)
    assert found["diverged"] == "validation: no client gave a usable reply"
    assert trials.accuracy(found) is None


def test_a_file_whose_trials_lack_the_validation_that_ranks_them_is_damaged(
    tmp_path: Path, fake: Callable[..., FakeJobs]
) -> None:
    fake(lr_of)
    finished(swept(tmp_path))
    file = tmp_path / "sweep.json"
    held = json.loads(file.read_text(encoding="utf-8"))
    held["points"][0]["trials"][1]["round"] = 1
    file.write_text(json.dumps(held), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"is damaged.*round 1 has no validation"):
        swept(tmp_path)
    held["points"][0]["trials"][1]["diverged"] = "round 1"
    file.write_text(json.dumps(held), encoding="utf-8")
    swept(tmp_path)


@pytest.mark.parametrize(
    ("words", "others", "said"),
    [
        (("test.way=2,3",), {}, "cannot be over test.way"),
        (("seed=1,2",), {}, "cannot be over seed"),
        (("run.choose=last,best_on_test_classes",), {}, "cannot be over run.choose"),
        (("data=digits,glyphs",), {}, "cannot be over data.name"),
        ((f"{LR}=log:1e-4,1e-2",), {}, "List the values, or add --random N"),
        ((f"{LR}=log:0,1",), {"random": 2}, "LOW,HIGH after log:"),
        ((f"{STEPS}=int:1,1.5",), {"random": 2}, "LOW,HIGH after log:"),
        (GRID, {"random": 2, "optuna": 2}, "exclude each other"),
        (GRID, {"jobs": 0}, "^jobs is 0; expected 1 or more"),
    ],
)  # fmt: skip
def test_what_cannot_be_ranked_or_drawn_is_refused(
    words: tuple[str, ...], others: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        swept(tmp_path, *words, **others)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"split": {"base": ["0-5"], "novel": ["8-9"]}}, "split.validation"),
        ({"run": {"choose": "best_on_test_classes"}}, "NOT HONEST.*run.choose to 'validation'"),
        ({"method": {"name": "fl_proto", "local_stepps": 1}}, "local_stepps"),
    ],
)
def test_a_sweep_without_a_fair_validation_or_with_an_invalid_point_is_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        swept(tmp_path, base=BASE | change).check()


def test_a_sweep_over_methods_drops_the_options_of_others(tmp_path: Path) -> None:
    base = BASE | {"method": {"name": "fl_proto", "optimizer": {"lr": 0.1}}}
    made = swept(tmp_path, "method=fl_proto,fsl_local", base=base)
    methods = [made.settings(point)["method"] for point in made.points.values()]
    assert [one["name"] for one in methods] == ["fl_proto", "fsl_local"]


def test_trainings_give_one_table_and_the_test_of_the_best_point_alone(
    tmp_path: Path, fake: Callable[..., FakeJobs], capsys: pytest.CaptureFixture[str]
) -> None:
    def trained(job: Job) -> dict[str, Any]:
        return cell_worker.execute(job.order())

    fake(trained)
    (tmp_path / "base.yaml").write_text(json.dumps(BASE), encoding="utf-8")
    out = tmp_path / "sweeps" / "one"
    words = ["sweep", "--config", str(tmp_path / "base.yaml"), "--set", *GRID, "--seeds", "2",
             "--out", str(out), "--run.rounds", "1", "--quiet"]  # fmt: skip
    assert main(words) == 0
    rows = list(csv.DictReader((out / "table.csv").open(encoding="utf-8")))
    assert [row["rank"] for row in rows] == ["1", "2"]
    assert [bool(row["test"]) for row in rows] == [True, False]
    tested = {path.parent.name for path in out.glob(f"runs/*/{RESULT}")}
    assert tested == {f"{rows[0]['point']}.s{seed}" for seed in (0, 1)}
    assert json.loads((out / "table.json").read_text())[0]["chosen"] is True
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "Points" in page
    assert "chosen" in page
    shown = capsys.readouterr().out
    assert "2 of 2 points finished, ranked by validation accuracy" in shown
    again = fake(trained)
    assert main(words) == 0
    assert again.done == []


def test_a_sweep_whose_points_all_diverge_has_no_test_and_fails(
    tmp_path: Path, fake: Callable[..., FakeJobs], capsys: pytest.CaptureFixture[str]
) -> None:
    fake(lambda _: told(0.5, diverged="round 1"))
    (tmp_path / "base.yaml").write_text(json.dumps(BASE))
    words = ["sweep", "--config", str(tmp_path / "base.yaml"), "--set", *GRID,
             "--out", str(tmp_path / "sweep"), "--quiet"]  # fmt: skip
    assert main(words) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "Training diverged in every point, so none is tested." in shown


def test_an_interrupted_sweep_says_how_to_continue_once_it_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "base.yaml").write_text(json.dumps(BASE))
    words = ["sweep", "--config", str(tmp_path / "base.yaml"), "--set", *GRID,
             "--out", str(tmp_path / "sweep")]  # fmt: skip
    monkeypatch.setattr(Sweep, "check", stop)
    assert main(words) == 130
    assert capsys.readouterr().err == "\nstopped\n"
    (tmp_path / "sweep").mkdir()
    assert main(words) == 130
    assert capsys.readouterr().err == "\nstopped\n", "the folder holds no sweep"
    (tmp_path / "sweep" / "runs" / "0123abcd.s0").mkdir(parents=True)
    assert main(words) == 130
    advice = "the same command continues with the unfinished points"
    assert capsys.readouterr().err == f"\nstopped; {advice}\n"


@pytest.mark.slow
def test_two_processes_train_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "base.yaml").write_text(json.dumps(BASE), encoding="utf-8")
    words = ["sweep", "--config", str(tmp_path / "base.yaml"), "--set", *GRID, "--seeds", "1",
             "--jobs", "2", "--out", str(tmp_path / "one"), "--json"]  # fmt: skip
    assert main(words) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["test"] is not None for row in rows] == [True, False]
    assert rows[0]["validation"] >= rows[1]["validation"]


def test_optuna_proposes_the_same_points_after_an_interruption(
    tmp_path: Path, fake: Callable[..., FakeJobs]
) -> None:
    pytest.importorskip("optuna")
    words = (f"{LR}=log:1e-4,1", f"{STEPS}=int:1,3", "model.backbone.hidden=[4],[8]")
    fake(lambda job: 1 - abs(lr_of(job) - 0.1))
    whole = finished(swept(tmp_path / "a", *words, optuna=5, seeds=1))
    assert len(whole.points) == 5
    count = iter(range(100))
    fake(lambda job: "killed" if next(count) == 3 else 1 - abs(lr_of(job) - 0.1))
    asked = (tmp_path / "b", *words)
    assert finished(swept(*asked, optuna=5, seeds=1)).chosen is None
    fake(lambda job: 1 - abs(lr_of(job) - 0.1))
    resumed = finished(swept(*asked, optuna=5, seeds=1))
    assert resumed.points.keys() == whole.points.keys()
    assert resumed.chosen is not None
    more = fake(lambda _: 0.5)
    finished(swept(*asked, optuna=5, seeds=1))
    assert not [job for job in more.done if job.do == "tune"]


def test_a_complete_study_whose_points_are_lost_is_told(
    tmp_path: Path, fake: Callable[..., FakeJobs]
) -> None:
    pytest.importorskip("optuna")
    fake(lr_of)
    made = finished(swept(tmp_path, f"{LR}=log:1e-4,1e-2", optuna=2, seeds=1))
    (tmp_path / "sweep.json").unlink()
    with pytest.raises(CheckpointError, match=r"points are lost: sweep\.json is missing"):
        finished(swept(tmp_path, f"{LR}=log:1e-4,1e-2", optuna=2, seeds=1))
    assert len(made.points) == 2


def test_without_optuna_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedshot\[optuna\]'"):
        optuna_search.require_optuna()
    with pytest.raises(
        ConfigError, match="a sweep with Optuna needs optuna, which is not installed"
    ):
        swept(tmp_path, optuna=2).check()
