"""Runs in simulated time: what they record, and what must not change them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedshot.core import tree
from fedshot.core.errors import CheckpointError, ConfigError
from fedshot.methods.base.fl_proto import FLProto
from fedshot.methods.registry import METHODS
from fedshot.protocol.method import Traits
from fedshot.runs.experiment import Experiment
from fedshot.use.trained import TrainedRun

from .runs import experiment, finished, last_hash, stopped

SPEEDS: dict[str, Any] = {"compute": 2.0, "download": 0.1, "upload": 0.05, "spread": 1.0}
LIMITS = SPEEDS | {"wait_for": 3, "deadline": 30.0}


def clocked(**options: Any) -> dict[str, Any]:
    return {"run": {"clock": options}}


def times(made: Experiment) -> list[tuple[Any, Any]]:
    return [(r["simulated"], r["late"]) for r in made.recorder.records()]


def server(made: Experiment) -> str:
    return tree.digest_of(tree.items(made.server))


def test_time_without_limits_changes_nothing_else(tmp_path: Path) -> None:
    plain = finished(tmp_path / "plain")
    timed = finished(tmp_path / "timed", clocked(**SPEEDS, deadline=1e9))
    assert server(plain) == server(timed)
    assert plain.meter.to_json() == timed.meter.to_json()
    for before, after in zip(plain.recorder.records(), timed.recorder.records(), strict=True):
        del after["simulated"], after["late"]
        for name in ("metrics", "validation", "faults", "bytes_up", "bytes_down"):
            assert before[name] == after[name]


def test_over_selection_counts_the_first_and_names_the_late(tmp_path: Path) -> None:
    made = finished(tmp_path, clocked(**LIMITS))
    records = made.recorder.records()
    assert [len(r["late"]) >= 1 for r in records] == [False, True, True, True, True]
    assert [r["faults"] for r in records] == [[]] * 5
    hours = [r["simulated"] for r in records]
    assert hours == sorted(hours)
    assert 0 < hours[-1] <= 4 * 30
    made.result()
    assert made.folder.joinpath("result.json").read_text().count('"hours"') == 1


def test_further_steps_of_a_secure_sum_are_not_training(tmp_path: Path) -> None:
    plain = finished(tmp_path / "plain", clocked(compute=1.0))
    secure = finished(tmp_path / "secure", clocked(compute=1.0), {"run": {"secure_sums": True}})
    assert times(secure) == times(plain)


def test_limits_that_privacy_or_secure_sums_do_not_allow_are_refused(tmp_path: Path) -> None:
    private = {"privacy": {"name": "client", "noise": 1.0, "clip": 1.0}}
    with pytest.raises(ConfigError, match=r"changes the sum by two clips"):
        experiment(tmp_path / "private", clocked(wait_for=3), private)
    secure = {"run": {"secure_sums": True, "quorum": 0.1}}
    with pytest.raises(ConfigError, match=r"run\.secure_threshold\. Raise wait_for"):
        experiment(tmp_path / "secure", clocked(wait_for=1), secure)


def test_every_fleet_has_the_same_times(tmp_path: Path) -> None:
    reference = finished(tmp_path, clocked(**LIMITS), {"run": {"fleet": "sequential"}})
    for fleet in ("threads", "processes", "vectorised"):
        workers = {"run": {"fleet": fleet, "workers": 2}}
        made = finished(tmp_path / fleet, clocked(**LIMITS), workers)
        assert times(made) == times(reference), fleet
        assert fleet == "vectorised" or server(made) == server(reference), fleet


def test_a_resumed_run_goes_on_at_its_time(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("client,from,to\n" + "".join(f"{k},{9 * k},{9 * k + 40}\n" for k in range(6)))
    limits = clocked(**SPEEDS | {"availability": str(trace), "deadline": 30.0})
    limits["run"] |= {"below_quorum": "skip"}
    whole = finished(tmp_path / "whole", limits)
    stopped(tmp_path / "cut", 2, limits)
    resumed = finished(tmp_path / "cut", limits)
    assert times(resumed) == times(whole)
    assert last_hash(tmp_path / "cut") == last_hash(tmp_path / "whole")
    trace.write_text(trace.read_text().replace("40", "41"))
    with pytest.raises(CheckpointError, match=r"other files of run\.clock\.speeds"):
        experiment(tmp_path / "cut", limits)


def test_secure_sums_leave_late_clients_out(tmp_path: Path) -> None:
    method = {"method": {"name": "fl_proto", "local_steps": 1}}
    options = {"secure_threshold": 0.51}
    summed = finished(tmp_path, method, clocked(**LIMITS), {"run": {"secure_sums": True} | options})
    assert [len(late) for _, late in times(summed)] == [0, 1, 1, 1, 1]
    assert [r["faults"] for r in summed.recorder.records()] == [[]] * 5


FEDBUFF = SPEEDS | {"wait_for": 2, "asynchronous": True}
KEPT = {"method": {"name": "fedfsl_naive", "local_steps": 1, "optimizer_state": "keep"}}


def test_asynchronous_rounds_resume_to_the_bit_on_every_fleet(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("client,from,to\n" + "".join(f"{k},{k // 5},30\n" for k in range(6)))
    options = clocked(**FEDBUFF | {"availability": str(trace)})
    proto = {"method": {"name": "fl_proto", "local_steps": 2}}
    for method in (proto, KEPT):
        whole = finished(tmp_path / f"whole-{method['method']['name']}", method, options)
        stale = [r["metrics"]["staleness"] for r in whole.recorder.records()[1:]]
        assert max(stale) > 0
        for name, fleet in (("cut", {}), ("threads", {"fleet": "threads", "workers": 2})):
            folder = tmp_path / f"{name}-{method['method']['name']}"
            stopped(folder, 2, method, options)
            made = finished(folder, method, options, {"run": fleet})
            assert (times(made), server(made)) == (times(whole), server(whole))
        assert TrainedRun(whole.folder).round == whole.best_round


def test_statistics_of_batch_norm_stay_positive(tmp_path: Path) -> None:
    conv = {
        "model": {"backbone": {"name": "conv4", "width": 4}},
        "method": {"name": "fl_proto", "local_steps": 10},
        "run": {"rounds": 6, "cohort": 6},
    }
    made = finished(tmp_path, conv, clocked(**FEDBUFF))
    assert max(r["metrics"]["staleness"] for r in made.recorder.records()[1:]) > 1
    stats = dict(tree.items(made.server.stats))  # type: ignore[attr-defined]
    assert all(bool((leaf > 0).all()) for path, leaf in stats.items() if path.endswith("var"))
    assert any(path.endswith("var") for path in stats)


def test_one_client_at_a_time_is_a_synchronous_run(tmp_path: Path) -> None:
    proto = {"method": {"name": "fl_proto", "local_steps": 2}, "run": {"cohort": 1}}
    plain = finished(tmp_path / "plain", proto, clocked(**SPEEDS))
    made = finished(tmp_path / "made", proto, clocked(**FEDBUFF | {"wait_for": 1}))
    assert (server(made), times(made)) == (server(plain), times(plain))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"method": {"name": "fsl_local"}},
            "'fsl_local', with these options, does more in a round .* of the model\\. Set",
        ),
        (
            {"method": {"name": "own_without_the_trait"}},
            "does more .*; if it only averages, its traits must say so: .*sends_changes=True",
        ),
        (
            {"method": {"name": "fl_proto"}, "run": {"secure_sums": True}},
            "secure_sums is true: a secure",
        ),
        ({"method": {"name": "fedfsl_mi", "reference": "exclusive"}}, "subtract their own upload"),
        ({"method": {"name": "fl_proto"}, "attack": {"name": "min_max"}}, "clients copy an upload"),
    ],
)
def test_asynchronous_rounds_are_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    traits = property(lambda _: Traits())
    own = type("Own", (FLProto,), {"traits": traits, "__module__": __name__})
    monkeypatch.setitem(METHODS, "own_without_the_trait", own)
    with pytest.raises(ConfigError, match=f"run.clock.asynchronous is true, and .*{reason}"):
        experiment(tmp_path, clocked(**FEDBUFF), changes)


@pytest.mark.parametrize("wait_for", [1, 5])
def test_waiting_for_less_than_the_quorum_or_more_than_all_is_refused(
    tmp_path: Path, wait_for: int
) -> None:
    with pytest.raises(ConfigError, match=r"wait_for is \d; expected at most the 4 clients"):
        experiment(tmp_path, clocked(wait_for=wait_for))


@pytest.mark.flower
def test_nodes_of_flower_are_refused(tmp_path: Path) -> None:
    from fedshot.deploy.flower.flower_runs import _check_clock

    _check_clock(experiment(tmp_path / "plain").prepared)
    with pytest.raises(
        ConfigError, match=r"run\.clock is set, but clients on nodes take real time"
    ):
        _check_clock(experiment(tmp_path / "timed", clocked(**SPEEDS)).prepared)


def test_privacy_is_refused_where_only_some_are_online(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    settings = {"privacy": {"name": "client", "noise": 1.0, "clip": 1.0, "delta": 0.01}}
    with pytest.raises(ConfigError, match=r"privacy is set, and run\.clock\.availability"):
        experiment(tmp_path, settings, clocked(availability="trace.csv"))
