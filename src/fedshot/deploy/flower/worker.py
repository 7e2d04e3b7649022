"""What a node does with a message: answer it, or say why not. It knows nothing of Flower."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedshot.deploy.flower.codec import LIMITS, CodecError, Limits
from fedshot.deploy.flower.letters import COMMON, Letter
from fedshot.deploy.flower.member import Member
from fedshot.deploy.flower.setup import Setup
from fedshot.deploy.flower.shards import Holdings
from fedshot.errors import FedshotError
from fedshot.protocol import Arrival
from fedshot.recorder import environment
from fedshot.tree import Tree


class Worker:
    """The node's side of every run.

    Args:
        name: what the node is called.
        holdings: its clients.
        folder: what it keeps; a folder for each run below it.
        limits: the most that it takes in.
        workers: clients that run at once.
        tell: where it says what it does.
    """

    def __init__(
        self,
        name: str,
        holdings: Holdings,
        folder: Path,
        *,
        limits: Limits = LIMITS,
        workers: int = 1,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.name, self._holdings, self._folder = name, holdings, folder
        self._limits, self._workers, self._tell = limits, workers, tell
        self._members: dict[str, tuple[str, Member]] = {}

    def answer(self, letter: Letter) -> Letter:
        """Return the reply to a letter; what goes wrong stands in the reply and in the log."""
        reply = Letter({"id": letter.head.get("id")})
        start = time.perf_counter()
        try:
            self._answer(letter, reply)
        except (CodecError, FedshotError) as error:
            reply = Letter({"id": letter.head.get("id"), "refused": str(error)})
            self._tell(f"refused: {error}")
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            reply = Letter({"id": letter.head.get("id"), "failed": words[:2000]})
            self._tell(traceback.format_exc())
        reply.head["seconds"] = time.perf_counter() - start
        return reply

    def _answer(self, letter: Letter, reply: Letter) -> None:
        head = letter.head
        try:
            setup, life = Setup.from_json(head["setup"]), int(head["life"])
            base = (int(head["base"][0]), str(head["base"][1]))
            orders = list(head["orders"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CodecError(f"a head that lacks what it must hold: {error!r}") from None
        member = self._member(setup)
        if head.get("hello"):
            clients = list(self._holdings.clients)
            reply.head |= {"name": self.name, "clients": clients, "environment": environment()}
            return
        member.arrive(life, base)
        member.obey(orders)
        if head.get("work"):
            do_work(member, letter, reply, self._limits)
        reply.head |= member.state

    def _member(self, setup: Setup) -> Member:
        key = setup.key()
        held = self._members.get(setup.run)
        if held is None or held[0] != key:
            folder = self._folder / setup.run
            held = key, Member.of(setup, self._holdings, folder, self._workers)
            self._members = {setup.run: held}  # of one run at a time, the others are on the disk
        return held[1]


def do_work(member: Member, letter: Letter, reply: Letter, limits: Limits) -> None:
    """Run the work that a letter asks for, and add what came of it to the reply."""
    work = letter.head["work"]
    try:
        clients = [int(client) for client in work["clients"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CodecError(f"work that lacks what it must hold: {error!r}") from None
    if COMMON in letter.blocks:
        messages = dict.fromkeys(clients, letter.get(COMMON, limits))
    else:
        messages = {client: letter.get(f"c{client}", limits) for client in clients}
    results = reply.head["results"] = {}
    for arrival in member.serve(work, messages):
        results[str(arrival.client)] = _put(arrival, reply)


def _put(arrival: Arrival, letter: Letter) -> dict[str, Any]:
    """Add what came of one client to a letter; return what stands in the head of it."""
    if arrival.reply is None:
        return {"fault": list(arrival.fault or ("lost", "no reply"))}
    reply = arrival.reply
    content: dict[str, Tree] = {"up": dict(reply.up), "metrics": _tensors(reply.metrics)}
    head: dict[str, Any] = {}
    if isinstance(reply.weight, Tensor):
        content["weight"] = reply.weight
    else:
        head["weight"] = reply.weight
    letter.put(f"c{arrival.client}", content)
    return head


def _tensors(metrics: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value if isinstance(value, Tensor) else torch.tensor(value)
            for name, value in metrics.items()}  # fmt: skip
