"""The commands of `fedshot flower`: each takes the parsed options and returns an exit code.

A node is a process that holds the data of some clients and trains for them. `fedshot.cli.main`
checks that Flower is installed before it imports this module.
"""

from __future__ import annotations

import argparse
import socket
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedshot.cli.train import chosen_config, config_to_resume, finish
from fedshot.config.load import Config
from fedshot.core.console import at_level, say, tell, warning
from fedshot.core.devices import devices_of
from fedshot.core.errors import ConfigError
from fedshot.core.extras import require
from fedshot.core.locks import only_one
from fedshot.core.regular_files import real_path
from fedshot.core.serialised import Limits
from fedshot.core.text import ranges
from fedshot.data.files.places import find_data_dir
from fedshot.data.sources.embedding import TextOptions, reading_digest
from fedshot.data.tokens import Tokens
from fedshot.deploy.flower import local
from fedshot.deploy.flower.connection import Connection
from fedshot.deploy.flower.data_files import (
    ServerTestRun,
    check_apart,
    read_shards,
    shares_of,
    write_server_tests,
    write_shards,
)
from fedshot.deploy.flower.flower_runs import Deployment, open_experiment
from fedshot.deploy.flower.keys import (
    CA_KEY,
    Peers,
    Verifier,
    fingerprint,
    load_node_key,
    load_public_key,
    make_node_key,
    make_server_keys,
    new_key,
)
from fedshot.deploy.flower.messages import WireMessage, refusal
from fedshot.deploy.flower.node import NodeLoop
from fedshot.deploy.flower.node_registry import admit, parse_clients
from fedshot.deploy.flower.packing import pack_client, pack_tests
from fedshot.deploy.flower.policy import Policy
from fedshot.deploy.flower.processes import Children, exit_with_parent
from fedshot.deploy.flower.server_folder import (
    CA,
    KEY,
    ServerFolder,
    check_secure,
    exposure_notice,
    join_address,
    make_private_folder,
    split_address,
)
from fedshot.deploy.flower.wire import silence_flower
from fedshot.deploy.flower.worker import Worker
from fedshot.fleets.influence import check_norms
from fedshot.methods.user_methods import for_children
from fedshot.runs import run_folder
from fedshot.runs.prepare import FederatedDataset, PreparedRun, read_data
from fedshot.runs.trackers.tracking import check as check_tracker

_MOST_MB = 1 << 20


def run(options: argparse.Namespace) -> int:
    """Train on the nodes that are connected to a server, then test."""
    return _begin(options, server=str(real_path(options.folder)), nodes=0)


def up(options: argparse.Namespace) -> int:
    """Start a server and nodes on this machine, train on them, test, and stop them."""
    _check("nodes", options.nodes, 1, 100)
    return _begin(options, server="", nodes=options.nodes)


def _begin(options: argparse.Namespace, *, server: str, nodes: int) -> int:
    chosen = chosen_config(options)
    folder = options.out / chosen.name
    tests = str(real_path(options.tests)) if server and options.tests else ""
    check_norms(options.norms, options.norm_multiple)
    deployment = Deployment.new(
        server, nodes, options.deadline,
        tests=tests, norms=options.norms, norm_multiple=options.norm_multiple,
    )  # fmt: skip
    if run_folder.begun(folder):
        chosen = config_to_resume(options, folder, chosen)
        deployment = deployment.of_begun(folder)
    options.run_folder = folder
    return _train(options, chosen, folder, deployment)


def resume(options: argparse.Namespace) -> int:
    """Resume a run whose clients are on nodes."""
    folder = options.run_folder = options.folder
    held = run_folder.configuration(folder)
    options.wait = 60.0
    return _train(options, held, folder, Deployment.read(folder))


def _train(
    options: argparse.Namespace, chosen: Config, folder: Path, deployment: Deployment
) -> int:
    if deployment.tests:
        prepared: PreparedRun = ServerTestRun(chosen, deployment.tests)
    else:
        prepared = PreparedRun(chosen, options.data_dir)
    if options.tracker:
        check_tracker(options.tracker)
    if (chosen.run.cohort or len(prepared.clients)) == 1:
        tell("The cohort is one client, so the server sees that client's update, not an average.")
    log = (lambda _: None) if options.quiet else tell
    with ExitStack() as stack:
        metrics = None
        if getattr(options, "metrics", None):  # `resume` has no such option
            metrics = _metrics().RunMetrics()
            stack.enter_context(_metrics().serving(options.metrics, metrics, tell))
        if deployment.server:
            server_folder, watch = ServerFolder(Path(deployment.server)), lambda: None
        else:
            own = folder / "flower"
            local.prepare(own, prepared, deployment.nodes, begun=run_folder.begun(folder))
            env = for_children(chosen.settings["method"]["name"])
            server_folder, children = stack.enter_context(
                local.federation(own, deployment.nodes, log, env, chosen.run.device)
            )
            watch = children.check
        experiment = stack.enter_context(
            open_experiment(
                prepared, folder, deployment, server_folder, log, wait=options.wait, watch=watch,
                opened=metrics.watch if metrics else lambda *_: None,
            )
        )  # fmt: skip
        return finish(experiment, options, metrics.record if metrics else lambda _: None)


def partition(options: argparse.Namespace) -> int:
    """Write the data of all clients, one folder for each node, and the server's test data."""
    federated = FederatedDataset(chosen_config(options), options.data_dir)
    clients = federated.clients
    _check("nodes", options.nodes, 1, len(clients))
    make_private_folder(options.to)
    shares = shares_of(clients, options.nodes)
    check_apart(options.to, shares)
    for i, share in enumerate(shares):
        node = options.to / f"node-{i}"
        make_private_folder(node)
        write_shards(node, federated.dataset, federated.client_split.train, share)
        held, most = ranges(share), max(len(federated.client_split.train[c]) for c in share)
        say(
            f"{node}: {len(share)} clients; admit its key on the server with "
            f"--clients {held.replace(' ', '')} --examples {most}"
        )
    if federated.own_tests:  # tests on own examples need the clients' data
        tell("Clients are tested on their own examples: the server needs the whole dataset.")
        return 0
    write_server_tests(options.to / "server", federated)
    say(f"{options.to / 'server'}: the test data, for a server without the training data")
    return 0


def pack(options: argparse.Namespace) -> int:
    """Write one client's data, or the server's test data, from the dataset on this machine."""
    if options.tests == (options.client is not None):
        raise ConfigError("give --client with a number, or --tests for the server's test data.")
    chosen, dataset = read_data(chosen_config(options), options.data_dir)
    notes = {}
    if isinstance(dataset.x, Tokens) and isinstance(chosen.data, TextOptions):
        notes = {"words": reading_digest(chosen.data, find_data_dir(options.data_dir))}
    if options.tests:
        *remarks, summary = pack_tests(options.to, chosen, dataset, notes)
    else:
        *remarks, summary = pack_client(options.to, chosen, dataset, options.client, notes)
    for text in remarks:
        tell(text)
    say(f"{options.to}: {summary}")
    return 0


def keys(options: argparse.Namespace) -> int:
    """Make a server's certificates or a node's key, or admit a node to a server."""
    if sum(map(bool, (options.server, options.node, options.admit))) != 1:
        raise ConfigError(
            "give --server with its host names, --node with a file for its key, or --admit with "
            "the .pub file of a node."
        )
    if bool(options.admit) != bool(options.clients) or (options.examples and not options.admit):
        raise ConfigError(
            "--admit needs --clients, and only --admit takes --clients and --examples: `fedshot "
            "flower keys --admit hospital-a.pub --clients 0-3` admits a node with its clients."
        )
    if options.admit:
        name, public_key = options.admit.stem, load_public_key(options.admit)
        nodes = ServerFolder(options.folder).nodes
        admit(nodes, name, public_key, options.clients, options.examples)
        say(f"{nodes / name}.pub: node {name} holds clients {options.clients}")
        say(f"SHA-256 of {options.admit}: {fingerprint(options.admit)}")
        return 0
    if options.node:
        public = make_node_key(options.node)
        say(f"{options.node}: keep it on this machine")
        say(f"{public}: copy it to the server, for `fedshot flower keys --admit {public.name}`")
        say(f"SHA-256 of {public}: {fingerprint(public)}")
        return 0
    _check("days", options.days, 1, 3650)
    hosts = [*options.server, "localhost", "127.0.0.1"]
    make_server_keys(options.folder, list(dict.fromkeys(hosts)), options.days)
    (options.folder / "nodes").mkdir(exist_ok=True)
    say(f"{options.folder / CA}: copy it to every node; the rest stays here")
    say(f"SHA-256 of {options.folder / CA}: {fingerprint(options.folder / CA)}")
    return 0


def server(options: argparse.Namespace) -> int:
    """Run a server until it is stopped."""
    exit_with_parent()
    _check("most-mb", options.most_mb, 1, _MOST_MB)
    _check("port", options.port, 1, 65535)
    folder, limits = ServerFolder(options.folder), Limits(message=options.most_mb << 20)
    secure = not options.insecure
    make_private_folder(folder.folder)
    for name in (KEY, CA_KEY, "token"):
        if text := exposure_notice(folder.folder / name):
            tell(warning(text))
    with ExitStack() as stack:
        lock = stack.enter_context(only_one(folder.folder / ".lock", "runs a server"))
        metrics = None
        if options.metrics:
            metrics = _metrics().ServerMetrics(folder)
            stack.enter_context(_metrics().serving(options.metrics, metrics, tell))
        children = stack.enter_context(Children())
        log = folder.folder / "server.log"
        child = local.start_server(
            children, folder, options.host, options.port, limits, log=log, secure=secure
        )
        registrar = local.Registrar(folder, tell)
        nodes = f"{len(registrar.known)} registered nodes" if secure else "open to all nodes"
        say(f"listening on {options.host}:{options.port}, {nodes}; log in {log}")
        if metrics:
            metrics.watch(child)
        while not child.ended:
            time.sleep(1)
            lock.check()
            if secure:
                registrar.update()
    tell(at_level("error", f"the server has ended. Its log ends with:\n{child.tail}"))
    return 1


def node(options: argparse.Namespace) -> int:
    """Run a node for the clients of this machine until it is stopped."""
    exit_with_parent()
    silence_flower()
    _check("most-mb", options.most_mb, 1, _MOST_MB)
    _check("workers", options.workers, 1, 1024)
    _check_device(options.device, options.workers)
    host, port = split_address(options.server)
    address = join_address(host, port)
    check_secure(host, secure=bool(options.ca and options.key), insecure=options.insecure)
    if options.ca and not options.key:
        raise ConfigError("--ca needs --key. Make a key with `fedshot flower keys --node FILE`.")
    if options.peers and not options.key:
        raise ConfigError("--peers needs --key, which signs. Name the node's key.")
    check = Verifier(options.ca).check if options.ca else None
    limits = Limits(message=options.most_mb << 20)
    name = options.name or (options.key.stem if options.key else socket.gethostname())
    key = load_node_key(options.key) if options.key else new_key()
    clients = parse_clients(options.clients) if options.clients else None
    policy = Policy.read(options.policy) if options.policy else None
    peers = Peers(key, options.peers) if options.peers else None
    data = read_shards(options.data, clients)
    make_private_folder(options.state)
    if options.key and (text := exposure_notice(options.key)):
        tell(warning(text))
    with only_one(options.state / ".lock", "runs a node") as lock:
        worker = Worker(name, data, options.state, limits=limits, workers=options.workers,
                        device=options.device, tell=tell, policy=policy,
                        signatures=peers)  # fmt: skip
        tell(
            f"node {name}: {len(data.clients)} clients of {data.dataset.name}, on {options.device}"
        )
        connection = Connection(address, key, options.ca, options.state / "node.json", limits)
        if connection.proxy:
            tell(f"connecting to {address} through the proxy {connection.proxy}, which is set in "
                 "the environment")  # fmt: skip
        with closing(connection), ExitStack() as stack:
            loop = NodeLoop(
                connection, worker, limits, tell, address, check, lock.check, handled=_log_message
            )
            if options.metrics:
                metrics = _metrics().NodeMetrics(len(data.clients))
                stack.enter_context(_metrics().serving(options.metrics, metrics, tell))

                def handled(received: int, reply: WireMessage) -> None:
                    _log_message(received, reply)
                    metrics.handled(received, reply)

                loop = replace(loop, connected=metrics.connected, handled=handled)
            loop.run()
    return 0


def _log_message(received: int, reply: WireMessage) -> None:
    text = f"a message of {received:,} bytes: {refusal(reply) or 'answered'}, with {reply.nbytes:,}"
    tell(at_level("debug", f"{text} bytes in {reply.head.get('seconds', 0.0):.2f} s"))


def _metrics() -> Any:
    """Return the module of the metrics, whose package is needed for --metrics only."""
    require("flower", "--metrics", "prometheus_client")
    from fedshot.deploy.flower import metrics

    return metrics


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"--{name} is {value}; expected {least} to {most}.")


def _check_device(name: str, workers: int) -> None:
    """Raise ConfigError if torch does not see the device, or a GPU has more than one worker."""
    if len(devices_of(name, "--device")) > 1:
        raise ConfigError(
            f"--device is {name!r}; a node has one device. Start a node for each GPU."
        )
    if name != "cpu" and workers > 1:
        raise ConfigError(
            f"--workers is {workers} with --device {name!r}, but a GPU runs many clients at once "
            "with one worker. Leave --workers out."
        )
