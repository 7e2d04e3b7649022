"""Who the server takes for whom, and what a node may say: with the network left out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from covering import CHARACTERS
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.core.serialised import LIMITS
from fedshot.deploy.flower import node_registry as registry
from fedshot.deploy.flower.fleet import _MAX_ORDERS, FlowerFleet, arrivals
from fedshot.deploy.flower.messages import Incoming, WireMessage
from fedshot.deploy.flower.node_registry import (
    RETRY_SECONDS,
    Entry,
    Following,
    NodeRegistry,
    admit,
    read_entries,
)
from fedshot.deploy.flower.setup import Setup
from fedshot.fleets.guard import Guard
from fedshot.fleets.meter import Meter
from fedshot.protocol.exchange import Arrival, ClientWork, Exchange, Fault, Reply
from fedshot.protocol.reducers import Gather, Mean

from .test_fleet import HOMES, Net, Run, assert_as_alone, joining, on

SETUP = Setup("0" * 32, "", (), 6, {}, "")


class Nodes:
    """Nodes that say who lives with them, or what they are told to."""

    def __init__(self, **says: Any) -> None:
        self.names: dict[int, str] = {}
        self.heads: dict[int, Any] = {}
        self.greeted: list[int] = []
        for i, (name, head) in enumerate(says.items(), 1):
            self.names[i], self.heads[i] = name, head

    def connected(self) -> dict[int, str]:
        return dict(self.names)

    def send_and_receive(
        self,
        wire_messages: Mapping[int, WireMessage],
        seconds: float,
        following: Following = lambda _: None,
    ) -> Iterator[Incoming]:
        del seconds, following
        for number in wire_messages:
            self.greeted.append(number)
            head = self.heads[number]
            if isinstance(head, str):
                yield Incoming(number, None, head)
            else:
                yield Incoming(
                    number, WireMessage({"clients": head} if isinstance(head, list) else head)
                )


def node_registry(nodes: Nodes) -> tuple[NodeRegistry, list[str]]:
    said: list[str] = []
    return NodeRegistry(nodes, SETUP, 1, said.append), said


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(registry.time, "monotonic", lambda: now[0])
    return now


def test_a_node_that_stays_away_is_asked_again_after_a_while_and_named_once(
    clock: list[float],
) -> None:
    nodes = Nodes(a=[0, 1], b=[1, 2])
    found, said = node_registry(nodes)
    for _ in range(5):
        assert [node.name for node in found.connected().values()] == ["a"]
    assert nodes.greeted == [1, 2]
    clock[0] += RETRY_SECONDS
    found.connected()
    assert nodes.greeted == [1, 2, 2]
    assert said == ["node a holds clients 0-1", "node b is left out: client 1 belongs to node a"]
    assert found.left_out() == said[1:]
    clock[0] += RETRY_SECONDS
    nodes.heads[2] = "no reply within 5 s"
    found.connected()
    assert said[2:] == ["node b is left out: no reply within 5 s"]
    clock[0] += RETRY_SECONDS
    nodes.heads[2] = [2]
    assert [node.name for node in found.connected().values()] == ["a", "b"]


def test_the_first_to_claim_all_clients_gets_those_that_the_operator_wrote_or_none(
    clock: list[float],
) -> None:
    nodes = Nodes(liar=[0, 1, 2, 3, 4, 5], honest=[0, 1], other=[2], unknown=[4])
    wrote = {"liar": Entry(frozenset({3})), "honest": Entry(frozenset({0, 1}), 120),
             "other": Entry(frozenset({2, 5}))}  # fmt: skip
    said: list[str] = []
    found = NodeRegistry(nodes, SETUP, 1, said.append, entries=lambda: wrote)
    assert {n.name: n.examples for n in found.connected().values()} == {
        "honest": 120,
        "other": None,
    }
    assert said == [
        "node liar is left out: it reports client 0; in the server's folder it has clients 3",
        "node honest holds clients 0-1",
        "node other holds clients 2",
        "node unknown is left out: the server's folder has no clients for it. To accept those that "
        "it reports, use `fedshot flower keys --admit unknown.pub --clients 4`",
    ]
    wrote["unknown"] = Entry(frozenset({4}))
    clock[0] += RETRY_SECONDS
    assert {node.name for node in found.connected().values()} == {"honest", "other", "unknown"}


def test_what_the_operator_writes_of_nodes_is_checked(tmp_path: Path) -> None:
    admit(tmp_path, "a", b"key", "0-3, 7", 120)
    admit(tmp_path, "b", b"key", "4", None)
    admit(tmp_path, "a", b"key", "0-2", 60)  # anew
    assert read_entries(tmp_path) == {
        "a": Entry(frozenset({0, 1, 2}), 60), "b": Entry(frozenset({4}))
    }  # fmt: skip
    with pytest.raises(ConfigError, match="gives client 4 to b and to c"):
        admit(tmp_path, "c", b"key", "4-5", None)
    with pytest.raises(ConfigError, match="expected numbers below 1048576"):
        admit(tmp_path, "c", b"key", "0-999999999", None)
    with pytest.raises(ConfigError, match="--examples is 0"):
        admit(tmp_path, "c", b"key", "5", 0)
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        admit(tmp_path / "nowhere" / "nodes", "c", b"key", "5", None)
    assert not (tmp_path / "c.pub").exists()
    for text in ("", "[", "[1]", "5", '{"clients": 5}', '{"clients": "x"}', '{"examples": 5}',
                 '{"clients": "5", "examples": 1e999}', '{"clients": "5", "more": 1}', "[" * 10**5,
                 '{"clients": "0"}'):  # fmt: skip
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(ConfigError, match=r"c\.json is damaged|gives client 0 to a and to c"):
            read_entries(tmp_path)


def test_admitting_a_node_does_not_replace_the_key_of_another(tmp_path: Path) -> None:
    admit(tmp_path, "a", b"key\nof a\n", "0-3", None)
    with pytest.raises(ConfigError, match=r"a\.pub holds another key.* Rename the file .* remove"):
        admit(tmp_path, "a", b"key\nof b\n", "5", None)
    assert (tmp_path / "a.pub").read_bytes() == b"key\nof a\n"
    assert read_entries(tmp_path) == {"a": Entry(frozenset({0, 1, 2, 3}))}
    (tmp_path / "a.pub").write_bytes(b"key\r\nof a\r\n")
    admit(tmp_path, "a", b"key\nof a\n", "0-2", None)
    assert read_entries(tmp_path) == {"a": Entry(frozenset({0, 1, 2}))}


def test_a_node_that_comes_again_under_another_number_is_greeted_at_once(
    clock: list[float],
) -> None:
    nodes = Nodes(a="refused: it runs another version")
    found, _ = node_registry(nodes)
    found.connected()
    nodes.names, nodes.heads = {9: "a"}, {9: [0]}
    assert [node.name for node in found.connected().values()] == ["a"]


@pytest.mark.parametrize(
    "claimed", [[-1], [6], [10**4000], [True], ["0"], [0.0], 5, {"0": 1}, None, [[0]]]
)
def test_clients_that_the_run_does_not_have_are_nobodys(claimed: Any) -> None:
    found, said = node_registry(Nodes(a={"clients": claimed}))
    assert not found.connected()
    assert len(said) == 1
    assert len(said[0]) < 200


def test_two_nodes_of_one_name_do_not_take_turns(clock: list[float]) -> None:
    """Without keys a node's name is what it says; two hosts may say the same."""
    nodes = Nodes(first={"name": "host", "clients": [0]})
    nodes.names[1] = ""
    found, said = node_registry(nodes)
    found.connected()
    nodes.names[2], nodes.heads[2] = "", {"name": "host", "clients": [0]}
    assert [node.number for node in found.connected().values()] == [1]
    assert (
        said[-1]
        == "node host is left out: another node of this name is connected. Choose another name, "
        "with --name"
    )
    del nodes.names[1]  # the first one has gone, and the second is the same host begun anew
    clock[0] += RETRY_SECONDS
    assert [node.number for node in found.connected().values()] == [2]


def test_a_client_belongs_to_the_node_that_has_its_states(tmp_path: Path) -> None:
    net = Net(tmp_path)
    run = Run(on(net)).play(2)
    sealed = json.loads(run.kept[2][1])
    assert sealed["clients"] == {f"n{n}": list(clients) for n, clients in HOMES.items()}
    homes = dict(HOMES)
    try:
        HOMES[1], HOMES[2] = (0, 3, 4), (1,)  # client 4 has moved
        again, said = joining(net, 9), []
        again.node_registry.tell = said.append
        again.open(2, run.kept[2][1])
        assert again.missing(range(6)) == [0, 3, 4]
        assert "node n1 is left out: the private state of client 4 is stored on node n2" in said[0]
        late = joining(net, 20)  # one that greeted before it knew the seal
        assert not late.missing(range(6))
        late.rewind(2, run.kept[2][1])
        assert late.missing(range(6)) == [0, 3, 4]
    finally:
        HOMES.update(homes)


@pytest.mark.parametrize(
    "said",
    [
        {"done": 1e999}, {"done": 10**400}, {"done": True}, {"done": "1"}, {"done": -1},
        {"done": 10**6}, {"done": 1, "sealed": 5}, {"done": 1, "sealed": [1]},
        {"done": 1, "sealed": [1e999, ""]}, {"done": 1, "sealed": [1, "x"]},
        {"done": 1, "sealed": [10**400, "a"]}, {"done": 1, "sealed": [1, "a" * 65]},
        {"done": 1, "sealed": {"0": 1, "1": 2}}, {},
    ],
)  # fmt: skip
def test_what_a_node_says_of_orders_is_taken_only_when_it_can_be(said: dict[str, Any]) -> None:
    found, _ = node_registry(Nodes(a=[0]))
    node = found.connected()[1]
    found.add_order(node, "drop", [1, 0], [0])
    assert found.update_from(Incoming(1, WireMessage({"seconds": 1.0, **said}))) == 0.0
    assert len(node.orders) == 1
    assert node.base == (-1, "")


@pytest.mark.parametrize("seconds", [1e999, float("nan"), 10**400, -1, "1", None, [1]])
def test_seconds_that_are_none_are_not_counted(seconds: Any) -> None:
    found, _ = node_registry(Nodes(a=[0]))
    found.add_order(found.connected()[1], "void", 1)
    head = {"done": 1, "sealed": [3, "ab"], "seconds": seconds}
    assert found.update_from(Incoming(1, WireMessage(head))) == 0.0
    assert found.nodes["a"].base == (3, "ab")
    assert not found.nodes["a"].orders


@pytest.mark.slow
def test_orders_for_a_node_that_is_away_do_not_pile_up(tmp_path: Path) -> None:
    net = Net(tmp_path)
    fleet = on(net)
    run = Run(fleet).play(1)
    net.gone.add(2)
    run.play(3)
    lost = set(run.lost)
    run.play_unsealed()
    run.fleet.void(run.round)
    assert [order[1] for order in fleet.node_registry.nodes["n2"].orders] == ["seal"]
    net.gone.clear()
    run.round, run.lost = run.round - 1, lost
    run.server = run.kept[-1][0]
    run.play(2)
    assert not fleet.node_registry.nodes["n2"].orders
    assert_as_alone(run, net, tmp_path / "alone")


def test_a_node_that_never_answers_gets_no_more_work_and_no_more_orders(tmp_path: Path) -> None:
    net = Net(tmp_path)
    fleet = on(net)
    run = Run(fleet).play(1)
    net.deaf.add(2)
    node = fleet.node_registry.nodes["n2"]
    for _ in range(_MAX_ORDERS + 1):
        fleet.node_registry.add_order(node, "drop", [1, 0], [])
    run.play(2)
    assert [order[1] for order in node.orders[_MAX_ORDERS + 1 :]] == ["seal"]
    net.deaf.clear()
    run.play(3)
    assert not node.orders
    assert {round for round, _ in run.lost} == {2, 3, 4}, "and is back after a seal that it heard"
    assert_as_alone(run, net, tmp_path / "alone")


ASKED = Exchange(ClientWork(object(), "work"), {}, (0, 1), {"g": Gather()}, Key(0), (1, 0), "train")  # type: ignore[arg-type]


def received(head: Any, blocks: Mapping[str, Any] = {}) -> tuple[list[Arrival], Meter, list[str]]:
    """Return what comes of a reply of a node that was asked for clients 0 and 1."""
    said: list[str] = []
    wire_message = WireMessage({})
    for name, content in blocks.items():
        wire_message.put(name, content)
    wire_message.head |= head
    wire_message = WireMessage(json.loads(json.dumps(wire_message.head)), wire_message.blocks)

    class ReferenceLogits(FlowerFleet):
        def __init__(self) -> None:
            pass

        def replies(self, exchange: Exchange) -> Iterator[Arrival]:
            yield from arrivals(
                exchange, Incoming(1, wire_message), "n", [0, 1], LIMITS, said.append
            )

    meter = Meter(ReferenceLogits())
    return list(Guard(meter).replies(ASKED)), meter, said


def block(up: Any = None, metrics: Any = None, **more: Any) -> dict[str, Any]:
    return {"up": {"g": torch.ones(1)} if up is None else up, "metrics": metrics or {}, **more}


ONE = torch.ones(1)
LONG = {f"m{'x' * 50}{i}": ONE for i in range(65)}


@pytest.mark.parametrize(
    ("result", "content", "words"),
    [
        ({"weight": 1}, block(), None),
        ({"weight": 1.5}, block(metrics={"loss": ONE}), None),
        ({"fault": ["lost", "power"]}, None, "power"),
        ({"fault": 5}, None, "a kind and a reason"),
        ({"fault": None}, None, "a kind and a reason"),
        ({"fault": {"a": 1}}, None, "a kind and a reason"),
        ({"fault": ["refused", ["x"]]}, None, "a kind and a reason"),
        ({"fault": ["refused", "\x07" * 10**5]}, None, "^ {500}"),
        (5, block(), "not a JSON object"),
        ({}, block(), "weight"),
        ({"weight": "1"}, block(), "weight"),
        ({"weight": True}, block(), "weight"),
        ({"weight": 10**4000}, block(), "weight"),
        ({"weight": 1e999}, block(), "weight"),
        ({"weight": -1}, block(), "weight"),
        ({"weight": {"a": [1]}}, block(), "weight"),
        ({}, block(weight=torch.ones(9)), "weight"),
        ({}, block(weight={"a": ONE}), "weight"),
        ({"weight": 1}, block(metrics=LONG), "at most 64 metrics"),
        ({"weight": 1}, block(metrics={"a\tb": ONE}), "not printable"),
        ({"weight": 1}, block(metrics={"a" * 65: ONE}), "a metric named"),
        ({"weight": 1}, block(metrics={"a": torch.ones(3)}), "not one number"),
        ({"weight": 1}, block(metrics={"a": {"b": ONE}}), "not one number"),
        ({"weight": 1}, {"up": {"g": ONE}, "metrics": ONE}, "metrics"),
        ({"weight": 1}, block(up={"g": ONE, **LONG}), "65 unknown parts"),
        ({"weight": 1}, block(up={"g": ONE, "h": ONE}), "the parts are"),
        ({"weight": 1}, block(up={"g": {"x" * 400: torch.full((1,), torch.inf)}}), "not finite"),
        ({"weight": 1}, block(up=ONE), "the parts are"),
        ({"weight": 1}, (ONE,), "lacks `up`"),
    ],
)
def test_what_a_node_says_of_a_client_is_a_reply_or_a_fault_in_few_words(
    result: Any, content: Any, words: str | None
) -> None:
    blocks = {} if content is None else {"c0": content}
    (first, second), meter, _ = received({"results": {"0": result}}, blocks)
    assert second.fault
    assert second.fault.reason == "node n sent no result for it"
    if words is None:
        assert isinstance(first.reply, Reply)
        return
    assert first.fault
    assert re.search(words, first.fault.reason), first.fault.reason
    assert len(first.fault.reason) <= 520
    assert first.fault.reason.isprintable()
    assert {line[3] for line in meter.bytes} <= {"g", "unknown", "message"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(CHARACTERS, max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["0", "1", "fault", "weight", "é"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["results", "forms", "form_of"]), json_values))
@settings(suppress_health_check=list(HealthCheck))
def test_no_head_of_a_reply_ends_an_exchange(head: dict[str, Any]) -> None:
    found, _, said = received(head, {"c0": block()})
    assert [arrival.client for arrival in found] == [0, 1]
    assert len(said) <= 1, "one line for all strangers"


def test_strangers_are_told_in_one_line() -> None:
    _, _, said = received({"results": {f"{i}": {} for i in range(1000)}})
    assert said == ["node n replies for '10' and 997 others, which it was not asked for; dropped"]


def test_what_was_not_asked_for_is_one_line_of_the_ledger() -> None:
    up = {"g": ONE, "h": ONE, "i": torch.ones(2)}
    _, meter, _ = received({"results": {"0": {"weight": 1}}}, {"c0": block(up=up)})
    rows = [(row["part"], row["bytes"]) for row in meter.to_json()]
    assert rows == [("g", 4), ("unknown", 12)]


def of_client(exchange: Exchange, reply: dict[str, Any], weight: float, holds: Any) -> Arrival:
    """Return what comes of a reply for client 0, who holds so many examples."""
    wire_message = WireMessage({"results": {"0": {"weight": weight}}})
    wire_message.put("c0", reply)
    (found,) = arrivals(exchange, Incoming(1, wire_message), "n", [0], LIMITS, print, {0: holds})
    return found


def test_no_client_weighs_more_than_it_holds() -> None:
    asked = replace(ASKED, reduce={"g": Mean(ONE, of_examples=True)})
    assert of_client(asked, block(), 4, 4).reply
    assert of_client(asked, block(), 5, None).reply
    found = of_client(asked, block(), 5, 4)
    assert found.fault == Fault("refused", "node n: the weight is 5; the client holds 4 examples")
    assert of_client(replace(ASKED, reduce={"g": Mean(ONE)}), block(), 5, 4).reply, "of episodes"


def test_answers_in_a_test_that_are_not_finite_are_a_fault_of_their_node() -> None:
    bad = block({"g": {"0": torch.tensor([[1.0, math.nan]])}})
    asked = replace(ASKED, phase="evaluate", reduce={"g": Gather(limit=None)})
    found = of_client(asked, bad, 1, None)
    assert found.fault
    assert found.fault.reason == "node n: a prediction holds a value that is not finite"
    assert of_client(asked, block({"g": {"0": torch.zeros(1, 2)}}), 1, None).reply
