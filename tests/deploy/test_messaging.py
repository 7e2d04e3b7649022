"""The server's messaging, with Flower's own messages and none of its processes.

An invalid reply is a fault of its node: it neither ends the run nor disturbs other nodes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="the extra `flower` is not installed")
import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from covering import CHARACTERS
from fedshot.core.errors import ServerGoneError
from fedshot.core.serialised import Limits
from fedshot.deploy.flower import messaging, wire
from fedshot.deploy.flower.messages import Incoming, WireMessage, read_message
from fedshot.deploy.flower.messaging import Messenger
from fedshot.deploy.flower.wire import set_message_id

LIMITS = Limits(message=1 << 22, head=1 << 16)
Prediction = Callable[[Message], "Message | None"]

pytestmark = [pytest.mark.flower, pytest.mark.usefixtures("flower_run")]


class Office:
    """What a grid reaches: keeps messages as a SuperLink does, and answers for the nodes."""

    node = Node(node_id=1)

    def __init__(self, nodes: dict[int, Prediction]) -> None:
        self.nodes = nodes
        self.outlines: dict[str, list[tuple[Any, Any]]] = {}
        self.objects: dict[str, bytes] = {}
        self.takes = True
        self._runtime_client = self

    def push_messages(self, messages: Iterable[Message]) -> list[str | None]:
        ids: list[str | None] = []
        for message in messages:
            set_message_id(message)
            ids.append(message.metadata.message_id)
            reply = self.nodes[message.metadata.dst_node_id](message)
            if reply is not None:
                self.put(message, reply)
        return ids if self.takes else []

    def put(self, asked: Message, reply: Message) -> None:
        """Take in a reply."""
        set_message_id(reply)
        for name, one in get_all_nested_objects(reply).items():
            self.objects[name] = one.deflate()
        found = message_to_proto(remove_content_from_message(reply)), get_object_tree(reply)
        self.outlines.setdefault(asked.metadata.message_id, []).append(found)

    def PullMessages(self, request: Any) -> Any:  # noqa: N802  (Flower's name)
        found = [one for name in request.message_ids for one in self.outlines.pop(name, [])]
        return SimpleNamespace(
            messages_list=[outline for outline, _ in found],
            message_object_trees=[objects for _, objects in found],
        )

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:  # noqa: N802  (Flower's name)
        found = self.objects.get(request.object_id)
        return PullObjectResponse(
            object_found=True, object_available=found is not None, object_content=found or b""
        )

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802  (Flower's name)
        del request


def replying(record: Callable[[WireMessage], RecordDict]) -> Prediction:
    return lambda asked: Message(record(read_message(asked.content, LIMITS)), reply_to=asked)


def honest(wire_message: WireMessage) -> RecordDict:
    return WireMessage({"id": wire_message.head["id"], "well": True}).record()


def asked(office: Office, seconds: float = 30.0) -> dict[int, Incoming]:
    messenger = Messenger(office, LIMITS, [].append)  # type: ignore[arg-type]
    received = list(
        messenger.send_and_receive({node: WireMessage({}) for node in office.nodes}, seconds)
    )
    assert sorted(incoming.node for incoming in received) == sorted(office.nodes), "each node once"
    return {incoming.node: incoming for incoming in received}


def test_messages_are_answered() -> None:
    found = asked(Office({2: replying(honest), 3: replying(honest)}))
    assert all(
        incoming.wire_message and incoming.wire_message.head["well"] and not incoming.reason
        for incoming in found.values()
    )


def test_a_node_that_has_replied_is_sent_its_next_message() -> None:
    office = Office({2: replying(honest), 3: replying(lambda _: WireMessage({"id": 0}).record())})
    left = {2: [WireMessage({}), WireMessage({})], 3: [WireMessage({})]}
    messenger = Messenger(office, LIMITS, [].append)  # type: ignore[arg-type]
    received = messenger.send_and_receive(
        {2: WireMessage({}), 3: WireMessage({})},
        30.0,
        lambda node: left[node].pop() if left[node] else None,
    )
    assert sorted((i.node, bool(i.reason)) for i in received) == [(2, False)] * 3 + [(3, True)]
    assert left == {2: [], 3: [WireMessage({})]}, "none after a reply that cannot be used"


def broken(data: bytes) -> Prediction:
    """Return a node whose text record is these bytes."""

    def answer(message: Message) -> Message:
        return Message(RecordDict({"fedshot": ConfigRecord({"head": data})}), reply_to=message)

    return answer


def texts(head: Any, **more: Any) -> Prediction:
    content = {"fedshot": ConfigRecord({"head": json.dumps(head), **more})}
    return lambda message: Message(RecordDict(dict(content)), reply_to=message)


def large(wire_message: WireMessage) -> RecordDict:
    reply = WireMessage({"id": wire_message.head["id"]})
    reply.put("c0", torch.zeros(3 << 20))
    return reply.record()


def pickled(wire_message: WireMessage) -> RecordDict:
    array = Array(dtype="uint8", shape=(1,), stype="numpy.ndarray", data=b"\x80\x05.")
    text = ConfigRecord({"head": json.dumps(wire_message.head)})
    return RecordDict({"fedshot": text, "arrays": ArrayRecord({"rest": array})})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (broken(b"{"), "entries besides head"),
        (texts([1]), "not a JSON object"),
        (texts({"sizes": {}}), "to another message"),
        (texts({"sizes": {"c0": 10**30}}), "blocks of other sizes"),
        (texts({"sizes": 3}), "no sizes"),
        (texts({}, more=b"x"), "entries besides head"),
        (
            texts({"sizes": {}, "refused": "a message that cannot be read: 5"}),
            "^refused: a message",
        ),
        (texts({"sizes": {}, "refused": "\x1b[2J" * 1000}), r"^refused:  \[2J"),
        (
            lambda m: Message(RecordDict({"m": MetricRecord({"a": 1})}), reply_to=m),
            "an unexpected object",
        ),
        (lambda m: Message(RecordDict({}), reply_to=m), "expected"),
        (
            lambda m: Message(Error(0, "out of sorts" * 100), reply_to=m),
            "Flower says: out of sorts",
        ),
        (replying(large), "more than 4194304 bytes"),
        (replying(pickled), "not in safetensors"),
    ],
)
def test_what_is_no_reply_is_lost_in_words_and_the_others_are_heard(
    answer: Prediction, words: str
) -> None:
    found = asked(Office({2: answer, 3: replying(honest)}))
    assert found[2].wire_message is None

    assert re.search(words, found[2].reason), found[2].reason
    assert len(found[2].reason) < 600
    assert found[2].reason.isprintable()
    assert not found[3].reason


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(CHARACTERS, max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(CHARACTERS, max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
names = st.sampled_from(["id", "forms", "form_of", "sizes", "results", "done", "sealed", "refused"])


@given(st.dictionaries(names, json_values), st.binary(max_size=60) | st.none())
@settings(suppress_health_check=list(HealthCheck))
def test_no_head_and_no_block_ends_a_run(head: dict[str, Any], block: bytes | None) -> None:
    more = {} if block is None else {"rest": block}
    found = asked(Office({2: texts(head, **more), 3: replying(honest)}))
    assert found[2].reason or found[2].wire_message is not None
    assert not found[3].reason


@given(st.data())
@settings(suppress_health_check=list(HealthCheck))
def test_no_objects_end_a_run(data: st.DataObject) -> None:
    """Any object of a reply is replaced by noise, by another, or by a half of itself."""
    office = Office({2: replying(honest), 3: replying(honest)})
    inner = office.put

    def put(asked: Message, reply: Message) -> None:
        inner(asked, reply)
        if reply.metadata.src_node_id == 2:
            mine = list(get_all_nested_objects(reply))
            victim, other = data.draw(st.sampled_from(mine)), data.draw(st.sampled_from(mine))
            held = office.objects[victim]
            office.objects = dict(office.objects)
            office.objects[victim] = data.draw(
                st.sampled_from([held[: len(held) // 2], office.objects[other], held * 2])
                | st.binary(max_size=40)
                | st.binary(max_size=40).map(lambda noise: held.partition(b"\0")[0] + b"\0" + noise)
            )

    office.put = put  # type: ignore[method-assign]
    found = asked(office)
    assert found[2].reason or found[2].wire_message is not None
    assert not found[3].reason


def test_an_error_in_opening_a_reply_is_no_server_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Too deep a recursion is a RuntimeError, as a closed client is."""

    def deep(*_: object) -> None:
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(messaging, "read_message", deep)
    assert "RecursionError" in asked(Office({2: replying(honest)}))[2].reason

    def gone(self: Office, request: Any) -> None:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(Office, "PullObject", gone)
    with pytest.raises(ServerGoneError):
        asked(Office({2: replying(honest)}))


def refusing(status: int) -> Callable[[Office, Any], Any]:
    """Return a call of Flower's that a server answers with this status."""

    def call(self: Office, request: Any) -> Any:
        asked_for = httpx.Request("POST", "https://127.0.0.1/")
        raise httpx.HTTPStatusError(
            f"{status}", request=asked_for, response=httpx.Response(status, request=asked_for)
        )

    return call


@pytest.mark.parametrize("call", ["PullMessages", "PullObject"])
@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_does_not_know_the_run_ends_it(
    call: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was started anew, also while a reply was being brought."""
    monkeypatch.setattr(Office, call, refusing(status))
    with pytest.raises(ServerGoneError, match=rf"does not know this run any more \({status}\)"):
        asked(Office({2: replying(honest)}))


def test_an_object_that_a_server_does_not_have_is_a_loss_of_its_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Office, "PullObject", refusing(404))
    assert "its reply cannot be read" in asked(Office({2: replying(honest)}))[2].reason
    monkeypatch.setattr(Office, "PullMessages", refusing(404))
    with pytest.raises(ServerGoneError, match="does not respond any more"):
        asked(Office({2: replying(honest)}))


def test_what_flower_does_not_take_is_said() -> None:
    office = Office({2: replying(honest)})
    office.takes = False
    assert asked(office)[2].reason == "Flower did not accept the message"


def test_a_message_that_is_too_large_is_lost_for_its_node_alone() -> None:
    office = Office({2: replying(honest), 3: replying(honest)})
    messenger = Messenger(office, LIMITS, print)  # type: ignore[arg-type]
    wire_messages = {2: WireMessage({"orders": ["x" * (1 << 16)]}), 3: WireMessage({})}
    found = {
        incoming.node: incoming for incoming in messenger.send_and_receive(wire_messages, 30.0)
    }
    assert "Let the node hold fewer clients" in found[2].reason
    assert not found[3].reason


def test_of_two_replies_the_first_counts() -> None:
    """Flower keeps one; should it keep two, the second is nobody's."""
    office = Office({})

    def twice(message: Message) -> None:
        head = read_message(message.content, LIMITS).head
        for which in (1, 2):
            reply = WireMessage({"id": head["id"], "which": which}).record()
            office.put(message, Message(reply, reply_to=message))

    office.nodes = {2: twice}  # type: ignore[dict-item]
    incoming = asked(office)[2]
    assert incoming.wire_message is not None
    assert incoming.wire_message.head["which"] == 1


def test_a_late_reply_is_dropped_and_named() -> None:
    held: list[Message] = []
    said: list[str] = []
    office = Office({2: held.append})  # type: ignore[dict-item]
    messenger = Messenger(office, LIMITS, said.append)  # type: ignore[arg-type]
    assert [
        incoming.reason for incoming in messenger.send_and_receive({2: WireMessage({})}, 0.2)
    ] == ["no reply within 0.2 s"]
    office.put(held[0], replying(honest)(held[0]) or held[0])
    office.nodes = {2: replying(honest)}
    received = list(messenger.send_and_receive({2: WireMessage({})}, 30.0))
    assert [incoming.reason for incoming in received] == [""]
    assert said == ["a reply of node 2 came too late and was dropped"]


def test_a_reply_of_which_only_the_outline_came_is_not_waited_for_longer_than_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "STALL_SECONDS", 0.3)
    office = Office({2: replying(honest)})
    inner = office.put

    def put(asked: Message, reply: Message) -> None:
        inner(asked, reply)
        office.objects.clear()

    office.put = put  # type: ignore[method-assign]
    assert "an incomplete message" in asked(office, seconds=1e5)[2].reason  # not a day
