"""The fleet on nodes and their side of it, with the network left out.

Whatever is lost, late, stale, restarted or gone: states end where the sequential fleet has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conformance.cases import EPISODE
from conformance.synthetic_method import SyntheticMethod
from conformance.wire_messages import answer, written
from covering import slow
from fedshot.conformance.small import CLASSES, CLIENTS, DATASET, PARTITION, SHAPE
from fedshot.core import tree
from fedshot.core.errors import CheckpointError
from fedshot.core.seeds import Key
from fedshot.core.serialised import LIMITS, CodecError
from fedshot.data.episodes.episode import ClientData
from fedshot.deploy.flower import fleet
from fedshot.deploy.flower.fleet import FlowerFleet
from fedshot.deploy.flower.messages import Incoming, WireMessage
from fedshot.deploy.flower.node_registry import Following
from fedshot.deploy.flower.setup import Setup
from fedshot.deploy.flower.worker import ClientRuntime, run_work
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.private import PrivateStore
from fedshot.fleets.sequential import Sequential
from fedshot.fleets.threads import Threads
from fedshot.fleets.unreliable import Trouble, Unreliable
from fedshot.fleets.vectorised import Vectorised
from fedshot.nn.models.backbones import MLP
from fedshot.nn.models.model import Model
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Exchange, Fault, Fleet

# Small: what clients train is not asked here, and conformance sends a Conv4 over this fleet, too.
METHOD = SyntheticMethod(Model(MLP((6,)), None, SHAPE), EPISODE, clients=CLIENTS, classes=CLASSES)
KEY, LATER = Key(0), (10**6, 0)
HOMES = {1: (0, 3), 2: (1, 4), 3: (2, 5)}  # clients of each node


class Net:
    """Three nodes in this process, each with a folder of its own; some of them unwell."""

    def __init__(self, folder: Path, kind: Callable[[Host], Sequential] = Sequential) -> None:
        self.folder, self.kind = folder, kind
        self.runtimes = {number: self.runtime(number) for number in HOMES}
        self.messages = 0  # that reached a node
        self.gone: set[int] = set()  # not connected
        self.mute: set[int] = set()  # do their work; the reply comes too late
        self.deaf: set[int] = set()  # connected; nothing reaches them

    def host(self, number: int) -> Host:
        store = PrivateStore(self.folder / str(number) / "clients")
        return Host(METHOD, DATASET, PARTITION, store, KEY.at("clients"))

    def runtime(self, number: int) -> ClientRuntime:
        """Return a node as a process that has just begun."""
        fleet, folder = self.kind(self.host(number)), self.folder / str(number)
        return ClientRuntime(METHOD, fleet, HOMES[number], folder, tell=lambda _: None)

    def connected(self) -> dict[int, str]:
        return {number: f"n{number}" for number in HOMES if number not in self.gone}

    def send_and_receive(
        self,
        wire_messages: Mapping[int, WireMessage],
        seconds: float,
        following: Following = lambda _: None,
    ) -> Iterator[Incoming]:
        for number, first in wire_messages.items():
            if number in self.deaf:
                yield Incoming(number, None, "no reply within 1 s")
                continue
            wire_message: WireMessage | None = first
            while wire_message is not None:
                self.messages += 1
                reply = self.answer(number, written(wire_message))
                if number in self.mute:
                    yield Incoming(number, None, "no reply within 1 s")
                    break
                wire_message = following(number)
                yield Incoming(number, written(reply))

    def answer(self, number: int, wire_message: WireMessage) -> WireMessage:
        return answer(self.runtimes[number], HOMES[number], wire_message)

    def privates(self) -> dict[int, str]:
        found = {}
        for number, clients in HOMES.items():
            host = self.runtimes[number]._fleet.host
            found |= {client: tree.digest(host.private(client, LATER)) for client in clients}
        return found


class Run:
    """A server on a fleet, checkpointing every round."""

    def __init__(self, fleet: Fleet, cohort: int = 4) -> None:
        self.fleet, self.cohort = Guard(fleet), cohort
        self.server: Any = METHOD.init(KEY.at("init"))
        self.round = 0
        self.kept: list[tuple[Any, str]] = [(self.server, self.fleet.seal(0, ()))]
        self.lost: set[tuple[int, int]] = set()
        self.faults: list[tuple[int, Fault]] = []

    def play(self, rounds: int = 1) -> Run:
        for _ in range(rounds):
            self.play_unsealed()
            self.kept.append((self.server, self.fleet.seal(self.round, range(self.round))))
        return self

    def play_unsealed(self) -> None:
        self.round += 1
        clients = Clients(
            self.fleet, range(CLIENTS), cohort=self.cohort, quorum=0.1, round=self.round
        )
        self.server, _ = METHOD.round(self.server, clients, KEY.at("round", self.round))
        self.lost |= {(self.round, client) for client, _ in clients.faults}
        self.faults += clients.faults

    def go_back(self, round: int) -> None:
        """Begin a new session from a checkpoint."""
        self.round, (self.server, sealed) = round, self.kept[round]
        del self.kept[round + 1 :]
        self.fleet.rewind(round, sealed)


def on(net: Net, session: int = 1) -> FlowerFleet:
    """Return a fleet that begins a run."""
    fleet = joining(net, session)
    fleet.rewind(-1, "")
    return fleet


def joining(net: Net, session: int) -> FlowerFleet:
    """Return a fleet that has yet to say where it goes on."""
    setup = Setup("0" * 32, "", (), CLIENTS, {}, "")
    here = Sequential(net.host(1))
    return FlowerFleet(here, net, setup, session=session, keeps_state=True, deadline=1.0)


def alone(
    folder: Path, rounds: int, lost: set[tuple[int, int]], cohort: int = 4
) -> tuple[str, dict[int, str]]:
    """Return the server's and the clients' states on the sequential fleet."""
    host = Host(METHOD, DATASET, PARTITION, PrivateStore(folder), KEY.at("clients"))

    def plan(exchange: Exchange, client: int) -> Trouble | None:
        return "drop" if (exchange.version[0], client) in lost else None

    run = Run(Unreliable(Sequential(host), plan), cohort).play(rounds)
    held = {client: tree.digest(host.private(client, LATER)) for client in range(CLIENTS)}
    return tree.digest(run.server), held


def assert_as_alone(run: Run, net: Net, folder: Path) -> None:
    assert (tree.digest(run.server), net.privates()) == alone(
        folder, run.round, run.lost, run.cohort
    )


@pytest.mark.parametrize("kind", [Sequential, partial(Threads, workers=2)])
def test_three_nodes_equal_one_machine(tmp_path: Path, kind: Callable[[Host], Sequential]) -> None:
    """Also with two clients at once on each node, as with `--workers 2`."""
    net = Net(tmp_path, kind)
    assert_as_alone(Run(on(net)).play(4), net, tmp_path / "alone")


def test_large_replies_come_one_client_at_a_time_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a node that does not reply, the clients that it was not asked for yet are lost, too."""
    monkeypatch.setattr(fleet, "_MAX_REPLY", 1)
    net = Net(tmp_path)
    run = Run(on(net), CLIENTS)
    net.messages = 0
    run.play_unsealed()
    asked, net.messages = net.messages, 0
    assert asked == 2 * CLIENTS  # two exchanges
    net.mute.add(2)
    run.play_unsealed()
    assert net.messages == asked - 2
    assert run.lost == {(2, client) for client in HOMES[2]}
    net.mute.clear()
    assert_as_alone(run.play(), net, tmp_path / "alone")


@pytest.mark.parametrize("kind", [Sequential, *slow(Vectorised)])
def test_an_error_in_the_work_of_one_client_loses_this_client_only(
    tmp_path: Path, kind: type[Sequential], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, data = Net(tmp_path, kind), Host.data

    def broken(host: Host, client: int, device: Any) -> ClientData:
        if client == 3:
            raise OSError(f"{tmp_path}/c3 is unreadable")
        return data(host, client, device)

    with monkeypatch.context() as patch:
        patch.setattr(Host, "data", broken)
        run = Run(on(net)).play(4)
    assert {client for _, client in run.lost} == {3}
    assert {reason for _, (_, reason) in run.faults} == {"OSError: c3 is unreadable"}
    if kind is Sequential:
        assert_as_alone(run, net, tmp_path / "alone")


def test_a_malformed_message_for_one_client_loses_this_client_only(tmp_path: Path) -> None:
    net = Net(tmp_path)
    honest = net.answer

    def damaged(number: int, wire_message: WireMessage) -> WireMessage:
        if "c0" in wire_message.blocks:
            wire_message.blocks["c0"] = b"\x00" * 16
        return honest(number, wire_message)

    net.answer = damaged  # type: ignore[method-assign]
    run = Run(on(net)).play(4)
    assert {client for _, client in run.lost} == {0}


@pytest.mark.parametrize("trouble", ["mute", *slow("gone", "deaf")])
def test_a_node_that_fails_for_two_rounds_is_lost_for_them_and_comes_back(
    tmp_path: Path, trouble: str
) -> None:
    net = Net(tmp_path)
    run = Run(on(net)).play(1)
    getattr(net, trouble).add(2)
    run.play(2)
    getattr(net, trouble).clear()
    run.play(2)
    assert {client for _, client in run.lost} <= set(HOMES[2])
    assert {round for round, _ in run.lost} == {2, 3}
    assert_as_alone(run, net, tmp_path / "alone")


@pytest.mark.slow
def test_a_node_that_is_killed_takes_up_what_it_wrote_and_drops_what_did_not_count(
    tmp_path: Path,
) -> None:
    net = Net(tmp_path)
    run = Run(on(net)).play(2)
    run.play_unsealed()  # accepted, written, not sealed
    net.runtimes[1] = net.runtime(1)
    net.mute.add(2)
    run.play(1)  # node 2 works; nobody hears of it
    net.runtimes[2] = net.runtime(2)
    net.mute.clear()
    run.play(2)
    assert {round for round, _ in run.lost} == {4}
    assert_as_alone(run, net, tmp_path / "alone")


def test_a_server_that_is_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Also where a node has sealed a round of which the server has no checkpoint."""
    net = Net(tmp_path)
    run = Run(on(net)).play(3)
    run.play_unsealed()
    run.fleet.seal(4, range(4))  # the server dies before its checkpoint of round 4
    run.go_back(3)
    assert_as_alone(run, net, tmp_path / "three")
    run.play(2)
    assert_as_alone(run, net, tmp_path / "five")


@pytest.mark.slow
def test_a_node_that_was_away_when_the_run_was_resumed_goes_back_when_it_comes(
    tmp_path: Path,
) -> None:
    net = Net(tmp_path)
    run = Run(on(net)).play(4)
    net.gone.add(3)
    run.go_back(2)
    run.play(1)
    net.gone.clear()
    net.runtimes[3] = net.runtime(3)
    run.play(2)
    assert_as_alone(run, net, tmp_path / "alone")


def test_a_seal_that_nobody_heard_of_can_still_be_gone_back_behind(tmp_path: Path) -> None:
    net = Net(tmp_path)
    run = Run(on(net)).play(1)
    net.mute.add(1)
    run.play(1)  # node 1 loses the round and seals it; the server knows its seal of round 1
    net.mute.clear()
    run.go_back(2)
    run.play(2)
    assert_as_alone(run, net, tmp_path / "alone")


def test_a_round_that_a_node_did_not_seal_can_be_returned_to_as_the_server_knows_it(
    tmp_path: Path,
) -> None:
    """Its states of round 2 were accepted and are not in the checkpoint; those of round 1 are."""
    net = Net(tmp_path)
    run = Run(on(net)).play(1)
    run.play_unsealed()
    net.deaf.add(2)
    run.kept.append((run.server, run.fleet.seal(2, (0, 1))))
    net.deaf.clear()
    for round, keep in ((3, (1, 2)), (4, (2, 3))):
        run.play_unsealed()
        run.kept.append((run.server, run.fleet.seal(round, keep)))
    again = joining(net, session=9)
    again.open(4, run.kept[4][1])  # another process goes on, and still keeps round 2
    again.rewind(4, run.kept[4][1])
    again.seal(5, (2, 4))
    base = json.loads(run.kept[2][1])["nodes"]["n2"]
    assert base[0] == 1
    for number, clients in HOMES.items():
        round, sha = json.loads(run.kept[2][1])["nodes"][f"n{number}"]
        host = net.host(number)
        host.store.open(round, sha)
        for client in clients:
            host.private(client, (round, 10**6))


def test_messages_of_an_earlier_life_are_refused(tmp_path: Path) -> None:
    net = Net(tmp_path)
    old = on(net, session=1)
    Run(on(net, session=5)).play(1)
    net.runtimes[1] = net.runtime(1)  # it has not forgotten
    wire_message = old.node_registry.message_to(old.node_registry.nodes["n1"])
    with pytest.raises(CheckpointError, match="of session 2, but the run is in session 6"):
        net.answer(1, wire_message)


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", "{}", "[" * 10**5, '{"life": 1e999, "done": 1, "sealed": [1, ""]}',
     '{"life": 1, "done": 1, "sealed": 5}', '{"life": 1, "done": 1, "sealed": []}'],
)  # fmt: skip
def test_a_damaged_note_of_a_node_is_named(tmp_path: Path, damage: str) -> None:
    net = Net(tmp_path)
    Run(on(net)).play(1)
    (tmp_path / "1" / "life.json").write_text(damage)
    with pytest.raises(CheckpointError, match=r"life\.json is damaged"):
        net.runtime(1)


def test_a_node_sent_back_to_the_beginning_keeps_what_it_had_sealed(tmp_path: Path) -> None:
    """Until a round as late is sealed again, since nothing tells that the order is right."""
    net = Net(tmp_path)
    run = Run(on(net)).play(2)
    folder = tmp_path / "1"
    held = {path.name: path.read_bytes() for path in (folder / "clients").glob("*/*")}
    assert held
    run.kept[0] = (run.kept[0][0], json.dumps({"nodes": {}}))
    run.go_back(0)
    (aside,) = folder.glob("before-*")
    assert {path.name: path.read_bytes() for path in aside.glob("*/*")} == held
    run.play(1)
    assert aside.exists()
    run.play(1)
    assert not aside.exists()
    assert_as_alone(run, net, tmp_path / "alone")


def test_a_node_without_the_states_of_the_checkpoint_is_named(tmp_path: Path) -> None:
    net = Net(tmp_path)
    run = Run(on(net)).play(2)
    for path in (tmp_path / "2" / "clients").glob("index-*"):
        path.unlink()
    net.runtimes[2] = net.runtime(2)
    with pytest.raises(
        CheckpointError, match="the index of the private states of round 2 cannot be read"
    ):
        run.go_back(2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "init"}, "has no client work 'init'"),
        ({"name": "__init__"}, "has no client work"),
        ({"name": "evaluate"}, "has no client work"),
        ({"phase": "test"}, "unknown phase 'test'"),
        ({"version": [0, 0]}, "round 0 is already committed"),
        ({"version": [1]}, "the work is invalid: IndexError"),
        ({"version": [1e999, 0]}, "the work is invalid: OverflowError"),
        ({"version": None}, "the work is invalid: TypeError"),
        ({"as_of": [1, "x"]}, "the work is invalid: ValueError"),
        ({"key": []}, "the work is invalid: ValueError"),
        ({"key": [0, [1]]}, "the work is invalid: ValueError"),
        ({"key": 0}, "the work is invalid: TypeError"),
    ],
)
def test_work_that_is_none_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    net = Net(tmp_path)
    Run(on(net))
    work = {"name": "count_images", "phase": "train", "version": [1, 0], "as_of": None, "key": [0]}
    with pytest.raises(CodecError, match=words):
        list(net.runtimes[1].run_work(work | change, {}, [0]))
    (arrival,) = net.runtimes[1].run_work(work, {}, [1])
    assert arrival.fault == ("lost", "this node does not hold the client")


def test_orders_are_carried_out_once(tmp_path: Path) -> None:
    net = Net(tmp_path)
    run = Run(on(net))
    run.play_unsealed()
    runtime = net.runtimes[1]
    before = runtime.state["done"]
    order = [before + 1, "seal", 1, []]
    runtime.apply_orders([order])
    held = runtime.state
    runtime.apply_orders([order, [before + 1, "void", 1], [before + 1, "nonsense"]])
    assert runtime.state == held
    with pytest.raises(CodecError, match=r"invalid order .*'nonsense'"):
        runtime.apply_orders([[before + 2, "nonsense"]])


@pytest.mark.parametrize(
    "order",
    [[], [9], 9, None, "9", {"9": 1}, ["9", "void", 1], [9, "void"], [9, "void", "1"],
     [9, ["void"]], [9, "drop", [1], [0]], [9, "drop", [1, 0], ["a"]],
     [9, "seal", 1, [[]]], [9, "seal", 1, 0]],
)  # fmt: skip
def test_an_order_that_is_none_is_refused(tmp_path: Path, order: Any) -> None:
    runtime = Net(tmp_path).runtimes[1]
    with pytest.raises(CodecError, match="invalid order"):
        runtime.apply_orders([order])
    assert runtime.state["done"] == 0


@pytest.mark.parametrize(
    "change",
    [{"work": 5}, {"work": [5]}, {"work": {"name": "count_images"}}, {"work": {"clients": ["a"]}},
     {"work": {"clients": 3}}, {"within": "soon"}, {"sent": None}, {"sent": [1]}],
)  # fmt: skip
def test_a_message_with_malformed_work_or_deadline_is_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    head = {"work": {"clients": []}, "sent": 0.0, "within": 1.0} | change
    runtime = Net(tmp_path).runtimes[1]
    with pytest.raises(CodecError, match="the work is invalid"):
        run_work(runtime, WireMessage(head), WireMessage({}), LIMITS)


def test_what_a_node_says_of_others_is_dropped_and_named(tmp_path: Path) -> None:
    """And what it leaves out is lost; neither stops the exchange."""
    net, said = Net(tmp_path), []
    fleet = on(net)
    fleet._tell = said.append
    honest = net.answer

    def lying(number: int, wire_message: WireMessage) -> WireMessage:
        reply = honest(number, wire_message)
        results = reply.head.get("results", {})
        if number == 1 and "0" in results:
            results["5"] = results.pop("0")
        if number == 2 and "1" in results:
            reply.blocks["c1"] = b"\x00" * 16
        return reply

    net.answer = lying  # type: ignore[method-assign]
    run = Run(fleet).play(3)
    assert {client for _, client in run.lost} == {0, 1}
    assert "node n1 replies for '5', which it was not asked for; dropped" in said
    net.answer = honest  # type: ignore[method-assign]
    run.play(1)
    assert_as_alone(run, net, tmp_path / "alone")
