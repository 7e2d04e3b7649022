"""Nodes as a cluster that simulates: many clients in one node, with the fleet of the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from system.runs import last_arrays

from .local_federation import TWELVE, LocalFederation, alone, newest

CHANGES = {"model": {"dtype": "float64"}, "run": {"rounds": 2, "cohort": 11}}


@pytest.mark.parametrize("method", ["synthetic", "fl_proto"])
def test_nodes_of_many_clients_equal_the_sequential_fleet(
    twelve: LocalFederation, tmp_path: Path, method: str
) -> None:
    """Stacks of clients, of at most three of four, are equal in float64 up to rounding."""
    chosen = {"method": {"name": method}}
    stacks = {"run": {"fleet": "vectorised", "chunk": 3}}
    with twelve.experiment(CHANGES, chosen, stacks) as there:
        records = list(there.run())
        result = there.result()
        private = twelve.private(there)
    here = alone(tmp_path / "run", TWELVE, CHANGES, chosen)
    assert not [fault for record in records for fault in record.faults]
    assert there.meter.to_json() == here.meter.to_json()
    assert private.keys() == newest((here.folder / "clients").glob("*")).keys()
    arrays = [last_arrays(run.folder) for run in (there, here)]
    torch.testing.assert_close(*arrays, rtol=0, atol=1e-9)
    assert result == here.result()
