"""The arguments of `fedshot flower`, in a module without heavy imports: `--help` is instant."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Add = Callable[..., argparse.ArgumentParser]

_PORT = 9092


def add_flower(commands: Commands, add: Add) -> None:
    """Add the command `flower` and its actions to the parser."""
    text = "train across machines, on Flower"
    flower = commands.add_parser("flower", help=text, description=f"{text[0].upper()}{text[1:]}.")
    actions = flower.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(
        name: str, help: str, *shared: str, settings: bool = False
    ) -> argparse.ArgumentParser:
        return add(actions, name, help, "flower", *shared, settings=settings)

    usual = ("config", "out", "resume", "quiet", "json", "data-dir", "tracker")
    text = "train on the nodes of a server, then test"
    run = action("run", text, *usual, settings=True)
    run.add_argument(
        "--folder", type=Path, default=Path("flower"), help="folder of the server (flower)"
    )
    run.add_argument(
        "--tests",
        type=Path,
        help="test data from `partition` or `pack`, used instead of the dataset",
    )
    text = "start a server and nodes on this machine, train, and stop them"
    up = action("up", text, *usual, settings=True)
    up.add_argument("--nodes", type=int, default=3, help="number of nodes (3)")
    for command in (run, up):
        command.add_argument(
            "--deadline", type=float, default=600.0,
            help="seconds that an exchange waits for replies; later replies are lost (600)",
        )  # fmt: skip
        command.add_argument(
            "--wait",
            type=float,
            default=120.0,
            help="seconds to wait until all clients are connected (120)",
        )
        command.add_argument(
            "--norms", choices=("off", "warn", "clip", "refuse"), default="warn",
            help="what to do with an update whose norm is much larger than others' (warn)",
        )  # fmt: skip
        command.add_argument(
            "--norm-multiple",
            type=float,
            default=10.0,
            help="limit of --norms, as a multiple of the cohort's median norm (10)",
        )
    _add_files(action)
    keys = action("keys", "make a server's certificates or a node's key, or admit a node")
    keys.add_argument(
        "--server", nargs="+", metavar="HOST", help="host names and IP addresses of the server"
    )
    keys.add_argument(
        "--folder", type=Path, default=Path("flower"), help="folder of the server (flower)"
    )
    keys.add_argument(
        "--days", type=int, default=365, help="days that the server's certificate is valid (365)"
    )
    keys.add_argument("--node", type=Path, metavar="FILE", help="where to write a node's key")
    keys.add_argument(
        "--admit", type=Path, metavar="FILE", help=".pub file of a node that the server admits"
    )
    keys.add_argument("--clients", help="numbers of the clients on that node, such as 0-3,7")
    keys.add_argument(
        "--examples", type=int,
        help="largest number of examples that one of these clients may report as its weight",
    )  # fmt: skip
    server = action("server", "run a server, until Ctrl-C")
    server.add_argument(
        "--folder", type=Path, default=Path("flower"), help="folder of the server (flower)"
    )
    server.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    server.add_argument("--port", type=int, default=_PORT, help=f"port to listen on ({_PORT})")
    node = action("node", "serve the clients of this machine, until Ctrl-C")
    node.add_argument("--server", required=True, metavar="HOST:PORT", help="address of the server")
    node.add_argument("--ca", type=Path, help="the server's ca.pem")
    node.add_argument("--key", type=Path, help="the node's own key")
    node.add_argument("--data", type=Path, required=True, help="folder of the clients' files")
    node.add_argument("--clients", help="clients to serve, such as 0-3,7 (all)")
    node.add_argument(
        "--state", type=Path, default=Path("node"), help="folder of the node's state (node)"
    )
    node.add_argument("--name", help="name of the node (that of the key file)")
    node.add_argument("--policy", type=Path, help="YAML file that limits what a server may ask for")
    node.add_argument(
        "--peers", type=Path,
        help="folder with the .pub and .json of every node: sign keys of secure sums, and accept "
        "only theirs",
    )  # fmt: skip
    node.add_argument(
        "--device", default="cpu", help="device of the clients: cpu, cuda, cuda:0 or mps (cpu)"
    )
    node.add_argument(
        "--workers", type=int, default=1, help="number of clients that run at once (1)"
    )
    for command in (run, up, server, node):
        command.add_argument(
            "--metrics", metavar="HOST:PORT",
            help="serve metrics for Prometheus and /healthz, such as at 127.0.0.1:9464 (off)",
        )  # fmt: skip
        command.add_argument(
            "--log-level", choices=("debug", "info", "warning", "error"), default="info",
            help="least level of the lines on stderr (info)",
        )  # fmt: skip
        command.add_argument(
            "--log-format", choices=("text", "json"), default="text",
            help="lines on stderr: plain text, or JSON with time, level and message (text)",
        )  # fmt: skip
    for command in (server, node):
        command.add_argument("--most-mb", type=int, default=512, help="largest message in MB (512)")
        command.add_argument(
            "--insecure", action="store_true", help="use no TLS and no keys, on any address"
        )


def _add_files(action: Add) -> None:
    """Add the actions `partition` and `pack`, which write the files that nodes and servers read."""
    text = "write the data of all clients, one folder for each node"
    partition = action("partition", text, "config", "data-dir", settings=True)
    partition.add_argument("--nodes", type=int, default=3, help="number of nodes (3)")
    partition.add_argument(
        "--to", type=Path, required=True, help="folder to write these folders in"
    )
    text = "write one client's data, or the server's test data, from the dataset on this machine"
    pack = action("pack", text, "config", "data-dir", settings=True)
    pack.add_argument("--client", type=int, metavar="N", help="number of the client")
    pack.add_argument(
        "--tests", action="store_true", help="write the server's test data, of novel classes"
    )
    pack.add_argument("--to", type=Path, required=True, help="folder to write")
