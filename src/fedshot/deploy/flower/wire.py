"""Flower's HTTP clients, bounded: what a response may weigh is known before it is read."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from flwr.app import Message
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.supercore.protobuf.client import ProtobufClient

from fedshot.deploy.flower.codec import CodecError, Limits

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


def be_quiet() -> None:
    """Let Flower keep to its work in this process; to be called before anything of it runs."""
    os.environ.update(QUIET)
    for name in ("flwr", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)


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
        if length is None or not length.isdigit() or int(length) > most:
            response.close()
            raise CodecError(f"a response of {length} bytes; at most {most} are taken")

    client._client.event_hooks = {"response": [look]}
    client._client.headers.update(headers)


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

    Raises CodecError when there are too many, or they do not come.
    """
    ids, most = [], most_objects(limits)
    for one in iterate_object_tree(objects):
        ids.append(one.object_id)
        if len(ids) > most:
            raise CodecError(f"a message of more than {most} objects")
    try:
        contents = pull_objects(
            ids,
            pull,
            max_time=seconds,
            max_tries_per_object=None,
            initial_backoff=_LOOK,
            backoff_cap=10 * _LOOK,
        )
    except ObjectPullError as error:
        raise CodecError(f"a message that did not arrive whole: {error}") from None
    ident = outline.metadata.message_id
    message: Message = inflate_object_from_contents(ident, contents)
    message.metadata.__dict__["_message_id"] = ident
    return message


def name_message(message: Message) -> None:
    """Give a message the name that Flower knows it by: the hash of its content."""
    message.metadata.__dict__["_message_id"] = message.object_id
