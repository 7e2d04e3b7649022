"""The commands of `fedshot flower`: each takes the parsed options and returns an exit code."""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedshot.cli.train import chosen_config, finish, going_on
from fedshot.config.load import Config
from fedshot.core.console import say, tell
from fedshot.core.errors import ConfigError
from fedshot.deploy.flower import require_flower
from fedshot.methods.user_methods import for_children
from fedshot.runs import run_folder
from fedshot.runs.prepare import FederatedDataset, PreparedRun
from fedshot.runs.trackers.tracking import check as check_tracker

if TYPE_CHECKING:
    from fedshot.deploy.flower.flower_runs import Place

_MOST_MB = 1 << 20


def run(options: argparse.Namespace) -> int:
    """Train on the nodes of a server."""
    return _begin(options, server=str(options.folder.resolve()), nodes=0)


def up(options: argparse.Namespace) -> int:
    """Train on a federation on this machine."""
    _check("nodes", options.nodes, 1, 100)
    return _begin(options, server="", nodes=options.nodes)


def _begin(options: argparse.Namespace, *, server: str, nodes: int) -> int:
    require_flower()
    from fedshot.deploy.flower.flower_runs import Place
    from fedshot.fleets.influence import check_norms

    chosen = chosen_config(options)
    folder = options.out / chosen.name
    tests = str(options.tests.resolve()) if server and options.tests else ""
    check_norms(options.norms, options.norm_multiple)
    place = replace(
        Place.new(server, nodes, options.deadline, tests),
        norms=options.norms, norm_multiple=options.norm_multiple,
    )  # fmt: skip
    if run_folder.begun(folder):
        chosen = going_on(options, folder, chosen)
        place = place.of_begun(folder)
    options.run_folder = folder
    return _train(options, _setting(chosen, place, options), folder, place)


def _setting(chosen: Config, place: Place, options: argparse.Namespace) -> PreparedRun:
    if not place.tests:
        return PreparedRun(chosen, options.data_dir)
    from fedshot.deploy.flower.server_tests import ServerTestRun

    return ServerTestRun(chosen, place.tests)


def resume(options: argparse.Namespace) -> int:
    """Resume a run whose clients live on nodes."""
    require_flower()
    from fedshot.deploy.flower.flower_runs import Place

    folder = options.run_folder = options.folder
    held = run_folder.configuration(folder)
    options.wait = 60.0
    place = Place.read(folder)
    return _train(options, _setting(held, place, options), folder, place)


def _train(options: argparse.Namespace, setting: PreparedRun, folder: Path, place: Place) -> int:
    from fedshot.deploy.flower import local
    from fedshot.deploy.flower.flower_runs import opened
    from fedshot.deploy.flower.server_folder import ServerFolder

    if options.tracker:
        check_tracker(options.tracker)
    _refuse_rehearsal(setting.config)
    if (setting.config.run.cohort or len(setting.clients)) == 1:
        tell("A cohort is one client: the server sees its change itself, not a mean over clients.")
    said = _silent if options.quiet else tell
    watch: Callable[[], None] = _nothing
    with ExitStack() as stack:
        if place.server:
            home = ServerFolder(Path(place.server))
        else:
            own = folder / "flower"
            local.prepare(own, setting, place.nodes, begun=run_folder.begun(folder))
            env = for_children(setting.config.settings["method"]["name"])
            home, children = stack.enter_context(local.federation(own, place.nodes, said, env=env))
            watch = children.check
        experiment = stack.enter_context(
            opened(setting, folder, place, home, said, wait=options.wait, watch=watch)
        )
        return finish(experiment, options)


def _refuse_rehearsal(chosen: Config) -> None:
    if chosen.run.device != "cpu":
        raise ConfigError(
            f"run.device is {chosen.run.device!r}; nodes compute on their CPUs. Set it to 'cpu'."
        )
    if chosen.run.fleet == "vectorised":
        raise ConfigError(
            "run.fleet is 'vectorised'; nodes run clients one by one, which gives other "
            "bits. Set it to 'threads'."
        )


def deal(options: argparse.Namespace) -> int:
    """Write the files of the clients, in a folder for each node."""
    require_flower()
    from fedshot.deploy.flower.node_registry import ranges
    from fedshot.deploy.flower.server_folder import own_folder
    from fedshot.deploy.flower.server_tests import write_server_tests
    from fedshot.deploy.flower.shards import check_apart, write_shards

    arranged = FederatedDataset(chosen_config(options), options.data_dir)
    _check("nodes", options.nodes, 1, len(arranged.clients))
    own_folder(options.to)
    deals = [[c for c in arranged.clients if c % options.nodes == i] for i in range(options.nodes)]
    check_apart(options.to, deals)
    for i, clients in enumerate(deals):
        own_folder(options.to / f"node-{i}")
        write_shards(options.to / f"node-{i}", arranged.dataset, arranged.deal.train, clients)
        here, most = ranges(clients), max(len(arranged.deal.train[c]) for c in clients)
        say(
            f"{options.to / f'node-{i}'}: {len(clients)} clients; admit its key at the server with "
            f"--clients {here.replace(' ', '')} --examples {most}"
        )
    if arranged.own_tests:  # the server needs the data for these tests
        tell("Clients are tested on images of their own: start the server on the whole dataset.")
        return 0
    write_server_tests(options.to / "server", arranged)
    say(f"{options.to / 'server'}: the tests, for a server without the training data")
    return 0


def pack(options: argparse.Namespace) -> int:
    """Write the file of one client, or the server's tests, from the data on this host."""
    require_flower()
    from fedshot.data.files.places import find_data_dir
    from fedshot.data.sources.embedding import TextOptions, reading_digest
    from fedshot.data.tokens import Tokens
    from fedshot.deploy.flower.packing import pack_client, pack_tests

    if options.tests == (options.client is not None):
        raise ConfigError("give --client with its number, or --tests for what the server needs.")
    chosen = chosen_config(options)
    data_dir = find_data_dir(options.data_dir)
    dataset, notes = chosen.data.load(data_dir), {}
    if isinstance(dataset.x, Tokens) and isinstance(chosen.data, TextOptions):
        notes = {"words": reading_digest(chosen.data, data_dir)}
    if options.tests:
        told = pack_tests(options.to, chosen, dataset, notes)
    else:
        told = pack_client(options.to, chosen, dataset, options.client, notes)
    for text in told[:-1]:
        tell(text)
    say(f"{options.to}: {told[-1]}")
    return 0


def keys(options: argparse.Namespace) -> int:
    """Make the certificates of a server, or the key of a node."""
    require_flower()
    from fedshot.deploy.flower.admission import admit
    from fedshot.deploy.flower.keys import (
        fingerprint,
        load_public_key,
        make_node_key,
        make_server_keys,
    )
    from fedshot.deploy.flower.server_folder import CA, ServerFolder

    if sum(map(bool, (options.server, options.node, options.admit))) != 1:
        raise ConfigError(
            "give --server with its names, --node with the file of its key, or --admit with the "
            ".pub file of a node."
        )
    if bool(options.admit) != bool(options.clients) or (options.examples and not options.admit):
        raise ConfigError(
            "--clients goes with --admit: `fedshot flower keys --admit hospital-a.pub --clients "
            "0-3` lets a node take part, and tells which clients live there."
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
        say(f"{public}: bring it to the server, for `fedshot flower keys --admit {public.name}`")
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
    require_flower()
    from fedshot.core.locks import only_one
    from fedshot.deploy.flower.codec import Limits
    from fedshot.deploy.flower.keys import CA_KEY
    from fedshot.deploy.flower.local import Registrar, start_server
    from fedshot.deploy.flower.processes import Children, heed_leash
    from fedshot.deploy.flower.server_folder import CA, KEY, ServerFolder, own_folder, told_open

    heed_leash()
    _check("most-mb", options.most_mb, 1, _MOST_MB)
    _check("port", options.port, 1, 65535)
    home, limits = ServerFolder(options.folder), Limits(message=options.most_mb << 20)
    secure = not options.insecure
    if secure and not (home.folder / CA).exists():
        raise ConfigError(
            f"{home.ca} does not exist. Make it with `fedshot flower keys --server "
            f"{options.host} --folder {options.folder}`; --insecure does without, on loopback or "
            "where the network itself is safe."
        )
    own_folder(home.folder)
    for name in (KEY, CA_KEY, "token"):
        if text := told_open(home.folder / name):
            tell(text)
    with only_one(home.folder / ".lock", "runs a server"), Children() as children:
        log = home.folder / "server.log"
        child = start_server(children, home, options.host, options.port, limits, log=log,
                             secure=secure)  # fmt: skip
        door = Registrar(home, tell)
        there = f"{len(door.known)} nodes known" if secure else "open to all"
        say(f"listening on {options.host}:{options.port}, {there}; log in {log}")
        while not child.ended:
            time.sleep(1)
            if secure:
                door.look()
    tell(f"the server has ended. Its log ends with:\n{child.tail}")
    return 1


def node(options: argparse.Namespace) -> int:
    """Serve the clients of this machine until it is stopped."""
    require_flower()
    from fedshot.core.locks import only_one
    from fedshot.deploy.flower.admission import parse_clients
    from fedshot.deploy.flower.codec import Limits
    from fedshot.deploy.flower.connection import Connection
    from fedshot.deploy.flower.keys import Verifier, load_node_key, new_key
    from fedshot.deploy.flower.node import serve
    from fedshot.deploy.flower.policy import Policy
    from fedshot.deploy.flower.processes import heed_leash
    from fedshot.deploy.flower.server_folder import (
        check_secure,
        joined,
        own_folder,
        split,
        told_open,
    )
    from fedshot.deploy.flower.shards import read_shards
    from fedshot.deploy.flower.wire import be_quiet
    from fedshot.deploy.flower.worker import Worker

    heed_leash()
    be_quiet()
    _check("most-mb", options.most_mb, 1, _MOST_MB)
    _check("workers", options.workers, 1, 1024)
    host, port = split(options.server)
    check_secure(host, secure=bool(options.ca and options.key), insecure=options.insecure)
    if options.ca and not options.key:
        raise ConfigError("--ca without --key: make a key with `fedshot flower keys --node FILE`.")
    if options.ca and not options.ca.is_file():
        raise ConfigError(f"{options.ca} is no file. Bring ca.pem from the server's folder.")
    check = Verifier(options.ca).check if options.ca else None
    limits = Limits(message=options.most_mb << 20)
    name = options.name or (options.key.stem if options.key else socket.gethostname())
    key = load_node_key(options.key) if options.key else new_key()
    clients = parse_clients(options.clients) if options.clients else None
    policy = Policy.read(options.policy) if options.policy else None
    holdings = read_shards(options.data, clients)
    own_folder(options.state)
    if options.key and (text := told_open(options.key)):
        tell(text)
    with only_one(options.state / ".lock"):
        worker = Worker(name, holdings, options.state, limits=limits, workers=options.workers,
                        tell=tell, policy=policy)  # fmt: skip
        tell(f"node {name}: {len(holdings.clients)} clients of {holdings.dataset.name}")
        link = Connection(joined(host, port), key, options.ca, options.state / "node.json", limits)
        if link.proxy:
            tell(f"{joined(host, port)} is reached by the proxy {link.proxy} of the environment")
        try:
            serve(link, worker, limits, tell, joined(host, port), check)
        finally:
            link.close()
    return 0


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"--{name} is {value}; expected {least} to {most}.")


def _nothing() -> None:
    pass


def _silent(text: str) -> None:
    del text
