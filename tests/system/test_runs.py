"""A run among others: read while it trains, resumed with other limits, compared across seeds."""

from __future__ import annotations

import dataclasses
import html
import json
import shutil
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from fedshot.core.errors import BusyError, CheckpointError, QuorumError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.evaluation.episodic_test import EpisodicTest, Score, ValidationResult
from fedshot.fleets.unreliable import Trouble, Unreliable
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Exchange, Fleet
from fedshot.reports.page import write_page
from fedshot.reports.run_files import Run
from fedshot.runs.experiment import Experiment

from .conftest import Trained
from .runs import CHOOSING, experiment, finished, last_hash, stopped


def test_a_run_can_be_tested_while_it_trains(tmp_path: Path) -> None:
    finished(tmp_path / "alone", CHOOSING)
    training = experiment(tmp_path / "watched", CHOOSING)
    for _ in training.run():
        watcher = experiment(tmp_path / "watched", CHOOSING)
        score = watcher.evaluate(watcher.prepared.test)
        assert score == training.evaluate(training.prepared.test)
    assert last_hash(tmp_path / "watched") == last_hash(tmp_path / "alone")


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    first = experiment(tmp_path / "run")
    rounds = first.run()
    next(rounds)
    second = experiment(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"another process is training in .*run"):
        next(second.run())
    assert len(list(rounds)) == 4
    assert list(experiment(tmp_path / "run").run()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="no process locks files so there")
@pytest.mark.parametrize("again", [False, True])
def test_a_run_whose_folder_is_deleted_writes_nothing_more_there(
    tmp_path: Path, again: bool
) -> None:
    """Above all where the same command was started again meanwhile."""
    rounds = experiment(tmp_path / "run").run()
    next(rounds)
    shutil.rmtree(tmp_path / "run")
    if again:
        finished(tmp_path / "run")
    written = last_hash(tmp_path / "run") if again else None
    with pytest.raises(BusyError, match=r"run was deleted or replaced while this process"):
        next(rounds)
    if again:
        assert last_hash(tmp_path / "run") == written
        assert len(experiment(tmp_path / "run").recorder.records()) == 5


@pytest.mark.parametrize("harm", ["all", "one", "older"])
def test_lost_private_states_are_noticed(tmp_path: Path, trained: Trained, harm: str) -> None:
    clients = trained(tmp_path / "run", {"run": {"cohort": 6}}) / "clients"
    states = sorted((clients / "000002").iterdir())
    if harm == "all":
        shutil.rmtree(clients)
    elif harm == "one":
        states[-1].unlink()
    else:
        states[-1].write_bytes(states[0].read_bytes())
    with pytest.raises(CheckpointError, match=r"client 2|private states of round 4"):  # noqa: PT012
        again = experiment(tmp_path / "run", {"run": {"cohort": 6}})
        again.evaluate(again.prepared.test)


def test_a_run_may_be_made_longer_and_more_tolerant(tmp_path: Path, trained: Trained) -> None:
    trained(tmp_path / "run")
    longer = {"run": {"rounds": 6, "quorum": 0.25, "below_quorum": "skip"}}
    rounds = [record.round for record in experiment(tmp_path / "run", longer).run()]
    assert rounds == [5, 6]
    whole = finished(tmp_path / "whole", longer)
    assert last_hash(tmp_path / "run") == last_hash(tmp_path / "whole")
    assert whole.best_round == 6


def test_the_last_round_may_be_tested_instead_of_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round 2 is made the best: which it would be is for a processor's rounding to say."""
    looks = iter(range(5))
    monkeypatch.setattr(ValidationResult, "beats", lambda *_: next(looks) in (0, 2))
    every = {"run": {"validate_every": 1}}
    assert finished(tmp_path / "best", CHOOSING, every).best_round == 2
    last = finished(tmp_path / "last", CHOOSING, every, {"run": {"choose": "last"}})
    assert last.best_round == 4
    last.result()
    assert '"chosen_by": "last round"' in (tmp_path / "last" / "result.json").read_text()


def test_fixed_labels_are_those_of_the_tests_too(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run", {"episode": {"labels": "fixed"}})
    for episodic_test in (made.prepared.test, made.prepared.episodic_test(made.config.test)):
        assert all(
            q.classes.tolist() == sorted(q.classes.tolist()) for q in episodic_test.eval_episodes
        )


def test_the_untrained_floor_is_that_of_round_0_whenever_it_is_asked_for(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run")
    before = made.evaluate_untrained(made.prepared.test)
    for _ in made.run():
        pass
    assert made.evaluate_untrained(made.prepared.test) == before != made.result()


def test_the_round_is_saved_as_often_as_asked(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run", {"run": {"rounds": 7, "checkpoint_every": 3}})
    saved = {max(made.checkpoints.rounds(), default=-1) for _ in made.run()}
    assert saved == {0, 3, 6, 7}


def test_threads_are_those_of_the_run_and_given_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    made = experiment(tmp_path / "run", {"run": {"threads": 2}})
    for _ in made.run():
        assert torch.get_num_threads() == before
    made.result()
    assert torch.get_num_threads() == before


def test_every_training_seed_sits_the_same_test(tmp_path: Path) -> None:
    drawn = {"split": {"random": [5, 0, 5]}}
    one = experiment(tmp_path / "one", drawn, {"seed": 1})
    two = experiment(tmp_path / "two", drawn, {"seed": 2})
    assert one.prepared.test.digest == two.prepared.test.digest


def test_a_method_is_handed_questions_without_labels(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run", {"method": {"name": "fl_proto"}})
    seen = []
    method = type(made.method)

    class Curious(method):  # type: ignore[misc, valid-type]
        def evaluate(
            self, server: object, clients: Clients, eval_episodes: object, key: Key
        ) -> object:
            seen.append(eval_episodes)
            return super().evaluate(server, clients, eval_episodes, key)

    fields = {f.name: getattr(made.method, f.name) for f in dataclasses.fields(made.method)}
    made.method = Curious(**fields)
    made.evaluate_untrained(made.prepared.test)
    assert not hasattr(seen[0], "labels")
    assert not hasattr(seen[0][0], "query_y")


@pytest.mark.parametrize(
    ("away", "best", "by"), [({2}, 4, "validation"), ({*range(5)}, 4, "last round")]
)
def test_a_look_that_no_client_answers_is_skipped_where_rounds_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: set[int], best: int, by: str
) -> None:
    """With `stop` it ends the run. Where no look was answered, the last round is tested."""
    monkeypatch.setattr(ValidationResult, "beats", lambda *_: True)

    def without(fleet: Fleet) -> Fleet:
        def plan(exchange: Exchange, _client: int) -> Trouble | None:
            missed = exchange.phase == "evaluate" and exchange.version[0] in away
            return "drop" if missed and not done else None

        return Unreliable(fleet, plan)

    done = False
    every = {"run": {"validate_every": 1, "below_quorum": "skip"}}
    made = Experiment(
        experiment(tmp_path / "none", CHOOSING, every).prepared, tmp_path / "run", without
    )
    records = list(made.run())
    assert [record.validation is None for record in records] == [r in away for r in range(5)]
    assert all(len(record.faults) == 6 for record in records if record.round in away)
    assert [record.skipped for record in records] == [None] * 5
    done = True
    made.result()
    told = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert (told["round"], told["chosen_by"]) == (best, by)
    stops = experiment(tmp_path / "none", CHOOSING, {"run": {"validate_every": 1}}).prepared
    done = False
    with pytest.raises(QuorumError, match="0 of 6 clients gave a usable reply"):
        list(Experiment(stops, tmp_path / "stops", without).run())


@pytest.mark.parametrize("from_round", [0, 4])
def test_a_lost_client_does_not_make_the_untrained_model_the_chosen_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_round: int
) -> None:
    """Its episodes are missing from every look; rounds are compared over the others.

    Each round is made better than the one before, whatever a processor's rounding makes of it.
    """
    many = {"run": {"rounds": 6, "cohort": 6, "validate_every": 1, "quorum": 0.5}}
    evaluate_chosen = Experiment._evaluate

    def rising(
        self: Experiment, episodic_test: EpisodicTest, server: Tree, round: int, clients: Clients
    ) -> Score:
        found = evaluate_chosen(self, episodic_test, server, round, clients)
        marks = tuple((round + u % 3) / 10 for u in range(len(found.per_episode)))
        return dataclasses.replace(found, per_episode=marks, accuracy=fmean(marks))

    monkeypatch.setattr(Experiment, "_evaluate", rising)

    def without(fleet: Fleet) -> Fleet:
        def plan(exchange: Exchange, client: int) -> Trouble | None:
            return "drop" if client == 3 and exchange.version[0] >= from_round else None

        return Unreliable(fleet, plan)

    setting = experiment(tmp_path / "none", CHOOSING, many).prepared
    made = Experiment(setting, tmp_path / "run", without)
    rounds = made.run()
    for _ in range(4):
        next(rounds)
    rounds.close()
    made = Experiment(setting, tmp_path / "run", without)  # what was best is read again
    list(made.run())
    looks = [r["validation"] for r in made.recorder.records()]
    assert [bool(look["unanswered"]) for look in looks] == [r >= from_round for r in range(7)]
    best, held = 0, None
    for r, look in enumerate(looks):
        marks = dict(zip((u for u in range(10) if u not in look["missing"]), look["per_episode"],
                         strict=True))  # fmt: skip
        common = [u for u in marks if held is None or u in held]
        if held is None or sum(marks[u] for u in common) > sum(held[u] for u in common) + 1e-12:
            best, held = r, marks
    assert made.best_round == best == 6


def test_a_run_that_is_made_longer_has_no_result_until_its_end(
    tmp_path: Path, trained: Trained
) -> None:
    experiment(trained(tmp_path / "run")).result()
    assert Run.read(tmp_path / "run").result is not None
    longer = {"run": {"rounds": 6}}
    stopped(tmp_path / "run", 5, longer)
    assert Run.read(tmp_path / "run").result is None
    early = experiment(tmp_path / "run", longer)
    early.result()  # of five rounds: a figure, and no result of the run
    assert Run.read(tmp_path / "run").result is None
    finished(tmp_path / "run", longer).result()
    assert Run.read(tmp_path / "run").test["accuracy"] > 0


def test_the_bytes_of_the_test_stand_beside_its_result(tmp_path: Path, trained: Trained) -> None:
    made = experiment(trained(tmp_path / "run"))
    before = (tmp_path / "run" / "ledger.json").read_text()
    made.result()
    assert (tmp_path / "run" / "ledger.json").read_text() == before
    lines = Run.read(tmp_path / "run").ledger
    asked = [line for line in lines if line["phase"] == "test"]
    assert {line["direction"] for line in asked} == {"down", "up"}
    assert sum(line["messages"] for line in asked if line["direction"] == "up") >= 6
    assert [line for line in lines if line["phase"] != "test"] == json.loads(before)


def test_a_run_keeps_its_test_where_the_raw_baselines_are_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        assert torch.get_num_threads() == 2
        raise KeyboardInterrupt

    made = finished(tmp_path / "run", {"run": {"rounds": 1, "threads": 2}})
    with monkeypatch.context() as patch:
        patch.setattr("fedshot.runs.experiment.raw_baselines", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.result()
    held = Run.read(tmp_path / "run").result
    assert held is not None
    assert "baselines" not in held
    made.result()
    after = Run.read(tmp_path / "run").result
    assert after is not None
    assert after.pop("baselines")["raw pixels"]["tasks"] == held["test"]["tasks"]
    assert after == held


def test_another_fleet_is_noted_where_a_run_goes_on(tmp_path: Path) -> None:
    stopped(tmp_path / "run", 0)
    finished(tmp_path / "run", {"run": {"fleet": "vectorised"}})
    noted = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert noted["fleet"] != "vectorised"
    (other,) = noted["resumed"]
    assert other["after_round"] == 0
    assert other["environment"]["fleet"] == "vectorised"
    assert Run.read(tmp_path / "run").changes_on_resume() == [
        (0, f"fleet was {noted['fleet']!r}, is 'vectorised'")
    ]


def test_a_run_that_is_made_longer_tells_it(tmp_path: Path, trained: Trained) -> None:
    trained(tmp_path / "run")
    finished(tmp_path / "run", {"run": {"rounds": 5}})
    read = Run.read(tmp_path / "run")
    told = "run.rounds was 4, is 5"
    assert read.changes_on_resume() == [(4, told)]
    finished(tmp_path / "run", {"run": {"rounds": 5}})  # nothing is other
    assert Run.read(tmp_path / "run").changes_on_resume() == [(4, told)]
    write_page(tmp_path / "page.html", "one", [], {"one": [read]})
    assert html.escape(told) in (tmp_path / "page.html").read_text("utf-8")


def test_what_was_tried_and_trained_again_is_not_told(tmp_path: Path, trained: Trained) -> None:
    folder = trained(tmp_path / "run")
    for n in (8, 8, 9):  # each dies before the next checkpoint
        stopped(folder, 5, {"run": {"rounds": n, "checkpoint_every": 9}})
    told = "run.checkpoint_every was 1, is 9; run.rounds was 4, is 9"
    assert Run.read(folder).changes_on_resume() == [(4, told)]
    finished(folder, {"run": {"quorum": 0.1}})  # trains nothing
    assert Run.read(folder).changes_on_resume() == [(4, told)]
    finished(folder, {"run": {"rounds": 5}})
    assert Run.read(folder).changes_on_resume() == [(4, "run.rounds was 4, is 5")]


def test_an_experiment_that_runs_twice_tells_its_turn_once(
    tmp_path: Path, trained: Trained
) -> None:
    longer = experiment(trained(tmp_path / "run"), {"run": {"rounds": 7}})
    for _ in range(2):
        begun = longer.run()
        next(begun)
        begun.close()
    assert [round for round, _ in Run.read(tmp_path / "run").changes_on_resume()] == [4]


def test_a_lost_environment_is_told(tmp_path: Path, trained: Trained) -> None:
    (trained(tmp_path / "run") / "environment.json").unlink()
    finished(tmp_path / "run", {"run": {"rounds": 5}})
    told = "run.rounds was 4, is 5; environment.json was lost"
    assert Run.read(tmp_path / "run").changes_on_resume() == [(4, told)]


@pytest.mark.parametrize(
    "resumed",
    ["null", "{}", "[1]", '[{"after_round": 1}]', '[{"environment": {}}]',
     '[{"after_round": 1, "environment": {}, "settings": 5}]'],
)  # fmt: skip
def test_a_damaged_environment_is_named(resumed: str, tmp_path: Path, trained: Trained) -> None:
    (trained(tmp_path / "run") / "environment.json").write_text(f'{{"resumed": {resumed}}}')
    with pytest.raises(CheckpointError, match=r"environment.json is damaged"):
        Run.read(tmp_path / "run")
