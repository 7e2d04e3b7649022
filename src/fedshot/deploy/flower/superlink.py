"""The server process: Flower's SuperLink behind a gate that filters requests.

On one port, the SuperLink serves nodes, starts runs and registers nodes. Without an account service
it does not authenticate requests to start runs or to register nodes. So the gate requires the token
in the server's folder, which only its owner can read, for all requests except those of nodes.
Flower checks the requests of nodes by their keys. The gate bounds the size of a request and the
time to receive it; with node keys, it reads a large body only if a registered key has signed the
request. From a node, the gate accepts no messages but the node's own replies: Flower would deliver
any other message to another node as if the server had sent it.

    python -m fedshot.deploy.flower.superlink MAX_BYTES --host ... (Flower's own options)

The environment variable FEDSHOT_FLOWER_TOKEN holds the token.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import sys
from base64 import b64decode
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from flwr.common.constant import SUPERLINK_NODE_ID, TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.supercore.constant import FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from google.protobuf.message import DecodeError

from fedshot.core.serialised import Limits
from fedshot.deploy.flower.processes import exit_with_parent
from fedshot.deploy.flower.wire import max_object_bytes, max_objects, silence_flower

TOKEN_HEADER = "x-fedshot-token"
TOKEN = "FEDSHOT_FLOWER_TOKEN"
_KEY = b"flwr-public-key"  # header with a node's public key
_FLEET = "/v1/fleet/"
_OUTLINE = _FLEET + "push-messages"
_NODE_PATHS = frozenset({
    _OUTLINE, *(_FLEET + name for name in (
        "register-node", "activate-node", "send-node-heartbeat", "pull-messages", "pull-object",
        "push-object", "confirm-message-received",
    )),
})  # fmt: skip
_PER_OBJECT = 256  # bytes for an object in the outline of a message
_SMALL = 1 << 16  # bytes of a header, or of a body that is read before its signature is checked
_HEAD_SECONDS = 15.0  # time to receive a header or a small body
_BODY_SECONDS = 120.0  # time to receive a larger body
_MAX_REQUESTS = 32  # large requests of one node at the same time
_MAX_IDLE = 64  # idle connections of one address


class Gate:
    """ASGI middleware in front of the SuperLink.

    `token` is required for all requests except those of nodes; `keys` says whether nodes have keys.
    """

    def __init__(self, app: Any, token: str, limits: Limits, *, keys: bool) -> None:
        self._app, self._token, self._keys = app, token.encode(), keys
        self._max_bytes = max_object_bytes(limits)
        self._max_outline = _PER_OBJECT * max_objects(limits)
        self._in_progress: Counter[bytes] = Counter()  # requests by node key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request to the SuperLink, or reject it."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        path, refusal = scope["path"], 0
        length = headers.get(b"content-length", b"")
        most = self._max_outline if path == _OUTLINE else self._max_bytes
        of_node = path in _NODE_PATHS
        if not of_node and not hmac.compare_digest(
            headers.get(TOKEN_HEADER.encode(), b""), self._token
        ):
            refusal = 403
        elif of_node and scope["method"] != "POST":
            refusal = 405
        elif scope["method"] == "POST" and (
            not length.isdigit() or b"transfer-encoding" in headers
        ):
            refusal = 411  # the length decides whether a signature is needed
        elif length and int(length) > most:
            refusal = 413
        elif of_node and self._keys and not is_signed(headers, scope["app"], int(length)):
            refusal = 401
        if refusal:
            await _refuse(send, refusal)
        elif of_node:
            large = int(length) > _SMALL
            signer = headers[_KEY] if large and self._keys else b""
            seconds = _BODY_SECONDS if large else _HEAD_SECONDS
            await self._pass_node_request(scope, receive, send, signer, int(length), seconds)
        else:
            await self._app(scope, receive, send)

    async def _pass_node_request(
        self, scope: Any, receive: Any, send: Any, signer: bytes, length: int, seconds: float
    ) -> None:
        """Pass a node's request once its body is received.

        The body has `length` bytes and must arrive within `seconds`. `signer` is the node's key if
        the signature was checked, else b"". Only checked requests count against a key's quota,
        since an unchecked request may name any key.
        """
        if signer and self._in_progress[signer] >= _MAX_REQUESTS:
            await _refuse(send, 503)
            return
        self._in_progress[signer] += 1
        try:
            try:
                async with asyncio.timeout(seconds):
                    body = await _body(receive, length)
            except TimeoutError:
                await _refuse(send, 408)
                return
            if len(body) > length:
                await _refuse(send, 413)
                return
            if scope["path"] == _OUTLINE and not is_reply(body):
                await _refuse(send, 403)
                return
            await self._app(scope, _replay(body, receive), send)
        finally:
            self._in_progress[signer] -= 1
            if not self._in_progress[signer]:
                del self._in_progress[signer]


async def _refuse(send: Any, status: int) -> None:
    await send({"type": "http.response.start", "status": status,
                "headers": [(b"content-length", b"0"), (b"connection", b"close")]})  # fmt: skip
    await send({"type": "http.response.body", "body": b""})


def is_signed(headers: Mapping[bytes, bytes], app: Any, length: int) -> bool:
    """Whether a request names a registered key and, if larger than 64 KB, is signed with the key.

    After reading the body, Flower checks that the signature is valid and recent and that the key is
    the requesting node's. Checking small requests here, too, would cost 5 % of an exchange.
    """
    try:
        key = b64decode(headers[_KEY], validate=True)
        if app.state.linkstate_factory.state().get_node_id_by_public_key(key) is None:
            return False
        if length <= _SMALL:
            return True
        signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER.lower().encode()], validate=True)
        stamp = headers[TIMESTAMP_HEADER.lower().encode()]
        return bool(verify_signature(bytes_to_public_key(key), stamp, signature))
    except (KeyError, ValueError, TypeError):
        return False


def bounded(protocol: type[Any]) -> type[Any]:
    """Return a subclass of a uvicorn protocol with a timeout for the header of a request.

    Uvicorn's own timeout covers only the idle time between two requests: a client could send one
    byte of a header and keep the connection.
    """

    class Bounded(protocol):  # type: ignore[misc]
        _waiting: ClassVar[dict[str, dict[Any, None]]] = {}  # connections by address, oldest first

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._received, self._timer = 0, None
            self._address = str(self.client and self.client[0])
            self._wait()

        def data_received(self, data: bytes) -> None:
            self._received += len(data)
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._received = 0
                self._stop_waiting()
            elif self._received > _SMALL:
                self.transport.abort()
            else:
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _wait(self) -> None:
            if self._timer is None and not self.transport.is_closing():
                self._timer = self.loop.call_later(_HEAD_SECONDS, self.transport.abort)
                held = self._waiting.setdefault(self._address, {})
                held[self] = None
                if len(held) > _MAX_IDLE:
                    next(iter(held)).transport.abort()

        def _stop_waiting(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
                held = self._waiting[self._address]
                del held[self]
                if not held:
                    del self._waiting[self._address]

    return Bounded


def is_reply(body: bytes) -> bool:
    """Whether a request body announces exactly one message: a reply of the node that sends it.

    The body holds the message's metadata, without the content. Flower authenticates the sender of
    the request. If a message in the request is a reply, Flower also checks that the node in its
    `source` field received the message that is replied to. Flower does not check that the sender is
    the node in this field, nor that the message is a reply.
    """
    try:
        request = PushMessagesRequest.FromString(body)
    except DecodeError:
        return False
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        return False
    metadata = request.messages_list[0].metadata
    return (
        bool(metadata.reply_to_message_id)
        and metadata.src_node_id == request.node.node_id != SUPERLINK_NODE_ID
        and metadata.dst_node_id == SUPERLINK_NODE_ID
        and metadata.message_id == request.message_object_trees[0].object_id
    )


async def _body(receive: Any, length: int) -> bytes:
    """Read the body of a request, but not beyond its announced length."""
    found = bytearray()
    while len(found) <= length:
        message = await receive()
        found += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body", False):
            break
    return bytes(found)


def _replay(body: bytes, receive: Any) -> Any:
    """Return an ASGI `receive` that first returns a body that was already read."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Any:
        return left.pop() if left else await receive()

    return next_message


def main() -> None:
    """Run the SuperLink until the process ends."""
    exit_with_parent()
    silence_flower()
    limits = Limits(message=int(sys.argv.pop(1)))
    token = os.environ.pop(TOKEN)
    if len(token) < 32:
        raise SystemExit("the token is too short to protect anything")
    import uvicorn
    from flwr.superlink import extensions
    from flwr.superlink.cli import flower_superlink
    from starlette.middleware import Middleware
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    keys = "--enable-supernode-auth" in sys.argv
    # The hook for middleware around all of Flower's interfaces.
    extensions.get_middleware = lambda: (Middleware(Gate, token, limits, keys=keys),)
    uvicorn.run = partial(uvicorn.run, http=bounded(AutoHTTPProtocol))
    flower_superlink()


if __name__ == "__main__":
    main()
