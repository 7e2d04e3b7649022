"""What a node does with a message: answer it, or say why not. It knows nothing of Flower."""

from __future__ import annotations

import math
import re
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedshot.core.errors import FedshotError
from fedshot.core.tree import Tree
from fedshot.deploy.flower.client_runtime import ClientRuntime
from fedshot.deploy.flower.codec import LIMITS, CodecError, Limits, short
from fedshot.deploy.flower.messages import COMMON, WireMessage
from fedshot.deploy.flower.policy import Policy, PolicyError, note
from fedshot.deploy.flower.setup import Setup
from fedshot.deploy.flower.shards import NodeData
from fedshot.protocol.exchange import Arrival
from fedshot.runs.recorder import environment

# What begins with a root, or with a drive, up to the last separator.
_FOLDERS = re.compile(r"(?<![\w.~/\\-])(?:~?/|[A-Za-z]:[/\\])(?:[^\s'\"/\\]+[/\\])*")


class Worker:
    """The node's side of every run.

    Args:
        name: what the node is called.
        holdings: its clients.
        folder: what it keeps; a folder for each run below it.
        limits: the most that it takes in.
        workers: clients that run at once.
        tell: where it says what it does.
        policy: what a server may ask for; None for anything, and no log.
    """

    def __init__(
        self,
        name: str,
        holdings: NodeData,
        folder: Path,
        *,
        limits: Limits = LIMITS,
        workers: int = 1,
        tell: Callable[[str], None] = print,
        policy: Policy | None = None,
    ) -> None:
        self._policy = policy
        self.name, self._holdings, self._folder = name, holdings, folder
        self._limits, self._workers, self._tell = limits, workers, tell
        self._members: dict[str, tuple[str, ClientRuntime]] = {}

    def answer(self, wire_message: WireMessage) -> WireMessage:
        """Return the reply to a letter; what goes wrong stands in the reply and in the log."""
        reply = WireMessage({"id": wire_message.head.get("id")})
        start = time.perf_counter()
        try:
            self._answer(wire_message, reply)
        except (CodecError, FedshotError) as error:
            reply = WireMessage(
                {"id": wire_message.head.get("id"), "refused": without_paths(str(error))}
            )
            self._tell(f"refused: {error}")
        except Exception as error:
            words = without_paths(f"{type(error).__name__}: {error}"[:2000])
            reply = WireMessage({"id": wire_message.head.get("id"), "failed": words})
            self._tell(traceback.format_exc())
        reply.head["seconds"] = time.perf_counter() - start
        self.log(wire_message.head, reply)
        return reply

    def log(self, head: Mapping[str, Any], reply: WireMessage) -> None:
        """Add a line to the log of what was asked, where there is a policy.

        `head` is the message's; {} for one that is not known to be the server's. Where the line
        cannot be written, the node says so and goes on.
        """
        if self._policy is None:
            return
        setup, work = head.get("setup"), head.get("work")
        asked = work if isinstance(work, dict) else {}
        try:
            note(
                self._folder / "audit.jsonl",
                run=short(setup.get("run"), 40) if isinstance(setup, dict) else "",
                work={name: short(asked[name], 60)
                      for name in ("name", "phase", "version", "clients") if name in asked},
                up={"clients": len(reply.blocks),
                    "bytes": sum(len(block) for block in reply.blocks.values())},
                seconds=round(reply.head.get("seconds", 0.0), 3),
                refused=short(reply.head.get("refused", reply.head.get("failed", ""))),
            )  # fmt: skip
        except OSError as error:
            self._tell(f"{self._folder / 'audit.jsonl'} lacks a message: {error}")

    def _answer(self, wire_message: WireMessage, reply: WireMessage) -> None:
        head = wire_message.head
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
            if self._policy is not None:
                self._policy.check_disk(self._folder / setup.run)
            do_work(member, wire_message, reply, self._limits, self._policy, self._tell)
        reply.head |= member.state

    def _member(self, setup: Setup) -> ClientRuntime:
        key = setup.key()
        held = self._members.get(setup.run)
        if held is None or held[0] != key:
            folder = self._folder / setup.run
            if self._policy is not None:  # before anything of the run is written
                self._policy.check_run(setup.config(), setup.clients)
            held = key, ClientRuntime.of(setup, self._holdings, folder, self._workers)
            self._members = {setup.run: held}  # of one run at a time, the others are on the disk
        return held[1]


def do_work(
    member: ClientRuntime,
    wire_message: WireMessage,
    reply: WireMessage,
    limits: Limits,
    policy: Policy | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Run the work that a letter asks for, and add what came of it to the reply.

    Once the policy's seconds are over, no other client's begins: the reply has what was done, and
    for the others a fault. Raises CodecError once nobody waits for the reply.
    """
    begun = time.monotonic()
    work = wire_message.head["work"]
    try:
        clients = [int(client) for client in work["clients"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CodecError(f"work that lacks what it must hold: {error!r}") from None
    if COMMON in wire_message.blocks:
        messages = dict.fromkeys(clients, wire_message.get(COMMON, limits))
    else:
        messages = {client: wire_message.get(f"c{client}", limits) for client in clients}
    results = reply.head["results"] = {}
    waited = _seconds(wire_message)
    with closing(member.serve(work, messages)) as arrivals:
        for arrival in arrivals:
            if policy is not None and arrival.reply is not None:
                policy.check_up(arrival.reply.up)
            results[str(arrival.client)] = _put(arrival, reply)
            if len(results) == len(messages):
                continue
            seconds = time.monotonic() - begun
            if seconds > waited:
                raise CodecError(
                    f"{len(results)} of {len(messages)} clients have worked, and nobody waits for "
                    "the reply any more"
                )
            try:
                if policy is not None:
                    policy.check_seconds(seconds)
            except PolicyError as error:
                tell(f"{len(results)} of {len(messages)} clients have worked: {error}")
                fault = {"fault": ["lost", str(error)]}
                reply.head["results"] = {str(client): fault for client in messages} | results
                break


def _seconds(wire_message: WireMessage) -> float:
    """Return for how long the reply to a letter is waited for, from now on."""
    within, sent = (wire_message.head.get(name) for name in ("within", "sent"))
    if not isinstance(within, int | float) or not isinstance(sent, int | float):
        return math.inf
    return sent + within - time.time()


def without_paths(words: str) -> str:
    """Return what a node says of itself without the folders of its files."""
    return _FOLDERS.sub("", words)


def _put(arrival: Arrival, wire_message: WireMessage) -> dict[str, Any]:
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
    wire_message.put(f"c{arrival.client}", content)
    return head


def _tensors(metrics: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value if isinstance(value, Tensor) else torch.tensor(value)
            for name, value in metrics.items()}  # fmt: skip
