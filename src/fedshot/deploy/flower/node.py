"""The process of a node: look for a message, answer it, look for the next."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
from flwr.app import Message

from fedshot.core.errors import ConfigError
from fedshot.deploy.flower.codec import CodecError, Limits
from fedshot.deploy.flower.connection import Connection, ConnectionLostError, UnreadableError
from fedshot.deploy.flower.messages import WireMessage, read_message
from fedshot.deploy.flower.worker import Worker

_SOON, _SELDOM = 0.03, 1.0  # seconds between two looks: right after a message, and after a while
_PATIENCE = 0.05  # of the time since the last message
_MANNERS = 8.0  # times what a look takes, so that looking does not keep the server from answering
_AGAIN = 10.0  # seconds between two tries when the server is gone, at most


Check = Callable[[bytes, str], None]


def serve(
    link: Connection,
    worker: Worker,
    limits: Limits,
    tell: Callable[[str], None],
    server: str,
    check: Check | None = None,
) -> None:
    """Answer messages until the process is ended.

    `check` tells those of the server from others', as `Verifier.check` does; None takes all.

    Raises ConfigError when the server does not want this node, or is not the right one.
    """
    number = _connect(link, tell, server, known=False)
    last = time.monotonic()
    while True:
        begun = time.monotonic()
        try:
            message = link.pull()
        except UnreadableError as error:
            tell(f"a message was dropped: {error}")
            _reply(link, error.outline, _unread(error, worker), limits, tell)
            time.sleep(_SELDOM)
            continue
        except (ConnectionLostError, ConfigError, httpx.HTTPError) as error:
            tell(f"the server is gone: {error}")
            number = _connect(link, tell, server, known=True)
            continue
        if message is None:
            now = time.monotonic()
            wait = max(_SOON, _PATIENCE * (now - last), _MANNERS * (now - begun))
            time.sleep(min(_SELDOM, wait))
            continue
        _reply(link, message, _answer(message, number, worker, limits, check, tell), limits, tell)
        last = time.monotonic()


def _reply(
    link: Connection,
    message: Message,
    wire_message: WireMessage,
    limits: Limits,
    tell: Callable[[str], None],
) -> None:
    """Send a reply, or what keeps it from being sent."""
    try:
        try:
            record = wire_message.record(limits)
        except CodecError as error:
            tell(f"a reply cannot be sent: {error}")
            kept = {
                name: wire_message.head[name]
                for name in ("id", "seconds")
                if name in wire_message.head
            }
            record = WireMessage(kept | {"refused": f"its reply cannot be sent: {error}"}).record()
        link.push(record, message)
    except (ConnectionLostError, ConfigError, CodecError, httpx.HTTPError) as error:
        tell(f"a reply came too late, or did not arrive: {error}")


def _unread(error: Exception, worker: Worker) -> WireMessage:
    """Return the reply to a message of which nothing is believed, and log it."""
    reply = WireMessage({"refused": f"a message that cannot be read: {error}"})
    worker.log({}, reply)
    return reply


def _answer(
    message: Message,
    number: int,
    worker: Worker,
    limits: Limits,
    check: Check | None,
    tell: Callable[[str], None],
) -> WireMessage:
    """Answer a message of the server to this node, unless nobody waits for the answer any more.

    A node that was cut off, or is slower than the deadline, would else work on what lies in its
    queue and never catch up. (The clocks agree: requests are signed with the time.)
    """
    try:
        wire_message = read_message(message.content, limits, check)
        if wire_message.head.get("to") != number:
            raise CodecError("it is to another node")
        age = time.time() - float(wire_message.head.get("sent", "nan"))
        if not age <= float(wire_message.head.get("within", "nan")):
            late = WireMessage(
                {"id": wire_message.head.get("id"), "refused": f"it is {age:.0f} s old"}
            )
            worker.log(wire_message.head, late)
            return late
    except (CodecError, TypeError, ValueError, OverflowError) as error:
        tell(f"a message was refused: {error}")
        return _unread(error, worker)
    return worker.answer(wire_message)


def _connect(link: Connection, tell: Callable[[str], None], server: str, *, known: bool) -> int:
    """Report to the server; return the node's number there.

    A server that has known this node may take a while to know it again.
    """
    wait = 0.2
    while True:
        try:
            number = link.open()
        except (ConnectionLostError, ConfigError) as error:
            if isinstance(error, ConfigError) and not known:
                raise
            tell(f"no connection to {server}: {error}; trying again in {wait:.1f} s")
            time.sleep(wait)
            wait = min(_AGAIN, 2 * wait)
            continue
        tell(f"connected to {server} as node {number}")
        return number
