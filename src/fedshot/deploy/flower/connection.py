"""A node's connection to the SuperLink: Flower's Fleet API, with its request signatures and TLS.

Flower's own SuperNode starts a process for every message and polls every three seconds. This
connection belongs to the process that has loaded torch and the data. It never requests a run's app
(a Flower App Bundle): a node runs only its own installed code.
"""

from __future__ import annotations

import json
import ssl
import threading
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, push_objects
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedshot.core import records, storage
from fedshot.core.errors import CheckpointError, ConfigError
from fedshot.core.serialised import CodecError, Limits
from fedshot.deploy.flower.keys import public_bytes
from fedshot.deploy.flower.server_folder import is_loopback, split_address
from fedshot.deploy.flower.wire import (
    STALL_SECONDS,
    fetch,
    limit_responses,
    proxy_to,
    set_message_id,
    tls_error,
    without_proxy,
)

_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")  # error codes of OpenSSL
_MIN_KEPT = 1 << 16  # bytes of an object that is kept until the next message, which may repeat it
HEARTBEAT = 10.0  # seconds, Flower's minimum; after twice that, Flower counts a node as lost


class ConnectionLostError(Exception):
    """The server cannot be reached at the moment."""


class RejectedError(ConfigError):
    """The server does not admit this node now; it may later, with the same key."""

    retryable = True


class UnreadableError(CodecError):
    """A received message is invalid; `outline` is its metadata, needed to reply."""

    def __init__(self, error: CodecError, outline: Message) -> None:
        super().__init__(str(error))
        self.outline = outline


class Connection:
    """A connection to a server.

    A server on this machine is reached directly. Any other server is reached through the proxy in
    environment variables such as https_proxy, if they are set. `proxy` is the URL of this proxy, or
    "". Raises ConfigError for an unusable proxy.

    Args:
        address: host and port.
        key: the node's private key.
        ca: certificate of the authority that signed the server's certificate; None for plain text.
        memory: file in which the node id assigned by the server is stored.
        limits: bounds on received messages.
    """

    def __init__(
        self,
        address: str,
        key: ec.EllipticCurvePrivateKey,
        ca: Path | None,
        memory: Path,
        limits: Limits,
    ) -> None:
        self._public = public_bytes(key.public_key())
        self._memory, self._limits, self._secure = memory, limits, ca is not None
        self._chunks: dict[str, bytes] = {}  # large objects of the last message, by their hash
        local = is_loopback(host := split_address(address)[0])
        self.proxy = "" if local else proxy_to(host, secure=self._secure)
        try:
            with without_proxy(host) if local else nullcontext():
                self._client = FleetHttpClient.from_server_address(
                    address,
                    ca is None,
                    None if ca is None else ca.read_bytes(),
                    interceptors=[
                        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                        NodeAuthHttpInterceptor(key, key.public_key()),
                    ],
                )
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise ConfigError(
                f"the environment's proxy {self.proxy or 'settings'} cannot be used: {error} "
                f"Correct https_proxy and all_proxy, or add {host} to no_proxy."
            ) from None
        limit_responses(self._client, limits)
        self._node = Node()
        self._stop = threading.Event()
        self._heartbeats: threading.Thread | None = None

    def open(self) -> int:
        """Activate the node at the server; return its node id.

        Raises:
            RejectedError: the server does not admit the node.
            ConfigError: the server's certificate is not trusted.
            ConnectionLostError: the server cannot be reached.
        """
        if not self._secure:
            # Without node keys, nodes register themselves. Errors mean that the key is registered
            # already, or that the server requires keys; then activation fails with the reason.
            with suppress(httpx.HTTPStatusError):
                self._call("RegisterNode", RegisterNodeFleetRequest(public_key=self._public))
        try:
            reply = self._call(
                "ActivateNode",
                ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT),
            )
            number = int(reply.node_id)
        except httpx.HTTPStatusError as error:
            number = self._last_number()  # after a crash, the server may count the node as active
            if number == 0 or not self._send_heartbeat(number):
                raise RejectedError(
                    "the server does not know this node's key, or the clocks of both differ by "
                    "more than a few seconds, or a node with this key was connected in the last "
                    "20 seconds. Admit its key at the server (`fedshot flower keys --admit`), set "
                    f"the clocks (NTP), and try again. ({_describe(error)})"
                ) from None
        self._node = Node(node_id=number)
        self._memory.parent.mkdir(parents=True, exist_ok=True)
        storage.write_bytes(self._memory, json.dumps({"node": number}).encode(), sync=True)
        if self._heartbeats is None:
            self._heartbeats = threading.Thread(target=self._run_heartbeats, daemon=True)
            self._heartbeats.start()
        return number

    def pull(self) -> Message | None:
        """Return the next message, or None if there is none.

        Raises ConnectionLostError, and UnreadableError for a message that is too large or
        incomplete.
        """
        got = self._call("PullMessages", PullMessagesRequest(node=self._node))
        if not got.messages_list:
            return None
        outline = message_from_proto(got.messages_list[0])
        run_id = outline.metadata.run_id
        pull = make_pull_object_fn_protobuf(partial(self._call, "PullObject"), self._node, run_id)
        held, self._chunks = self._chunks, {}

        def pull_once(ident: str) -> bytes:
            content: bytes = held[ident] if ident in held else pull(ident)
            if len(content) > _MIN_KEPT:
                self._chunks[ident] = content
            return content

        try:
            message = fetch(
                outline, got.message_object_trees[0], pull_once, self._limits, STALL_SECONDS
            )
        except CodecError as error:
            raise UnreadableError(error, outline) from None
        confirm = ConfirmMessageReceivedRequest(
            node=self._node, run_id=run_id, message_object_id=outline.metadata.message_id
        )
        self._call("ConfirmMessageReceived", confirm)
        return message

    def push(self, content: RecordDict, to: Message) -> None:
        """Send `content` as the reply to a message.

        Raises ConnectionLostError; HTTPStatusError if the server no longer waits for the reply.
        """
        reply = Message(content, reply_to=to)
        with no_object_id_recompute():
            set_message_id(reply)
            got = self._call(
                "PushMessages",
                PushMessagesRequest(
                    node=self._node,
                    messages_list=[message_to_proto(remove_content_from_message(reply))],
                    message_object_trees=[get_object_tree(reply)],
                    clientapp_runtime_list=[0.0],
                ),
            )
            push = make_push_object_fn_protobuf(
                partial(self._call, "PushObject"), self._node, reply.metadata.run_id, got.session_id
            )
            try:
                push_objects(get_all_nested_objects(reply), push,
                             object_ids_to_push=set(got.objects_to_push))  # fmt: skip
            except ObjectPushError as error:
                raise ConnectionLostError(str(error)) from None

    def close(self) -> None:
        """Close the connection. The server notices when it receives no more heartbeats."""
        self._stop.set()
        self._client.close()

    def _call(self, name: str, request: Any) -> Any:
        try:
            return getattr(self._client, name)(request)
        except (CodecError, ValueError) as error:  # the response is too large, or not from Flower
            if name == "PullObject":
                raise CodecError(str(error)) from None  # affects one message, not the connection
            raise ConnectionLostError(str(error)) from None
        except httpx.HTTPStatusError as error:
            if error.response.status_code >= 500:
                raise ConnectionLostError(_describe(error)) from None
            raise
        except httpx.TransportError as error:
            cause = tls_error(error)
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise ConfigError(
                    f"the server's certificate is not trusted: {cause}. Give --ca the ca.pem of "
                    "this server, and --server a name that its certificate has."
                ) from None
            if cause is not None and cause.reason in _NO_TLS:
                raise ConfigError(
                    "the server does not speak TLS. Start it without --insecure; or, if the "
                    "network itself is safe, leave out --ca and use --insecure here, too."
                ) from None
            if not self._secure and isinstance(error, httpx.RemoteProtocolError):
                raise ConfigError(
                    "the server does not speak plain text. Give its ca.pem with --ca."
                ) from None
            via = f", through the proxy {self.proxy}" if self.proxy else ""
            raise ConnectionLostError(f"{str(error) or type(error).__name__}{via}") from None

    def _send_heartbeat(self, number: int) -> bool:
        request = SendNodeHeartbeatRequest(node=Node(node_id=number), heartbeat_interval=HEARTBEAT)
        try:
            return bool(self._call("SendNodeHeartbeat", request).success)
        except httpx.HTTPStatusError:
            return False

    def _run_heartbeats(self) -> None:
        while not self._stop.wait(HEARTBEAT / 3):
            # Without heartbeats the server takes the node for lost, so no error may end this
            # thread; the loop of the node reports lost connections.
            with suppress(Exception):
                self._send_heartbeat(self._node.node_id)

    def _last_number(self) -> int:
        try:
            return int(records.read(self._memory, dict[str, int])["node"])
        except (OSError, CheckpointError, KeyError):
            return 0


def _describe(error: httpx.HTTPStatusError) -> str:
    return f"{error.response.status_code}: {' '.join(error.response.text.split())[:200]}"
