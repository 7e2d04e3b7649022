"""A federation on one machine: what `up` starts, and takes down again.

It is the real one: certificates, keys and processes as on hosts of their own, on loopback.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from fedshot.core.console import tell
from fedshot.core.errors import ConfigError, FedshotError
from fedshot.deploy.flower.admission import admit
from fedshot.deploy.flower.codec import LIMITS, Limits
from fedshot.deploy.flower.keys import (
    authority,
    load_node_key,
    load_public_keys,
    make_node_key,
    make_server_keys,
    public_bytes,
)
from fedshot.deploy.flower.operator import Operator
from fedshot.deploy.flower.processes import Child, Children
from fedshot.deploy.flower.server_folder import (
    CERTIFICATE,
    ServerFolder,
    check_free,
    free_port,
    joined,
    own_folder,
)
from fedshot.deploy.flower.shards import write_shards
from fedshot.deploy.flower.superlink import TOKEN
from fedshot.runs.prepare import PreparedRun

PROGRAM = [sys.executable, "-P", "-m", "fedshot.cli.main"]  # -P: no modules of the folder
_START = 120.0  # seconds for a process to begin its work


class StartError(FedshotError):
    """A process of a federation that did not come up."""


def prepare(folder: Path, setting: PreparedRun, nodes: int, *, begun: bool = False) -> None:
    """Make keys and deal the clients' data, where that has not been done yet.

    Unless the run has begun, data that lie there are of another, and are dealt again.
    Raises ConfigError for more nodes than there are clients to live on them.
    """
    for i in range(nodes):
        if not share(setting, nodes, i):
            raise ConfigError(
                f"--nodes is {nodes}, and no client would live on node {i}: there are "
                f"{len(setting.clients)}. Choose fewer nodes."
            )
    home = ServerFolder(folder / "server")
    own_folder(folder)
    own_folder(home.folder)
    if not (home.folder / CERTIFICATE).exists():
        make_server_keys(home.folder, ["localhost", "127.0.0.1"])
    home.nodes.mkdir(exist_ok=True)
    for stale in (*home.nodes.glob("*.pub"), *home.nodes.glob("*.json")):
        stale.unlink()
    for old in folder.glob("node-*/data" if not begun else "node-*/data.partial"):
        shutil.rmtree(old)
    for i in range(nodes):
        own = node_folder(folder, i)
        own_folder(own)
        if not (own / "node.key").exists():
            (own / "node.pub").unlink(missing_ok=True)
            make_node_key(own / "node.key")
        public = public_bytes(load_node_key(own / "node.key").public_key())
        here = ",".join(map(str, share(setting, nodes, i)))
        admit(home.nodes, f"node-{i}", public, here, None)
        data, partial = own / "data", own / "data.partial"
        if not data.exists():
            shutil.rmtree(partial, ignore_errors=True)
            write_shards(partial, setting.dataset, setting.deal.train, share(setting, nodes, i))
            partial.replace(data)


def share(setting: PreparedRun, nodes: int, i: int) -> list[int]:
    """Return the clients of node i: every nodes-th."""
    return [client for client in setting.clients if client % nodes == i]


def node_folder(folder: Path, i: int) -> Path:
    """Return the folder of node i."""
    return folder / f"node-{i}"


def node_words(folder: Path, i: int, address: str) -> list[str]:
    """Return the words that start node i."""
    own = node_folder(folder, i)
    return [
        *PROGRAM, "flower", "node", "--server", address,
        "--ca", str(ServerFolder(folder / "server").ca), "--key", str(own / "node.key"),
        "--data", str(own / "data"), "--state", str(own / "state"), "--name", f"node-{i}",
    ]  # fmt: skip


@contextmanager
def federation(
    folder: Path,
    nodes: int,
    said: Callable[[str], None],
    limits: Limits = LIMITS,
    env: Mapping[str, str] = {},
) -> Iterator[tuple[ServerFolder, Children]]:
    """Start a server and nodes in a folder that was prepared, and take them down again.

    `env` is what the environment of the nodes adds. Logs are in logs/ below the folder. Raises
    StartError when one of them does not come up.
    """
    home = ServerFolder(folder / "server")
    with Children() as children:
        port = free_port()
        start_server(children, home, "127.0.0.1", port, limits, log=folder / "logs" / "server.log")
        address = joined("127.0.0.1", port)
        for i in range(nodes):
            log = folder / "logs" / f"node-{i}.log"
            children.start(f"node-{i}", node_words(folder, i, address), log, env)
        said(f"a server and {nodes} nodes on {address}; logs in {folder / 'logs'}")
        yield home, children


def start_server(
    children: Children, home: ServerFolder, host: str, port: int, limits: Limits, *, log: Path,
    secure: bool = True,
) -> Child:  # fmt: skip
    """Start a SuperLink, wait until it answers, and register the nodes.

    Raises StartError when it does not, and ConfigError where another program has the port, or the
    certificate is another host's.
    """
    check_free(host, port)  # before the folder says that a server is there
    words = home.command(host, port, secure=secure, limits=limits)
    env = {TOKEN: home.token(), "FLWR_HOME": str(home.folder / "flwr")}
    home.write_address(host, port, secure=secure, limits=limits)
    child = children.start("server", words, log, env)
    operator = operator_of(home)
    until = time.monotonic() + _START
    while not operator.ready():
        if child.ended or time.monotonic() > until:
            raise StartError(f"the server did not come up. Its log ends with:\n{child.tail}")
        time.sleep(0.1)
    if secure:
        for text in operator.register(load_public_keys(home.nodes)):
            tell(f"node {text}")
    return child


class Registrar:
    """Lets the nodes take part whose public keys lie in a server's folder, and no others.

    Whatever is put there, the server goes on: what cannot be read is named once, and those who were
    known stay known until it can.
    """

    def __init__(self, home: ServerFolder, tell: Callable[[str], None]) -> None:
        self._home, self._tell = home, tell
        self.known = load_public_keys(home.nodes)
        self._told = ""

    def look(self) -> None:
        """Take in what has changed."""
        try:
            if self.known and not self._home.nodes.is_dir():
                raise ConfigError(f"{self._home.nodes} is no folder any more. Put it back.")
            now = load_public_keys(self._home.nodes)
            if now == self.known:
                self._told = ""
                return
            refused = operator_of(self._home).register(now)
        except (FedshotError, OSError, ValueError, httpx.HTTPError) as error:
            if str(error) != self._told:
                self._tell(f"the nodes are left as they are: {error}")
            self._told = str(error)
            return
        for text in refused:
            self._tell(f"node {text}")
        self._tell(f"nodes known: {', '.join(now) or 'none'}")
        self.known, self._told = now, ""


def operator_of(home: ServerFolder) -> Operator:
    """Return the operator of a server on this machine."""
    address, secure, limits = home.address()
    if secure:
        authority(home.ca)  # is it a certificate at all?
    return Operator(address, home.token(), home.ca if secure else None, limits)
