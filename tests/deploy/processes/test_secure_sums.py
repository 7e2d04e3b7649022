"""Secure sums on three nodes with twelve clients: the bits of the plain run, losses or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedshot.fleets.guard import Guard
from fedshot.fleets.unreliable import Trouble, Unreliable
from fedshot.protocol.exchange import Exchange

from .local_federation import TWELVE, LocalFederation, alone, lost, newest, weights
from .test_same_results import METHODS

ROUNDS = {"run": {"rounds": 5, "validate_every": 50, "quorum": 0.5}}
SECURE = {"run": {"secure_sums": True}}
# Of 12 clients 8 are needed. Those of one node are (0, 3, 6, 9).
LOSSES = {
    1: ("advertise_keys", {5}),
    2: ("share_secrets", {0, 3, 6, 9}),
    3: ("", {1, 2, 3, 4}),  # the masked upload
    4: ("unmask", {0, 3, 6, 9}),
}
PLAIN = {(round, client) for round in (1, 2, 3) for client in LOSSES[round][1]}


def plan(exchange: Exchange, client: int) -> Trouble | None:
    step, victims = LOSSES.get(exchange.version[0], ("", set()))
    name = exchange.work.name if exchange.work.method is None else ""
    return "drop" if name == step and client in victims else None


@pytest.mark.parametrize("name", ["fedfsl_mi, exclusive", "f2l", "fedcgs"])
def test_a_secure_run_on_nodes_equals_the_plain_one(
    twelve: LocalFederation, tmp_path: Path, name: str
) -> None:
    """In each round, clients are lost at another step; then all come back."""
    method = {**METHODS, "fedcgs": {"method": {"name": "fedcgs"}}}[name]
    with twelve.experiment(method, ROUNDS, SECURE) as there:
        there.fleet = Guard(Unreliable(there.meter, plan))
        records = list(there.run())
        result = there.result()
    here = alone(tmp_path / "run", TWELVE, method, ROUNDS, faults=PLAIN)
    assert set().union(*map(lost, records)) == PLAIN
    assert weights(there.folder) == weights(here.folder)
    assert twelve.private(there) == newest((here.folder / "clients").glob("*"))
    assert result == here.result()
    for mine, theirs in zip(records, here.recorder.records(), strict=True):
        assert dict(mine.metrics) == theirs["metrics"]


def test_compressed_uploads_have_the_bits_of_a_simulation(
    twelve: LocalFederation, tmp_path: Path
) -> None:
    """With errors, ranges and losses as in the test above."""
    compressed = {**METHODS["fl_proto"], "compress": {"up": "int8", "down": "int8"}}
    with twelve.experiment(compressed, ROUNDS, SECURE) as there:
        there.fleet = Guard(Unreliable(there._compressed, plan))
        records = list(there.run())
    here = alone(tmp_path / "run", TWELVE, compressed, ROUNDS, SECURE, faults=PLAIN)
    assert set().union(*map(lost, records)) == PLAIN
    assert weights(there.folder) == weights(here.folder)
    assert twelve.private(there) == newest((here.folder / "clients").glob("*"))
    assert there._ranges == here._ranges


def test_a_node_killed_in_a_round_is_left_out_of_the_sum_or_in_it(
    twelve: LocalFederation, tmp_path: Path
) -> None:
    """It depends on whether its uploads have left; the sum is the plain one of who is accepted."""
    with twelve.experiment(METHODS["f2l"], ROUNDS, SECURE, deadline=15.0) as there:
        faults = twelve.run_with_killed_node(there)
    assert faults in (set(), {(3, client) for client in (1, 4, 7, 10)})
    here = alone(tmp_path / "run", TWELVE, METHODS["f2l"], ROUNDS, faults=faults)
    assert weights(there.folder) == weights(here.folder)
    assert twelve.private(there) == newest((here.folder / "clients").glob("*"))
