"""Nodes as a cluster that simulates: many clients in one node, with the fleet of the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from system.runs import last_arrays

from .local_federation import LocalFederation, alone, newest

CHANGES = {
    "partition": {"clients": 9},
    "model": {"dtype": "float64"},
    "run": {"rounds": 2, "cohort": None},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    """Two nodes, with five and four clients."""
    with LocalFederation(tmp_path_factory.mktemp("cluster"), 2, CHANGES) as made:
        yield made


@pytest.mark.parametrize("method", ["synthetic", "fl_proto"])
def test_two_nodes_of_many_clients_equal_the_sequential_fleet(
    cluster: LocalFederation, tmp_path: Path, method: str
) -> None:
    """Stacks of clients have the same float64 numbers up to rounding."""
    chosen = {"method": {"name": method}}
    with cluster.experiment(chosen, {"run": {"fleet": "vectorised", "chunk": 3}}) as there:
        records = list(there.run())
        result = there.result()
        private = cluster.private(there)
    here = alone(tmp_path / "run", CHANGES, chosen)
    assert not [fault for record in records for fault in record.faults]
    assert there.meter.to_json() == here.meter.to_json()
    assert private.keys() == newest((here.folder / "clients").glob("*")).keys()
    arrays = [last_arrays(run.folder) for run in (there, here)]
    torch.testing.assert_close(*arrays, rtol=0, atol=1e-9)
    assert result == here.result()
