"""The server's messaging: it sends messages to nodes, waits for replies and drops late ones."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
from flwr.app import Message
from flwr.common.serde import message_from_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from fedshot.core.console import warning
from fedshot.core.errors import ServerGoneError
from fedshot.core.serialised import CodecError, Limits, short
from fedshot.deploy.flower.messages import LATE, Incoming, WireMessage, read_message, refusal
from fedshot.deploy.flower.node_registry import Following
from fedshot.deploy.flower.wire import fetch

if TYPE_CHECKING:
    from flwr.superlink.grid import HttpGrid

_TYPE = "query.fedshot"
_MIN_POLL, _MAX_POLL = 0.02, 0.25  # seconds between polls
_POLL_SHARE = 0.05  # pause between polls, as a share of the time waited so far
_POLL_FACTOR = 4.0  # the pause is at least this times a poll's duration, to spare the server
_LATE_SECONDS = 600.0  # time after the deadline in which late replies are logged
_FETCHES = 8  # number of replies fetched at the same time
_UNKNOWN_RUN = (401, 403)  # statuses of a server that does not know the run


@dataclass(frozen=True)
class _Sent:
    node: int
    id: str
    expires: float  # monotonic time at which Flower forgets the message


@contextmanager
def _server_errors() -> Iterator[None]:
    """Turn errors of requests to the server into ServerGoneError."""
    try:
        yield
    except (httpx.HTTPError, RuntimeError, CodecError, ObjectPushError) as error:
        if status := _unknown_run(error):
            what = (
                f"know this run any more ({status}): it was restarted, or has not heard from the "
                "run for too long. Use"
            )
        else:
            what = f"respond any more ({error}). Start it again, and use"
        raise ServerGoneError(f"the server does not {what} `fedshot resume`.") from None


def _unknown_run(error: Exception) -> int:
    """Return the error's HTTP status if it means that the server does not know the run, else 0."""
    status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
    return status if status in _UNKNOWN_RUN else 0


class Messenger:
    """Exchanges messages with the nodes of one run.

    Args:
        grid: Flower's connection to the server.
        limits: bounds on messages.
        tell: logs replies that are dropped.
        sign: returns the proof that the server sent a message; None if nodes have no keys.
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
        self._pool = ThreadPoolExecutor(_FETCHES, thread_name_prefix="messaging")

    def connected(self) -> dict[int, str]:
        """Return the registered name of each connected node, by node id."""
        with _server_errors():
            infos: Any = list(self._grid.get_nodes())
        return {info.node_id: info.name for info in infos if info.status == "online"}

    def send_and_receive(
        self,
        wire_messages: Mapping[int, WireMessage],
        seconds: float,
        following: Following = lambda _: None,
    ) -> Iterator[Incoming]:
        """Send each node its message, and yield one `Incoming` per message as replies arrive.

        When a node has replied, it is sent the message that `following` returns for it, if any.
        After `seconds`, an `Incoming` without a message is yielded for every node that has not
        replied. Later replies are dropped by the next call of this method, which logs each of them.
        """
        sent, unsent = self._send(wire_messages, seconds)
        for node, reason in unsent.items():
            yield Incoming(node, None, reason)
        begun = time.monotonic()
        fetching: dict[Future[WireMessage], _Sent] = {}
        while (sent or fetching) and (left := begun + seconds - time.monotonic()) > 0:
            poll_start = time.monotonic()
            for outline, objects in self._poll([*sent]) if sent else ():
                id = outline.metadata.reply_to_message_id
                if id in sent:
                    task = self._pool.submit(self._fetch, outline, objects, left)
                    fetching[task] = sent.pop(id)
            polled = time.monotonic() - poll_start
            pause = max(_MIN_POLL, _POLL_SHARE * (seconds - left), _POLL_FACTOR * polled)
            pause = min(_MAX_POLL, pause, left)
            if not fetching:
                time.sleep(pause)
                continue
            for task in wait(fetching, pause, FIRST_COMPLETED).done:
                incoming = self._parse(fetching.pop(task), task)
                more = None if incoming.reason else following(incoming.node)
                more_unsent: dict[int, str] = {}
                if more is not None:  # sent first: the node works while this reply is processed
                    left = max(1.0, begun + seconds - time.monotonic())
                    more_sent, more_unsent = self._send({incoming.node: more}, left)
                    sent |= more_sent
                yield incoming
                for node, reason in more_unsent.items():
                    yield Incoming(node, None, reason)
        self._late |= sent
        for one in (*sent.values(), *fetching.values()):
            yield Incoming(one.node, None, f"{LATE} {seconds:g} s")

    def _send(
        self, wire_messages: Mapping[int, WireMessage], seconds: float
    ) -> tuple[dict[str, _Sent], dict[int, str]]:
        """Send the messages.

        Returns (the messages that were sent, keyed by Flower's message id; the reasons why the
        other messages could not be sent, keyed by node).
        """
        ttl = seconds + _LATE_SECONDS
        sent: list[_Sent] = []
        unsent: dict[int, str] = {}
        messages = []
        for node, wire_message in wire_messages.items():
            one = _Sent(node, secrets.token_hex(8), time.monotonic() + ttl - 1)
            wire_message.head |= {"id": one.id, "to": node, "sent": time.time(), "within": seconds}
            try:
                record = wire_message.record(self._limits, self._sign)
                messages.append(Message(record, node, _TYPE, ttl=ttl))
            except CodecError as error:
                unsent[node] = f"the message cannot be sent: {error}"
                continue
            sent.append(one)
        if not messages:
            return {}, unsent
        with _server_errors():
            # Flower returns None for a message it rejects, and an empty list if all are too large.
            ids = list(self._grid.push_messages(messages)) or [None] * len(sent)
        accepted = {id: one for id, one in zip(ids, sent, strict=True) if id}
        nodes = {one.node for one in accepted.values()}
        rejected = [one.node for one in sent if one.node not in nodes]
        return accepted, unsent | dict.fromkeys(rejected, "Flower did not accept the message")

    def _poll(self, wanted: list[str]) -> list[tuple[Message, Any]]:
        """Return the outlines (metadata) of arrived replies; log late replies of earlier calls."""
        now = time.monotonic()
        self._late = {id: sent for id, sent in self._late.items() if sent.expires > now}
        with _server_errors():
            got = self._grid._runtime_client.PullMessages(
                PullAppMessagesRequest(message_ids=[*wanted, *self._late])
            )
        found = []
        for proto, objects in zip(got.messages_list, got.message_object_trees, strict=True):
            try:
                found.append((message_from_proto(proto), objects))
            except Exception as error:  # the node composed the message, so any error may occur
                self._tell(warning(short(f"the metadata of a reply cannot be read: {error!r}")))
        for outline, _ in found:
            late = self._late.pop(outline.metadata.reply_to_message_id, None)
            if late is not None and not outline.has_error():
                self._tell(warning(f"a reply of node {late.node} came too late and was dropped"))
        return found

    def _fetch(self, outline: Message, objects: Any, seconds: float) -> WireMessage:
        """Fetch a reply; Flower's message, which holds all arrays twice, is freed afterwards."""
        client, run_id = self._grid._runtime_client, outline.metadata.run_id
        pull = make_pull_object_fn_protobuf(client.PullObject, self._grid.node, run_id)
        message = fetch(outline, objects, pull, self._limits, seconds)
        client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self._grid.node, run_id=run_id, message_object_id=outline.metadata.message_id
            )
        )
        if message.has_error():
            raise CodecError(f"Flower says: {message.error.reason}")
        return read_message(message.content, self._limits)

    def _parse(self, sent: _Sent, task: Future[WireMessage]) -> Incoming:
        """Parse a fetched reply. An invalid reply is a fault of its node and never an error."""
        try:
            wire_message = task.result()
        except Exception as error:
            if isinstance(error, httpx.TransportError) or _unknown_run(error):
                with _server_errors():
                    raise error
            text = str(error) if isinstance(error, CodecError) else repr(error)
            return Incoming(sent.node, None, short(f"its reply cannot be read: {text}"))
        refused = refusal(wire_message)
        if refused and wire_message.head.get("id") is None:  # the node could not read the message
            return Incoming(sent.node, None, refused)
        if wire_message.head.get("id") != sent.id:
            return Incoming(sent.node, None, "its reply is to another message")
        return Incoming(sent.node, wire_message, refused)
