"""Functions of tensors as CUDA graphs: recorded once, then replayed in a single call.

A step of a small network consists of hundreds of GPU kernels that take a few microseconds each, and
Python takes longer to launch them than the GPU takes to run them. The kernels of a pure function
can be recorded while it runs, and replayed on other inputs. Replays run concurrently, each on its
own stream. They run the same kernels as consecutive calls, so their results have the same bits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.devices import CPU
from fedshot.core.tree import Tree

Result: TypeAlias = tuple[Tree, Any]  # tensors, and a value that depends on the inputs' form only
Function: TypeAlias = Callable[[Tree], Result]

_ALIGNED = 256  # bytes, as torch's allocator aligns
_SHARE = 0.5  # of the GPU's free memory that the recordings of one form may take
_FORMS = 64  # maximum number of recorded forms; further ones run without recording


class Recording:
    """A function recorded for inputs of one form, with its own memory and CUDA stream.

    The form of a tree is its structure, and the shapes, dtypes and devices of its leaves. Raises
    RuntimeError if the function cannot be recorded, for example if it copies a value to the CPU.
    """

    def __init__(self, function: Function, inputs: Tree, device: torch.device) -> None:
        leaves = tree.leaves(inputs)
        self._pending: Callable[[], Result] | None = None
        self._from_host = [i for i, leaf in enumerate(leaves) if leaf.device.type == "cpu"]
        self._on_device = [i for i, leaf in enumerate(leaves) if leaf.device.type != "cpu"]
        host = [leaves[i] for i in self._from_host]
        sent, self._staging = _packed(host, CPU, pin=True)
        received, views = _packed(host, device)
        self._inputs = [torch.empty_like(leaf) for leaf in leaves]
        for i, view in zip(self._from_host, views, strict=True):
            self._inputs[i] = view
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._graph = torch.cuda.CUDAGraph()
        self._fill(leaves)
        with torch.cuda.stream(self._stream):
            received.copy_(sent, non_blocking=True)
            found, _ = function(tree.unflatten(inputs, self._inputs))  # libraries set themselves up
        self._stream.synchronize()
        returned, self._results = _packed(_on_device(found), CPU, pin=True)
        del found
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            received.copy_(sent, non_blocking=True)
            found, self._constant = function(tree.unflatten(inputs, self._inputs))
            self._like = tree.detach(found)
            outputs = _on_device(self._like)  # what is on the CPU depends on the form alone
            buffer, places = _packed(outputs, device)
            _copy(places, outputs)
            returned.copy_(buffer, non_blocking=True)
        self._kept: Any = sent, returned  # the graph has their addresses

    def _fill(self, leaves: Sequence[Tensor]) -> None:
        for i, place in zip(self._from_host, self._staging, strict=True):
            place.copy_(leaves[i])
        given = [leaves[i] for i in self._on_device]
        with torch.cuda.stream(self._stream):
            _copy([self._inputs[i] for i in self._on_device], given)
        self._given = given  # until they are copied

    def start(self, inputs: Tree) -> Callable[[], Result]:
        """Start a replay; return a function that waits for it and returns the result on the CPU."""
        self.end()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._fill(tree.leaves(inputs))
        with torch.cuda.stream(self._stream):
            self._graph.replay()
            self._done.record()
        self._pending = cache(self._wait)
        return self._pending

    def end(self) -> None:
        """Wait for the current replay, if any. The function that `start` returned stays valid."""
        if self._pending is not None:
            self._pending()

    def _wait(self) -> Result:
        self._done.synchronize()
        self._pending = None
        results = iter(self._results)
        found = [
            leaf if leaf.device.type == "cpu" else next(results).clone()
            for leaf in tree.leaves(self._like)
        ]
        return tree.unflatten(self._like, found), self._constant


class Graphs:
    """Recordings of functions on one device, by name and by form of the inputs (see `Recording`).

    The first call for a form runs without recording, since many forms occur only once. Functions
    that cannot be recorded always run without it, as does every function if the device is not a
    CUDA device.

    Args:
        device: the device.
        most: maximum number of replays of one form at a time; fewer if memory is short.
    """

    def __init__(self, device: torch.device, most: int = 16) -> None:
        self.device, self.most = device, most
        self.refused: dict[Hashable, str] = {}  # why a form cannot be recorded
        self._recordings: dict[Hashable, deque[Recording]] = {}
        self._room: dict[Hashable, int] = {}

    def start(
        self, name: Hashable | None, function: Function, inputs: Tree
    ) -> Callable[[], Result]:
        """Start a function; return another that waits for its result and returns it on the CPU.

        Calls with the same name and the same form of inputs must compute the same function. Tensors
        that the function uses besides its inputs must live as long as this object. If `name` is
        None, the call is not recorded.
        """
        if name is None or self.device.type != "cuda":
            return self._run(function, inputs)
        form = (name, _form(inputs))
        recordings = self._recordings.get(form)
        if recordings is None or form in self.refused:
            if len(self._recordings) < _FORMS:
                self._recordings.setdefault(form, deque())
            return self._run(function, inputs)
        if len(recordings) < self._room.get(form, 1):
            try:
                recordings.append(self._record(form, function, inputs))
            except RuntimeError as error:
                torch.cuda.synchronize(self.device)
                if not recordings:
                    cause = error.__context__ or error
                    self.refused[form] = f"{type(cause).__name__}: {cause}"
                    return self._run(function, inputs)
                self._room[form] = len(recordings)
        recordings.rotate(1)  # from the most recent to the one that has run for the longest time
        return recordings[0].start(inputs)

    def _record(self, form: Hashable, function: Function, inputs: Tree) -> Recording:
        here = torch.cuda.current_stream(self.device)  # a failed recording does not restore it
        with torch.cuda.device(self.device), torch.cuda.stream(here):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # as recording does, so that the sizes can be compared
            before = torch.cuda.memory_reserved()
            recording = Recording(function, inputs, self.device)
            size = max(torch.cuda.memory_reserved() - before, 1)
            free = torch.cuda.mem_get_info()[0]
        self._room.setdefault(form, max(1, min(self.most, 1 + math.floor(_SHARE * free / size))))
        return recording

    def _run(self, function: Function, inputs: Tree) -> Callable[[], Result]:
        try:
            found, constant = function(tree.to(inputs, self.device))
        except torch.OutOfMemoryError:
            if not any(self._recordings.values()):
                raise
            self.forget()
            return self._run(function, inputs)
        result = tree.to(tree.detach(found), CPU), constant
        return lambda: result

    def forget(self) -> None:
        """Wait for all replays to end, then delete the recordings and free their memory."""
        for recordings in self._recordings.values():
            for recording in recordings:
                recording.end()
            recordings.clear()
        torch.cuda.empty_cache()


def _packed(
    leaves: Sequence[Tensor], device: torch.device, *, pin: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Return one buffer with room for all leaves, and a view of it for each leaf."""
    sizes = [leaf.numel() * leaf.element_size() for leaf in leaves]
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNED) * _ALIGNED
    buffer = torch.empty(end, dtype=torch.uint8, device=device, pin_memory=pin)
    views = [
        buffer[start : start + size].view(leaf.dtype).view(leaf.shape)
        for start, size, leaf in zip(starts, sizes, leaves, strict=True)
    ]
    return buffer, views


def _copy(places: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Copy each leaf to its place, with one call for each dtype."""
    for dtype in {leaf.dtype for leaf in leaves}:
        pairs = [pair for pair in zip(places, leaves, strict=True) if pair[1].dtype == dtype]
        torch._foreach_copy_([place for place, _ in pairs], [leaf for _, leaf in pairs])


def _form(part: Tree) -> Hashable:
    """Return the structure of a tree: the names, shapes, dtypes and devices of its leaves."""
    return tuple(
        (path, leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
        for path, leaf in tree.items(part)
    )


def _on_device(found: Tree) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(found) if leaf.device.type != "cpu"]
