"""What finished cells and trials stand on: data, search, seeds and files that may change since."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedshot.cli.main import main
from fedshot.config.load import Config
from fedshot.core.errors import CheckpointError
from fedshot.recipes import cell_worker, plots, provenance, results_page
from fedshot.recipes.plan import digest, marks
from fedshot.recipes.reading import read
from fedshot.recipes.recipe import Recipe
from fedshot.recipes.results import Results, outdated
from fedshot.recipes.results import read as read_result
from fedshot.recipes.runner import current
from fedshot.recipes.tuning import Search
from system.runs import experiment, finished

from .example_recipe import changed, example, facts, finished_cells, runner

HERE = digest({"data": {"name": "digits"}}, None)


def of_here(**other: Any) -> dict[str, Any]:
    return facts(**other) | {"data": facts()["data"] | {"digest": HERE}}


def tuned(recipe: Recipe, folder: Path, best: int, **other: Any) -> dict[str, Any]:
    """Write three trials of the row `proto`, of which one is best, and return what it chose."""
    row = recipe.rows["proto"]
    looks = [[[2, 0.6 if i == best else 0.4, 0.1]] for i in range(3)]
    told = [of_here(validation=look) | other for look in looks]
    return dict(Search.of(recipe, "small", row, 3, folder / "t" / "small-tune3").write(told))


def test_a_kind_by_its_name_alone_keeps_its_name_under_other_layers() -> None:
    tree = changed()
    tree["settings"] |= {"partition": "dirichlet", "model": {"backbone": "resnet12"}}
    tree["columns"]["one"]["settings"] = {"partition": {"clients": 6}}
    tree["budgets"]["small"]["settings"] = {"model": {"backbone": {"dropblock": 0.1}}}
    tree["rows"]["proto"]["settings"]["model"] = {"head": "none"}
    cells = {cell.key: cell.settings() for cell in read("t", tree).cells("small")}
    assert cells["proto/one"]["partition"] == {"name": "dirichlet", "clients": 6}
    assert cells["proto/one"]["model"]["backbone"] == {"name": "resnet12", "dropblock": 0.1}
    tree["settings"]["model"]["head"] = {"name": "linear", "way": 5}
    head = {key: cell.settings()["model"]["head"] for key, cell in
            ((cell.key, cell) for cell in read("t", tree).cells("small"))}  # fmt: skip
    assert head["proto/one"] == {"name": "none"}, "the options of another kind do not stay"
    assert head["local/one"] == {"name": "linear", "way": 5}


def test_rows_are_looked_at_as_often_where_no_layer_says_how_often() -> None:
    tree = changed(budgets={"small": {"exchanges": 100}})
    tree["rows"]["local"]["exchanges"] = 4
    every = {c.row.key: Config.of(c.settings()).run for c in read("t", tree).cells("small")}
    assert (every["proto"].rounds, every["proto"].validate_every) == (100, 10)
    assert (every["local"].rounds, every["local"].validate_every) == (25, 2)


def test_an_option_that_two_rows_search_is_drawn_alike_for_both() -> None:
    tree = changed(tune={})
    for row in tree["rows"].values():
        row["tune"] = {"method.optimizer.lr": {"log": [1e-4, 1e-2]}}
    made = read("t", tree)
    rows = made.rows.values()
    one, two = (Search.of(made, "small", row, 5, Path()).trials for row in rows)
    assert one == two


def test_a_worker_tells_the_round_that_would_be_tested(tmp_path: Path) -> None:
    last = {"run": {"choose": "last"}, "test": {"way": 2}}
    split = {"split": {"base": ["0-4"], "validation": ["5", "6"], "novel": ["7-9"]}}
    assert cell_worker._tune(experiment(tmp_path, split, last), {})["round"] == 4


@pytest.mark.slow
@pytest.mark.usefixtures("jobs_here")
def test_two_draws_that_come_to_the_same_are_trained_once(tmp_path: Path) -> None:
    tree = changed(tune={"method.local_steps": {"choice": [1, 2]}})
    tree["rows"]["local"]["tune"] = {}
    asked = runner(read("t", tree), tmp_path, "proto/one", seeds=1, tune=4, jobs=2)
    events = [(event.kind, event.job.do) for event in asked.run()]
    assert events.count(("done", "tune")) == 3, "2 values, and what the recipe leaves open"
    assert events.count(("done", "train")) == 1
    file = asked._search(asked.request.recipe.rows["proto"]).file
    assert len(json.loads(file.read_text("utf-8"))["trials"]) == 4


def test_seeds_on_other_data_are_not_joined_by_more(tmp_path: Path) -> None:
    made = example()
    cell = made.cells("small", ["proto/one"])[0]
    Results(tmp_path).add(cell, "small", None, 0, facts())
    more = runner(made, tmp_path, "proto/*", seeds=2)
    more.check()
    told = more.states["proto/one"].obstacle
    assert told is not None
    assert "its seeds were trained on other data (d) than those here" in told.reason
    assert "proto.one.json away" in told.reason
    assert more.states["proto/five"].obstacle is None
    assert {job.key.split()[1] for job in more._jobs()} == {"proto/five"}
    whole = runner(made, tmp_path, "proto/one", seeds=1)
    whole.check()
    assert whole.states["proto/one"].obstacle is not None, "finished, and not of what is here"
    Results(tmp_path).add(cell, "small", None, 0, of_here())
    same = runner(made, tmp_path, "proto/one", seeds=2)
    same.check()
    assert same.states["proto/one"].obstacle is None


def test_trials_on_other_data_choose_for_nobody(tmp_path: Path) -> None:
    made = example()
    tuned(made, tmp_path, 1, data=facts()["data"])
    asked = runner(made, tmp_path, "proto/one", tune=3)
    asked.check()
    told = asked.states["proto/one"].obstacle
    assert told is not None
    assert "its trials were on other data (d)" in told.reason
    tuned(made, tmp_path, 1)
    again = runner(made, tmp_path, "proto/one", tune=3)
    again.check()
    assert again.states["proto/one"].obstacle is None


def test_the_column_that_trials_are_made_in_is_looked_at_whichever_is_asked_for(
    tmp_path: Path,
) -> None:
    tree = changed()
    tree["columns"]["one"]["settings"] = {"episode": {"shot": 500}}
    asked = runner(read("t", tree), tmp_path, "proto/five", tune=2)
    asked.check()
    told = asked.states["proto/five"].obstacle
    assert told is not None
    assert told.reason.startswith("proto/one, in which it is tuned: ")


def test_cells_of_trials_that_count_no_more_are_left_out(tmp_path: Path) -> None:
    made = example()
    chosen = tuned(made, tmp_path, 2)
    cell = made.cells("small", ["proto/one"])[0]
    result = Results(tmp_path).add(cell, "small-tune3", chosen, 0, facts())
    states, left = current("t", "small-tune3", [result], made)
    assert (len(states), left) == (1, [])
    other = example(tune={"method.optimizer.lr": {"log": [1e-3, 1e-1]}})
    states, left = current("t", "small-tune3", [result], other)
    assert states == []
    assert left == [
        "t/small-tune3, proto/one: out of date, its file of trials, proto.tune.json, is missing or "
        "belongs to another search"
    ]
    assert plots.write(tmp_path, other, "small-tune3") == []
    assert result.path is not None
    (result.path.parent / "proto.tune.json").write_text("{}", encoding="utf-8")
    assert "is damaged" in current("t", "small-tune3", [result], made)[1][0]


def test_rows_with_fewer_seeds_have_a_command_of_their_own(tmp_path: Path) -> None:
    made = example()
    for cell in made.cells("small"):
        for seed in range(2 if cell.row.key == "proto" else 1):
            Results(tmp_path).add(cell, "small", None, seed, facts())
    text = results_page.pages(tmp_path, {"t": made})["results/t.md"]
    assert "`fedshot reproduce t --cells 'proto/*' --budget small --seeds 2`" in text
    assert "`fedshot reproduce t --cells 'local/*' --budget small --seeds 1`" in text


def test_a_seed_that_is_missing_between_others_is_told(tmp_path: Path) -> None:
    cell = example().cells("small")[0]
    for seed in (0, 2):
        result = Results(tmp_path).add(cell, "small", None, seed, facts())
    assert "only seeds 0, 2" in marks(cell, result)
    assert result.path is not None
    content = json.loads(result.path.read_text())
    content["seeds"] = dict(reversed(content["seeds"].items()))  # as edited by hand
    result.path.write_text(json.dumps(content))
    assert list(read_result(result.path).seeds) == [0, 2]


def test_another_budget_s_training_with_the_same_settings_is_taken_over(tmp_path: Path) -> None:
    made = example()
    assert tuned(made, tmp_path, 0) == {}
    Results(tmp_path).add(made.cells("small")[0], "small", None, 0, of_here())
    asked = runner(made, tmp_path, "proto/one", seeds=1, tune=3)
    asked.check()
    assert list(asked.run()) == [], "the recipe as it stands was best, and is trained already"
    told = marks(asked.cells[0], asked.states["proto/one"].result)
    assert "shares the training of proto/one of small, which has the same settings" in told


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"settings": {', '"settings": null, "was": {'),
        ('"queries": 10', '"queries": 0'),
        ('"accuracy": 0.5', '"was": 0.5'),
        ('"digest": "d"', '"was": "d"'),
        ("[0, 0.3, 0.1]", "[0, 0.3]"),
        ('"tuned": null', '"tuned": [1]'),
    ],
)
def test_a_damaged_file_is_told_and_is_the_matter_of_its_own_cell(
    before: str, after: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = example()
    cells, results = made.cells("small"), Results(tmp_path)
    good, bad = (results.add(cell, "small", None, 0, facts()) for cell in cells[:2])
    assert bad.path is not None
    text = bad.path.read_text(encoding="utf-8")
    assert before in text
    bad.path.write_text(text.replace(before, after, 1), encoding="utf-8")
    assert Results(tmp_path).readable() == [good]
    assert plots.write(tmp_path, made, "small") == [], "one method alone is no comparison"
    assert main(["reproduce", "results", "--results", str(tmp_path)]) == 2
    assert "proto.five.json is damaged" in capsys.readouterr().err


def test_a_row_that_was_broken_since_is_out_of_date(tmp_path: Path) -> None:
    cell = example().cells("small")[0]
    result = Results(tmp_path).add(cell, "small", None, 0, facts())
    tree = changed()
    tree["rows"]["proto"]["settings"]["method"]["lokal"] = 1
    told = outdated(result, read("t", tree).cells("small")[0], None)
    assert told is not None
    assert told.startswith("its current settings are invalid: there is no option 'method.lokal'")


def test_budgets_that_some_recipes_have_list_those(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "list", "--budget", "digits", "--json"]) == 0
    assert [line["name"] for line in json.loads(capsys.readouterr().out)] == ["fedfsl-fig6"]
    assert main(["reproduce", "list", "--budget", "smal"]) == 2
    assert "no recipe has a budget 'smal'. Did you mean 'small'" in capsys.readouterr().err


def test_pictures_are_linked_from_where_the_page_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results" / "ours"
    folder.mkdir(parents=True)
    tree = changed(kind="curve")
    for i, column in enumerate(tree["columns"].values()):
        column["x"] = i
    (folder / "recipe.yaml").write_text(json.dumps(tree), encoding="utf-8")
    finished_cells(read("ours", tree), tmp_path / "results")
    for name in ("page.md", "pages/deep/page.md"):
        assert main(["reproduce", "results", "--to", name]) == 0
        page = (tmp_path / name).with_suffix("") / "ours.md"
        link = page.read_text(encoding="utf-8").split("![A test](")[1].split(")")[0]
        assert (page.parent / link).is_file()


def test_a_run_that_another_process_went_on_with_is_read_again(tmp_path: Path) -> None:
    early = experiment(tmp_path, {"run": {"rounds": 4}})
    waiting = experiment(tmp_path, {"run": {"rounds": 4}})
    for record in early.run():
        if record.round == 2:
            break
    late = experiment(tmp_path, {"run": {"rounds": 4}})
    assert late.round == 2
    whole = finished(tmp_path, {"run": {"rounds": 4}})
    for one in (waiting, late):
        assert list(one.run()) == [], "the other has trained to the end"
        assert one.round == 4
        assert one.result().accuracy == whole.result().accuracy


def test_a_run_whose_checkpoints_are_gone_says_so(tmp_path: Path) -> None:
    begun = experiment(tmp_path, {"run": {"rounds": 4}})
    for record in begun.run():
        if record.round == 1:
            break
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="holds no checkpoint any more"):
        next(begun.run())


def test_a_worker_that_found_all_trained_is_not_told_to_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = experiment(tmp_path)
    for commit, run in (("aaa", experiment(tmp_path)), ("bbb", late)):
        monkeypatch.setattr(cell_worker.provenance, "revision", lambda told=commit: told)
        cell_worker._finish(run)
    assert [hand["commit"] for hand in provenance.history(tmp_path)] == ["aaa"]


def test_new_trials_do_not_join_seeds_of_other_data(tmp_path: Path) -> None:
    made = example()
    cell = made.cells("small", ["proto/one"])[0]
    Results(tmp_path).add(cell, "small-tune3", tuned(made, tmp_path, 0), 0, facts())
    (tmp_path / "t" / "small-tune3" / "proto.tune.json").unlink()
    asked = runner(made, tmp_path, "proto/one", seeds=2, tune=3)
    asked.check()
    assert asked.states["proto/one"].obstacle is None, "untuned, nothing of it counts"
    told = {i: of_here(validation=[[2, 0.6 - 0.1 * i, 0.1]]) for i in range(3)}
    asked._choose("proto", list(told.values()))
    obstacle = asked.states["proto/one"].obstacle
    assert obstacle is not None
    assert "its seeds were trained on other data (d)" in obstacle.reason
    assert asked._jobs() == []


@pytest.mark.parametrize("broken", ["search", "column"])
def test_trials_that_could_not_be_today_leave_the_rest_of_the_page(
    broken: str, tmp_path: Path
) -> None:
    made = example()
    chosen = tuned(made, tmp_path, 0)
    cell = made.cells("small", ["proto/five"])[0]
    result = Results(tmp_path).add(cell, "small-tune3", chosen, 0, facts())
    tree = changed()
    if broken == "search":
        tree["tune"] = {}
    else:
        tree["columns"]["one"]["settings"] = {"run": {"choose": "best_on_test_classes"}}
    states, left = current("t", "small-tune3", [result], read("t", tree))
    assert states == []
    said = "has no search space" if broken == "search" else "trials are judged on validation"
    assert said in left[0]
    other = replace(result, variant="small-tunex")
    assert "names no number of trials" in current("t", "small-tunex", [other], made)[1][0]


def test_one_recipe_that_cannot_be_read_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.yaml").write_text("title: [")
    words = ["reproduce", "list", "--results", str(tmp_path), "--json", "--budget", "digits"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)
    assert "mine is left out: " in err
