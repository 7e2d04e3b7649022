"""A federation on one machine: what `up` starts, and takes down again.

It is the real one: certificates, keys and processes as on hosts of their own, on loopback.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedshot.deploy.flower.codec import LIMITS, Limits
from fedshot.deploy.flower.home import Home, free_port, joined
from fedshot.deploy.flower.keys import (
    CERTIFICATE,
    load_public_keys,
    make_node_key,
    make_server_keys,
)
from fedshot.deploy.flower.operator import Operator
from fedshot.deploy.flower.processes import Child, Children
from fedshot.deploy.flower.shards import write_shards
from fedshot.deploy.flower.superlink import TOKEN
from fedshot.errors import FedshotError
from fedshot.setting import Setting

PROGRAM = [sys.executable, "-m", "fedshot.cli"]
_START = 120.0  # seconds for a process to begin its work


class StartError(FedshotError):
    """A process of a federation that did not come up."""


def prepare(folder: Path, setting: Setting, nodes: int) -> None:
    """Make keys and deal the clients' data, where that has not been done yet."""
    home = Home(folder / "server")
    if not (home.folder / CERTIFICATE).exists():
        make_server_keys(home.folder, ["localhost", "127.0.0.1"])
    home.nodes.mkdir(exist_ok=True)
    for i in range(nodes):
        own = node_folder(folder, i)
        public = home.nodes / f"node-{i}.pub"
        if not (own / "node.key").exists():
            public.write_bytes(make_node_key(own / "node.key").read_bytes())
        if not (own / "data").exists():
            write_shards(
                own / "data", setting.dataset, setting.deal.train, share(setting, nodes, i)
            )


def share(setting: Setting, nodes: int, i: int) -> list[int]:
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
        "--ca", str(Home(folder / "server").ca), "--key", str(own / "node.key"),
        "--data", str(own / "data"), "--state", str(own / "state"), "--name", f"node-{i}",
    ]  # fmt: skip


@contextmanager
def federation(
    folder: Path, nodes: int, tell: Callable[[str], None], limits: Limits = LIMITS
) -> Iterator[tuple[Home, Children]]:
    """Start a server and nodes in a folder that was prepared, and take them down again.

    Logs are in logs/ below the folder. Raises StartError when one of them does not come up.
    """
    home = Home(folder / "server")
    with Children() as children:
        port = free_port()
        start_server(children, home, "127.0.0.1", port, limits, log=folder / "logs" / "server.log")
        address = joined("127.0.0.1", port)
        for i in range(nodes):
            log = folder / "logs" / f"node-{i}.log"
            children.start(f"node-{i}", node_words(folder, i, address), log)
        tell(f"a server and {nodes} nodes on {address}; logs in {folder / 'logs'}")
        yield home, children


def start_server(
    children: Children, home: Home, host: str, port: int, limits: Limits, *, log: Path,
    secure: bool = True,
) -> Child:  # fmt: skip
    """Start a SuperLink, wait until it answers, and register the nodes.

    Raises StartError when it does not.
    """
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
        operator.register(load_public_keys(home.nodes))
    return child


def operator_of(home: Home) -> Operator:
    """Return the operator of a server on this machine."""
    address, secure, limits = home.address()
    return Operator(address, home.token(), home.ca if secure else None, limits)
