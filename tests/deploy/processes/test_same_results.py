"""Promise 1 on the real thing: the bits of the sequential fleet.

A method joins by one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedshot.runs import trust
from fedshot.runs.checkpoint import Checkpoints

from .local_federation import ALLOWED, LocalFederation, alone, newest, weights

MAML = {"model": {"head": {"name": "linear", "way": 5}}}
PROTO = {"name": "fsl_local", "learner_name": "proto", "local_steps": 2}

METHODS: dict[str, dict[str, Any]] = {
    "fl_proto": {"method": {"name": "fl_proto", "local_steps": 2}},
    "fsl_local": {"method": PROTO},
    "fedfsl_mi, exclusive": {
        **MAML,
        "method": {"name": "fedfsl_mi", "reference": "exclusive", "local_steps": 1},
    },
    "f2l": {
        **MAML,
        "method": {"name": "f2l", "local_steps": 1, "transformer": {"heads": 2, "hidden": 8}},
    },
    "frl": {"method": {"name": "frl", "inner_rounds": 2}},
    "pfedfsl": {"method": {"name": "pfedfsl", "m": 2, "delay": 1, "local_steps": 2}},
    "fl_proto, compressed": {
        "method": {"name": "fl_proto", "local_steps": 2}, "compress": {"up": "topk", "down": "int8"}
    },
    "fl_proto, lora": {
        "model": {"backbone": {"name": "module", "factory": "nn.models.user_nets:vit",
                               "args": {"dropout": 0.1}, "tune": "lora", "rank": 2}},
        "method": {"name": "fl_proto", "local_steps": 2},
    },
}  # fmt: skip
CLOCK = {"seconds": 0, "elapsed": 0, "ended": ""}  # what no two runs share
# Secure sums and a cluster of two nodes ask it of others.
NAMES = ("fsl_local", "frl", "pfedfsl", "fl_proto, compressed", "fl_proto, lora")
PRIVATE = {"fsl_local", "fl_proto, compressed"}


@pytest.mark.parametrize("name", NAMES)
def test_a_run_on_nodes_equals_one_on_the_sequential_fleet(
    federation: LocalFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Five rounds, four of six clients in each: weights, private states, bytes, scores, result."""
    if name.endswith("lora"):
        pytest.importorskip("peft", reason="the extra `encoders` is not installed")
        for variable, value in ALLOWED.items():
            monkeypatch.setenv(variable, value)
    with federation.experiment(METHODS[name]) as there:
        records = list(there.run())
        result = there.result()
    here = alone(tmp_path / "run", METHODS[name])
    assert not [fault for record in records for fault in record.faults]
    assert weights(there.folder) == weights(here.folder)
    assert there.meter.to_json() == here.meter.to_json()
    held = newest((here.folder / "clients").glob("*"))
    assert federation.private(there) == held
    assert bool(held) == (name in PRIVATE)
    if name == "fsl_local":
        states = federation.folder.glob("node-*/state/*/clients/*/*.safetensors")
        assert not kept_at_the_server(there.folder, states)
    assert result == here.result()
    for mine, theirs in zip(records, here.recorder.records(), strict=True):
        assert json.loads(json.dumps(mine.to_json())) | CLOCK == theirs | CLOCK


@pytest.mark.parametrize("attack", ["sign_flip", "label_flip"])
def test_clients_lie_on_their_nodes_as_they_do_on_one_machine(
    federation: LocalFederation, tmp_path: Path, attack: str
) -> None:
    lies: dict[str, Any] = {"attack": {"name": attack, "clients": [0, 3]}, "aggregate": "median"}
    change = {**METHODS["fl_proto"], **lies, "run": {"rounds": 2}}
    with federation.experiment(change) as there:
        records = list(there.run())
    here = alone(tmp_path / "run", change)
    assert not [fault for record in records for fault in record.faults]
    assert weights(there.folder) == weights(here.folder)
    assert trust.read(there.folder) == trust.read(here.folder)
    honest = alone(tmp_path / "honest", {**METHODS["fl_proto"], "run": {"rounds": 2}})
    assert weights(honest.folder) != weights(here.folder)


def kept_at_the_server(folder: Path, states: Iterator[Path]) -> list[bytes]:
    """Return the ends of private states that a file of the run's folder holds."""
    secrets = [path.read_bytes()[-256:] for path in states]
    assert secrets
    kept = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return [secret for secret in secrets if any(secret in data for data in kept)]


def test_an_earlier_round_is_answered_with_its_own_private_states(
    federation: LocalFederation, tmp_path: Path
) -> None:
    """Validation chose a round; nodes go on training, and still answer as of that round."""
    change = {**METHODS["fsl_local"], "run": {"rounds": 6, "validate_every": 1}}
    with federation.experiment(change) as there:
        list(there.run())
        chosen, result = there.best_round, there.result()
    here = alone(tmp_path / "run", change)
    assert (chosen, result) == (here.best_round, here.result())
    assert chosen < 6, "choose another seed, so that an earlier round is the best"
    last = Checkpoints(there.folder / "checkpoints").rounds()[-1]
    assert last == 6
