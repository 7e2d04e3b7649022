"""A row that differs from another at the test alone has its training, and its own numbers."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covering import slow
from fedshot.core.errors import CheckpointError, ConfigError
from fedshot.core.locks import only_one
from fedshot.recipes import cell_worker, timing
from fedshot.recipes.index import load
from fedshot.recipes.jobs import Job, Jobs
from fedshot.recipes.plan import marks
from fedshot.recipes.reading import read
from fedshot.recipes.recipe import Column, Recipe
from fedshot.recipes.results import Results, kept
from fedshot.recipes.runner import RecipeRunner, Request

from .example_recipe import changed, example, made, runner

GROUP = {"clients": 4, "by": "iid", "spare": 4}
FRL: dict[str, Any] = {"name": "frl", "variant": "proto", "inner_rounds": 2}
HERE = {key: value for key, value in made("0123").items() if key != "after_round"}


MLP = {"name": "mlp", "hidden": [8]}
CONV4 = {"name": "conv4", "width": 4}


def recipe(backbone: Any = MLP, **rows: Any) -> Recipe:
    """Few-round learning on digits; each row a method, and whose training is its own."""
    tree = changed(
        settings=changed()["settings"]
        | {
            "partition": {"name": "resampled", "clients": 4, "by": "iid"},
            "model": {"backbone": backbone, "head": {"name": "linear"}},
            "split": {"base": ["0-2"], "validation": ["3-5"], "novel": ["6-9"]},
            "episode": {"way": 3, "shot": 16, "query": 16},
            "test": {"way": 3, "shot": 16, "query": 8, "episodes": 2, "validation_episodes": 2,
                     "group": GROUP},
            "run": {"threads": 1, "validate_every": 2},
        },
        columns={"one": {"label": "IID"}},
        budgets={"paper": {"exchanges": 5}, "small": {"exchanges": 5}},
        rows={
            key: {"label": key, "published": [None], "settings": {"method": method}}
            | ({"trained_as": lead} if lead else {})
            for key, (method, lead) in rows.items()
        },
    )  # fmt: skip
    return read("t", tree)


def two_rows() -> Recipe:
    """A row that has the training of another."""
    return recipe(lead=(FRL, None), row=({**FRL, "test_rounds": 0}, "lead"))


def jobs(made: Recipe, folder: Path) -> dict[str, Job]:
    return {job.key.split(" ")[1]: job for job in runner(made, folder)._jobs()}


def done(
    job: Job, monkeypatch: pytest.MonkeyPatch, *, alone: bool = False, here: Any = HERE
) -> dict[str, Any]:
    """Obey a job in this process; `alone` has a follower train by itself."""
    monkeypatch.setattr(cell_worker, "_emit", lambda *_: None)
    monkeypatch.setattr(cell_worker.provenance, "here", lambda *_: here)
    order = json.loads(json.dumps(job.order()))
    told = cell_worker.execute(order | ({"do": "train"} if alone else {}))
    return kept({key: one for key, one in told.items() if key not in ("seconds", "peak")})


def numbers(told: dict[str, Any]) -> dict[str, Any]:
    """What a row told, but for who trained and answered."""
    return {k: v for k, v in told.items() if k not in ("made", "answered", "followed")}


PAIRS = {
    "other R": ((FRL, None), ({**FRL, "test_rounds": 0}, "lead")),
    "preparation": (
        ({"name": "frl_finetune", "batch": 20}, None),
        ({"name": "frl_one_shot", "candidates": 8, "keep": 4, "batch": 20}, "lead"),
    ),
    "probe": (
        ({"name": "fedavg_probe", "batch": 20}, None),
        ({"name": "fedavg_probe", "batch": 20, "probe": "ridge", "ridge_lambda": 0.5}, "lead"),
    ),
    "new head": (
        ({"name": "fedbabu", "batch": 20, "probe": "mean"}, None),
        ({"name": "fedbabu", "batch": 20, "finetune_lr": 0.5, "finetune_steps": 9}, "lead"),
    ),
    # With running statistics at its test, where fine-tuning has those of supports.
    "control": (
        ({"name": "frl_finetune", "batch": 20}, None),
        ({"name": "frl_frozen", "batch": 20}, "lead"),
    ),
}


SLOW = pytest.mark.slow


@pytest.mark.parametrize("pair", [pytest.param(p, marks=() if p == "control" else SLOW)
                                  for p in PAIRS])  # fmt: skip
def test_a_row_that_follows_has_the_numbers_of_its_own_training(
    pair: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead, row = PAIRS[pair]
    made = recipe(CONV4, lead=lead, row=row)
    job = jobs(made, tmp_path / "one")["row/one"]
    assert job.do == "follow"
    told = done(job, monkeypatch)
    assert not (job.folder / "checkpoints").exists(), "it trained nothing itself"
    again = done(jobs(made, tmp_path / "two")["row/one"], monkeypatch, alone=True)
    assert numbers(told) == numbers(again)
    cell = made.cells("small", ["row/one"])[0]
    held = Results(tmp_path).add(cell, "small", None, 0, told | {"seconds": 1.0})
    assert "shares the training of lead/one, whose rounds are the same" in marks(cell, held)
    first = done(jobs(made, tmp_path / "one")["lead/one"], monkeypatch)
    assert first["validation"] != told["validation"], "its answers are its own"


def two_columns(method: dict[str, Any], **row: Any) -> Recipe:
    """A row whose training in the second column, with other hands, is that in the first."""
    tree = recipe(lead=(method, None))
    shards = {"by": "shards", "per_client": 2, "shards": 8}
    other = {"partition": {"clients": 4, **shards}, "test": {"group": {**GROUP, **shards}}}
    columns = {"one": tree.columns["one"], "two": Column("two", "shards", other)}
    led = replace(tree.rows["lead"], published=(None, None), spread=(None, None), **row)
    return replace(tree, columns=columns, rows={"lead": led})


@pytest.mark.parametrize("method", ["fedavg_probe", *slow("frl_finetune")])
def test_a_column_that_deals_otherwise_has_the_numbers_of_its_own_training(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What prepares on a pool that all see does not look at how a test deals its images."""
    made = two_columns({"name": method, "batch": 20}, trained_in={"two": "one"})
    found = jobs(made, tmp_path / "one")
    assert found["lead/one"].keep_validated
    job = found["lead/two"]
    assert (job.do, job.keep_validated) == ("follow", False)
    told = done(job, monkeypatch)
    assert not (job.folder / "checkpoints").exists(), "it trained nothing itself"
    assert told["followed"] == "lead/one"
    again = done(jobs(made, tmp_path / "two")["lead/two"], monkeypatch, alone=True)
    assert numbers(told) == numbers(again)


def test_a_column_of_a_method_that_learns_from_hands_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = two_columns(FRL, trained_in={"two": "one"})
    job = jobs(made, tmp_path)["lead/two"]
    assert "followed" not in done(job, monkeypatch)
    assert (job.folder / "checkpoints").exists()


def test_a_follower_in_a_column_that_follows_has_the_first_ones_training() -> None:
    made = load("frl-e1")
    leads = {cell.key: cell.lead and cell.lead.key for cell in made.cells("small")}
    assert leads["finetune/cifar-iid"] is None
    for key in ("finetune/cifar-noniid", "one-shot/cifar-iid", "one-shot/cifar-noniid"):
        assert leads[key] == "finetune/cifar-iid"
    assert leads["proto/cifar-noniid"] is None
    assert leads["proto-r0/cifar-noniid"] == "proto/cifar-noniid"


@pytest.mark.slow
def test_looks_that_this_model_answered_are_not_answered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = two_rows()
    job = jobs(made, tmp_path)["row/one"]
    told = done(job, monkeypatch)
    path = job.folder / "looks.json"
    held = json.loads(path.read_text(encoding="utf-8"))
    assert list(held) == ["0", "2", "4", "5"]
    held["2"]["per_episode"] = [0.999 for _ in held["2"]["per_episode"]]
    path.write_text(json.dumps(held), encoding="utf-8")
    assert done(job, monkeypatch)["round"] == 2
    for stale in ("model", "settings", "data"):
        other = {**held, "2": held["2"] | {"of": held["2"]["of"] | {stale: "another"}}}
        path.write_text(json.dumps(other), encoding="utf-8")
        assert done(job, monkeypatch) == told, stale
    for damaged in ('{"0": {"acc', "[]"):
        path.write_text(damaged, encoding="utf-8")
        assert done(job, monkeypatch) == told


@pytest.mark.slow
def test_a_row_that_cannot_follow_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong recipe costs time alone, and trains no lead in vain."""
    other = {**FRL, "test_rounds": 0, "inner_lr": 0.05}
    job = jobs(recipe(lead=(FRL, None), row=(other, "lead")), tmp_path / "one")["row/one"]
    told = done(job, monkeypatch)
    assert (job.folder / "checkpoints").exists()
    assert job.lead is not None
    assert not job.lead.folder.exists()
    assert told == done(job, monkeypatch, alone=True)
    made = two_rows()
    first, second = (jobs(made, tmp_path / "two")[key] for key in ("lead/one", "row/one"))
    done(first, monkeypatch)
    next((first.folder / "checkpoints").glob("round-000002*")).unlink()
    assert "followed" not in done(second, monkeypatch)
    assert (second.folder / "checkpoints").exists()


def test_every_look_is_kept_however_rare_checkpoints_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = two_rows()
    made.settings["run"]["checkpoint_every"] = 100
    lead, row = (jobs(made, tmp_path)[key] for key in ("lead/one", "row/one"))
    assert done(row, monkeypatch)["followed"] == "lead/one"
    names = sorted(path.name for path in (lead.folder / "checkpoints").iterdir())
    assert [int(name[6:12]) for name in names] == [0, 2, 4, 5]


def test_who_trained_and_who_answered_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = two_rows()
    lead, row = (jobs(made, tmp_path)[key] for key in ("lead/one", "row/one"))
    done(lead, monkeypatch)
    told = done(row, monkeypatch, here=HERE | {"commit": "4567+"})
    assert [part["commit"] for part in told["made"]] == ["0123"]
    assert [part["commit"] for part in told["answered"]] == ["4567+"]
    cell = made.cells("small", ["row/one"])[0]
    held = Results(tmp_path).add(cell, "small", None, 0, told | {"seconds": 1.0})
    assert "trained with code that was not committed" in marks(cell, held)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such lock on Windows")
@pytest.mark.parametrize("busy", ["lead", "row"])
def test_a_folder_in_which_another_process_works_is_left_to_it(
    busy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = two_rows()
    lead, row = (jobs(made, tmp_path)[key] for key in ("lead/one", "row/one"))
    folder = {"lead": lead, "row": row}[busy].folder
    folder.mkdir(parents=True)
    with (
        only_one(folder / ".lock"),
        pytest.raises(CheckpointError, match="another process is training in"),
    ):
        done(row, monkeypatch)
    assert not (folder / "trained_by.json").exists(), "who does not train is not noted"


def test_those_that_follow_come_last_and_cost_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe(row=({**FRL, "test_rounds": 0}, "lead"), lead=(FRL, None))
    assert list(jobs(made, tmp_path)) == ["lead/one", "row/one"]
    found = {"step": 1.0, "question": 0.0, "clients": 4, "own": False}
    cells = {cell.row.key: cell for cell in made.cells("small")}
    monkeypatch.setattr(timing, "_held", lambda: {timing.key(c): found for c in cells.values()})
    assert timing.seconds(cells["row"]) == timing._START
    assert (timing.seconds(cells["lead"]) or 0) > timing._START


def test_a_job_that_follows_waits_for_the_run_that_it_follows(tmp_path: Path) -> None:
    rows = {key: ({**FRL, "test_rounds": n}, "lead") for n, key in enumerate(("one", "two"))}
    made = recipe(lead=(FRL, None), **rows, other=({**FRL, "inner_lr": 0.2}, None))
    found = jobs(made, tmp_path)
    lead, one, two, other = (found[f"{key}/one"] for key in ("lead", "one", "two", "other"))

    def following(waiting: list[Job], running: list[Job], ended: list[Job]) -> Job | None:
        queue = Jobs(waiting)
        queue._running = {job.key: (job, None) for job in running}  # type: ignore[misc]
        queue._finished = {job.folder for job in ended}
        return queue._next()

    assert following([one, two, lead, other], [], []) is lead
    assert following([one, two, other], [lead], []) is other
    assert following([one, two], [lead], []) is None
    assert following([one, two], [other], [lead]) is one
    assert following([one, two], [], []) is one, "it trains the lead itself, and the other waits"
    assert following([two, other], [one], []) is other
    assert following([two], [one], [lead]) is two


@pytest.mark.slow
@pytest.mark.usefixtures("jobs_here")
def test_a_bench_trains_once_for_all_that_follow(tmp_path: Path) -> None:
    rows = {f"r{n}": ({**FRL, "test_rounds": n}, "lead") for n in (0, 1)}
    asked = RecipeRunner(Request(recipe(lead=(FRL, None), **rows), seeds=1, jobs=2, runs=tmp_path,
                          results=tmp_path))  # fmt: skip
    events = list(asked.run())
    assert next(e.job.do for e in events if e.kind == "done") == "train"
    assert not any(state.failed for state in asked.states.values())
    held = {key: state.result for key, state in asked.states.items()}
    assert all(result is not None for result in held.values())
    trained = [job for job in {e.job.key: e.job for e in events}.values()
               if (job.folder / "checkpoints").exists()]  # fmt: skip
    assert [job.do for job in trained] == ["train"]


def test_with_tuning_every_row_trains_for_itself(tmp_path: Path) -> None:
    """What was chosen for one is not what was chosen for the other."""
    made = two_rows()
    asked = runner(made, tmp_path, tune=2)
    for key in ("lead/one", "row/one"):
        job = asked._job(made.cells("small", [key])[0], 0, "train", None)
        assert (job.do, job.keep_validated) == ("train", False)


@pytest.mark.parametrize(
    "where", [{"one": "nowhere"}, {"one": "one"}, {"strange": "one"}, {"one": "two", "two": "one"}]
)
def test_a_column_that_cannot_follow_is_refused(where: dict[str, str]) -> None:
    columns = {"one": {"label": "IID"}, "two": {"label": "shards"}}
    row = {"label": "row", "published": [None, None], "settings": {"method": FRL}}
    with pytest.raises(ConfigError, match=r"row row in \w+ is trained in '\w+'; expected another"):
        example(columns=columns, rows={"row": row | {"trained_in": where}})


@pytest.mark.parametrize("lead", ["nobody", "row", "other"])
def test_a_row_that_cannot_follow_is_refused(lead: str) -> None:
    with pytest.raises(ConfigError, match=f"row row is trained as '{lead}'; expected another row"):
        recipe(lead=(FRL, None), other=(FRL, "lead"), row=(FRL, lead))
