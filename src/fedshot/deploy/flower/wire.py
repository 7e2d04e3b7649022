"""Flower's HTTP clients, bounded: what a response may weigh is known before it is read."""

from __future__ import annotations

import json
import logging
import os
import ssl
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    inflate_object_from_contents,
    pull_objects,
)
from flwr.supercore.protobuf.client import ProtobufClient

from fedshot.deploy.flower.codec import CodecError, Limits, short

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Flower's environment: no telemetry, no look for updates, no installing."""

_CHUNK = max(FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, 1 << 23)
_FRAME = 1 << 16  # what protobuf and Flower add to an object, at most
_LOOK = 0.02  # seconds between two looks for an object
_FEW = 64  # objects of a message that are no pieces of arrays
_MADE_OF = {"Message": 1, "RecordDict": 1, "ConfigRecord": 1, "ArrayRecord": 1, "Array": 2}
_NAME = 128  # bytes, at most, by which one object names another


def be_quiet() -> None:
    """Let Flower keep to its work in this process; to be called before anything of it runs."""
    os.environ.update(QUIET)
    for name in ("flwr", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)


_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_environment = Lock()


@contextmanager
def direct(host: str) -> Iterator[None]:
    """Let clients that are made within reach a host without the proxies of the environment.

    Their variables are read when a client is made, and not again.
    """
    with _environment:
        held = {name: value for name, value in os.environ.items() if name.lower() in _PROXIES}
        for name in held:
            del os.environ[name]
        os.environ["no_proxy"] = host  # else some systems are asked for their settings
        try:
            yield
        finally:
            del os.environ["no_proxy"]
            os.environ.update(held)


def proxy_to(host: str, *, secure: bool) -> str:
    """Return the proxy by which clients that are made now reach a host; "" for none.

    It is named without the user and password that it may ask for.
    """
    proxies = getproxies()
    found = proxies.get("https" if secure else "http") or proxies.get("all") or ""
    if not found or proxy_bypass(host):
        return ""
    parts = urlsplit(found if "://" in found else f"http://{found}")
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def most_objects(limits: Limits) -> int:
    """Return how many objects a message may be made of."""
    return limits.message // FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE + _FEW


def largest_object(limits: Limits) -> int:
    """Return the bytes of the largest object, or of any other body."""
    return max(_CHUNK, limits.head) + _FRAME


def bound(client: ProtobufClient, limits: Limits, headers: Mapping[str, str] = {}) -> None:
    """Let a client of Flower's refuse large responses, and send these headers."""
    most = largest_object(limits)

    def look(response: httpx.Response) -> None:
        length = response.headers.get("content-length")
        coded = response.headers.get("content-encoding", "identity")
        if length is None or not length.isdigit() or int(length) > most or coded != "identity":
            response.close()
            raise CodecError(
                f"a response of {length} bytes, coded as {coded[:20]!r}; at most {most} plain ones "
                "are taken"
            )

    client._client.event_hooks = {"response": [look]}
    client._client.follow_redirects = False
    client._client.headers.update({"accept-encoding": "identity", **headers})


def fetch(
    outline: Any, objects: Any, pull: Callable[[str], bytes], limits: Limits, seconds: float
) -> Message:
    """Return a message of which the outline has come, object by object.

    The outline may be there before its objects are. Flower looks again after a second, then ever
    more seldom, for two hours; a node that is killed while it sends would hold everything up.

    Args:
        outline: the message without its content.
        objects: the tree of the names of its objects.
        pull: brings one.
        limits: the most that is taken in.
        seconds: how long objects are waited for.

    Raises:
        CodecError: they are too many, too large or no message, or they do not come.
        Exception: what `pull` raises.
    """
    ids, most = dict.fromkeys([outline.metadata.message_id]), most_objects(limits)
    for one in iterate_object_tree(objects):
        ids[one.object_id] = None
        if len(ids) > most:
            raise CodecError(f"a message of more than {most} objects")
    room, came, lock = limits.message + limits.head + _FRAME + _NAME * most, 0, Lock()

    def counted(ident: str) -> bytes:
        nonlocal came
        content = pull(ident)
        with lock:
            came += len(content)
        if came > room:
            raise CodecError(f"a message of more than {limits.message} bytes")
        return content

    try:
        contents = pull_objects(
            [*ids],
            counted,
            max_time=seconds,
            max_tries_per_object=None,
            initial_backoff=_LOOK,
            backoff_cap=10 * _LOOK,
        )
    except ObjectPullError as error:
        raise CodecError(f"a message that did not arrive whole: {error}") from None
    ident = outline.metadata.message_id
    try:
        _weigh(contents, limits)
        message = inflate_object_from_contents(ident, contents)
    except CodecError:
        raise
    except Exception as error:  # Flower takes what it inflates for its own
        raise CodecError(short(f"objects that are no message: {error!r}")) from None
    if not isinstance(message, Message):
        raise CodecError("objects that are no message")
    message.metadata.__dict__["_message_id"] = ident
    return message


def _weigh(contents: Mapping[str, bytes], limits: Limits) -> None:
    """Raise CodecError unless objects can be those of a letter, and weigh no more unfolded.

    An array names its pieces by number, and one may stand in it many times: pieces that are all
    zeros come once. So what it will weigh is not what came.
    """
    most = most_objects(limits)
    kinds: Counter[str] = Counter()
    arrays: list[tuple[list[str], bytes]] = []
    pieces: dict[str, int] = {}
    for ident, content in contents.items():
        kind, children, size = get_object_head_values_from_object_content(content)
        kinds[kind] += 1
        if kind == "ArrayChunk":
            pieces[ident] = len(content)
            if children:
                raise CodecError("a piece of an array that has pieces")
        elif kind not in _MADE_OF or kinds[kind] > _MADE_OF[kind]:
            raise CodecError(f"an object {short(kind, 40)} that no letter has")
        elif kind != "ConfigRecord" and len(content) > _FRAME + _NAME * most:
            raise CodecError(f"an object {kind} of {size} bytes")
        elif kind == "Array":
            arrays.append((children, content))
    weight = 0
    for children, content in arrays:
        numbers = json.loads(get_object_body(content, Array))["arraychunk_ids"]
        if not _are_numbers(numbers, len(children)) or len(numbers) > most:
            raise CodecError("an array of pieces that it does not have")
        weight += sum(pieces[children[i]] for i in numbers)
    if weight > limits.message + _FRAME + _NAME * most:
        raise CodecError(f"arrays of {weight} bytes; at most {limits.message} are taken")


def _are_numbers(found: Iterable[Any], below: int) -> bool:
    return isinstance(found, list) and all(type(i) is int and 0 <= i < below for i in found)


def name_message(message: Message) -> None:
    """Give a message the name that Flower knows it by: the hash of its content."""
    message.metadata.__dict__["_message_id"] = message.object_id


def tls_error(error: BaseException) -> ssl.SSLError | None:
    """Return what TLS said, if that is what an error of a connection comes from."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, ssl.SSLError):
        found = found.__cause__ or found.__context__
    return found
