"""A federation on one machine, which `fedshot flower up` starts and stops.

It uses the certificates, keys and processes of a real deployment, on loopback.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from fedshot.core.console import tell, warning
from fedshot.core.errors import ConfigError, FedshotError
from fedshot.core.serialised import LIMITS, CodecError, Limits
from fedshot.deploy.flower.data_files import shares_of, write_shards
from fedshot.deploy.flower.keys import (
    load_authority,
    load_node_key,
    load_public_keys,
    make_node_key,
    make_server_keys,
    public_bytes,
)
from fedshot.deploy.flower.node_registry import admit
from fedshot.deploy.flower.operator import Operator
from fedshot.deploy.flower.processes import Child, ChildError, Children
from fedshot.deploy.flower.server_folder import (
    CERTIFICATE,
    ServerFolder,
    check_free,
    free_port,
    join_address,
    make_private_folder,
)
from fedshot.deploy.flower.superlink import TOKEN
from fedshot.runs.prepare import PreparedRun

# -P keeps modules of the working folder from being imported.
PROGRAM = [sys.executable, "-P", "-m", "fedshot.cli.main"]
_START_SECONDS = 120.0


def prepare(folder: Path, prepared: PreparedRun, nodes: int, *, begun: bool = False) -> None:
    """Make the missing keys of a federation and write its client files.

    If the run has `begun`, existing client files are kept; otherwise they are replaced, since they
    may belong to another configuration. Raises ConfigError for more nodes than clients.
    """
    shares = shares_of(prepared.clients, nodes)
    server_folder = ServerFolder(folder / "server")
    make_private_folder(folder)
    make_private_folder(server_folder.folder)
    _policy(folder).write_text("attack: true\n", encoding="utf-8")
    if not (server_folder.folder / CERTIFICATE).exists():
        make_server_keys(server_folder.folder, ["localhost", "127.0.0.1"])
    if server_folder.nodes.exists():
        shutil.rmtree(server_folder.nodes)  # recreated by `admit` below
    for old in folder.glob("node-*/data" if not begun else "node-*/data.partial"):
        shutil.rmtree(old)
    for i, clients in enumerate(shares):
        node = folder / f"node-{i}"
        make_private_folder(node)
        if not (node / "node.key").exists():
            (node / "node.pub").unlink(missing_ok=True)
            make_node_key(node / "node.key")
        public = public_bytes(load_node_key(node / "node.key").public_key())
        admit(server_folder.nodes, node.name, public, ",".join(map(str, clients)), None)
        data, partial = node / "data", node / "data.partial"
        if not data.exists():
            if partial.exists():
                shutil.rmtree(partial)
            write_shards(partial, prepared.dataset, prepared.client_split.train, clients)
            partial.replace(data)


def node_command(folder: Path, i: int, address: str, device: str = "cpu") -> list[str]:
    """Return the command line that starts node i."""
    node = folder / f"node-{i}"
    return [
        *PROGRAM, "flower", "node", "--server", address,
        "--ca", str(ServerFolder(folder / "server").ca), "--key", str(node / "node.key"),
        "--data", str(node / "data"), "--state", str(node / "state"), "--name", node.name,
        "--device", device, "--policy", str(_policy(folder)),
    ]  # fmt: skip


def _policy(folder: Path) -> Path:
    return folder / "policy.yaml"


@contextmanager
def federation(
    folder: Path,
    nodes: int,
    tell: Callable[[str], None],
    env: Mapping[str, str] = {},
    device: str = "cpu",
) -> Iterator[tuple[ServerFolder, Children]]:
    """Run a server and nodes in a folder made by `prepare`; logs go to logs/ in the folder.

    `env` adds to the environment of the nodes, which compute on `device`. Raises ChildError if the
    server does not start.
    """
    server_folder = ServerFolder(folder / "server")
    with Children() as children:
        port = free_port()
        log = folder / "logs" / "server.log"
        start_server(children, server_folder, "127.0.0.1", port, LIMITS, log=log)
        address = join_address("127.0.0.1", port)
        for i in range(nodes):
            log = folder / "logs" / f"node-{i}.log"
            children.start(f"node-{i}", node_command(folder, i, address, device), log, env)
        tell(f"a server and {nodes} nodes on {address}; logs in {folder / 'logs'}")
        yield server_folder, children


def start_server(
    children: Children, server_folder: ServerFolder, host: str, port: int, limits: Limits, *,
    log: Path, secure: bool = True,
) -> Child:  # fmt: skip
    """Start a SuperLink, wait until it responds, and register the nodes.

    Raises ChildError if the server does not start or does not register them, ConfigError if the
    port is taken or the certificate is for another host.
    """
    command = server_folder.command(host, port, secure=secure, limits=limits)
    check_free(host, port)  # before server.json announces the server
    env = {
        TOKEN: server_folder.token(),
        "FLWR_HOME": str(server_folder.folder / "flwr"),
        "MALLOC_MMAP_THRESHOLD_": str(1 << 20),  # glibc then returns freed parts of messages
    }
    server_folder.write_address(host, port, secure=secure, limits=limits)
    child = children.start("server", command, log, env)
    operator = operator_of(server_folder)
    until = time.monotonic() + _START_SECONDS
    while not operator.ready():
        if child.ended or time.monotonic() > until:
            raise ChildError(child, "the server did not start. Its log ends with")
        time.sleep(0.1)
    if secure:
        keys = load_public_keys(server_folder.nodes)
        try:
            refused = operator.register(keys)
        except (httpx.HTTPError, CodecError) as error:
            why = str(error) or type(error).__name__
            text = (
                f"the server did not register the nodes: {why}. Start it again. Its log ends with"
            )
            raise ChildError(child, text) from None
        for text in refused:
            tell(warning(f"node {text}"))
    return child


class Registrar:
    """Keeps the registered nodes equal to the public keys in a server's folder.

    An error in the folder does not stop the server. It is logged once, and the registered nodes
    stay as they are until it is fixed.
    """

    def __init__(self, server_folder: ServerFolder, tell: Callable[[str], None]) -> None:
        self._server_folder, self._tell = server_folder, tell
        self.known = load_public_keys(server_folder.nodes)
        self._last_error = ""

    def update(self) -> None:
        """Update the registered nodes if the public keys of the server's folder have changed."""
        nodes = self._server_folder.nodes
        try:
            if self.known and not nodes.is_dir():
                raise ConfigError(f"{nodes} is not a folder any more. Put it back.")
            now = load_public_keys(nodes)
            changed = now != self.known
            refused = operator_of(self._server_folder).register(now) if changed else []
        except (FedshotError, OSError, ValueError, httpx.HTTPError) as error:
            if str(error) != self._last_error:
                self._tell(warning(f"registered nodes unchanged: {error}"))
            self._last_error = str(error)
            return
        for text in refused:
            self._tell(warning(f"node {text}"))
        if changed:
            self._tell(f"registered nodes: {', '.join(now) or 'none'}")
        self.known, self._last_error = now, ""


def operator_of(server_folder: ServerFolder) -> Operator:
    """Return the `Operator`, which controls a SuperLink, for a server on this machine."""
    address, secure, limits = server_folder.address()
    if secure:
        load_authority(server_folder.ca)  # raises ConfigError for an invalid file
    return Operator(address, server_folder.token(), server_folder.ca if secure else None, limits)
