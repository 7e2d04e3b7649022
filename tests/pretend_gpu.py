"""A pretended CUDA device: the rules of a GPU with the numbers of a CPU, for machines without one.

A tensor on the device wraps a CPU tensor, on which every operator runs, so results equal those of
the CPU bit by bit. What CUDA refuses is refused: operands on two devices, a generator of the CPU,
the memory address, numpy. Reads by the host, for which a GPU has to finish all queued work, and
copies in both directions are recorded with the line of fedshot that asked for them.

A CUDA graph records the operators and their memory, and a replay runs them again on what the memory
holds then. So a function that depends on its inputs in any other way gives another result.

Not pretended: CUDA's own kernels (cuDNN, autocast) and their rounding, streams, and the amount of
memory. Only the thread that entered the device has it.
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

DEVICE = "cuda:0"
_SOURCES = str(Path(fedshot.__file__).parent)
_ops = torch.ops.aten
_COPIES = {_ops._to_copy.default, _ops.copy_.default}
# The host waits for a value, or for a size that depends on values.
_READS = {
    *(_ops._local_scalar_dense.default, _ops.equal.default, _ops.nonzero.default),
    *(_ops.masked_select.default, _ops._unique2.default, _ops.unique_consecutive.default),
    *(_ops.unique_dim.default, _ops.bincount.default, _ops.repeat_interleave.Tensor),
    *(_ops._linalg_check_errors.default, _ops.is_nonzero.default),
}
_INDEXED = {_ops.index.Tensor, _ops._unsafe_index.Tensor}
_INDEXED |= {_ops.index_put.default, _ops.index_put_.default, _ops._index_put_impl_.default}
# Other operators take a CPU tensor without dimensions as a number; these do not.
_NO_NUMBERS = {
    *(_ops.stack.default, _ops.cat.default, _ops.gather.default, _ops.index_select.default),
    *(_ops.embedding.default, _ops.mm.default, _ops.bmm.default, _ops.addmm.default),
    *(_ops.native_batch_norm.default, _ops.convolution.default, _ops.scatter.src),
    *(_ops.index_add.default, _ops.index_copy.default, _ops.native_layer_norm.default),
}
_PRODUCTS = {_ops.mm.default, _ops.bmm.default, _ops.addmm.default, _ops.mv.default}
_PRODUCTS |= {_ops.dot.default, _ops.baddbmm.default, _ops.addmv.default}


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
        kwargs = kwargs or {}
        given: list[Tensor] = []
        values = [_values(part, given) for part in args]
        options = {name: _values(part, given) for name, part in kwargs.items()}
        there = {id(leaf.values): leaf for leaf in given if type(leaf) is OnGpu}
        device = kwargs.get("device")
        lands = bool(there) if device is None else torch.device(device).type != "cpu"
        kwargs.pop("pin_memory", None)
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
        if kwargs.get("generator") is not None:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        if func in _COPIES:
            to_gpu = lands if func is _ops._to_copy.default else type(args[0]) is OnGpu
            pinned = func is _ops.copy_.default and len(args) > 2 and args[2]
            if (type(given[-1]) is OnGpu) != to_gpu and not pinned:
                self.record("down" if to_gpu else "up", str(func))
            return
        if func in _PRODUCTS and not given[-1].is_floating_point():
            raise RuntimeError(f"{func} of {given[-1].dtype} is not implemented on CUDA")
        if func in _READS:
            self.record("read", str(func))
        numbers = {leaf.number for leaf in given if type(leaf) is OnGpu}
        if len(numbers) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, found {numbers}")
        here = [leaf for leaf in given if type(leaf) is not OnGpu]
        if func in _INDEXED and type(args[0]) is OnGpu:
            index = [leaf for leaf in args[1] if leaf is not None]
            if any(leaf.dtype in {torch.bool, torch.uint8} for leaf in index):
                self.record("read", str(func))
            if any(type(leaf) is not OnGpu for leaf in index):
                self.record("down", str(func))
            here = [leaf for leaf in here if all(leaf is not one for one in index)]
        for leaf in here:
            if len(here) < len(given) and (leaf.ndim or func in _NO_NUMBERS):
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two "
                    f"devices, {DEVICE} and cpu! ({func}, {leaf.dtype} {list(leaf.shape)} is on "
                    f"the CPU, at {_place()})"
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
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch, "tensor", tensor)  # makes a CPU tensor, and copies it below the mode
        nothing = SimpleNamespace(
            device=None,
            **dict.fromkeys(("synchronize", "wait_stream", "record"), lambda *_: None),
        )
        for name, pretended in {
            **dict.fromkeys(("Stream", "Event", "current_stream"), lambda *_: nothing),
            **dict.fromkeys(("stream", "device"), lambda _: nullcontext()),
            "synchronize": lambda *_: None, "memory_reserved": lambda *_: 0,
            "mem_get_info": lambda *_: (1 << 40, 1 << 40), "device_count": lambda: 2,
            "is_available": lambda: True, "get_device_name": lambda _: "a pretended GPU",
            "CUDAGraph": Graph, "graph": gpu.graph,
        }.items():  # fmt: skip
            patch.setattr(torch.cuda, name, pretended)
        yield gpu
