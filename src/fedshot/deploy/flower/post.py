"""Letters to nodes and back: who is there, what they answered, what came too late."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from flwr.app import Message
from flwr.superlink.grid import HttpGrid

from fedshot.deploy.flower.codec import CodecError, Limits
from fedshot.deploy.flower.letters import Letter, Mail, read_letter, refusal
from fedshot.errors import FedshotError

_TYPE = "query.fedshot"
_SOON, _SELDOM, _PATIENCE = 0.02, 0.25, 0.05  # seconds between looks, and a share of the waiting
_MANNERS = 4.0  # times what a look takes, so that looking does not keep the server from its work
_LATE = 600.0  # seconds for which a reply is waited for to be named


class ServerGoneError(FedshotError):
    """The SuperLink has ended, or another has taken its place."""


@dataclass(frozen=True)
class _Sent:
    node: int
    ident: str
    until: float  # by the clock of the wall, when Flower forgets it


@contextmanager
def _server() -> Iterator[None]:
    """Say in words that the server has gone."""
    try:
        yield
    except (httpx.HTTPError, CodecError, RuntimeError) as error:
        raise ServerGoneError(
            f"the server does not answer any more ({error}). Start it again, and go on with "
            "`fedshot resume`."
        ) from None


class Post:
    """The messages of one run.

    Args:
        grid: Flower's.
        limits: the most that is taken in.
        tell: where it is said what was dropped.
    """

    def __init__(self, grid: HttpGrid, limits: Limits, tell: Callable[[str], None]) -> None:
        self._grid, self._limits, self._tell = grid, limits, tell
        self._late: dict[str, _Sent] = {}

    def there(self) -> dict[int, str]:
        """Return the nodes that are connected, with the names they are registered by."""
        found: dict[int, str] = {}
        with _server():
            infos: Any = list(self._grid.get_nodes())
        for info in infos:
            if info.status == "online":
                found[info.node_id] = info.name
        return found

    def ask(self, letters: Mapping[int, Letter], seconds: float) -> Iterator[Mail]:
        """Send each node its letter, and yield what comes back, each node once.

        Those that have not answered after so many seconds have not at all: what comes of them later
        is dropped, and named.
        """
        sent = self._send(letters, seconds)
        for node in letters.keys() - {one.node for one in sent.values()}:
            yield Mail(node, None, "Flower did not take the letter")
        begun = time.monotonic()
        while sent:
            waited = time.monotonic() - begun
            if waited >= seconds:
                break
            got = self._pull([*sent])
            took = time.monotonic() - begun - waited
            for message in got:
                ident = message.metadata.reply_to_message_id
                if ident in sent:
                    yield self._open(sent.pop(ident), message)
            if sent and not got:
                wait = min(_SELDOM, max(_SOON, _PATIENCE * waited, _MANNERS * took))
                time.sleep(max(0.0, min(wait, seconds - waited)))
        self._late |= sent
        for one in sent.values():
            yield Mail(one.node, None, f"no reply within {seconds:g} s")

    def _send(self, letters: Mapping[int, Letter], seconds: float) -> dict[str, _Sent]:
        made = {}
        messages = []
        for node, letter in letters.items():
            ident = letter.head["id"] = secrets.token_hex(8)
            letter.head["within"] = seconds
            ttl = seconds + _LATE
            messages.append(Message(letter.record(), node, _TYPE, ttl=ttl))
            made[len(messages) - 1] = _Sent(node, ident, time.time() + ttl - 1)
        if not messages:
            return {}
        with _server():
            ids = list(self._grid.push_messages(messages))
        return {ids[i]: sent for i, sent in made.items() if ids[i]}

    def _pull(self, wanted: list[str]) -> list[Message]:
        """Return what has come for these messages, and name what has come for earlier ones."""
        now = time.time()
        self._late = {ident: sent for ident, sent in self._late.items() if sent.until > now}
        with _server():
            got = list(self._grid.pull_messages([*wanted, *self._late]))
        for message in got:
            late = self._late.pop(message.metadata.reply_to_message_id, None)
            if late is not None:
                self._tell(f"a reply of node {late.node} came too late and was dropped")
        return got

    def _open(self, sent: _Sent, message: Message) -> Mail:
        if message.has_error():
            return Mail(sent.node, None, f"Flower says: {message.error.reason}")
        try:
            letter = read_letter(message.content, self._limits)
        except CodecError as error:
            return Mail(sent.node, None, f"its reply cannot be read: {error}")
        if letter.head.get("id") != sent.ident:
            return Mail(sent.node, None, "its reply is to another letter")
        return Mail(sent.node, letter, refusal(letter))
