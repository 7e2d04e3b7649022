"""A fleet of threads, each of which runs one client after another; the default on a CPU.

Every worker uses the same number of intra-op threads and the same code as `Sequential`, so results
are bitwise equal for any number of workers. Torch's operators release the GIL, so several workers
are faster than one unless a step takes less than a few milliseconds.
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
    """A fleet of worker threads.

    Args:
        host: holds the clients' data and private states, and runs the method's client functions.
        workers: number of threads that run clients.
        intra_op: number of torch threads per worker. Changing it changes the rounding of results.
    """

    def __init__(self, host: Host, workers: int, intra_op: int = 1) -> None:
        super().__init__(host)
        self.workers, self._intra_op = workers, intra_op
        self._pool: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the replies as clients finish; at most two per worker are queued or running."""
        yield from self.each(partial(self.host.serve, exchange), exchange.to, len(exchange.to))

    def each(self, fn: Callable[[T], R], items: Iterable[T], n: int) -> Iterator[R]:
        """Yield `fn(item)` for n items as calls finish, with at most two pending per worker."""
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
        finally:  # also if the caller stops iterating
            _stop(running)

    def parallel_map(self, fn: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Return `fn(item)` for every item, in order, computed by all workers."""
        if self.workers == 1 or len(items) == 1:
            return super().parallel_map(fn, items)
        tasks = [self._workers().submit(fn, item) for item in items]
        try:
            wait(tasks, return_when=FIRST_EXCEPTION)
        finally:
            _stop(tasks)
        # Tasks start in order, so a failed task comes before the tasks cancelled because of it.
        return [task.result() for task in tasks]

    def _workers(self) -> ThreadPoolExecutor:
        if self._pool is None or self._process != os.getpid():  # a forked process has no threads
            self._process = os.getpid()
            self._pool = ThreadPoolExecutor(
                self.workers,
                thread_name_prefix="fedshot",
                initializer=begin_thread,
                initargs=(self._intra_op, denormals_flushed()),
            )
        return self._pool


def _stop(tasks: Collection[Future[Any]]) -> None:
    """Cancel tasks that have not begun; wait for running tasks unless the program shuts down."""
    for task in tasks:
        task.cancel()
    if not shutdown.asked.is_set():
        wait(tasks)
