"""The operator's access to a SuperLink: register nodes, start a run, get its Grid.

Flower starts a ServerApp process on the server for every run. Here, the process that starts a run
acts as its ServerApp, so that a run is stopped, monitored and resumed like a run on one machine.
The app that Flower requires is empty and never executed.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from flwr.common.constant import SubStatus
from flwr.common.serde import run_from_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    StartRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.fab_pb2 import Fab
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity

from fedshot.core.errors import ConfigError, ServerGoneError
from fedshot.core.serialised import LIMITS, Limits
from fedshot.core.text import typed
from fedshot.deploy.flower.server_folder import split_address
from fedshot.deploy.flower.superlink import TOKEN_HEADER
from fedshot.deploy.flower.wire import limit_responses, silence_flower, tls_error, without_proxy

if TYPE_CHECKING:
    from flwr.superlink.grid import HttpGrid

_RETRY_SECONDS = 60.0  # time during which unanswered requests are repeated
_TEMPORARY = (502, 503, 504)  # statuses of a server or proxy that may recover
_APP = b"""\
[project]
name = "fedshot"
version = "0"
description = "Empty: nodes run the fedshot that is installed on them."
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
    """Access to a server on this machine by its token, never through a proxy.

    Args:
        address: host and port of the SuperLink.
        token: the token that `Gate` requires.
        ca: certificate of the server's authority; None for plain text.
        limits: bounds on received messages.
    """

    address: str
    token: str
    ca: Path | None
    limits: Limits = LIMITS

    def statuses(self) -> list[str]:
        """Return the status of each registered node, such as "online".

        Raises HTTPError if the server does not respond.
        """
        with self._control() as client:
            listed = client.ListNodes(ListNodesRequest()).nodes_info
        return [info.status for info in listed if info.status != "unregistered"]

    def ready(self) -> bool:
        """Whether the server responds. Raises ConfigError if its certificate is not trusted."""
        try:
            self.statuses()
        except httpx.TransportError as error:
            self._check_trust(error)
            return False
        except httpx.HTTPStatusError:
            return False
        return True

    def register(self, keys: Mapping[str, bytes]) -> list[str]:
        """Register these nodes and unregister all others; return a message for each rejected one.

        `keys` has the public key of each node, as PEM, by node name. Flower registers a key only
        once: to register a key again, or under another name, the server must be restarted. Raises
        HTTPError if the server does not respond.
        """
        wanted: dict[bytes, str] = {}
        refused = []
        for name, key in keys.items():
            if key in wanted:
                refused.append(f"{name} has the same key as {wanted[key]}; make a key of its own")
            wanted.setdefault(key, name)
        with self._control() as client:
            listed = client.ListNodes(ListNodesRequest()).nodes_info
            known = {info.public_key: info for info in listed if info.status != "unregistered"}
            for key, info in known.items():
                if wanted.get(key) != info.name:
                    # Flower fails for a node that never connected, but unregisters it.
                    with suppress(httpx.HTTPStatusError):
                        client.UnregisterNode(UnregisterNodeRequest(node_id=info.node_id))
            for key, name in wanted.items():
                if key in known and known[key].name == name:
                    continue
                try:
                    client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
                except httpx.HTTPStatusError as error:
                    refused.append(
                        f"{name} was registered before, or Flower does not accept its key "
                        f"({error.response.status_code}); restart the server to admit this key "
                        "again"
                    )
        return refused

    @contextmanager
    def grid(self) -> Iterator[HttpGrid]:
        """Start a Flower run and yield its Grid.

        Raises ServerGoneError if the server cannot be reached, ConfigError if it rejects the token.
        """
        from flwr.superlink.grid import HttpGrid  # a node does without its database

        silence_flower()
        try:
            run_id = self._start()
            token = self._acquire(run_id)
        except httpx.HTTPStatusError as error:
            if not _is_final(error):
                raise self._gone(error) from None
            raise ConfigError(
                f"the server at {self.address} refuses to start a run "
                f"({error.response.status_code}). Use the folder of that server, as its owner."
            ) from None
        except httpx.TransportError as error:
            self._check_trust(error)
            raise self._gone(error) from None
        grid = HttpGrid(self.address, self.ca is None, self._certificate, token=token)
        grid._retry_invoker.max_time = _RETRY_SECONDS
        # Flower's default interrupts the process if the server does not know the run any more.
        grid._retry_invoker.should_giveup = _is_final
        with without_proxy(split_address(self.address)[0]):
            client = grid._runtime_client
        limit_responses(client, self.limits, {TOKEN_HEADER: self.token})
        try:
            got = client.PullTaskInput(PullTaskInputRequest())
        except httpx.HTTPError as error:
            grid.close()
            raise self._gone(error) from None
        TaskIdentity.task_id, TaskIdentity.run_id = got.task_id, got.run.run_id
        TaskIdentity.node_id = got.context.node_id
        grid.set_run(run_from_proto(got.run))
        heartbeats = HeartbeatSender(partial(_send_heartbeat, client))
        heartbeats.start()
        status = SubStatus.FAILED
        try:
            yield grid
            status = SubStatus.COMPLETED
        finally:
            heartbeats.stop()
            grid._retry_invoker.max_tries = 1
            # Without this, the server ends the run only once its heartbeats are missing.
            with suppress(httpx.HTTPError, RuntimeError):
                client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=""))
            grid.close()

    def _gone(self, error: httpx.HTTPError) -> ServerGoneError:
        return ServerGoneError(
            f"the server at {self.address} does not respond: {error}. Start it with "
            "`fedshot flower server`."
        )

    def _check_trust(self, error: httpx.TransportError) -> None:
        cause = tls_error(error)
        if isinstance(cause, ssl.SSLCertVerificationError) and self.ca is not None:
            raise ConfigError(
                f"the certificate of the server at {self.address} is not trusted: {cause}. Make "
                "one for the address that it listens on and for every name that nodes use, "
                "with `fedshot flower keys --server ADDRESS NAME... --folder "
                f"{typed(self.ca.parent)}`, "
                "and restart the server."
            ) from None

    def _start(self) -> int:
        from flwr.cli.build import build_fab_from_files

        fab, _ = build_fab_from_files(
            {"pyproject.toml": _APP, "LICENSE": b"Apache-2.0\n", "fedshot_app.py": b"\n"}
        )
        with self._control() as client:
            return int(client.StartRun(StartRunRequest(fab=Fab(content=fab))).run_id)

    def _acquire(self, run_id: int) -> str:
        """Claim the SuperLink's task of starting this run's ServerApp; return the task's token.

        Tasks of other runs, whose process died before it claimed them, are skipped.
        """
        with self._client(RuntimeHttpClient, "SuperExec") as client:
            for _ in range(100):
                wanted = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
                got = client.AcquireTask(wanted)
                if got.token and got.task.run_id == run_id:
                    return str(got.token)
                time.sleep(0.0 if got.token else 0.1)
        raise ServerGoneError(
            f"the server at {self.address} does not assign the run's task. Restart it."
        )

    def _control(self) -> Any:
        return self._client(ControlHttpClient, "flwr CLI")

    def _client(self, kind: Any, component: str) -> Any:
        interceptors = [RuntimeVersionHttpInterceptor(component_name=component)]
        with without_proxy(split_address(self.address)[0]):
            client = kind.from_server_address(
                self.address, self.ca is None, self._certificate, interceptors=interceptors
            )
        limit_responses(client, self.limits, {TOKEN_HEADER: self.token})
        return client

    @property
    def _certificate(self) -> bytes | None:
        return None if self.ca is None else self.ca.read_bytes()


def _is_final(error: Exception) -> bool:
    """Whether repeating the request would give the same error."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code not in _TEMPORARY
    return isinstance(tls_error(error), ssl.SSLCertVerificationError)


def _send_heartbeat(client: RuntimeHttpClient) -> bool:
    try:
        client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
    except (httpx.HTTPError, RuntimeError):
        return False
    return True
