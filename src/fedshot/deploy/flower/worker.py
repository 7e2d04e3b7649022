"""The worker of a node: it handles messages, and replies with results or refusals.

This module does not depend on Flower.
"""

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
from fedshot.deploy.flower.messages import COMMON, LIMITS, CodecError, Limits, WireMessage, short
from fedshot.deploy.flower.node_registry import checked_seal
from fedshot.deploy.flower.policy import NO_BOUNDS, Policy, PolicyError, append_to_log
from fedshot.deploy.flower.setup import Setup
from fedshot.deploy.flower.shards import NodeData
from fedshot.protocol.exchange import Arrival
from fedshot.runs.recorder import environment

# The folders of an absolute path: from a root, a home or a drive to the last separator.
_FOLDERS = re.compile(r"(?<![\w.~/\\-])(?:~?/|[A-Za-z]:[/\\])(?:[^\s'\"/\\]+[/\\])*")


class Worker:
    """Handles the messages of all runs on a node.

    Args:
        name: name of the node.
        data: data of its clients.
        folder: state folder of the node, with a subfolder for each run.
        limits: bounds on received messages.
        workers: number of clients that run at once.
        tell: logs errors.
        policy: bounds on requests; None for no bounds and no audit log.
    """

    def __init__(
        self, name: str, data: NodeData, folder: Path, *, limits: Limits = LIMITS, workers: int = 1,
        tell: Callable[[str], None] = print, policy: Policy | None = None,
    ) -> None:  # fmt: skip
        self.name, self._data, self._folder = name, data, folder
        self._limits, self._workers, self._tell = limits, workers, tell
        self._policy, self._keeps_log = policy or NO_BOUNDS, policy is not None
        self._runtimes: dict[str, tuple[str, ClientRuntime]] = {}  # run id -> setup key, runtime

    def handle(self, wire_message: WireMessage) -> WireMessage:
        """Return the reply to a message; errors are logged and named in the reply."""
        id = wire_message.head.get("id")
        reply = WireMessage({"id": id})
        start = time.perf_counter()
        try:
            self._handle(wire_message, reply)
        except (CodecError, FedshotError) as error:
            reply = WireMessage({"id": id, "refused": without_paths(str(error))})
            self._tell(f"refused: {error}")
        except Exception as error:
            text = without_paths(f"{type(error).__name__}: {error}"[:2000])
            reply = WireMessage({"id": id, "failed": text})
            self._tell(traceback.format_exc())
        reply.head["seconds"] = time.perf_counter() - start
        self.log(wire_message.head, reply)
        return reply

    def log(self, head: Mapping[str, Any], reply: WireMessage) -> None:
        """Add a message and its reply to the audit log, if there is a policy.

        `head` is the message's header, or {} if the message is not verified. If the log cannot be
        written, the node reports it with `tell` and continues.
        """
        if not self._keeps_log:
            return
        setup, work = head.get("setup"), head.get("work")
        work = work if isinstance(work, dict) else {}
        try:
            append_to_log(
                self._folder / "audit.jsonl",
                run=short(setup.get("run"), 40) if isinstance(setup, dict) else "",
                work={name: short(work[name], 60)
                      for name in ("name", "phase", "version", "clients") if name in work},
                up={"clients": len(reply.blocks),
                    "bytes": sum(len(block) for block in reply.blocks.values())},
                seconds=round(reply.head.get("seconds", 0.0), 3),
                refused=short(reply.head.get("refused", reply.head.get("failed", ""))),
            )  # fmt: skip
        except OSError as error:
            self._tell(f"{self._folder / 'audit.jsonl'} lacks a message: {error}")

    def _handle(self, wire_message: WireMessage, reply: WireMessage) -> None:
        head = wire_message.head
        try:
            setup, session = Setup.from_json(head["setup"]), int(head["life"])
            base, orders = checked_seal(head["base"]), list(head["orders"])
        except (KeyError, TypeError, ValueError) as error:
            raise CodecError(f"the head is incomplete: {error!r}") from None
        runtime = self._runtime(setup)
        if head.get("hello"):
            clients = list(self._data.clients)
            reply.head |= {"name": self.name, "clients": clients, "environment": environment()}
            return
        runtime.start_session(session, base)
        runtime.apply_orders(orders)
        if head.get("work"):
            self._policy.check_disk(self._folder / setup.run)
            run_work(runtime, wire_message, reply, self._limits, self._policy, self._tell)
        reply.head |= runtime.state

    def _runtime(self, setup: Setup) -> ClientRuntime:
        key = setup.key()
        held = self._runtimes.get(setup.run)
        if held is None or held[0] != key:
            self._policy.check_run(setup.config(), setup.clients)  # before any file is written
            folder = self._folder / setup.run
            held = key, ClientRuntime.of(setup, self._data, folder, self._workers)
            self._runtimes = {setup.run: held}  # the states of other runs stay on disk
        return held[1]


def run_work(
    runtime: ClientRuntime, wire_message: WireMessage, reply: WireMessage, limits: Limits,
    policy: Policy = NO_BOUNDS, tell: Callable[[str], None] = print,
) -> None:  # fmt: skip
    """Run the work that a message requests, and add the results to the reply.

    Once the time that the policy allows is used up, the remaining clients are skipped and get a
    fault. Raises CodecError once the server no longer waits for the reply.
    """
    begun = time.monotonic()
    head, work = wire_message.head, wire_message.head["work"]
    clients = [int(client) for client in work["clients"]]
    if COMMON in wire_message.blocks:
        messages = dict.fromkeys(clients, wire_message.get(COMMON, limits))
    else:
        messages = {client: wire_message.get(f"c{client}", limits) for client in clients}
    # Seconds for which the server waits for the reply.
    remaining = head.get("sent", math.inf) + head.get("within", math.inf) - time.time()
    results = reply.head["results"] = {}
    with closing(runtime.run_work(work, messages)) as arrivals:
        for arrival in arrivals:
            if arrival.reply is not None:
                policy.check_up(arrival.reply.up)
            results[str(arrival.client)] = _put(arrival, reply)
            if len(results) == len(messages):
                continue
            seconds = time.monotonic() - begun
            done = f"{len(results)} of {len(messages)} clients are done"
            if seconds > remaining:
                raise CodecError(f"{done}, and the server does not wait for the reply any more")
            try:
                policy.check_seconds(seconds)
            except PolicyError as error:
                tell(f"{done}: {error}")
                fault = {"fault": ["lost", str(error)]}
                reply.head["results"] = {str(client): fault for client in messages} | results
                break


def without_paths(text: str) -> str:
    """Return a text in which absolute paths are shortened to their file names."""
    return _FOLDERS.sub("", text)


def _put(arrival: Arrival, wire_message: WireMessage) -> dict[str, Any]:
    """Add a client's reply to a message; return the client's entry for `results` in its header."""
    if arrival.reply is None:
        return {"fault": list(arrival.fault or ("lost", "no reply"))}
    reply = arrival.reply
    metrics = {name: value if isinstance(value, Tensor) else torch.tensor(value)
               for name, value in reply.metrics.items()}  # fmt: skip
    content: dict[str, Tree] = {"up": dict(reply.up), "metrics": metrics}
    entry: dict[str, Any] = {}
    if isinstance(reply.weight, Tensor):
        content["weight"] = reply.weight
    else:
        entry["weight"] = reply.weight
    wire_message.put(f"c{arrival.client}", content)
    return entry
