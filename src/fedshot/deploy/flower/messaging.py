"""Letters to nodes and back: who is there, what they answered, what came too late."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from flwr.app import Message
from flwr.common.serde import message_from_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.superlink.grid import HttpGrid

from fedshot.core.errors import ServerGoneError
from fedshot.deploy.flower.codec import CodecError, Limits, short
from fedshot.deploy.flower.messages import Incoming, WireMessage, read_message, refusal
from fedshot.deploy.flower.wire import fetch

_TYPE = "query.fedshot"
_SOON, _SELDOM, _PATIENCE = 0.02, 0.25, 0.05  # seconds between looks, and a share of the waiting
_MANNERS = 4.0  # times what a look takes, so that looking does not keep the server from its work
_LATE = 600.0  # seconds for which a reply is waited for to be named
_AT_ONCE = 8  # replies that are brought at once
_WHOLE = 60.0  # seconds for a reply to arrive whole, of which the outline has come
_STRANGER = (401, 403)  # what a server says to a run that it does not know


@dataclass(frozen=True)
class _Sent:
    node: int
    ident: str
    until: float  # by the monotonic clock, when Flower forgets it


@contextmanager
def _server() -> Iterator[None]:
    """Say in words that the server has gone."""
    try:
        yield
    except (httpx.HTTPError, RuntimeError, CodecError, ObjectPushError) as error:
        if status := _stranger(error):
            raise ServerGoneError(
                f"the server does not know this run any more ({status}): it was started anew, or "
                "has heard nothing of the run for too long. Go on with `fedshot resume`."
            ) from None
        raise ServerGoneError(
            f"the server does not answer any more ({error}). Start it again, and go on with "
            "`fedshot resume`."
        ) from None


def _stranger(error: Exception) -> int:
    """Return the status by which a server says that it does not know the run that asks, or 0."""
    status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
    return status if status in _STRANGER else 0


class Messenger:
    """The messages of one run.

    Args:
        grid: Flower's.
        limits: the most that is taken in.
        tell: where it is said what was dropped.
        sign: proves to nodes that a letter is the server's; None where they have no certificate.
    """

    def __init__(
        self,
        grid: HttpGrid,
        limits: Limits,
        tell: Callable[[str], None],
        sign: Callable[[bytes], str] | None = None,
    ) -> None:
        self._grid, self._limits, self._tell, self._sign = grid, limits, tell, sign
        self._late: dict[str, _Sent] = {}
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="post")

    def there(self) -> dict[int, str]:
        """Return the nodes that are connected, with the names they are registered by."""
        with _server():
            infos: Any = list(self._grid.get_nodes())
        return {info.node_id: info.name for info in infos if info.status == "online"}

    def ask(self, wire_messages: Mapping[int, WireMessage], seconds: float) -> Iterator[Incoming]:
        """Send each node its letter, and yield what comes back, each node once.

        Those that have not answered after so many seconds have not at all: what comes of them later
        is dropped, and named.
        """
        sent, unsent = self._send(wire_messages, seconds)
        for node, reason in unsent.items():
            yield Incoming(node, None, reason)
        begun = time.monotonic()
        coming: dict[Future[Message], _Sent] = {}
        while (sent or coming) and (left := begun + seconds - time.monotonic()) > 0:
            took = time.monotonic()
            for outline, objects in self._look([*sent]) if sent else ():
                ident = outline.metadata.reply_to_message_id
                if ident in sent:
                    task = self._pool.submit(self._bring, outline, objects, min(left, _WHOLE))
                    coming[task] = sent.pop(ident)
            took = time.monotonic() - took
            pause = min(_SELDOM, max(_SOON, _PATIENCE * (seconds - left), _MANNERS * took))
            if not coming:
                time.sleep(min(pause, left))
                continue
            for task in wait(coming, min(pause, left), FIRST_COMPLETED).done:
                yield self._open(coming.pop(task), task)
        self._late |= sent
        for one in (*sent.values(), *coming.values()):
            yield Incoming(one.node, None, f"no reply within {seconds:g} s")

    def _send(
        self, wire_messages: Mapping[int, WireMessage], seconds: float
    ) -> tuple[dict[str, _Sent], dict[int, str]]:
        """Return what was sent by the name of the message, and why the rest was not, by node."""
        ttl = seconds + _LATE
        sent: list[_Sent] = []
        unsent: dict[int, str] = {}
        messages = []
        for node, wire_message in wire_messages.items():
            one = _Sent(node, secrets.token_hex(8), time.monotonic() + ttl - 1)
            wire_message.head |= {
                "id": one.ident,
                "to": node,
                "sent": time.time(),
                "within": seconds,
            }
            try:
                record = wire_message.record(self._limits, self._sign)
                messages.append(Message(record, node, _TYPE, ttl=ttl))
            except CodecError as error:
                unsent[node] = f"the letter to it cannot be sent: {error}"
                continue
            sent.append(one)
        if not messages:
            return {}, unsent
        with _server():
            # None for a message that Flower does not take, and nothing at all for too large ones.
            ids = list(self._grid.push_messages(messages)) or [None] * len(sent)
        taken = {ident: one for ident, one in zip(ids, sent, strict=True) if ident}
        known = {one.node for one in taken.values()}
        refused = [one.node for one in sent if one.node not in known]
        return taken, unsent | dict.fromkeys(refused, "Flower did not take the letter")

    def _look(self, wanted: list[str]) -> list[tuple[Message, Any]]:
        """Return the outlines of the replies to these messages; name the late ones of others."""
        now = time.monotonic()
        self._late = {ident: sent for ident, sent in self._late.items() if sent.until > now}
        with _server():
            got = self._grid._runtime_client.PullMessages(
                PullAppMessagesRequest(message_ids=[*wanted, *self._late])
            )
        found = []
        for proto, objects in zip(got.messages_list, got.message_object_trees, strict=True):
            try:
                found.append((message_from_proto(proto), objects))
            except Exception as error:  # of a node's making; it has not answered, then
                self._tell(short(f"an outline of a reply cannot be read: {error!r}"))
        for outline, _ in found:
            late = self._late.pop(outline.metadata.reply_to_message_id, None)
            if late is not None and not outline.has_error():
                self._tell(f"a reply of node {late.node} came too late and was dropped")
        return found

    def _bring(self, outline: Message, objects: Any, seconds: float) -> Message:
        client, run_id = self._grid._runtime_client, outline.metadata.run_id
        pull = make_pull_object_fn_protobuf(client.PullObject, self._grid.node, run_id)
        message = fetch(outline, objects, pull, self._limits, seconds)
        client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self._grid.node,
                run_id=run_id,
                message_object_id=outline.metadata.message_id,
            )
        )
        return message

    def _open(self, sent: _Sent, task: Future[Message]) -> Incoming:
        """Return what a node has sent. Only a server that is gone ends the run, never a reply."""
        try:
            message = task.result()
            if message.has_error():
                return Incoming(sent.node, None, short(f"Flower says: {message.error.reason}"))
            wire_message = read_message(message.content, self._limits)
        except Exception as error:
            if isinstance(error, httpx.TransportError) or _stranger(error):
                with _server():
                    raise error
            words = str(error) if isinstance(error, CodecError) else repr(error)
            return Incoming(sent.node, None, short(f"its reply cannot be read: {words}"))
        refused = refusal(wire_message)
        if refused and wire_message.head.get("id") is None:  # it could not read which letter it was
            return Incoming(sent.node, None, refused)
        if wire_message.head.get("id") != sent.ident:
            return Incoming(sent.node, None, "its reply is to another letter")
        return Incoming(sent.node, wire_message, refused)
