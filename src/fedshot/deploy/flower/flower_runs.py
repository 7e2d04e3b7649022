"""A run whose clients live on nodes: what `run`, `up` and `resume` have in common.

flower.json in the run's folder holds what it takes to go on: the run's name among the nodes, how
often it has been begun or gone on with, and where its server is.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from fedshot.core import records, storage, tree
from fedshot.core.errors import AbsentError, ConfigError
from fedshot.core.records import Whole
from fedshot.deploy.flower.admission import read_entries
from fedshot.deploy.flower.fleet import FlowerFleet
from fedshot.deploy.flower.keys import Signer
from fedshot.deploy.flower.local import operator_of
from fedshot.deploy.flower.messaging import Messenger
from fedshot.deploy.flower.server_folder import ServerFolder, own_folder
from fedshot.deploy.flower.server_tests import ServerTestRun
from fedshot.deploy.flower.setup import Setup
from fedshot.fleets.influence import Influence, NormPolicy
from fedshot.protocol.exchange import Fleet
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun
from fedshot.runs.run_folder import NODES, begun

INFLUENCE = "influence.jsonl"
_WEEK = 7 * 86400
_LIVES = 1 << 20  # that a process may begin


class _Place(TypedDict):
    """What flower.json holds."""

    __pydantic_config__ = {"extra": "forbid"}  # type: ignore[misc]  # noqa: RUF012

    run: str
    life: Whole
    server: str
    nodes: Annotated[int, Field(ge=0, lt=10**6)]
    deadline: Annotated[float, Field(ge=1, le=_WEEK)]
    tests: NotRequired[str]
    norms: NotRequired[NormPolicy]
    norm_multiple: NotRequired[Annotated[float, Field(gt=0, allow_inf_nan=False)]]


@dataclass(frozen=True)
class Place:
    """Where a run's clients are.

    Args:
        run: the run's name among the nodes.
        life: how often it was begun or gone on with.
        server: folder of the server; "" for one that `up` starts in the run's own folder.
        nodes: how many nodes `up` starts.
        deadline: seconds that an exchange waits for replies.
        tests: folder with what the server knows in place of a dataset; "" where it has one.
        norms: what is done with a change that is large beside the others'; see `Influence`.
        norm_multiple: what is large, in medians of the cohort.
    """

    run: str
    life: int
    server: str
    nodes: int
    deadline: float
    tests: str = ""
    norms: NormPolicy = "warn"
    norm_multiple: float = 10.0

    @classmethod
    def new(cls, server: str, nodes: int, deadline: float, tests: str = "") -> Place:
        """Return the place of a new run. Raises ConfigError for a deadline that is none."""
        if not 1 <= deadline <= _WEEK:
            raise ConfigError(f"--deadline is {deadline:g}; expected 1 second to a week.")
        return cls(secrets.token_hex(16), 0, server, nodes, deadline, tests)

    def of_begun(self, folder: Path) -> Place:
        """Return this place for a run that has begun. Raises ConfigError where it is another."""
        if not (folder / NODES).exists():
            raise ConfigError(
                f"the clients of {folder} live on this machine. Go on with `fedshot resume "
                f"{folder}`, or choose another --name."
            )
        begun = Place.read(folder)
        if (bool(begun.server), begun.nodes) != (bool(self.server), self.nodes):
            how = "run" if begun.server else f"up --nodes {begun.nodes}"
            raise ConfigError(f"{folder} was begun with `fedshot flower {how}`. Go on with that.")
        return replace(self, run=begun.run, life=begun.life)

    @classmethod
    def read(cls, folder: Path) -> Place:
        """Read a run's place. Raises CheckpointError when the file is damaged."""
        fix = f"{records.COPY}, or start a new run"
        return cls(**records.read(folder / NODES, _Place, fix))

    def write(self, folder: Path) -> None:
        """Write the place into the folder of its run."""
        own_folder(folder)  # a bank of clients' models may lie in it
        text = json.dumps(asdict(self), indent=1)
        storage.write_bytes(folder / NODES, text.encode(), sync=True)


@contextmanager
def opened(
    setting: PreparedRun,
    folder: Path,
    place: Place,
    home: ServerFolder,
    tell: Callable[[str], None],
    *,
    wait: float,
    watch: Callable[[], None] = lambda: None,
) -> Iterator[Experiment]:
    """Yield the experiment of a run whose clients are asked through a server.

    Raises ConfigError when clients have not come after so many seconds. `watch` is called while
    they are waited for, and may raise, too.
    """
    if not 0 <= wait <= _WEEK:
        raise ConfigError(f"--wait is {wait:g}; expected seconds, at most a week.")
    new, place = not begun(folder), replace(place, life=place.life + 1)
    if not new:
        place.write(folder)  # before anybody hears of this life
    operator = operator_of(home)
    setup = Setup.of(place.run, setting)
    keeps = bool(tree.leaves(setting.method.init_client(0, setting.key.at("clients"))))
    made: list[FlowerFleet] = []

    def record(influence: dict[str, Any]) -> None:
        with (folder / INFLUENCE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(influence) + "\n")

    with operator.grid() as grid:
        sign = Signer(home.folder).sign if operator.ca else None
        post = Messenger(grid, operator.limits, tell, sign)

        def elsewhere(here: Fleet) -> Fleet:
            made.append(
                FlowerFleet(
                    here,
                    post,
                    setup,
                    life=place.life * _LIVES,
                    keeps=keeps,
                    deadline=place.deadline,
                    limits=operator.limits,
                    tell=tell,
                    entries=partial(read_entries, home.nodes) if operator.ca else None,
                    sizes=_sizes(setting),
                )
            )
            return Influence(made[0], place.norms, place.norm_multiple, record, tell)

        experiment = Experiment(setting, folder, elsewhere)
        await_clients(made[0], setting.clients, wait, tell, watch)
        place.write(folder)
        _note_nodes(folder, made[0])
        try:
            yield experiment
        finally:
            if new and not begun(folder):  # it never began; a run on this machine may, here
                (folder / NODES).unlink()


def _sizes(setting: PreparedRun) -> dict[int, int]:
    """Return how many examples clients hold, where the server has them."""
    if isinstance(setting, ServerTestRun):
        return {}
    return {client: len(setting.deal.train[client]) for client in setting.clients}


def await_clients(
    fleet: FlowerFleet,
    clients: list[int],
    wait: float,
    tell: Callable[[str], None],
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Wait until every client has a node. Raises AbsentError when that takes too long."""
    until = time.monotonic() + wait
    told = 0.0
    while missing := fleet.missing(clients):
        watch()
        now = time.monotonic()
        if now > until:
            raise AbsentError(
                f"no node holds client {missing[0]}"
                f"{f' and {len(missing) - 1} others' if len(missing) > 1 else ''}, after "
                f"{wait:g} s. Start the nodes with `fedshot flower node`; their logs say what "
                "keeps them away."
            )
        if now > told + 10:
            tell(f"waiting for the nodes of {len(missing)} clients")
            told = now
        time.sleep(0.1)


def _note_nodes(folder: Path, fleet: FlowerFleet) -> None:
    found: dict[str, Any] = {
        node.name: {"clients": sorted(node.clients), "environment": node.environment}
        for node in fleet.node_registry
    }
    storage.write_bytes(folder / "nodes.json", json.dumps(found, indent=1).encode(), sync=False)
