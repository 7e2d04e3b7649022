"""The process of a node: poll for messages and reply to them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from flwr.app import Message

from fedshot.core.console import warning
from fedshot.core.errors import ConfigError
from fedshot.core.serialised import CodecError, Limits
from fedshot.deploy.flower.connection import Connection, ConnectionLostError, UnreadableError
from fedshot.deploy.flower.messages import WireMessage, read_message
from fedshot.deploy.flower.worker import Worker

_MIN_POLL, _MAX_POLL = 0.03, 1.0  # seconds between polls
_POLL_SHARE = 0.05  # pause between polls, as a share of the time since the last message
_POLL_FACTOR = 8.0  # the pause is at least this times a poll's duration, to spare the server
_MAX_RETRY = 10.0  # seconds between attempts to connect


@dataclass(frozen=True)
class NodeLoop:
    """Replies to the messages of one server.

    Args:
        connection: the connection to the server.
        worker: handles the messages.
        limits: bounds on messages.
        tell: writes a line to the log.
        server: the server's address, for the log.
        check: raises CodecError for a message that the server has not signed, as `Verifier.check`
            does; None to accept all messages.
        check_lock: raises BusyError if another process has taken over the node's state folder.
        connected: called with whether the node is connected, when this changes.
        handled: called with the bytes of a message's arrays and the reply to it.
    """

    connection: Connection
    worker: Worker
    limits: Limits
    tell: Callable[[str], None]
    server: str
    check: Callable[[bytes, str], None] | None = None
    check_lock: Callable[[], None] = lambda: None
    connected: Callable[[bool], None] = lambda _: None
    handled: Callable[[int, WireMessage], None] = lambda *_: None

    def run(self) -> None:
        """Reply to messages until the process is ended.

        Raises ConfigError if the server rejects this node or has no trusted certificate, and
        BusyError as `check_lock` does.
        """
        number = self._connect(known=False)
        last = time.monotonic()
        while True:
            self.check_lock()
            begun = time.monotonic()
            try:
                message = self.connection.pull()
            except UnreadableError as error:
                self.tell(warning(f"a message was dropped: {error}"))
                self._reply(error.outline, self._unreadable(error))
                time.sleep(_MAX_POLL)
                continue
            except (ConnectionLostError, ConfigError, httpx.HTTPError) as error:
                self.tell(warning(f"connection lost: {error}"))
                number = self._connect(known=True)
                continue
            if message is None:
                now = time.monotonic()
                wait = max(_MIN_POLL, _POLL_SHARE * (now - last), _POLL_FACTOR * (now - begun))
                time.sleep(min(_MAX_POLL, wait))
                continue
            self.check_lock()
            self._reply(message, self._handle(message, number))
            last = time.monotonic()

    def _reply(self, message: Message, reply: WireMessage) -> None:
        """Send a reply to a message; if the reply is too large, send a refusal instead."""
        try:
            try:
                record = reply.record(self.limits)
            except CodecError as error:
                self.tell(warning(f"a reply cannot be sent: {error}"))
                kept: dict[str, Any] = {
                    name: reply.head[name] for name in ("id", "seconds") if name in reply.head
                }
                kept["refused"] = f"its reply cannot be sent: {error}"
                record = WireMessage(kept).record()
            self.connection.push(record, message)
        except (ConnectionLostError, ConfigError, CodecError, httpx.HTTPError) as error:
            self.tell(warning(f"a reply came too late, or did not arrive: {error}"))

    def _unreadable(self, error: Exception) -> WireMessage:
        """Log an invalid message, and return a refusal to reply with."""
        reply = WireMessage({"refused": f"a message that cannot be read: {error}"})
        self.worker.log({}, reply)
        self.handled(0, reply)
        return reply

    def _handle(self, message: Message, number: int) -> WireMessage:
        """Return the reply to a message; a message whose deadline has passed is refused.

        Without the deadline, a node that is slow or was disconnected would work through outdated
        messages and never catch up. The deadline is compared with the node's clock, which agrees
        with the server's: Flower rejects signed requests whose time is wrong. `number` is the
        node's id, to which a message must be addressed.
        """
        try:
            wire_message = read_message(message.content, self.limits, self.check)
            head = wire_message.head
            if head.get("to") != number:
                raise CodecError("it is addressed to another node")
            age = time.time() - float(head.get("sent", "nan"))
            in_time = age <= float(head.get("within", "nan"))
        except (CodecError, TypeError, ValueError, OverflowError) as error:
            self.tell(warning(f"a message was refused: {error}"))
            return self._unreadable(error)
        if in_time:
            reply = self.worker.handle(wire_message)
        else:
            reply = WireMessage({"id": head.get("id"), "refused": f"it is {age:.0f} s old"})
            self.worker.log(head, reply)
        self.handled(wire_message.nbytes, reply)
        return reply

    def _connect(self, *, known: bool) -> int:
        """Connect to the server; return the node's id there.

        A failed connection is tried again. With `known`, i.e. if the server has accepted this node
        before, a rejection is tried again, too: a restarted server takes a while to register its
        nodes. Otherwise a rejection raises ConfigError.
        """
        wait = 0.2
        self.connected(False)
        while True:
            try:
                number = self.connection.open()
            except (ConnectionLostError, ConfigError) as error:
                if isinstance(error, ConfigError) and not known:
                    raise
                self.tell(
                    warning(
                        f"no connection to {self.server}: {error}; trying again in {wait:.1f} s"
                    )
                )
                time.sleep(wait)
                wait = min(_MAX_RETRY, 2 * wait)
                continue
            self.connected(True)
            self.tell(f"connected to {self.server} as node {number}")
            return number
