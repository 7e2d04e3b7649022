"""Signed keys of secure sums: an active server cannot exchange keys or invent clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip(
    "fedshot.deploy.flower.flower_runs", reason="the extra `flower` is not installed"
)

from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.deploy.flower.keys import Peers, load_node_key, make_node_key
from fedshot.deploy.flower.node_registry import admit, parse_clients
from fedshot.fleets.guard import Guard
from fedshot.fleets.wrapper import Wrapper
from fedshot.privacy.secure_sums.masking_clients import KEYS, SHARES, MaskingClients
from fedshot.privacy.secure_sums.server_sum import SecureSums
from fedshot.protocol.exchange import Arrival, ClientWork, Exchange, Outcome, PerClient, Reply
from fedshot.protocol.reducers import Sum

pytestmark = pytest.mark.flower
NODES = {"a": "0-1", "b": "2-3", "c": "4"}  # clients of each node
ONES = torch.ones(3, dtype=torch.float64)
WORK: Any = ClientWork(SimpleNamespace(name="stub"), "train")
EXCHANGE = Exchange(WORK, {}, tuple(range(5)), {"x": Sum(ONES)}, Key(0), (1, 0))


class Replies(Wrapper):
    def __init__(self) -> None:
        pass

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        for client in exchange.to:
            yield Arrival(client, Reply({"x": ONES * client}, {}, 1.0))


class Nodes(Wrapper):
    """A server that passes messages on to nodes, and may change them."""

    def __init__(self, nodes: dict[int, MaskingClients], change: Callable[[str, Tree], Tree]):
        self.nodes, self.change = nodes, change

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        for client in exchange.to:
            message = self.change(exchange.work.name, exchange.message(client))
            asked = replace(exchange, to=(client,), down=PerClient(lambda _, m=message: m))
            yield from self.nodes[client].replies(asked)


@pytest.fixture
def known(tmp_path: Path) -> Path:
    """A folder with the public files of all nodes; their keys are beside it."""
    folder = tmp_path / "nodes"
    folder.mkdir()
    for name, clients in NODES.items():
        public = make_node_key(tmp_path / f"{name}.key")
        admit(folder, name, public.read_bytes(), clients, None)
    return folder


def summed(
    known: Path,
    signers: dict[str, str] | None = None,
    change: Callable[[str, Tree], Tree] = lambda _, message: message,
) -> Outcome:
    """Return a sum over 5 clients of three nodes; `signers` names whose key a node signs with."""
    nodes = {}
    for name, clients in NODES.items():
        signer = name if signers is None else signers.get(name)
        key = known.parent / f"{signer}.key"
        peers = Peers(load_node_key(key), known) if signer else None
        nodes |= dict.fromkeys(parse_clients(clients), MaskingClients(Replies(), signatures=peers))
    return SecureSums(0.66)(Guard(Nodes(nodes, change)), EXCHANGE)


def test_nodes_that_know_each_other_get_the_sum(known: Path) -> None:
    found = summed(known)
    assert torch.equal(found["x"], 10 * ONES)
    assert found.accepted == (0, 1, 2, 3, 4)
    assert summed(known, {}).accepted == found.accepted  # without signatures


@pytest.mark.parametrize("signers", [{"a": "a", "b": "b"}, {"a": "a", "b": "b", "c": "a"}])
def test_keys_without_the_signature_of_their_node_are_refused(
    known: Path, signers: dict[str, str]
) -> None:
    found = summed(known, signers)
    assert found.accepted == ()
    assert found.faults[0].reason == "the keys of client 4 are not signed by its node"


def test_a_server_cannot_exchange_keys_nor_use_those_of_another_client(known: Path) -> None:
    def exchanged(step: str, message: Tree) -> Tree:
        if step == SHARES:
            keys = message["keys"].clone()
            keys[1, 0] = 9  # a key of the server's own
            return {**message, "keys": keys}
        return message

    def another(step: str, message: Tree) -> Tree:
        if step == SHARES:
            return {**message, "keys": message["keys"].flip(0)}
        return message

    for change in (exchanged, another):
        found = summed(known, change=change)
        assert found.accepted == ()
        assert {fault.reason for fault in found.faults.values()} <= {
            f"the keys of client {c} are not signed by its node" for c in range(5)
        }


def test_a_client_of_no_node_is_refused(known: Path) -> None:
    (known / "c.pub").unlink()
    (known / "c.json").unlink()
    assert summed(known).faults[0].reason == "no node of --peers has client 4"


def test_keys_have_their_form(known: Path) -> None:
    class Odd(MaskingClients):
        def replies(self, exchange: Exchange) -> Iterator[Arrival]:
            for client in exchange.to:
                if exchange.work.name == KEYS:
                    yield Arrival(client, Reply({"answer": torch.zeros(3, 32)}, {}, 1.0))

    found = SecureSums(0.66)(Guard(Odd(Replies())), EXCHANGE)
    assert "its keys are not 2 rows of 32 bytes, or 4 with a signature" in found.faults[0].reason


def test_a_folder_without_both_files_of_a_node_is_refused(known: Path) -> None:
    key = load_node_key(known.parent / "a.key")
    (known / "b.json").unlink()
    for folder in (known, known / "empty"):
        with pytest.raises(ConfigError, match=r"does not have a \.pub and a \.json file of every"):
            Peers(key, folder)
