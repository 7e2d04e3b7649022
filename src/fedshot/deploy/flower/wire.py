"""Flower's HTTP clients with bounds on the size of responses and messages."""

from __future__ import annotations

import json
import logging
import os
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx
from flwr.app import Array, Message
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectUnavailableError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.supercore.protobuf.client import ProtobufClient

from fedshot.core.console import StderrHandler
from fedshot.core.serialised import CodecError, Limits, short
from fedshot.core.text import natural

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Environment variables for Flower: no telemetry, no update check, no installing."""

_CHUNK = max(FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, 1 << 23)
_FRAME = 1 << 16  # maximum bytes that protobuf and Flower add to an object
_POLL = 0.02  # seconds between polls for an object
STALL_SECONDS = 60.0  # time without a new object after which a message is given up
_MAX_OTHERS = 64  # maximum number of objects of a message besides array chunks
_MAX_KINDS = {"Message": 1, "RecordDict": 1, "ConfigRecord": 1, "ArrayRecord": 1, "Array": 2}
_REFERENCE = 128  # maximum bytes of a reference to another object


def silence_flower() -> None:
    """Set environment variables (`QUIET`) and Flower's log; call it before using Flower."""
    os.environ.update(QUIET)
    logging.getLogger("flwr").handlers[:] = [StderrHandler()]
    for name in ("flwr", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)


_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_environment = Lock()


@contextmanager
def without_proxy(host: str) -> Iterator[None]:
    """Let HTTP clients made in this context reach a host directly.

    A client reads the proxy variables of the environment only when it is made.
    """
    with _environment:
        held = {name: value for name, value in os.environ.items() if name.lower() in _PROXIES}
        for name in held:
            del os.environ[name]
        os.environ["no_proxy"] = host  # otherwise httpx reads the system settings on some platforms
        try:
            yield
        finally:
            del os.environ["no_proxy"]
            os.environ.update(held)


def proxy_to(host: str, *, secure: bool) -> str:
    """Return the URL of the proxy for a host, without user and password; "" if there is none."""
    proxies = getproxies()
    found = proxies.get("https" if secure else "http") or proxies.get("all") or ""
    if not found or proxy_bypass(host):
        return ""
    parts = urlsplit(found if "://" in found else f"http://{found}")
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def max_objects(limits: Limits) -> int:
    """Return the largest number of Flower objects (separately sent parts) of a message."""
    return limits.message // FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE + _MAX_OTHERS


def max_object_bytes(limits: Limits) -> int:
    """Return the largest size in bytes of an object, or of any other request or response."""
    return max(_CHUNK, limits.head) + _FRAME


def limit_responses(
    client: ProtobufClient, limits: Limits, headers: Mapping[str, str] = {}
) -> None:
    """Make a client refuse large, compressed and redirecting responses, and send these headers."""
    most = max_object_bytes(limits)

    def check(response: httpx.Response) -> None:
        length = response.headers.get("content-length")
        encoding = response.headers.get("content-encoding", "identity")
        size = natural(length or "")
        if size is None or size > most or encoding != "identity":
            response.close()
            raise CodecError(
                f"a response of {length} bytes, encoded as {encoding[:20]!r}; at most {most} plain "
                "bytes are accepted"
            )

    client._client.event_hooks = {"response": [check]}
    client._client.follow_redirects = False
    client._client.headers.update({"accept-encoding": "identity", **headers})


def fetch(
    outline: Any, objects: Any, pull: Callable[[str], bytes], limits: Limits, seconds: float
) -> Message:
    """Fetch the objects of a message, and return the message.

    The outline may arrive before its objects. Flower's own code polls for the objects after one
    second and then ever more rarely, for two hours: a node killed while sending would stall a run.

    Args:
        outline: the message without its content.
        objects: tree of the ids of the message's objects.
        pull: fetches one object.
        limits: bounds on the message.
        seconds: time to wait for all objects; after `STALL_SECONDS` without a new one, they are
            given up sooner.

    Raises:
        CodecError: the objects are too many, too large, invalid, or do not arrive.
        Exception: any error that `pull` raises.
    """
    ids, most = dict.fromkeys([outline.metadata.message_id]), max_objects(limits)
    for one in iterate_object_tree(objects):
        ids[one.object_id] = None
        if len(ids) > most:
            raise CodecError(f"a message of more than {most} objects")
    allowed, received, lock = limits.message + limits.head + _FRAME + _REFERENCE * most, 0, Lock()
    latest = time.monotonic()  # arrival of an object

    def counted(ident: str) -> bytes:
        nonlocal received, latest
        try:
            content = pull(ident)
        except ObjectUnavailableError:
            if time.monotonic() - latest > STALL_SECONDS:
                raise ObjectPullError(ident, "no more of it arrives") from None
            raise
        with lock:
            received += len(content)
            latest = time.monotonic()
        if received > allowed:
            raise CodecError(f"a message of more than {limits.message} bytes")
        return content

    try:
        contents = pull_objects(
            [*ids],
            counted,
            max_time=seconds,
            max_tries_per_object=None,
            initial_backoff=_POLL,
            backoff_cap=10 * _POLL,
        )
    except ObjectPullError as error:
        raise CodecError(f"an incomplete message: {error}") from None
    ident = outline.metadata.message_id
    try:
        _check_objects(contents, limits)
        message = inflate_object_from_contents(ident, contents)
    except CodecError:
        raise
    except Exception as error:  # Flower does not validate objects
        raise CodecError(short(f"objects that are not a message: {error!r}")) from None
    if not isinstance(message, Message):
        raise CodecError("objects that are not a message")
    message.metadata.__dict__["_message_id"] = ident
    return message


def _check_objects(contents: Mapping[str, bytes], limits: Limits) -> None:
    """Raise CodecError unless objects can form a message within the limits.

    An array lists its chunks by index. Equal chunks are sent once and listed repeatedly, so an
    array may be larger than the bytes received for it.
    """
    most = max_objects(limits)
    kinds: Counter[str] = Counter()
    arrays: list[tuple[list[str], bytes]] = []
    chunks: dict[str, int] = {}
    for ident, content in contents.items():
        kind, children, size = get_object_head_values_from_object_content(content)
        kinds[kind] += 1
        if kind == "ArrayChunk":
            chunks[ident] = len(content)
            if children:
                raise CodecError("an array chunk that has chunks")
        elif kind not in _MAX_KINDS or kinds[kind] > _MAX_KINDS[kind]:
            raise CodecError(f"an unexpected object {short(kind, 40)}")
        elif kind != "ConfigRecord" and len(content) > _FRAME + _REFERENCE * most:
            raise CodecError(f"an object {kind} of {size} bytes")
        elif kind == "Array":
            arrays.append((children, content))
    total = 0
    for children, content in arrays:
        numbers = json.loads(get_object_body(content, Array))["arraychunk_ids"]
        if (
            not isinstance(numbers, list)
            or not all(type(i) is int and 0 <= i < len(children) for i in numbers)
            or len(numbers) > most
        ):
            raise CodecError("an array with invalid chunk indices")
        total += sum(chunks[children[i]] for i in numbers)
    if total > limits.message + _FRAME + _REFERENCE * most:
        raise CodecError(f"arrays of {total} bytes; at most {limits.message} are accepted")


def set_message_id(message: Message) -> None:
    """Set a message's id to the hash of its content, as Flower does."""
    message.metadata.__dict__["_message_id"] = message.object_id


def tls_error(error: BaseException) -> ssl.SSLError | None:
    """Return the TLS error that caused a connection's error, or None."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, ssl.SSLError):
        found = found.__cause__ or found.__context__
    return found
