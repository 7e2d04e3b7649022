"""The operator's side of a SuperLink: register nodes, begin a run, get its Grid.

Flower starts an app for every run, in a process of the server's. Here the process that begins a run
is its app, so that a run is stopped, watched and gone on with like any other: the app that Flower
asks for is an empty one, and nobody runs it.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SubStatus
from flwr.common.serde import run_from_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    StartRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.fab_pb2 import Fab
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest, PushTaskOutputRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from fedshot.core.errors import ConfigError, ServerGoneError
from fedshot.deploy.flower.codec import LIMITS, Limits
from fedshot.deploy.flower.server_folder import split
from fedshot.deploy.flower.superlink import TOKEN_HEADER
from fedshot.deploy.flower.wire import be_quiet, bound, direct, tls_error

_PATIENCE = 60.0  # seconds for which a server that does not answer may come back
_BUSY = (502, 503, 504)  # what a server, or what stands before it, says when it may be well soon
_APP = b"""\
[project]
name = "fedshot"
version = "0"
description = "Holds no code: clients run the fedshot that is installed where they live."
license = { file = "LICENSE" }
dependencies = []
[tool.flwr.app]
publisher = "fedshot"
[tool.flwr.app.components]
serverapp = "fedshot_app:server"
clientapp = "fedshot_app:client"
[tool.flwr.app.config]
"""


@dataclass(frozen=True)
class Operator:
    """Whoever holds the token of a server, on its host: no proxy lies between them.

    Args:
        address: host and port of the SuperLink.
        token: what the gate asks for.
        ca: certificate of the authority of the server; None for plain text.
        limits: the most that is taken in from it.
    """

    address: str
    token: str
    ca: Path | None
    limits: Limits = LIMITS

    def ready(self) -> bool:
        """Whether the server answers. Raises ConfigError when its certificate is another host's."""
        try:
            with self._control() as client:
                client.ListNodes(ListNodesRequest())
        except httpx.TransportError as error:
            self._check_trust(error)
            return False
        except httpx.HTTPStatusError:
            return False
        return True

    def register(self, keys: Mapping[str, bytes]) -> list[str]:
        """Let these nodes, and no others, take part; return in words which could not be let.

        Flower knows a key once: one that was taken away, or has another name now, waits for a new
        server. Raises HTTPError when the server does not answer.
        """
        wanted: dict[bytes, str] = {}
        refused = []
        for name, key in keys.items():
            if key in wanted:
                refused.append(f"{name} has the key of {wanted[key]}; make it one of its own")
            wanted.setdefault(key, name)
        with self._control() as client:
            listed = client.ListNodes(ListNodesRequest()).nodes_info
            known = {info.public_key: info for info in listed if info.status != "unregistered"}
            for key, info in known.items():
                if wanted.get(key) != info.name:
                    # It is unregistered even where Flower stumbles over one that never came.
                    with suppress(httpx.HTTPStatusError):
                        client.UnregisterNode(UnregisterNodeRequest(node_id=info.node_id))
            for key, name in wanted.items():
                if key in known and known[key].name == name:
                    continue
                try:
                    client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
                except httpx.HTTPStatusError as error:
                    refused.append(
                        f"{name} was known before, or is no key that Flower takes "
                        f"({error.response.status_code}); restart the server to admit this key "
                        "again"
                    )
        return refused

    @contextmanager
    def grid(self) -> Iterator[HttpGrid]:
        """Begin a run of Flower's and yield what reaches its nodes.

        Raises ServerGoneError when the server cannot be reached, ConfigError when it refuses the
        token.
        """
        be_quiet()
        try:
            run_id = self._start()
            token = self._acquire(run_id)
        except httpx.HTTPStatusError as error:
            raise ConfigError(
                f"the server at {self.address} refuses to begin a run "
                f"({error.response.status_code}). Use the folder of that server, as its owner."
            ) from None
        except httpx.TransportError as error:
            self._check_trust(error)
            raise self._gone(error) from None
        grid = HttpGrid(self.address, self.ca is None, self._root(), token=token)
        grid._retry_invoker.max_time = _PATIENCE
        # Flower's own interrupts the process where the server does not know the run any more.
        grid._retry_invoker.should_giveup = _is_final
        with direct(self._host):
            client = grid._runtime_client
        bound(client, self.limits, self._headers())
        try:
            got = client.PullTaskInput(PullTaskInputRequest())
        except httpx.HTTPError as error:
            grid.close()
            raise self._gone(error) from None
        TaskIdentity.task_id, TaskIdentity.run_id = got.task_id, got.run.run_id
        TaskIdentity.node_id = got.context.node_id
        grid.set_run(run_from_proto(got.run))
        heart = HeartbeatSender(_beat(client))
        heart.start()
        status = SubStatus.FAILED
        try:
            yield grid
            status = SubStatus.COMPLETED
        finally:
            heart.stop()
            grid._retry_invoker.max_tries = 1
            # A server that has gone ends the run by itself when nothing is heard of it.
            with suppress(httpx.HTTPError, RuntimeError):
                client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=""))
            grid.close()

    def _gone(self, error: httpx.HTTPError) -> ServerGoneError:
        return ServerGoneError(
            f"the server at {self.address} does not answer: {error}. Start it with "
            "`fedshot flower server`."
        )

    def _check_trust(self, error: httpx.TransportError) -> None:
        said = tls_error(error)
        if isinstance(said, ssl.SSLCertVerificationError) and self.ca is not None:
            raise ConfigError(
                f"the certificate of the server at {self.address} is not trusted: {said}. Make one "
                "for the address that it listens on, and for every name that nodes reach it by, "
                f"with `fedshot flower keys --server ADDRESS NAME... --folder {self.ca.parent}`, "
                "and start it anew."
            ) from None

    def _start(self) -> int:
        fab, _ = build_fab_from_files(
            {"pyproject.toml": _APP, "LICENSE": b"Apache-2.0\n", "fedshot_app.py": b"\n"}
        )
        with self._control() as client:
            return int(client.StartRun(StartRunRequest(fab=Fab(content=fab))).run_id)

    def _acquire(self, run_id: int) -> str:
        """Claim the task of our own run; those of others that died before theirs are passed by."""
        client = self._client(RuntimeHttpClient, "SuperExec")
        with client:
            for _ in range(100):
                wanted = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
                got = client.AcquireTask(wanted)
                if got.token and got.task.run_id == run_id:
                    return str(got.token)
                time.sleep(0.0 if got.token else 0.1)
        raise ConfigError(f"the server at {self.address} does not hand its run over. Restart it.")

    def _control(self) -> Any:
        return self._client(ControlHttpClient, "flwr CLI")

    def _client(self, kind: Any, component: str) -> Any:
        with direct(self._host):
            client = kind.from_server_address(
                self.address,
                self.ca is None,
                self._root(),
                interceptors=[RuntimeVersionHttpInterceptor(component_name=component)],
            )
        bound(client, self.limits, self._headers())
        return client

    @property
    def _host(self) -> str:
        return split(self.address)[0]

    def _root(self) -> bytes | None:
        return None if self.ca is None else self.ca.read_bytes()

    def _headers(self) -> dict[str, str]:
        return {TOKEN_HEADER: self.token}


def _is_final(error: Exception) -> bool:
    """Whether an answer of a server, or its certificate, stays the same when asked again."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code not in _BUSY
    return isinstance(tls_error(error), ssl.SSLCertVerificationError)


def _beat(client: RuntimeHttpClient) -> Any:
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

    def beat() -> bool:
        try:
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except (httpx.HTTPError, RuntimeError):
            return False
        return True

    return beat
