"""A pretended CUDA device: the rules of a GPU with the numbers of a CPU, for machines without one.

A tensor on the device wraps a CPU tensor, on which every operator runs, so results equal those of
the CPU bit by bit. What CUDA refuses is refused: operands on two devices, a generator of the CPU,
the memory address, numpy. Reads by the host, for which a GPU has to finish all queued work, and
copies in both directions are recorded with the line of fedshot that asked for them.

A CUDA graph records the operators and their memory, and a replay runs them again on what the
memory holds then; so a function that depends on its inputs in another way gives another result.

Not pretended: CUDA's own kernels (cuDNN, autocast) and their rounding, streams, and the amount of
memory. Only the thread that entered the devices has them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import fedshot
from fedshot.protocol import method

DEVICE = "cuda:0"
_SOURCES = str(Path(fedshot.__file__).parent)
# Names of operators. For the first the host waits: for a value, or a size that depends on values.
_READS = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2",
    "unique_consecutive", "unique_dim", "bincount", "repeat_interleave", "_linalg_check_errors",
}  # fmt: skip
_INDEXED = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
_PRODUCTS = {"mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv"}
# Other operators take a CPU tensor without dimensions as a number; these do not.
_NO_NUMBERS = _PRODUCTS | {
    "stack", "cat", "gather", "index_select", "embedding", "native_batch_norm",
    "native_layer_norm", "_fused_adam_", "convolution", "scatter", "index_add", "index_copy",
}  # fmt: skip


class OnGpu(Tensor):
    """A tensor on a pretended device; `values` are its numbers, on the CPU.

    Torch takes it for a tensor of the device "meta", which every build of torch has.
    """

    values: Tensor
    gpu: PretendGpu
    number: int
    device = property(lambda self: torch.device("cuda", self.number))  # type: ignore[assignment]
    is_cuda = property(lambda _: True)  # type: ignore[assignment]
    is_meta = property(lambda _: False)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: Tensor, gpu: PretendGpu, number: int) -> OnGpu:
        it = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), storage_offset=values.storage_offset(),
            dtype=values.dtype, device="meta",
        )  # fmt: skip
        it.values, it.gpu, it.number = values, gpu, number
        return it

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found: list[Any] = []
        _values((*args, *(kwargs or {}).values()), found)
        gpu = next(leaf.gpu for leaf in found if type(leaf) is cls)
        return gpu.__torch_dispatch__(func, types, args, kwargs)

    def __repr__(self) -> str:
        return f"OnGpu({self.values})"

    def tolist(self) -> Any:
        self.gpu.record("read", "tolist")
        return self.values.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def data_ptr(self) -> int:
        raise RuntimeError("a function of the CPU was given a tensor on the GPU")


class Graph:
    """A recording of operators, with the memory that they read and write."""

    def __init__(self) -> None:
        self.operators: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        """Run the operators again on what their memory holds now."""
        with no_dispatch(), torch.no_grad():
            for func, values, options, held in self.operators:
                for new, old in zip(_flat(func(*values, **options)), _flat(held), strict=True):
                    if new is not old:
                        old.copy_(new)


class PretendGpu(TorchDispatchMode):
    """The devices; as a context manager, they exist within the context.

    `events` counts (kind, part, operator, place): kind is "read", "down" for a copy to the device
    or "up" for one from it; place is the line of fedshot; part is that of `during`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: Counter[tuple[str, str, str, str]] = Counter()
        self._part = ""
        self._recording: Graph | None = None

    @contextmanager
    def graph(self, graph: Graph, **_: Any) -> Iterator[None]:
        """Record the operators of the context; CUDA refuses reads and copies to the CPU in it."""
        self._recording = graph
        try:
            yield
        finally:
            self._recording = None

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Record events under the name of a part of the program."""
        before, self._part = self._part, part
        try:
            yield
        finally:
            self._part = before

    def count(self, *kinds: str, part: str | None = None) -> int:
        """Return the number of events of some kinds."""
        return sum(n for e, n in self.events.items() if e[0] in kinds and part in {None, e[1]})

    def record(self, kind: str, op: str) -> None:
        """Count one event."""
        if self._recording is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {kind} by {op}")
        self.events[kind, self._part, op, _place()] += 1

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that skips it costs as much as an operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: part for name, part in (kwargs or {}).items() if name != "pin_memory"}
        given: list[Tensor] = []
        values = [_values(part, given) for part in args]
        options = {name: _values(part, given) for name, part in kwargs.items()}
        there = {id(leaf.values): leaf for leaf in given if type(leaf) is OnGpu}
        device = kwargs.get("device")
        lands = bool(there) if device is None else torch.device(device).type != "cpu"
        if not lands and not there:
            return func(*args, **kwargs)
        numbers = {leaf.number for leaf in there.values()}
        if device is not None:
            numbers = {torch.device(device).index or 0}
            options["device"] = torch.device("cpu")
        self._check(func, args, kwargs, given, lands)
        if torch.Tag.inplace_view in func.tags:
            with no_dispatch():
                func(*args, **kwargs)  # changes the shape that torch has of the tensor

        def wrapped(out: Any) -> Any:
            if isinstance(out, Tensor):
                found = there.get(id(out), out)  # an operator in place returns its input
                return OnGpu(out, self, *numbers) if found is out and lands else found
            return type(out)(map(wrapped, out)) if isinstance(out, tuple | list) else out

        found = func(*values, **options)
        if self._recording is not None:
            self._recording.operators.append((func, values, options, found))
        return wrapped(found)

    def _check(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], lands: bool) -> None:
        """Refuse what CUDA refuses, and record reads and copies."""
        name, here = func.__name__.partition(".")[0], [t for t in given if type(t) is not OnGpu]
        if kwargs.get("generator") is not None:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        if name in {"_to_copy", "copy_"}:
            to_gpu = lands if name == "_to_copy" else type(args[0]) is OnGpu
            queued = name == "copy_" and len(args) > 2 and args[2]  # of pinned memory
            if (type(given[-1]) is OnGpu) != to_gpu and not queued:
                self.record("down" if to_gpu else "up", name)
            return
        if len({t.number for t in given if type(t) is OnGpu}) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device ({name})")
        if name in _PRODUCTS and not given[-1].is_floating_point():
            raise RuntimeError(f"{name} of {given[-1].dtype} is not implemented on CUDA")
        if name in _READS:
            self.record("read", name)
        if name in _INDEXED and type(args[0]) is OnGpu:
            index = [t for t in args[1] if t is not None]
            if any(t.dtype in {torch.bool, torch.uint8} for t in index):
                self.record("read", name)
            if any(type(t) is not OnGpu for t in index):
                self.record("down", name)
            here = [t for t in here if all(t is not one for one in index)]
        for t in here:
            if len(here) < len(given) and (t.ndim or name in _NO_NUMBERS):
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two "
                    f"devices, {DEVICE} and cpu! ({name} at {_place()}: a {t.dtype} "
                    f"{list(t.shape)} is on the CPU)"
                )


def _values(given: Any, found: list[Tensor]) -> Any:
    """Return an argument with CPU tensors for those on the device; add its tensors to `found`."""
    if isinstance(given, Tensor):
        found.append(given)
        return given.values if type(given) is OnGpu else given
    if isinstance(given, tuple | list):
        return [_values(part, found) for part in given]
    return given


def _flat(given: Any) -> Iterator[Tensor]:
    """Yield the tensors that an operator returned."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, tuple | list):
        for part in given:
            yield from _flat(part)


def _place() -> str:
    """Return the innermost line of fedshot that is running, as "methods/frl/frl.py:12"."""
    frame = sys._getframe()
    while frame.f_back and not frame.f_code.co_filename.startswith(_SOURCES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.removeprefix(_SOURCES + '/')}:{frame.f_lineno}"


@contextmanager
def pretend_gpu() -> Iterator[PretendGpu]:
    """Give this thread two devices, "cuda:0" and "cuda:1", within the context."""
    made = torch.tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        found = made(data, **options)
        return found if device is None else found.to(device)

    with pytest.MonkeyPatch.context() as patch, PretendGpu() as gpu:
        method._graphs.cache_clear()  # recordings of an earlier pretended GPU
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.backends.cudnn, "version", lambda: 0)  # it would look for the GPU
        patch.setattr(torch, "tensor", tensor)  # makes a CPU tensor, and copies it below the mode
        nothing = SimpleNamespace(
            device=None,
            **dict.fromkeys(("synchronize", "wait_stream", "record"), lambda *_: None),
        )
        for name, pretended in {
            **dict.fromkeys(("Stream", "Event", "current_stream"), lambda *_: nothing),
            **dict.fromkeys(("stream", "device"), lambda _: nullcontext()),
            "synchronize": lambda *_: None, "empty_cache": lambda: None,
            "memory_reserved": lambda *_: 0,
            "mem_get_info": lambda *_: (1 << 40, 1 << 40), "device_count": lambda: 2,
            "is_available": lambda: True, "get_device_name": lambda _: "a pretended GPU",
            "CUDAGraph": Graph, "graph": gpu.graph,
        }.items():  # fmt: skip
            patch.setattr(torch.cuda, name, pretended)
        yield gpu
