"""The report's section on trust: what each client contributed, and what an attack cost."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fedshot.config.registry import difference
from fedshot.core.text import percent, printable, ranges
from fedshot.evaluation.episodic_test import worst_tenth
from fedshot.reports import charts
from fedshot.reports.figures import FigureBlock
from fedshot.reports.run_files import Groups, Run
from fedshot.runs import trust

_RUNS, _CLIENTS, _PARTS = 6, 50, 2  # most runs, clients of a run, and parts of an exchange shown
_LEFT_OUT = 0.5  # a client with less than this share of the cohort's median is mostly left out
_UNSET = "\N{EN DASH}"
OUTCOME = ("run", "attack", "aggregator", "accuracy", "without attack", "backdoor succeeds",
           "worst tenth of honest clients")  # fmt: skip
CLIENT = ("client", "dishonest", "norm / median", "cosine", "share that counts",
          "mostly left out or refused in rounds")  # fmt: skip


class Trust(NamedTuple):
    """The report's section on trust: figures, a table of runs, and a table of clients per run.

    The columns of the tables are `OUTCOME` and `CLIENT`.
    """

    figures: list[FigureBlock]
    outcomes: list[tuple[str, ...]]
    clients: list[tuple[str, str, list[tuple[str, ...]]]]


def trust_views(groups: Groups) -> Trust:
    """Return the section for runs with an attack or an aggregator; empty lists if there are none.

    Raises CheckpointError if a run's trust.jsonl is damaged.
    """
    runs = [run for group in groups.values() for run in group]
    watched = [(run, lines) for run in runs if (lines := trust.read(run.folder))]
    shown = watched[:_RUNS]
    return Trust(
        [block for i, (run, lines) in enumerate(shown) for block in _figures(i, run, lines)],
        [_outcome(run, runs) for run, _ in watched],
        [(run.label, _summary(lines), _clients(run, lines)) for run, lines in shown],
    )


def _figures(i: int, run: Run, lines: Sequence[Mapping[str, Any]]) -> Iterator[FigureBlock]:
    """Yield a run's figure of norms and cosines by round, with a button for each."""
    found = _by_part(lines)
    liars = {client for line in lines for client in line["liars"]}
    choices = [
        (f"{name} of {part!r}" + (f" in {work!r}" if len({w for w, _ in found}) > 1 else ""),
         charts.contributions(
             {c: [(round, row[at]) for round, row in held] for c, held in clients.items()},
             liars, name,
         ))
        for (work, part), clients in [*found.items()][:_PARTS]
        for at, name in enumerate(("norm", "cosine"))
    ]  # fmt: skip
    if choices:
        yield FigureBlock(
            f"trust-{i}",
            f"Norms and cosines of the clients' changes by round: {printable(run.label)}",
            f"{printable(run.label)}: the norm of each client's change of a part of the model, and "
            "the cosine of its angle to the aggregate of the round: 1 is the same direction, -1 "
            "the opposite. Clients that an attack makes lie are drawn thick and in colour, all "
            "others in grey.",
            choices,
        )


def _by_part(
    lines: Sequence[Mapping[str, Any]],
) -> dict[tuple[str, str], dict[int, list[tuple[int, list[float]]]]]:
    """Return (client function, part of its reply) -> client -> [(round, [norm, cosine, share])].

    The share is that of the client's part that counted in the aggregate. `lines` are those of
    trust.jsonl, one for each round.
    """
    found: dict[tuple[str, str], dict[int, list[tuple[int, list[float]]]]] = {}
    for line in lines:
        for part in line["parts"]:
            clients = found.setdefault((part["work"], part["part"]), defaultdict(list))
            for client, numbers in part["clients"].items():
                clients[int(client)].append((line["round"], numbers))
    return found


def _outcome(run: Run, runs: Sequence[Run]) -> tuple[str, ...]:
    """Return a run's row in the table with the columns `OUTCOME`.

    The accuracy without attack is that of a run in `runs` with otherwise equal settings.
    """
    result, attack = run.result or {}, run.settings.get("attack")
    test, done = result.get("test"), result.get("attack") or {}
    honest = [a for c, a in (test or {}).get("clients", {}).items()
              if int(c) not in done.get("liars", ())]  # fmt: skip
    other = next((one for one in runs if attack and _is_honest_twin(one, run)), None)
    success = done.get("backdoor")
    return (
        run.label,
        str(attack["name"]) if attack else "none",
        str((run.settings.get("aggregate") or {"name": "mean"})["name"]),
        _percent(test),
        _percent((other.result or {}).get("test")) if other else _UNSET,
        _UNSET if success is None else f"{100 * success:.1f} %",
        f"{100 * worst_tenth(honest):.1f} %" if honest else _UNSET,
    )


def _is_honest_twin(one: Run, run: Run) -> bool:
    """Whether `one` is `run` without its attack."""
    settings = {k: v for k, v in run.settings.items() if k not in ("name", "attack")}
    theirs = {k: v for k, v in one.settings.items() if k != "name"}
    return "attack" not in theirs and difference(theirs, settings) is None


def _percent(test: Mapping[str, Any] | None) -> str:
    return f"{percent(test['accuracy'], test['interval'])} %" if test else _UNSET


def _summary(lines: Sequence[Mapping[str, Any]]) -> str:
    liars = {client for line in lines for client in line["liars"]}
    return f"{len(lines)} rounds; dishonest by configuration: {ranges(liars) or 'none'}"


def _clients(run: Run, lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the table with the columns `CLIENT`: a row per client, the dishonest ones first."""
    numbers: dict[int, list[list[float]]] = defaultdict(list)
    left_out: dict[int, set[int]] = defaultdict(set)
    for line in lines:
        for part in line["parts"]:
            norms, kept = (statistics.median(row[at] for row in part["clients"].values())
                           for at in (0, 2))  # fmt: skip
            for client, (norm, cosine, share) in part["clients"].items():
                numbers[int(client)].append([norm / norms if norms else 0.0, cosine, share])
                if share < _LEFT_OUT * kept:
                    left_out[int(client)].add(line["round"])
    for record in run.records:
        for fault in record["faults"]:
            if fault.get("kind") == "refused":
                left_out[int(fault["client"])].add(record["round"])
    liars = {client for line in lines for client in line["liars"]}
    every = sorted({*numbers, *left_out}, key=lambda client: (client not in liars, client))
    missing = [_UNSET] * 3
    return [
        (str(client), "yes" if client in liars else "no",
         *(f"{statistics.fmean(column):.2f}" for column in zip(*numbers[client], strict=True)),
         *(missing if not numbers[client] else []),
         ranges(left_out[client]) or _UNSET)
        for client in every[:_CLIENTS]
    ]  # fmt: skip
