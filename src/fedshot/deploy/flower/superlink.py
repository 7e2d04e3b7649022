"""The process of the server: Flower's SuperLink behind a gate.

The SuperLink listens on one port for nodes, for whoever starts runs, and for whoever registers
nodes, and without an account service it asks the last two for nothing. So the gate lets through
what nodes ask for, which Flower checks by their keys, and all else only with the token that lies in
the server's folder, readable by its owner alone. It also bounds what a request may weigh, before it
is read, and how long it may take to come; with node keys, no body is read of who has none. Of what
a node sends it lets through replies of that node's own: Flower would take a message that says it is
the server's for one, and bring it to another node.

    python -m fedshot.deploy.flower.superlink MOST_BYTES --host ... (Flower's own options)

The token comes in the environment, as FEDSHOT_FLOWER_TOKEN.
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

from fedshot.deploy.flower.codec import Limits
from fedshot.deploy.flower.processes import heed_leash
from fedshot.deploy.flower.wire import be_quiet, largest_object, most_objects

TOKEN_HEADER = "x-fedshot-token"
TOKEN = "FEDSHOT_FLOWER_TOKEN"
_KEY = b"flwr-public-key"  # header by which a node names its key
_NODES = "/v1/fleet/"
_OUTLINE = _NODES + "push-messages"
_ASKED = frozenset({  # what nodes ask for
    _OUTLINE, *(_NODES + name for name in (
        "register-node", "activate-node", "send-node-heartbeat", "pull-messages", "pull-object",
        "push-object", "confirm-message-received",
    )),
})  # fmt: skip
_PER_OBJECT = 256  # bytes that name an object in the outline of a message
_SMALL = 1 << 16  # bytes of a head, or of a body that is read before its signature is looked at
_HEAD = 15.0  # seconds for a head or a small body to come
_BODY = 120.0  # for a larger one
_AT_ONCE = 32  # large requests of one node
_HEADLESS = 64  # connections of one address on which no request is under way


class Gate:
    """An ASGI application in front of another."""

    def __init__(self, app: Any, token: str, limits: Limits, *, keys: bool = False) -> None:
        self._app, self._token, self._keys = app, token.encode(), keys
        self._most = largest_object(limits)
        self._outline = _PER_OBJECT * most_objects(limits)
        self._under_way: Counter[bytes] = Counter()  # requests, by the key of their node

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        path, refusal = scope["path"], 0
        length = headers.get(b"content-length", b"")
        most = self._outline if path == _OUTLINE else self._most
        asked = path in _ASKED
        if not asked and not hmac.compare_digest(
            headers.get(TOKEN_HEADER.encode(), b""), self._token
        ):
            refusal = 403
        elif asked and scope["method"] != "POST":
            refusal = 405
        elif scope["method"] == "POST" and (
            not length.isdigit() or b"transfer-encoding" in headers
        ):
            refusal = 411  # which bodies need a signature is decided by the length
        elif length and int(length) > most:
            refusal = 413
        elif asked and self._keys and not is_signed(headers, scope["app"], int(length)):
            refusal = 401
        if refusal:
            await _refuse(send, refusal)
        elif asked:
            large = int(length) > _SMALL
            signer = headers[_KEY] if large and self._keys else b""
            seconds = _BODY if large else _HEAD
            await self._of_node(scope, receive, send, signer, int(length), seconds)
        else:
            await self._app(scope, receive, send)

    async def _of_node(
        self, scope: Any, receive: Any, send: Any, signer: bytes, length: int, seconds: float
    ) -> None:
        """Pass on what a node asks for, once it is there; `signer` is b"" for who has not signed.

        The others are not counted, since anybody may name the key of another.
        """
        if signer and self._under_way[signer] >= _AT_ONCE:
            await _refuse(send, 503)
            return
        self._under_way[signer] += 1
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
            await self._app(scope, _again(body, receive), send)
        finally:
            self._under_way[signer] -= 1
            if not self._under_way[signer]:
                del self._under_way[signer]


async def _refuse(send: Any, status: int) -> None:
    await send({"type": "http.response.start", "status": status,
                "headers": [(b"content-length", b"0"), (b"connection", b"close")]})  # fmt: skip
    await send({"type": "http.response.body", "body": b""})


def is_signed(headers: Mapping[bytes, bytes], app: Any, length: int) -> bool:
    """Whether a request names a key that is registered and, above 64 KB, is signed with it.

    Flower looks again, once it has read the body, whether the signature is good and fresh and the
    key that of the node that asks. Two looks at each would cost a twentieth of an exchange.
    """
    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.supercore.constant import FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

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
    """Return a protocol of uvicorn's whose connections do not wait for ever for a request.

    Its own timeout is for those that are idle after a request, and a single byte ends it.
    """

    class Bounded(protocol):  # type: ignore[misc]
        _waiting: ClassVar[dict[str, dict[Any, None]]] = {}  # by address, the oldest first

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._came, self._timer, self._address = 0, None, str(self.client and self.client[0])
            self._wait()

        def data_received(self, data: bytes) -> None:
            self._came += len(data)
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._came = 0
                self._wait_no_more()
            elif self._came > _SMALL:
                self.transport.abort()
            else:
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._wait_no_more()
            super().connection_lost(exc)

        def _wait(self) -> None:
            if self._timer is None and not self.transport.is_closing():
                self._timer = self.loop.call_later(_HEAD, self.transport.abort)
                held = self._waiting.setdefault(self._address, {})
                held[self] = None
                if len(held) > _HEADLESS:
                    next(iter(held)).transport.abort()

        def _wait_no_more(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
                held = self._waiting[self._address]
                del held[self]
                if not held:
                    del self._waiting[self._address]

    return Bounded


def is_reply(body: bytes) -> bool:
    """Whether the body of a request is the outline of one reply, by the node that sends it.

    Flower checks that the sender is who it says it is, and that the message it answers was sent to
    the source of the reply; not that these two are one, nor that it is a reply at all.
    """
    from flwr.common.constant import SUPERLINK_NODE_ID
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from google.protobuf.message import DecodeError

    try:
        request = PushMessagesRequest.FromString(body)
    except DecodeError:
        return False
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        return False
    told = request.messages_list[0].metadata
    return (
        bool(told.reply_to_message_id)
        and told.src_node_id == request.node.node_id != SUPERLINK_NODE_ID
        and told.dst_node_id == SUPERLINK_NODE_ID
        and told.message_id == request.message_object_trees[0].object_id
    )


async def _body(receive: Any, length: int) -> bytes:
    """Return the body of a request, of which no more is read once it is longer than it told."""
    found = bytearray()
    while len(found) <= length:
        message = await receive()
        found += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body", False):
            break
    return bytes(found)


def _again(body: bytes, receive: Any) -> Any:
    """Return what gives an application a body that was read, and then what else comes."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Any:
        return left.pop() if left else await receive()

    return next_message


def main() -> None:
    """Run the SuperLink until the process is ended."""
    heed_leash()
    be_quiet()
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
    # The hook by which Flower's own extensions put a layer around all of its interfaces.
    extensions.get_middleware = lambda: (Middleware(Gate, token, limits, keys=keys),)
    uvicorn.run = partial(uvicorn.run, http=bounded(AutoHTTPProtocol))
    flower_superlink()


if __name__ == "__main__":
    main()
