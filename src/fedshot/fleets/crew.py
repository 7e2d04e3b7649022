"""Forked processes that work through a list of numbers, and the pipes to and from them.

A worker takes the next number when it is free. Nothing runs on what it is told: a packet is a JSON
head and bytes.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

_NUMBER, _SIZES = struct.Struct("<q"), struct.Struct("<qq")
_AHEAD = 2  # numbers given out to each worker before it asks


class Packet(NamedTuple):
    """What a worker sends for a number."""

    head: dict[str, Any]  # as JSON has them
    data: bytes


class Crew:
    """Workers for one list, from `with` to its end; iterating yields (number, packet) as they come.

    Args:
        workers: processes, no more than there are numbers.
        work: what a worker does for a number; it sees this process's memory as it stands now, and
            changes none of it.
        numbers: the list, each one once.

    Raises RuntimeError, with the worker's own words, where work fails or a worker ends.
    """

    def __init__(self, workers: int, work: Callable[[int], Packet], numbers: Sequence[int]) -> None:
        self._work, self._waiting, self._left = work, iter(numbers), len(numbers)
        self._size = min(workers, len(numbers))
        self._pids: dict[int, int] = {}  # by the end of the pipe that is read

    def __enter__(self) -> Self:
        self._take, self._give = os.pipe()
        try:
            for _ in range(self._size):
                self._fork()
            for _ in range(_AHEAD * self._size):
                self._next()
        except BaseException:
            self._end()
            raise
        finally:
            os.close(self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._end()

    def __iter__(self) -> Iterator[tuple[int, Packet]]:
        with DefaultSelector() as ready:
            for end in self._pids:
                ready.register(end, EVENT_READ)
            while self._left:
                for key, _ in ready.select():
                    number, packet = self._read(key.fd)
                    self._left -= 1
                    self._next()
                    yield number, packet

    def _next(self) -> None:
        """Give out a number, if one is left. There is always room: few are on the way."""
        number = next(self._waiting, None)
        if number is not None:
            os.write(self._give, _NUMBER.pack(number))

    def _read(self, end: int) -> tuple[int, Packet]:
        try:
            long, wide = _SIZES.unpack(_exactly(end, _SIZES.size))
            head, data = json.loads(_exactly(end, long)), _exactly(end, wide)
        except EOFError:
            raise RuntimeError(self._fate(end)) from None
        if "error" in head:
            raise RuntimeError(f"in a worker process: {head['error']}")
        return head.pop("number"), Packet(head, data)

    def _fate(self, end: int) -> str:
        """Say how a worker ended that should not have."""
        pid = self._pids[end]
        _, status = os.waitpid(pid, 0)
        del self._pids[end]
        os.close(end)
        code = os.waitstatus_to_exitcode(status)
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        hint = ", as when memory runs out" if code == -signal.SIGKILL else ""
        return (
            f"worker process {pid} ended {how}{hint}. Set run.fleet to 'threads', or run.workers "
            "to fewer."
        )

    def _fork(self) -> None:
        read, write = os.pipe()
        with warnings.catch_warnings():  # of threads, none of which is at work now
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _serve(self._work, self._take, write, [self._give, read, *self._pids])
        os.close(write)
        self._pids[read] = pid

    def _end(self) -> None:
        """End the workers, whatever they are at: they keep nothing."""
        os.close(self._give)
        for end, pid in self._pids.items():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(end)
        self._pids.clear()


def _serve(work: Callable[[int], Packet], take: int, write: int, others: list[int]) -> NoReturn:
    """Be a worker: work until there are no more numbers."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that forked this one decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for end in others:
            os.close(end)
        while number := os.read(take, _NUMBER.size):
            (n,) = _NUMBER.unpack(number)
            packet = work(n)
            _send(write, {"number": n} | packet.head, packet.data)
        status = 0
    except BaseException:
        with suppress(OSError):
            _send(write, {"error": traceback.format_exc()}, b"")
    finally:
        os._exit(status)


def _send(end: int, head: dict[str, Any], data: bytes) -> None:
    text = json.dumps(head).encode()
    for part in (_SIZES.pack(len(text), len(data)) + text, data):
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(end, rest) :]


def _exactly(end: int, n: int) -> bytes:
    parts: list[bytes] = []
    while n:
        part = os.read(end, min(n, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        n -= len(part)
    return b"".join(parts)
