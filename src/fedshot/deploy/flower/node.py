"""The process of a node: look for a message, answer it, look for the next."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx

from fedshot.deploy.flower.codec import CodecError, Limits
from fedshot.deploy.flower.letters import Letter, read_letter
from fedshot.deploy.flower.link import Link, LinkDown
from fedshot.deploy.flower.worker import Worker

_SOON, _SELDOM = 0.02, 1.0  # seconds between two looks: right after a message, and after a while
_PATIENCE = 0.05  # of the time since the last message
_AGAIN = 10.0  # seconds between two tries when the server is gone, at most


def serve(
    link: Link, worker: Worker, limits: Limits, tell: Callable[[str], None], server: str
) -> None:
    """Answer messages until the process is ended.

    Raises ConfigError when the server does not want this node, or is not the right one.
    """
    _connect(link, tell, server)
    last = time.monotonic()
    while True:
        try:
            message = link.pull()
        except CodecError as error:
            tell(f"a message was dropped: {error}")
            continue
        except (LinkDown, httpx.HTTPError) as error:
            tell(f"the server is gone: {error}")
            _connect(link, tell, server)
            continue
        if message is None:
            quiet = time.monotonic() - last
            time.sleep(min(_SELDOM, max(_SOON, _PATIENCE * quiet)))
            continue
        try:
            reply = worker.answer(read_letter(message.content, limits))
        except (CodecError, ValueError) as error:
            reply = Letter({"refused": f"a message that cannot be read: {error}"})
        try:
            link.push(reply.record(), message)
        except (LinkDown, httpx.HTTPError) as error:
            tell(f"a reply came too late, or did not arrive: {error}")
        last = time.monotonic()


def _connect(link: Link, tell: Callable[[str], None], server: str) -> None:
    wait = 0.2
    while True:
        try:
            number = link.open()
        except LinkDown as error:
            tell(f"no connection to {server}: {error}; trying again in {wait:.1f} s")
            time.sleep(wait)
            wait = min(_AGAIN, 2 * wait)
            continue
        tell(f"connected to {server} as node {number}")
        return
