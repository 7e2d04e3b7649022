"""Flower's HTTP clients, bounded: what a response may weigh is known before it is read."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import httpx
from flwr.app import Message
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
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


def check_objects(trees: Any, limits: Limits) -> None:
    """Raise CodecError when a message is made of too many objects."""
    most = most_objects(limits)
    for i, _ in enumerate(iterate_object_tree(trees)):
        if i >= most:
            raise CodecError(f"a message of more than {most} objects")


def name_message(message: Message) -> None:
    """Give a message the name that Flower knows it by: the hash of its content."""
    message.metadata.__dict__["_message_id"] = message.object_id
