"""A node's loop: it answers what it can, says what it cannot, and goes on."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="the extra `flower` is not installed")
import httpx
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesResponse
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from fedshot.core.errors import BusyError, ConfigError, FedshotError
from fedshot.core.locks import only_one
from fedshot.core.serialised import CodecError, Limits
from fedshot.deploy.flower import node as nodes
from fedshot.deploy.flower.connection import (
    Connection,
    ConnectionLostError,
    RejectedError,
    UnreadableError,
)
from fedshot.deploy.flower.keys import Signer, Verifier, make_server_keys, new_key
from fedshot.deploy.flower.messages import COMMON, WireMessage, read_message
from fedshot.deploy.flower.node import NodeLoop
from fedshot.deploy.flower.operator import Operator
from fedshot.deploy.flower.wire import set_message_id

pytestmark = pytest.mark.flower
LIMITS = Limits(message=1 << 16, head=1 << 12)


class EndError(Exception):
    """The test has seen enough."""


@pytest.fixture(autouse=True)
def nobody_sleeps(flower_run: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes.time, "sleep", lambda _: None)


class Line:
    """A line to a server that brings these, one after the other."""

    def __init__(self, *brought: Any, pushing: Exception | None = None) -> None:
        self._brought, self._pushing = list(brought), pushing
        self.sent: list[dict[str, Any]] = []
        self.opened = 0

    def open(self) -> int:
        self.opened += 1
        return 7

    def pull(self) -> Any:
        if not self._brought:
            raise EndError
        found = self._brought.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def push(self, content: Any, to: Message) -> None:
        assert to.metadata.dst_node_id == 7
        self.sent.append(read_message(content, LIMITS).head)
        if self._pushing:
            raise self._pushing


class Worker:
    def __init__(self, handle: Callable[[WireMessage], WireMessage]) -> None:
        self.handle = handle
        self.logged: list[tuple[Any, str]] = []

    def log(self, head: Any, reply: WireMessage) -> None:
        self.logged.append((head.get("id"), reply.head["refused"]))


def message(wire_message: WireMessage) -> Message:
    return Message(wire_message.record(), 7, "query.x", ttl=60.0)


def served(
    line: Line,
    answer: Callable[[WireMessage], WireMessage] = lambda wire_message: WireMessage(
        dict(wire_message.head)
    ),
    check: Any = None,
    worker: Worker | None = None,
) -> list[str]:
    said: list[str] = []
    worker = worker or Worker(answer)
    with pytest.raises(EndError):
        NodeLoop(line, worker, LIMITS, said.append, "here", check).run()  # type: ignore[arg-type]
    return said


WELL = WireMessage({"id": "1", "to": 7, "sent": time.time(), "within": 1e6})


def test_a_message_that_cannot_be_read_is_answered_and_the_next_one_is_heard() -> None:
    large = WireMessage({"id": "2"})
    large.put("c0", torch.zeros(1 << 15))
    bad = UnreadableError(CodecError("more than 65536 bytes"), message(WELL))
    line = Line(bad, message(large), message(WELL))
    served(line)
    first, second, third = line.sent
    assert first["refused"] == "a message that cannot be read: more than 65536 bytes"
    assert "a message that cannot be read: more than" in second["refused"]
    assert third["id"] == "1"
    assert "refused" not in third
    assert line.opened == 1


def test_a_node_whose_state_folder_was_deleted_and_made_anew_handles_no_more_messages(
    tmp_path: Path,
) -> None:
    """Another process may hold the lock of the new folder."""
    state = tmp_path / "state"
    state.mkdir()

    def replace_folder(wire_message: WireMessage) -> WireMessage:
        shutil.rmtree(state)
        state.mkdir()
        (state / ".lock").touch()
        return WireMessage(dict(wire_message.head))

    line = Line(message(WELL), message(WELL))
    with only_one(state / ".lock", "runs a node") as lock:
        loop = NodeLoop(
            line,
            Worker(replace_folder),
            LIMITS,
            print,
            "here",
            check_lock=lock.check,  # type: ignore[arg-type]
        )
        with pytest.raises(BusyError, match="state was deleted or replaced while this process"):
            loop.run()
    assert len(line.sent) == 1


def test_a_reply_that_is_too_large_is_said_to_be() -> None:
    def verbose(wire_message: WireMessage) -> WireMessage:
        return WireMessage({**wire_message.head, "words": "x" * 5000, "seconds": 1.0})

    line = Line(message(WELL))
    served(line, verbose)
    assert line.sent[0]["id"] == "1"
    assert "its reply cannot be sent: a head of" in line.sent[0]["refused"]


@pytest.mark.parametrize(
    "error",
    [
        ConnectionLostError("gone"),
        ConfigError("no certificate"),
        CodecError("much"),
        httpx.ReadError("cut"),
    ],
)
def test_nothing_that_fails_in_sending_ends_a_node(error: Exception) -> None:
    line = Line(message(WELL), message(WELL), pushing=error)
    said = served(line)
    assert len(line.sent) == 2
    assert len([text for text in said if "did not arrive" in text]) == 2


def test_only_a_letter_that_the_server_has_signed_for_this_node_is_answered(
    tmp_path: Path,
) -> None:
    for name in ("server", "other"):
        make_server_keys(tmp_path / name, ["127.0.0.1"])
    sign = Signer(tmp_path / "server").sign
    well = WireMessage(WELL.head)
    well.put(COMMON, torch.ones(1))

    def sealed(wire_message: WireMessage, by: Any = sign) -> Message:
        return Message(wire_message.record(sign=by), 7, "query.x", ttl=60.0)

    altered = sealed(well)
    text = altered.content["fedshot"]
    text["head"] = str(text["head"]).replace('"id": "1"', '"id": "2"')
    swapped = sealed(well)
    swapped.content["fedshot"]["common"] = b"\x00"
    line = Line(
        sealed(well),
        message(well),
        sealed(well, Signer(tmp_path / "other").sign),
        sealed(well, lambda _: "{}"),
        altered,
        swapped,
        sealed(WireMessage(WELL.head | {"to": 8})),
        sealed(WireMessage(WELL.head | {"sent": 0.0, "within": 60.0})),
    )
    served(line, check=Verifier(tmp_path / "server" / "ca.pem").check)
    answers = [head.get("refused", "") for head in line.sent]
    assert answers[0] == ""
    assert all("it is not signed by the server" in text for text in answers[1:6])
    assert "it is addressed to another node" in answers[6]
    assert " s old" in answers[7]


def test_a_message_that_is_refused_unread_is_logged() -> None:
    def forged(*_: Any) -> None:
        raise CodecError("it is not signed by the server")

    worker = Worker(lambda wire_message: WireMessage(dict(wire_message.head)))
    line = Line(
        UnreadableError(CodecError("too much"), message(WELL)),
        message(WireMessage(WELL.head | {"id": "foreign", "to": 8})),
        message(WireMessage(WELL.head | {"id": "stale", "sent": time.time() - 60, "within": 1.0})),
        message(WELL),
    )
    served(line, worker=worker)
    served(Line(message(WELL)), check=forged, worker=worker)
    assert "not signed" in worker.logged.pop()[1]
    assert [who for who, _ in worker.logged] == [None, None, "stale"]
    assert [head.get("refused", "") for head in line.sent] == [*(t for _, t in worker.logged), ""]


def test_loopback_goes_without_a_proxy_and_another_host_s_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def proxy(address: str) -> str:
        made = Connection(address, new_key(), None, tmp_path / "node.json", LIMITS)
        made.close()
        return made.proxy

    monkeypatch.setenv("http_proxy", "http://user:secret@proxy:3128")
    assert proxy("10.0.0.1:9092") == "http://proxy:3128"
    monkeypatch.setenv("no_proxy", "10.0.0.1")
    assert proxy("10.0.0.1:9092") == ""
    monkeypatch.setenv("all_proxy", "nonsense://user:secret@proxy:1")
    for address in ("127.0.0.1:1", "[::1]:1", "localhost:1"):
        assert proxy(address) == ""
    Operator("10.0.0.1:1", "", None)._control().close()  # on the server's own host
    assert os.environ["no_proxy"] == "10.0.0.1"
    monkeypatch.setenv("http_proxy", "nonsense://user:secret@proxy:1")
    with pytest.raises(ConfigError, match=r"proxy nonsense://proxy:1 cannot be used") as told:
        proxy("10.0.0.2:1")
    assert "secret" not in str(told.value)


@pytest.mark.parametrize("error", [ConnectionLostError("gone"), ConfigError("no plain text")])
def test_a_node_that_was_known_connects_again(error: Exception) -> None:
    line = Line(error, message(WELL))
    served(line)
    assert (line.opened, len(line.sent)) == (2, 1)


def link(tmp_path: Path, status: int = 200, **response: Any) -> Connection:
    """Return a connection to a server that has one response to all requests."""
    made = Connection("127.0.0.1:1", new_key(), None, tmp_path / "node.json", LIMITS)
    answers = httpx.MockTransport(lambda _: httpx.Response(status, **response))
    made._client._client._transport = answers
    return made


def test_a_response_that_is_too_large_is_a_server_that_is_away(tmp_path: Path) -> None:
    """For now: the heart goes on, and the loop tries again."""
    made = link(tmp_path, headers={"content-length": str(1 << 40)})
    with pytest.raises(ConnectionLostError, match="bytes, encoded as"):
        made.pull()
    beats: list[bool] = []
    made._stop.wait = lambda _: len(beats) > 2  # type: ignore[method-assign,misc,assignment]
    inner = made._send_heartbeat

    def beat(number: int) -> bool:
        beats.append(True)
        return inner(number)

    made._send_heartbeat = beat  # type: ignore[method-assign]
    made._run_heartbeats()
    assert len(beats) == 3
    made.close()


def test_a_node_pulls_once_what_a_second_message_repeats(tmp_path: Path) -> None:
    """The model, if an exchange sends a node several messages."""
    connection = Connection("127.0.0.1:1", new_key(), None, tmp_path / "node.json", Limits())
    model, pulled = os.urandom(1 << 23), list[int]()

    def server(rest: bytes) -> Callable[[str, Any], Any]:
        message = Message(WireMessage({}, {COMMON: model, "c0": rest}).record(), 7, "query.fedshot")
        set_message_id(message)
        objects = {name: one.deflate() for name, one in get_all_nested_objects(message).items()}

        def answer(call: str, request: Any) -> Any:
            if call == "PullObject":
                pulled.append(len(objects[request.object_id]))
                return PullObjectResponse(
                    object_found=True, object_available=True,
                    object_content=objects[request.object_id],
                )  # fmt: skip
            return PullMessagesResponse(
                messages_list=[message_to_proto(remove_content_from_message(message))],
                message_object_trees=[get_object_tree(message)],
            )

        return answer

    for rest in (b"a" * 10, b"b" * 10):
        pulled.clear()
        connection._call = server(rest)  # type: ignore[method-assign]
        received = connection.pull()
        assert received is not None
        assert read_message(received.content, Limits()).blocks == {COMMON: model, "c0": rest}
    assert sum(pulled) < 1 << 16
    connection.close()


def test_what_is_no_response_of_flowers_is_a_server_that_is_away(tmp_path: Path) -> None:
    with pytest.raises(ConnectionLostError, match="Invalid protobuf"):
        link(tmp_path, content=b"\xff" * 9).pull()
    nothing = PullMessagesResponse().SerializeToString()
    assert link(tmp_path, content=nothing, headers={"content-length": "0"}).pull() is None


@pytest.mark.parametrize(("status", "retryable"), [(503, True), (403, False)])
def test_a_server_that_is_busy_may_start_the_run_later(
    status: int, retryable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: Operator) -> int:
        request = httpx.Request("POST", "http://127.0.0.1:1")
        raise httpx.HTTPStatusError("no", request=request, response=httpx.Response(status))

    monkeypatch.setattr(Operator, "_start", start)
    with pytest.raises(FedshotError) as error, Operator("127.0.0.1:1", "", None).grid():
        pass
    assert error.value.retryable == retryable


def test_who_is_not_let_in_hears_of_keys_and_clocks(tmp_path: Path) -> None:
    made = link(tmp_path, 401, content=b"Invalid SuperNode authentication")
    with pytest.raises(RejectedError, match=r"does not know this node's key.*NTP") as error:
        made.open()
    assert error.value.retryable, "a service must start the node again until it is admitted"
