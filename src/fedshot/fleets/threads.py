"""A worker thread per core, each running one client after another: the default on a CPU.

Every worker gives torch the same number of intra-op threads and calls the same kernel as
`Sequential`, so the bits agree whatever the number of workers and the order in which they finish.
Operators release Python's lock, so workers share the cores well wherever a step takes longer than
Python needs to start it; for steps below a few milliseconds one worker is as good as many.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    FIRST_EXCEPTION,
    Future,
    ThreadPoolExecutor,
    wait,
)
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from fedshot.core import shutdown
from fedshot.core.machine import begin_thread, denormals_flushed
from fedshot.fleets.host import Host
from fedshot.fleets.sequential import Sequential
from fedshot.protocol.exchange import Arrival, Exchange

T = TypeVar("T")
R = TypeVar("R")


class Threads(Sequential):
    """A pool of workers.

    Args:
        host: where the clients live.
        workers: threads that run clients.
        intra_op: threads that torch uses inside each of them. Bits depend on it.
    """

    def __init__(self, host: Host, workers: int, intra_op: int = 1) -> None:
        super().__init__(host)
        self.workers, self._intra_op = workers, intra_op
        self._pool: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the replies as they come in; at most two per worker are held at once."""
        yield from self.each(partial(self.host.serve, exchange), exchange.to, len(exchange.to))

    def each(self, fn: Callable[[T], R], items: Iterable[T], n: int) -> Iterator[R]:
        """Yield `fn` of n items as they come in, at most two per worker held at once."""
        if self.workers == 1 or n == 1:
            yield from map(fn, items)
            return
        waiting = iter(items)
        running: set[Future[R]] = set()
        try:
            while True:
                begun = islice(waiting, 2 * self.workers - len(running))
                running |= {self._workers().submit(fn, item) for item in begun}
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:  # nobody works for a caller that has gone
            _stop(running)

    def parallel_map(self, fn: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Return `fn` of every item, in their order, computed by all workers."""
        if self.workers == 1 or len(items) == 1:
            return super().parallel_map(fn, items)
        tasks = [self._workers().submit(fn, item) for item in items]
        try:
            wait(tasks, return_when=FIRST_EXCEPTION)
        finally:
            _stop(tasks)
        # Tasks start in their order: one that failed comes before all that were cancelled for it.
        return [task.result() for task in tasks]

    def _workers(self) -> ThreadPoolExecutor:
        if self._pool is None or self._process != os.getpid():  # a fork has none of its threads
            self._process = os.getpid()
            self._pool = ThreadPoolExecutor(
                self.workers,
                thread_name_prefix="fedshot",
                initializer=begin_thread,
                initargs=(self._intra_op, denormals_flushed()),
            )
        return self._pool


def _stop(tasks: Collection[Future[Any]]) -> None:
    """Cancel what has not begun, and wait for what has, unless the whole program is to end."""
    for task in tasks:
        task.cancel()
    if not shutdown.asked.is_set():
        wait(tasks)
