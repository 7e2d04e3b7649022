"""Runs with secure sums: the records and states of the plain run, and refusals before round 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="secure sums need the extra `secure`")

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from system.runs import OWN, experiment, finished

PROTO = {"method": {"name": "fl_proto", "local_steps": 2}, "run": {"rounds": 2}}
SECURE = {"run": {"secure_sums": True}}
UNRELIABLE = {"drop": 0.1, "delay": 0.2, "corrupt": 0.1}
CLOCK = {"seconds": 0, "elapsed": 0, "ended": "", "bytes_down": 0, "bytes_up": 0}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"run": {"fleet": "vectorised"}}, marks=pytest.mark.slow),
        pytest.param({"run": {"fleet": "sequential", "cohort": 5}}, marks=pytest.mark.slow),
        pytest.param({"run": {"cohort": None, "unreliable": UNRELIABLE}}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_run_has_the_records_and_the_states_of_a_plain_one(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    plain = finished(tmp_path / "plain", PROTO, changes)
    secure = finished(tmp_path / "secure", PROTO, changes, SECURE)
    found, expected = secure.recorder.records(), plain.recorder.records()
    assert any(record["faults"] for record in found) == ("unreliable" in changes.get("run", {}))
    for mine, theirs in zip(found, expected, strict=True):
        for fault in (*mine["faults"], *theirs["faults"]):
            fault["reason"] = ""  # what is damaged on the way is a mask
        assert mine | CLOCK == theirs | CLOCK
    assert tree.digest(secure.server) == tree.digest(plain.server)
    assert {part for _, _, _, part in secure.meter.bytes} > {"masked", "answer"}
    assert secure.meter.total("train", "up") > plain.meter.total("train", "up")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run": {"cohort": 2}}, "run.secure_sums is true, and 2 clients take part in a round; a "
         "sum over fewer than 3 hides none of them. Raise run.cohort or partition.clients, or set "
         "run.secure_sums to false."),
        ({**OWN, "method": {"name": "fedfomo"}}, "method 'fedfomo' needs the part 'model' of each "
         "client in its exchange 'train', not only a sum."),
        ({"run": {"secure_threshold": 0.5}}, "run.secure_threshold is 0.5; expected a number above "
         "0.5 and at most 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_secure_sum_is_refused_before_round_1(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        experiment(tmp_path, PROTO, SECURE, changes)
    assert words in str(error.value)
    assert not any(tmp_path.iterdir())
