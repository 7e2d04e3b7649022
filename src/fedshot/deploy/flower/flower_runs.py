"""Runs whose clients are on nodes: code shared by the commands `run`, `up` and `resume`.

flower.json in the run's folder holds what a resumed run needs: the run's id, the number of its last
start, and where its server is.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from fedshot.core import records, storage, tree
from fedshot.core.errors import AbsentError, ConfigError
from fedshot.core.machine import keep_freed_memory
from fedshot.core.records import Whole
from fedshot.core.text import ranges, typed
from fedshot.deploy.flower.data_files import ServerTestRun
from fedshot.deploy.flower.fleet import FlowerFleet
from fedshot.deploy.flower.keys import Signer
from fedshot.deploy.flower.local import operator_of
from fedshot.deploy.flower.messaging import Messenger
from fedshot.deploy.flower.node_registry import read_entries
from fedshot.deploy.flower.server_folder import ServerFolder, make_private_folder
from fedshot.deploy.flower.setup import Setup
from fedshot.fleets.attacks import Collusion
from fedshot.fleets.client_checks import checked_init_client
from fedshot.fleets.client_times import ClockOptions
from fedshot.fleets.influence import Influence, NormPolicy
from fedshot.privacy.differential import ExampleLevel
from fedshot.protocol.exchange import Fleet
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun
from fedshot.runs.run_folder import NODES, begun

INFLUENCE = "influence.jsonl"
_WEEK = 7 * 86400
_SESSIONS_PER_START = 1 << 20  # session numbers reserved per start; each rewind uses one


class Deployment(NamedTuple):
    """How a run is deployed on nodes; also the content of flower.json.

    Args:
        run: the run's id on the nodes.
        life: number of the last start or resume: its Unix time, or one more than the number before
            if the clock went back.
        server: folder of the server; "" if `up` starts a server in the run's own folder.
        nodes: number of nodes that `up` starts.
        deadline: seconds to wait for the replies of an exchange.
        tests: folder of the server's test data; "" if the server has the whole dataset.
        norms: what happens to client updates with a large norm, as `policy` of `Influence`.
        norm_multiple: threshold of a large norm, in multiples of the cohort's median.
    """

    run: str
    life: Whole
    server: str
    nodes: Annotated[int, Field(ge=0, lt=10**6)]
    deadline: Annotated[float, Field(ge=1, le=_WEEK)]
    tests: str = ""
    norms: NormPolicy = "warn"
    norm_multiple: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0

    @classmethod
    def new(cls, server: str, nodes: int, deadline: float, **more: Any) -> Deployment:
        """Return the deployment of a new run, which gets a random id; `more` are further fields.

        Raises ConfigError for an invalid deadline.
        """
        if not 1 <= deadline <= _WEEK:
            raise ConfigError(f"--deadline is {deadline:g}; expected 1 second to a week.")
        return cls(secrets.token_hex(16), 0, server, nodes, deadline, **more)

    def of_begun(self, folder: Path) -> Deployment:
        """Return this deployment with the id and the number of starts of the run in `folder`.

        Raises ConfigError if the run was begun with another command or number of nodes.
        """
        if not (folder / NODES).exists():
            raise ConfigError(
                f"the clients of {folder} are on this machine. Resume the run with `fedshot "
                f"resume {typed(folder)}`, or choose another --name."
            )
        begun = Deployment.read(folder)
        if (bool(begun.server), begun.nodes) != (bool(self.server), self.nodes):
            how = "run" if begun.server else f"up --nodes {begun.nodes}"
            raise ConfigError(
                f"{folder} was begun with `fedshot flower {how}`. Use the same command again."
            )
        return self._replace(run=begun.run, life=begun.life)

    @classmethod
    def read(cls, folder: Path) -> Deployment:
        """Read the deployment of a run. Raises CheckpointError for a damaged file."""
        fix = f"{records.COPY}, or start a new run"
        found = records.read(folder / NODES, dict[str, Any], fix)
        records.check(found, cls, folder / NODES, fix)
        return cls(**found)

    def write(self, folder: Path) -> None:
        """Write the deployment into the folder of its run."""
        make_private_folder(folder)
        text = json.dumps(self._asdict(), indent=1)
        storage.write_bytes(folder / NODES, text.encode(), sync=True)


@contextmanager
def open_experiment(
    prepared: PreparedRun,
    folder: Path,
    deployment: Deployment,
    server_folder: ServerFolder,
    tell: Callable[[str], None],
    *,
    wait: float,
    watch: Callable[[], None] = lambda: None,
    opened: Callable[[Experiment, FlowerFleet], None] = lambda *_: None,
) -> Iterator[Experiment]:
    """Yield the experiment of a run whose clients are reached through a server.

    Waits at most `wait` seconds for the nodes. Meanwhile it calls `watch`, which may raise errors.
    Then it calls `opened` with the experiment and the fleet that sends its messages. Raises
    ConfigError for an invalid `wait`, and AbsentError if nodes are missing after this time.
    """
    if not 0 <= wait <= _WEEK:
        raise ConfigError(f"--wait is {wait:g}; expected 0 seconds to a week.")
    _check_privacy(prepared, deployment)
    _check_clock(prepared)
    if prepared.config.run.allocator == "keep":
        keep_freed_memory()  # before threads start: each would fragment a heap of its own
    # Not a count: a restored copy of the folder has an old count, which the nodes know already.
    life = max(deployment.life + 1, int(time.time()))
    new, deployment = not begun(folder), deployment._replace(life=life)
    if not new:
        deployment.write(folder)  # before any node hears of this session
    operator = operator_of(server_folder)
    setup = Setup.of(deployment.run, prepared)
    compress = prepared.config.compress
    first = checked_init_client(prepared.method, 0, prepared.key)
    keeps_state = compress.remembers or bool(tree.leaves(first))
    sizes = {}
    if not isinstance(prepared, ServerTestRun):
        sizes = {client: len(prepared.client_split.train[client]) for client in prepared.clients}
    fleets: list[FlowerFleet] = []

    def record(influence: dict[str, Any]) -> None:
        with (folder / INFLUENCE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(influence) + "\n")

    with operator.grid() as grid:
        sign = Signer(server_folder.folder).sign if operator.ca else None
        messenger = Messenger(grid, operator.limits, tell, sign)

        def on_nodes(local: Fleet) -> Fleet:
            fleet = FlowerFleet(
                local,
                messenger,
                setup,
                session=deployment.life * _SESSIONS_PER_START,
                keeps_state=keeps_state,
                deadline=deployment.deadline,
                limits=operator.limits,
                tell=tell,
                entries=partial(read_entries, server_folder.nodes) if operator.ca else None,
                sizes=sizes,
                names_reducers=prepared.config.attack is not None or compress.up is not None,
                splits=not isinstance(prepared.config.attack, Collusion),
            )
            fleets.append(fleet)
            return fleet

        def measured(fleet: Fleet) -> Fleet:
            return Influence(fleet, deployment.norms, deployment.norm_multiple, record, tell)

        experiment = Experiment(prepared, folder, on_nodes, around=measured)
        wait_for_clients(fleets[0], prepared.clients, wait, tell, watch)
        deployment.write(folder)
        nodes: dict[str, Any] = {
            node.name: {"clients": sorted(node.clients), "environment": node.environment}
            for node in fleets[0].node_registry
        }
        storage.write_bytes(folder / "nodes.json", json.dumps(nodes, indent=1).encode(), sync=False)
        opened(experiment, fleets[0])
        try:
            yield experiment
        finally:
            if new and not begun(folder):  # so that the folder stays free for a local run
                (folder / NODES).unlink()


def _check_clock(prepared: PreparedRun) -> None:
    """Raise ConfigError if a run on nodes has simulated time."""
    if prepared.config.run.clock != ClockOptions():
        raise ConfigError(
            "run.clock is set, but clients on nodes take real time, which cannot be simulated. "
            "Remove run.clock, or run without nodes."
        )


def _check_privacy(prepared: PreparedRun, deployment: Deployment) -> None:
    """Raise ConfigError if a private run on nodes would reveal more than its epsilon covers."""
    privacy, run = prepared.config.privacy, prepared.config.run
    if privacy is not None and deployment.norms in ("clip", "refuse"):
        raise ConfigError(
            f"privacy is set, and --norms is {deployment.norms}: it bounds an upload by "
            "the norms of others, so one client can change what many contribute. Set it to warn."
        )
    if isinstance(privacy, ExampleLevel) and run.rounds > 1:
        raise ConfigError(
            f"privacy.name is 'example', and run.rounds is {run.rounds}: a node that lost its "
            "state may upload an example twice, which is not counted. Set run.rounds to 1, with "
            "all clients, or privacy.name to 'client'."
        )


def wait_for_clients(
    fleet: FlowerFleet,
    clients: list[int],
    wait: float,
    tell: Callable[[str], None],
    watch: Callable[[], None],
) -> None:
    """Wait for the nodes of all clients to connect. Raises AbsentError after `wait` seconds."""
    until = time.monotonic() + wait
    next_notice = time.monotonic()
    while missing := fleet.missing(clients):
        watch()
        now = time.monotonic()
        if now > until:
            reasons = ["Start the nodes with `fedshot flower node`; their logs say why a node "
                       "does not connect."]  # fmt: skip
            reasons += [f"{text[0].upper()}{text[1:]}" for text in fleet.node_registry.left_out()]
            raise AbsentError(
                f"no node holds {'client' if len(missing) == 1 else 'clients'} {ranges(missing)}, "
                f"after {wait:g} s. {' '.join(reasons)}"
            )
        if now >= next_notice:
            tell(f"waiting for the nodes of {len(missing)} clients")
            next_notice = now + 10
        time.sleep(0.1)
