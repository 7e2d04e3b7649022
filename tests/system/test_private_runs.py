"""Runs with differential privacy: what is refused before round 1, recorded, and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedshot.config.load import Config
from fedshot.core.errors import CheckpointError, ConfigError
from fedshot.methods.registry import METHODS
from fedshot.privacy.accounting import Accountant
from fedshot.privacy.differential import Mechanism
from fedshot.reports import Run, summary
from fedshot.runs.prepare import PreparedRun
from fedshot.runs.private_runs import PrivacyLedger, PrivacyPlan
from system.runs import OWN, SMALL, finished, last_hash, merged, stopped

CLIENT = {"privacy": {"name": "client", "noise": 1.0, "delta": 0.01}}
PROTO: dict[str, Any] = {"method": {"name": "fl_proto", "local_steps": 1}}
WITHOUT_NORM = {"model": {"backbone": {"name": "mlp", "hidden": []}}}
LAST = {"run": {"choose": "last"}}
DEALT = {"episode": {"way": 2, "shot": 12, "query": 12}, "run": {"cohort": None}}


def test_settings_without_privacy_are_those_of_older_versions() -> None:
    assert "privacy" not in Config.of({"privacy": "none"}).settings


@pytest.mark.parametrize(
    ("privacy", "message"),
    [
        ({"name": "client"}, "privacy has neither epsilon nor noise. Set privacy.epsilon"),
        ({"name": "client", "noise": 0}, "privacy.noise is 0; expected a number of at least 0.1"),
        ({"name": "client", "epsilon": 1e3}, "privacy.epsilon is 1000.0; expected a number above"),
        ({"name": "client", "epsilon": 8, "clip": 0}, "privacy.clip is 0; expected a number above"),
        ({"name": "client", "epsilon": 8, "quantile": 1}, "privacy.quantile is 1; expected a"),
        ({"name": "client", "epsilon": 8, "sampling": "all"}, "privacy.sampling is 'all'"),
        (
            {"name": "example", "epsilon": 8, "clip": 1},
            "'privacy.clip' belongs to privacy 'client'",
        ),
        ({"name": "person", "epsilon": 8}, "privacy.name is 'person'"),
    ],
)
def test_wrong_options_are_refused(privacy: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.of({"privacy": privacy})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"privacy": {"delta": 0.3}}, "privacy.delta is 0.3, above 1 / 6: with that delta the run"),
        ({"privacy": {"name": "example", "noise": 1.0}}, "nothing bounds what one example changes"),
        ({"method": {"name": "fsl_local"}}, "the clients of fsl_local send nothing"),
        ({"method": {"name": "pfedfsl"}}, "keeps the part 'delta'"),
        (
            {"method": {"name": "fedfsl_mi", "reference": "exclusive"}},
            "subtract their own models from the mean",
        ),
        (
            {**OWN, **LAST, "method": {"name": "ditto"}},
            "is tested by predictions of the clients' own models",
        ),
        ({"model": {"backbone": {"name": "conv4", "width": 4}}}, "upload variances of batch norm"),
        (
            {**DEALT, "partition": {"name": "resampled", "clients": 6}},
            "partition 'resampled' gives a client",
        ),
        ({**OWN, "method": {"name": "fedavg"}}, "run.choose is 'validation', but the split has no"),
        (
            {"privacy": {"clip": {"theta": 1.0}}},
            "privacy.clip has no 'stats', a part that fl_proto",
        ),
        (
            {"privacy": {"clip": {"theta": 1.0, "stats": 1.0, "sums": 2.0}}},
            "privacy.clip has 'sums', and fl_proto uploads stats, theta. Remove it.",
        ),
    ],
)
def test_a_run_that_is_not_covered_is_refused_before_its_first_round(
    changes: dict[str, Any], message: str
) -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    if "pfedfsl" in str(changes):
        message = "of each client apart (Gather)"
    with pytest.raises(ConfigError) as error:
        PreparedRun(Config.of(merged(SMALL, PROTO, CLIENT, changes)))
    assert message in str(error.value)


class _RoundsAsEpsilon(Accountant):
    def epsilon(self, rounds: int) -> float:
        return float(rounds)


def test_rounds_repeated_with_secret_noise_are_spent_and_end_the_run_early(tmp_path: Path) -> None:
    """A round begins, the process dies, and the round is trained again: the budget is 3 rounds."""
    mechanism, accountant = Mechanism(1.0, 1.0), _RoundsAsEpsilon(1.0, 1e-5)
    plan = PrivacyPlan(mechanism, accountant, 1, by_client=True, budget=3.0)
    ledger = PrivacyLedger(plan, tmp_path, secret=True)
    for round in (1, 2, 2):
        ledger.charge(round)
    assert PrivacyLedger(plan, tmp_path, secret=True).epsilon(2) == 3.0
    with pytest.raises(ConfigError, match=r"round 3 would spend 4: 1 round had to be repeated"):
        ledger.charge(3)
    (tmp_path / "privacy.json").unlink()
    assert ledger.epsilon(0) == 0.0
    with pytest.raises(CheckpointError, match=r"privacy\.json is missing, which counts"):
        ledger.epsilon(2)
    seeded = PrivacyLedger(plan, tmp_path, secret=False)
    seeded.charge(2)
    assert seeded.epsilon(2) == 2.0
    one_example = PrivacyPlan(mechanism, accountant, 1, by_client=False)
    assert [one_example.epsilon(round) for round in (0, 1, 5)] == [0.0, 1.0, 1.0]
    assert one_example.epsilon(5, repeated=1) == 2.0


@pytest.mark.slow
def test_a_run_records_what_it_spends_and_a_resumed_one_spends_no_more(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    target: dict[str, Any] = {"privacy": {"name": "client", "epsilon": 8, "delta": 0.01}}
    target["run"] = {"cohort": None}
    made = finished(tmp_path / "whole", PROTO, target)
    made.result()
    records = made.recorder.records()
    spent = [record["epsilon"] for record in records]
    assert spent[0] == 0.0
    assert spent == sorted(set(spent))
    assert 7.9 < spent[-1] <= 8.0
    assert all(record["metrics"] == {} for record in records)
    settings = yaml.safe_load((tmp_path / "whole" / "config.yaml").read_text(encoding="utf-8"))
    noise = settings["privacy"]["noise"]
    expected = Accountant(noise, 0.01)
    assert spent[2] == expected.epsilon(2)
    assert PreparedRun(Config.of(settings)).config.settings == settings

    stopped(tmp_path / "halted", 2, PROTO, target)
    finished(tmp_path / "halted", PROTO, target)
    assert last_hash(tmp_path / "halted") == last_hash(tmp_path / "whole")
    result = json.loads((tmp_path / "whole" / "result.json").read_text(encoding="utf-8"))
    assert result["privacy"]["epsilon"] == spent[-1]
    text = summary([], [Run.read(tmp_path / "whole", "A run")])
    assert f"A run hides single clients: epsilon is {spent[-1]:.3g} at delta 0.01." in text

    with pytest.raises(ConfigError) as error:
        PreparedRun(Config.of(merged(settings, {"run": {"rounds": 9}})))
    assert f"9 rounds with privacy.noise {noise:g} spend" in str(error.value)
    assert "Set run.rounds to 4, raise privacy.noise, or leave it out" in str(error.value)


@pytest.mark.slow
def test_a_resumed_run_continues_with_its_clips_and_cohorts_of_a_fixed_size(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    options = {"privacy": {"quantile": 0.5, "sampling": "fixed"}}
    changes = (PROTO, CLIENT, options)
    made = finished(tmp_path / "whole", *changes)
    assert made.prepared.privacy is not None
    spent = Accountant(1.0, 0.01, probability=4 / 6, fixed_of=6).epsilon(4)
    records = made.recorder.records()
    assert records[-1]["epsilon"] == spent
    clips = [record["metrics"].get("clip_train") for record in records]
    assert clips[0] is None
    assert len({*clips}) == 5
    stopped(tmp_path / "halted", 2, *changes)
    again = finished(tmp_path / "halted", *changes)
    assert last_hash(tmp_path / "halted") == last_hash(tmp_path / "whole")
    resumed = again.recorder.records()
    assert [record["metrics"].get("clip_train") for record in resumed] == clips


@pytest.mark.slow
def test_few_round_learning_counts_every_exchange_of_a_round(tmp_path: Path) -> None:
    """R rounds, the prototypes recomputed, and the meta-gradient."""
    pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    method = {"name": "frl", "inner_rounds": 2, "positions": "pooled"}
    made = finished(tmp_path / "run", {"method": method}, CLIENT)
    assert made.prepared.privacy is not None
    assert made.prepared.privacy.releases == 4
    spent = Accountant(1.0, 0.01, releases=4, probability=4 / 6).epsilon(4)
    assert made.recorder.records()[-1]["epsilon"] == spent


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedncm", "fedcgs", "fed3r"])
def test_a_one_round_method_hides_examples_at_one_cost_for_all_rounds(
    name: str, tmp_path: Path
) -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    privacy = {"privacy": {"name": "example", "noise": 5.0, "delta": 1e-4}}
    method = {"method": {"name": name}, "run": {"rounds": 3, "cohort": 3}}
    made = finished(tmp_path / "run", WITHOUT_NORM, method, privacy)
    spent = [record["epsilon"] for record in made.recorder.records()]
    assert spent == [0.0] + 3 * [Accountant(5.0, 1e-4).epsilon(1)]
    assert made.result().accuracy > 0.2


COVERED = {
    "fedavg_probe", "fedbabu", "fedfsl_naive", "fedfsl_prox", "fedfsl_mi", "fedfsl_mi_adv",
    "fedmeta", "fl_proto", "frl", "frl_finetune", "frl_frozen", "frl_one_shot", "frl_personal",
    "fedncm", "fedcgs", "fed3r", "fedavg", "fedprox", "per_fedavg",
}  # fmt: skip
"""The methods whose server needs sums alone, and predicts: those of docs/privacy.md."""
ONLY_OLD_CLASSES = {
    "fedavg", "fedprox", "ditto", "fedfomo", "fedproto", "fedrep", "heur_fedamp", "per_fedavg",
    "pfedme",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_covered_or_refused_with_a_reason(name: str) -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    method = {"name": name} | ({"positions": "pooled"} if name == "frl" else {})
    head = {"model": {"head": {"name": "linear", "way": 10}}}
    own = {**OWN, **LAST} if name in ONLY_OLD_CLASSES else {}
    config = Config.of(merged(SMALL, {"method": method}, CLIENT, head, own))
    if name in COVERED:
        assert PreparedRun(config).privacy is not None
    else:
        with pytest.raises(ConfigError, match="privacy is set, and"):
            PreparedRun(config)
