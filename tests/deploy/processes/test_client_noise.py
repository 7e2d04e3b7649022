"""Noise by the clients on three nodes: of the stated size, fresh, and also if clients are lost.

The nodes know each other, and sign the keys of secure sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshot.core import tree
from fedshot.fleets.guard import Guard
from fedshot.fleets.unreliable import Trouble, Unreliable
from fedshot.protocol.exchange import Exchange

from .local_federation import LocalFederation, lost

pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")

SETTINGS: dict[str, Any] = {
    "method": {"name": "fl_proto", "local_steps": 1},
    "run": {"rounds": 2, "cohort": None, "validate_every": 50, "quorum": 0.5, "secure_sums": True},
    "privacy": {"name": "client", "noise": 100.0, "clip": 0.001},
}
"""Six clients, of whom 4 are needed. Their contributions are far smaller than the noise."""


@pytest.fixture
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    """Nodes that know each other."""
    from fedshot.deploy.flower import local

    command = local.node_command

    def with_peers(folder: Path, *arguments: Any) -> list[str]:
        return [*command(folder, *arguments), "--peers", str(folder / "server" / "nodes")]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "node_command", with_peers)
        with LocalFederation(tmp_path_factory.mktemp("peers")) as made:
            yield made


def plan(exchange: Exchange, client: int) -> Trouble | None:
    """Lose the masked uploads of one node in round 2."""
    masked = exchange.work.method is not None
    return "drop" if masked and exchange.version[0] == 2 and client in (1, 4) else None


def test_a_private_secure_run_on_nodes_trains_with_fresh_noise(peers: LocalFederation) -> None:
    ends = []
    for _ in range(2):
        with peers.experiment(SETTINGS) as there:
            there.fleet = Guard(Unreliable(there.meter, plan))
            states = [there.server]
            for record in there.run():
                assert lost(record) == ({(2, 1), (2, 4)} if record.round == 2 else set())
                if record.round:
                    states.append(there.server)
            assert 0 < there.spent["epsilon"] < 1
            keys = there.meter.bytes["train", "advertise_keys", "up", "answer"]
            assert keys == 2 * 6 * (64 + 64)  # 2 keys and a signature
        for clients, before, after in zip((6, 4), states, states[1:], strict=False):
            changes = [(b - a).flatten() for a, b in zip(
                tree.leaves(before), tree.leaves(after), strict=True
            )]  # fmt: skip
            found = float(torch.cat(changes).std())
            assert found == pytest.approx(0.1 * math.sqrt(clients / 3) / 6, rel=0.15)
        ends.append(tree.digest(states[-1]))
    assert ends[0] != ends[1]
