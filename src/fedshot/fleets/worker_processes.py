"""A fleet of processes, each of which runs one client after another; for short steps.

In threads, clients wait for each other whenever they run Python, which is half of a step of a small
network. Processes do not. They are forked from this one, so that they share its data in memory and
compute the same bits, and they end with it.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import WorkerError
from fedshot.core.machine import begin_thread, denormals_flushed
from fedshot.core.seeds import Key
from fedshot.core.serialised import Limits, pack, unpack
from fedshot.core.tree import Tree
from fedshot.fleets.host import ClientCall, Host
from fedshot.fleets.threads import Threads
from fedshot.protocol.exchange import Arrival, ClientWork, Exchange, PerClient, Reply

_ANY = Limits(*[sys.maxsize] * 4)
_SECONDS = 1.0  # between checks that the parent is alive


class _Worker(NamedTuple):
    process: BaseProcess
    pipe: Connection


class Processes(Threads):
    """A fleet of worker processes.

    Predictions of a test, runs with dishonest clients and the steps of secure sums use threads.

    Args:
        host: holds the clients' data and private states, and runs the method's client functions.
        workers: number of processes that run clients.
        intra_op: number of torch threads per worker. Changing it changes the rounding of results.
    """

    def __init__(self, host: Host, workers: int, intra_op: int = 1) -> None:
        super().__init__(host, workers, intra_op)
        self._forked: list[_Worker] = []
        weakref.finalize(self, _stop, self._forked)

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the replies as clients finish.

        Raises WorkerError if a worker process has ended, and any error of a client function.
        """
        here = exchange.work.method is None or self.host.liars is not None
        if here or self.workers == 1 or len(exchange.to) < 2:
            yield from super().replies(exchange)
            return
        waiting, idle = iter(exchange.to), list(self._running_workers())
        running: dict[Any, tuple[_Worker, ClientCall]] = {}
        alike, quiet = not isinstance(exchange.down, PerClient), replace(exchange, on_send=None)
        common = self.host.message(quiet, exchange.to[0]) if alike else {}
        done = False
        try:
            for worker in idle:
                _send(worker.pipe, {"work": exchange.work.name}, {"down": common})
            while True:
                for worker, client in zip(list(idle), waiting, strict=False):
                    idle.remove(worker)
                    running[worker.pipe] = worker, self._call(exchange, client, worker)
                if not running:
                    done = True
                    return
                for pipe in wait(list(running)):
                    worker, call = running.pop(pipe)
                    idle.append(worker)
                    yield self._finish(exchange, call, worker)
        except (EOFError, ConnectionError):
            ended = [worker.process for worker in self._forked]
            sentinels = wait([process.sentinel for process in ended], _SECONDS)
            gone = [process for process in ended if process.sentinel in sentinels]
            for process in gone:
                process.join(_SECONDS)  # its exit code comes after its sentinel
            codes = [process.exitcode for process in gone]
            short = " Memory was probably short: set run.workers to a smaller number."
            raise WorkerError(
                f"a worker process has ended with exit code {codes[0] if codes else 'unknown'}."
                f"{short if -signal.SIGKILL in codes else ''} `fedshot resume` continues the run."
            ) from None
        finally:
            if not done:  # an error, or the caller stopped: replies are on the way
                _stop(self._forked)

    def _call(self, exchange: Exchange, client: int, worker: _Worker) -> ClientCall:
        """Send one client's inputs to a worker."""
        down = self.host.message(exchange, client)
        private = self.host.private(client, exchange.version)
        sent = {"private": private}
        if isinstance(exchange.down, PerClient):
            sent["down"] = down
        key = exchange.client_key(client)
        _send(worker.pipe, {"client": client, "key": [key.root, key.path]}, sent)
        return ClientCall(client, down, private, {})

    def _finish(self, exchange: Exchange, call: ClientCall, worker: _Worker) -> Arrival:
        """Receive the reply of one client."""
        head, found = _receive(worker.pipe)
        if "error" in head:  # run it again here, so that its error has a traceback and its type
            return self.host.serve(replace(exchange, on_send=None), call.client)
        return self.host.finish(exchange, call, Reply(**found))

    def _running_workers(self) -> list[_Worker]:
        """Return the workers, forked from this process if there are none."""
        if not self._forked:
            context = multiprocessing.get_context("fork")
            for _ in range(self.workers):
                ours, theirs = context.Pipe()
                others = [ours, *(worker.pipe for worker in self._forked)]
                process = context.Process(
                    target=_serve,
                    args=(self.host, theirs, others, self._intra_op, denormals_flushed()),
                    daemon=True,
                )
                with warnings.catch_warnings():  # of threads, none of which computes now
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                theirs.close()
                self._forked.append(_Worker(process, ours))
        return self._forked


def _serve(
    host: Host, pipe: Connection, others: list[Connection], threads: int, flush: bool
) -> None:
    """Run client functions in a worker process until its parent closes the pipe, or ends.

    `others` are the parent's ends of pipes, which this process has inherited.
    """
    parent = os.getppid()
    for other in others:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    begin_thread(threads, flush)
    name, common = "", None
    while True:
        try:
            while not pipe.poll(_SECONDS):
                if os.getppid() != parent:
                    return
            head, content = _receive(pipe)
            if "work" in head:
                name, common = head["work"], content["down"]
                continue
            work, data = ClientWork(host.method, name), host.data(head["client"])
            root, path = head["key"]
            drawn = host.checks.draw(work, data, Key(root, tuple(path)))
            reply = host.checks.run(work, content.get("down", common), content["private"], drawn)
            up, private, weight, metrics = reply.on_cpu()
            if not isinstance(weight, Tensor):
                weight = torch.tensor(weight, dtype=torch.float64)
            found = {"up": dict(up), "private": private, "weight": weight}
            _send(pipe, {}, found | {"metrics": dict(metrics)})
        except (EOFError, ConnectionError):
            return
        except Exception:  # a method may raise anything
            with contextlib.suppress(OSError):
                _send(pipe, {"error": True}, {})


def _send(pipe: Connection, head: dict[str, Any], content: Tree) -> None:
    form, data = pack(content)
    pipe.send_bytes(json.dumps([head, form]).encode())
    pipe.send_bytes(data)


def _receive(pipe: Connection) -> tuple[dict[str, Any], Tree]:
    head, form = json.loads(_bytes(pipe))
    found = unpack(form, _bytes(pipe), _ANY, trusted=True)
    return head, tree.map(Tensor.clone, found)  # results may depend on where a tensor begins


def _bytes(pipe: Connection) -> bytes:
    try:
        return pipe.recv_bytes()
    except OSError as error:  # the other process was killed in the middle of a message
        raise EOFError from error


def _stop(workers: list[_Worker]) -> None:
    """End the worker processes at once."""
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.pipe.close()
        worker.process.join()
    workers.clear()
