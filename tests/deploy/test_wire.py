"""Messages as Flower carries them: large ones come back, and none unfolds to more than is taken."""

from __future__ import annotations

import asyncio
import gzip
import json
from base64 import b64encode
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="the extra `flower` is not installed")
import httpx
from flwr.app import Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import Metadata, ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
)
from flwr.supercore.primitives.asymmetric import sign_message
from flwr.supercore.runtime import RuntimeHttpClient

from fedshot.core import tree
from fedshot.core.serialised import LIMITS, CodecError, Limits
from fedshot.core.tree import Tree
from fedshot.deploy.flower.keys import new_key, public_bytes
from fedshot.deploy.flower.messages import COMMON, WireMessage, read_message
from fedshot.deploy.flower.superlink import Gate, bounded, is_reply, is_signed
from fedshot.deploy.flower.wire import fetch, limit_responses, set_message_id

MB = 1 << 20

pytestmark = [pytest.mark.flower, pytest.mark.usefixtures("flower_run")]


def sent(record: RecordDict) -> tuple[Message, dict[str, bytes]]:
    """Return a message as it is sent, and its objects by name."""
    message = Message(record, 1, "query.x", ttl=60.0)
    set_message_id(message)
    objects = get_all_nested_objects(message)
    return message, {name: one.deflate() for name, one in objects.items()}


def fetched(message: Message, objects: Mapping[str, bytes], limits: Limits = LIMITS) -> Message:
    return fetch(message, get_object_tree(message), objects.__getitem__, limits, 5.0)


def journey(content: dict[str, Tree]) -> WireMessage:
    wire_message = WireMessage({"id": "7"})
    for name, part in content.items():
        wire_message.put(name, part)
    return read_message(fetched(*sent(wire_message.record())).content, LIMITS)


def test_a_message_of_many_pieces_comes_back_in_the_same_bits() -> None:
    """Arrays above 4 MB travel as objects of their own, in pieces of 5 MB; some are all zeros."""
    noise = torch.randn(3 * MB, generator=torch.Generator().manual_seed(0))
    content = {
        COMMON: {"theta": noise, "zeros": torch.zeros(6 * MB)},
        "c0": {"up": torch.zeros(4 * MB), "more": noise[:5]},
        "c1": {"up": noise},
    }
    found = journey(content)
    assert found.head["id"] == "7"
    for name, part in content.items():
        assert tree.digest(found.get(name, LIMITS)) == tree.digest(part)


def test_a_form_that_many_share_is_written_once() -> None:
    part = {f"layer{i}": {"weight": torch.zeros(1), "bias": torch.zeros(1)} for i in range(50)}
    alone, many = WireMessage({}), WireMessage({})
    alone.put("c0", part)
    other = WireMessage({})
    other.put(COMMON, {"theta": torch.zeros(2)})
    many.add(other)
    for client in range(100):
        many.put(f"c{client}", part)
    assert len(json.dumps(many.head)) < len(json.dumps(alone.head)) + 2500
    assert tree.difference(many.get("c99", LIMITS), part) is None
    assert many.get(COMMON, LIMITS)["theta"].shape == (2,)


def test_names_of_other_order_are_another_form() -> None:
    wire_message = WireMessage({})
    wire_message.put("c0", {"a": torch.zeros(1), "b": torch.ones(1)})
    wire_message.put("c1", {"b": torch.ones(1), "a": torch.zeros(1)})
    assert [list(wire_message.get(name, LIMITS)) for name in ("c0", "c1")] == [
        ["a", "b"],
        ["b", "a"],
    ]


def test_a_message_that_the_other_side_would_refuse_is_not_sent() -> None:
    wire_message = WireMessage({"orders": ["x" * 100]})
    with pytest.raises(
        CodecError, match=r"at most 64 are accepted. Let the node hold fewer clients"
    ):
        wire_message.record(Limits(head=64))
    wire_message.put("c0", torch.zeros(1000))
    with pytest.raises(CodecError, match=r"at most 2048 are accepted. Raise --most-mb"):
        wire_message.record(Limits(message=2048))


def forged(numbers: Any) -> tuple[Message, dict[str, bytes]]:
    """Return a message whose array names its pieces by these numbers."""
    wire_message = WireMessage({})
    wire_message.put("c0", torch.arange(5 * MB // 4 + 1, dtype=torch.float32))
    message, objects = sent(wire_message.record())
    for old, data in list(objects.items()):
        if data.startswith(b"Array "):
            head, _, body = data.partition(b"\x00")
            body = json.dumps(json.loads(body) | {"arraychunk_ids": numbers}).encode()
            kind, children, _ = head.decode().split(" ")
            objects[old] = f"{kind} {children} {len(body)}\x00".encode() + body
            return message, objects
    raise AssertionError("no array")


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([0, 1] * 35, "arrays of 18[0-9]{7} bytes; at most 67108864"),
        ([0] * 100_000, "Array of 300082 bytes"),
        ([-1, 0], "invalid chunk indices"),
        ([0, 7], "invalid chunk indices"),
        ([0, True], "invalid chunk indices"),
        ("01", "invalid chunk indices"),
    ],
)
def test_a_piece_that_stands_in_an_array_again_and_again_is_weighed_first(
    numbers: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eleven megabytes that would become a terabyte are never put together."""
    from fedshot.deploy.flower import wire

    message, objects = forged(numbers)
    monkeypatch.setattr(wire, "inflate_object_from_contents", lambda *_: pytest.fail("inflated"))
    with pytest.raises(CodecError, match=words):
        fetched(message, objects, Limits(message=64 * MB))


def test_no_more_is_brought_than_is_taken() -> None:
    """Each piece is within its own bound; together they are not."""
    wire_message = WireMessage({})
    wire_message.put("c0", torch.arange(10 * MB, dtype=torch.float32))
    message, objects = sent(wire_message.record())
    brought = []

    def pull(ident: str) -> bytes:
        brought.append(len(objects[ident]))
        return objects[ident]

    with pytest.raises(CodecError, match="more than 8388608 bytes"):
        fetch(message, get_object_tree(message), pull, Limits(message=8 * MB, head=MB), 5.0)
    assert sum(brought) < 30 * MB < sum(map(len, objects.values()))


def replaced(change: dict[bytes, bytes]) -> tuple[Message, dict[str, bytes]]:
    message, objects = sent(WireMessage({"a": 1}).record())
    for old, data in objects.items():
        for kind, new in change.items():
            if data.startswith(kind):
                objects[old] = new
    return message, objects


@pytest.mark.parametrize(
    "change",
    [
        {b"ConfigRecord": b"ConfigRecord  3\x00abc"},
        {b"ConfigRecord": b"no object at all"},
        {b"ConfigRecord": b"\xff\xfe\x00"},
        {b"ConfigRecord": b"MetricRecord  0\x00"},
        {b"RecordDict": b"RecordDict  2\x00{}"},
        {b"RecordDict": b"RecordDict  9\x00[[[[[[[[["},
        {b"RecordDict": b"ArrayChunk " + b"0" * 64 + b" 0\x00"},
        {b"Message": b"RecordDict  2\x00{}"},
        {b"Message": b"Message " + b"0" * 64 + b" 1\x00x"},
        {b"Message": b"Message  4\x00\xff\xff\xff\xff"},
    ],
)
def test_objects_that_are_no_message_are_a_codec_error(change: dict[bytes, bytes]) -> None:
    message, objects = replaced(change)
    with pytest.raises(CodecError):
        read_message(fetched(message, objects).content, LIMITS)


def test_an_object_that_is_part_of_itself_is_no_message() -> None:
    message, objects = sent(WireMessage({"a": 1}).record())
    ident = message.metadata.message_id
    objects[ident] = f"Message {ident} 0\x00".encode()
    with pytest.raises(CodecError, match="not a message"):
        fetched(message, objects)
    assert get_object_id(objects[ident]) != ident


def answering(**reply: Any) -> RuntimeHttpClient:
    client = RuntimeHttpClient.from_server_address("127.0.0.1:1", True, None, interceptors=[])
    limit_responses(client, LIMITS)
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(**({"status_code": 200} | reply))

    client._client._transport = httpx.MockTransport(answer)
    client.seen = seen
    return client


def test_a_response_that_would_grow_when_it_is_read_is_refused() -> None:
    plain = PullAppMessagesResponse().SerializeToString()
    well = answering(content=plain, headers={"content-length": str(len(plain))})
    assert well.PullMessages(PullAppMessagesRequest()) is not None
    coded = answering(content=gzip.compress(bytes(64 * MB)), headers={"content-encoding": "gzip"})
    with pytest.raises(CodecError, match="encoded as 'gzip'"):
        coded.PullMessages(PullAppMessagesRequest())
    assert coded.seen[0].headers["accept-encoding"] == "identity"


def test_a_server_sends_nobody_elsewhere() -> None:
    client = answering(
        status_code=307, headers={"location": "http://192.0.2.1/", "content-length": "0"}
    )
    with pytest.raises(httpx.HTTPStatusError):
        client.PullMessages(PullAppMessagesRequest())
    assert len(client.seen) == 1


def outline(**changes: Any) -> bytes:
    """Return the request by which node 7 answers a message, with changes."""
    source, to = changes.pop("source", 7), changes.pop("to", SUPERLINK_NODE_ID)
    told = Metadata(message_id="a", src_node_id=source, dst_node_id=to,
                    reply_to_message_id=changes.pop("reply_to", "b"))  # fmt: skip
    trees = [ObjectTree(object_id=changes.pop("tree", "a"))]
    times = changes.pop("times", 1)
    return PushMessagesRequest(
        node=Node(node_id=7), messages_list=[ProtoMessage(metadata=told)] * times,
        message_object_trees=trees,
    ).SerializeToString()  # fmt: skip


def test_of_a_node_the_gate_takes_one_reply_of_its_own() -> None:
    assert is_reply(outline())
    for change in (
        {"reply_to": ""}, {"reply_to": "", "source": SUPERLINK_NODE_ID, "to": 8}, {"source": 8},
        {"source": SUPERLINK_NODE_ID}, {"to": 8}, {"to": 0}, {"tree": "c"}, {"times": 2},
        {"times": 0},
    ):  # fmt: skip
        assert not is_reply(outline(**change)), change
    assert not is_reply(b"")
    assert not is_reply(b"\xff" * 9)


def behind_the_gate(public: bytes) -> Any:
    """Return what the gate asks of Flower: a server with one registered key."""
    state = SimpleNamespace(get_node_id_by_public_key={public: 7}.get)
    return SimpleNamespace(
        state=SimpleNamespace(linkstate_factory=SimpleNamespace(state=lambda: state))
    )


def test_a_large_body_is_read_of_a_registered_key_that_has_signed_alone() -> None:
    key, other, stamp = new_key(), new_key(), b"2026-01-01T00:00:00+00:00"
    app = behind_the_gate(public_bytes(key.public_key()))

    def signed(by: Any, length: int, **more: Any) -> bool:
        named = public_bytes(more.get("named", by).public_key())
        headers = {b"flwr-public-key": b64encode(named), b"flwr-timestamp": stamp,
                   b"flwr-signature": b64encode(sign_message(by, stamp))}  # fmt: skip
        return is_signed(headers, app, length)

    assert signed(key, 1 << 20)
    assert not signed(other, 1 << 20)
    assert not signed(other, 1)
    assert not signed(other, 1 << 20, named=key)
    assert signed(other, 1, named=key), "which Flower refuses, once it has read the little there is"
    assert not is_signed({}, app, 1)
    assert not is_signed({b"flwr-public-key": b"\xff"}, app, 1)


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {b"transfer-encoding": b"chunked"}, 405),
        ("GET", {}, 405),
        ("GET", {b"content-length": b"10"}, 405),
        ("POST", {b"transfer-encoding": b"chunked"}, 411),
        ("POST", {b"content-length": b"10", b"transfer-encoding": b"chunked"}, 411),
        ("POST", {b"content-length": b"10"}, 413),
        ("POST", {b"content-length": b"65536"}, 200),
    ],
)
def test_without_a_signature_no_body_above_64_kb_is_read(
    method: str, headers: dict[bytes, bytes], status: int
) -> None:
    """Whatever the request says of its length, and a registered key that anybody can name."""
    public = public_bytes(new_key().public_key())
    left, answers, handed = 1 << 16 if status == 200 else 9 * MB, [], []
    whole = left

    async def receive() -> dict[str, Any]:
        nonlocal left
        took = min(left, 1 << 14)
        left -= took
        return {"type": "http.request", "body": b"x" * took, "more_body": left > 0}

    async def send(message: dict[str, Any]) -> None:
        answers.append(message.get("status"))

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        handed.append((await receive())["body"])
        await send({"status": 200})

    scope = {"type": "http", "path": "/v1/fleet/push-object", "method": method,
             "app": behind_the_gate(public),
             "headers": [(b"flwr-public-key", b64encode(public)), *headers.items()]}  # fmt: skip
    asyncio.run(Gate(behind, "t" * 32, LIMITS, keys=True)(scope, receive, send))
    assert answers[0] == status
    assert handed == ([b"x" * whole] if status == 200 else [])
    assert whole - left <= 1 << 16


class Loop:
    """A clock that strikes when told to."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def call_later(self, seconds: float, call: Any) -> Any:
        handle = SimpleNamespace(call=call, cancel=lambda: self.calls.remove(handle))
        self.calls.append(handle)
        return handle


class Line:
    """A connection, and what uvicorn makes of it, in few words: a line end ends a head."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.cycle, self.aborted = loop, None, False

    def connection_made(self, transport: Any) -> None:
        self.transport, self.client = transport, ("10.0.0.1", 5)

    def data_received(self, data: bytes) -> None:
        if b"\n" in data:
            self.cycle = SimpleNamespace(response_complete=False)

    def connection_lost(self, exc: Exception | None) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True
        self.connection_lost(None)

    def is_closing(self) -> bool:
        return self.aborted


def test_no_connection_waits_for_ever_for_the_head_of_a_request() -> None:
    loop, kind = Loop(), bounded(Line)

    def opened() -> Any:
        made = kind(loop)
        made.connection_made(made)
        return made

    well = opened()
    well.data_received(b"GET / HTTP/1.1\r\n")
    assert not loop.calls, "its request is under way"
    well.cycle.response_complete = True
    well.data_received(b"G")
    (timer,) = loop.calls
    well.data_received(b"E")
    assert loop.calls == [timer], "a byte does not begin it anew"
    timer.call()
    assert well.aborted
    assert not loop.calls
    verbose = opened()
    for _ in range(17):
        verbose.data_received(b"x" * 4096)
    assert verbose.aborted
    many = [opened() for _ in range(70)]
    assert [line.aborted for line in many] == [True] * 6 + [False] * 64, "the oldest give way"
    for line in many:
        line.connection_lost(None)
    assert not loop.calls
    assert not kind._waiting
