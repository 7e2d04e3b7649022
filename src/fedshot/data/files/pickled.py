"""The pickled CIFAR files, read without unpickling.

CIFAR-10 and CIFAR-100 are published in no other complete form. A pickle is a program for a stack
machine. The module `pickle` executes it, and it may import any module and call any function.
`read` interprets only the opcodes that the CIFAR files use (Python 2, protocol 2), as parsed by
`pickletools.genops`. It cannot import or call anything: it treats numpy's names in the files as
plain text, and the only call it accepts creates a uint8 array over bytes of the file. Everything
else raises DataError. Nothing in fedshot imports `pickle`; a test checks that.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from fedshot.core.errors import DataError
from fedshot.data.dataset import Pixels

LIMIT = 1 << 29  # bytes of one file; the largest published file has 155,249,918
_STEPS = 4_000_000  # opcodes; the largest published file has about 350,000
_BIG = 1 << 16  # longer strings, the contents of arrays, stay views of the file; in bytes
_FIX = "Fetch the file again from its publisher, and do not open this one with other programs."
_NAMES = (
    "numpy.core.multiarray _reconstruct",
    "numpy._core.multiarray _reconstruct",
    "numpy ndarray",
    "numpy dtype",
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, type[Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
Text: TypeAlias = str | memoryview


@dataclass(frozen=True)
class _Name:
    """A name of numpy in the file, one of `_NAMES`."""

    name: str


class _Uint8:
    """The dtype uint8, the only dtype that is allowed."""


@dataclass
class _Array:
    """An array; the opcode BUILD sets its value."""

    value: Pixels | None = None


def read(data: bytes, name: str) -> dict[str, Any]:
    """Return the dictionary of a CIFAR file: strings, lists of numbers or strings, and arrays.

    Strings are decoded as latin-1. Raises DataError for any other content.
    """
    if len(data) > LIMIT:
        raise DataError(f"{name} has {len(data)} bytes, expected at most {LIMIT}. {_FIX}")
    try:
        content = _Machine(data).run()
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
    except (ValueError, IndexError, KeyError, TypeError) as error:
        reason = str(error) if isinstance(error, ValueError) else "its opcodes make no sense"
        raise DataError(
            f"{name} is not one of CIFAR's pickles: {reason[:200]}; expected a dictionary of "
            f"lists, numbers, strings and one array of bytes. {_FIX}"
        ) from error
    return {k: v.value if isinstance(v, _Array) else v for k, v in content.items()}


class _Machine:
    """The stack machine of a pickle, restricted to the opcodes in `_step`."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._copied = 0  # bytes of arrays that are not views of the file

    def run(self) -> Any:
        for i, (opcode, arg, position) in enumerate(pickletools.genops(self._data)):
            if i >= _STEPS:
                raise ValueError(f"it has more than {_STEPS} opcodes")
            if opcode.name == "STOP":
                break
            if opcode.name == "BINSTRING" and arg is not None and len(arg) >= _BIG:
                start = (position or 0) + 5  # after the opcode, 1 byte, and the length, 4 bytes
                self._stack.append(memoryview(self._data)[start : start + len(arg)])
            else:
                self._step(opcode.name, arg)
        return self._stack.pop()

    def _step(self, opcode: str, arg: Any) -> None:  # noqa: PLR0912  a line for each opcode
        match opcode:
            case "PROTO":
                if arg != 2:
                    raise ValueError("its protocol is not 2")
            case "MARK":
                self._marks.append(len(self._stack))
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                self._stack.append(_EMPTY[opcode]())
            case "TUPLE":
                self._stack.append(tuple(self._pop_to_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self._stack.append(tuple(self._pop(int(opcode[-1]))))
            case "APPEND":
                self._extend([self._stack.pop()])
            case "APPENDS":
                self._extend(self._pop_to_mark())
            case "SETITEM":
                self._update(self._pop(2))
            case "SETITEMS":
                self._update(self._pop_to_mark())
            case "BINPUT" | "LONG_BINPUT":
                self._memo[arg] = self._stack[-1]
            case "BINGET" | "LONG_BINGET":
                self._stack.append(self._memo[arg])
            case "SHORT_BINSTRING" | "BINSTRING" | "BINUNICODE" | "BININT1" | "BININT2" | "BININT":
                self._stack.append(arg)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                self._stack.append(_CONSTANTS[opcode])
            case "GLOBAL":
                if arg not in _NAMES:
                    raise ValueError(f"it asks for {arg.replace(' ', '.')}")
                self._stack.append(_Name(arg.split(" ")[1]))
            case "REDUCE":
                self._stack.append(_call(*self._pop(2)))
            case "BUILD":
                target, state = self._pop(2)
                self._build(target, state)
                self._stack.append(target)
            case _:
                raise ValueError(f"it has the opcode {opcode}")

    def _pop(self, n: int) -> list[Any]:
        if len(self._stack) - n < (self._marks[-1] if self._marks else 0):
            raise IndexError
        start = len(self._stack) - n
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _pop_to_mark(self) -> list[Any]:
        return self._pop(len(self._stack) - self._marks.pop())

    def _extend(self, values: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise ValueError("it appends to something other than a list")
        self._stack[-1].extend(values)

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or not all(isinstance(key, str) for key in items[::2]):
            raise ValueError("it has a dictionary whose keys are not strings")
        target.update(zip(items[::2], items[1::2], strict=True))

    def _build(self, target: object, state: object) -> None:
        match target, state:
            case _Uint8(), tuple():  # byte order and alignment, irrelevant for single bytes
                return
            case _Array(), (
                int(),
                tuple(shape),
                _Uint8(),
                bool(fortran),
                str() | memoryview() as raw,
            ):
                if not all(type(n) is int and 0 <= n <= LIMIT for n in shape):
                    raise ValueError("it has an array of an impossible shape")
                flat = np.frombuffer(self._bytes(raw), dtype=np.uint8)
                target.value = flat.reshape(shape, order="F" if fortran else "C")
            case _:
                raise ValueError("it changes something other than an array of bytes")

    def _bytes(self, raw: Text) -> bytes | memoryview:
        if isinstance(raw, memoryview):
            return raw
        self._copied += len(raw)  # one string may be used for many arrays
        if self._copied > len(self._data):
            raise ValueError("its arrays have more bytes than the file")
        return raw.encode("latin-1")


def _call(function: object, arguments: object) -> object:
    match function, arguments:
        case _Name("_reconstruct"), (_Name("ndarray"), (0,), str()):
            return _Array()
        case _Name("dtype"), ("u1", *_):
            return _Uint8()
    raise ValueError("it calls something other than numpy's array of bytes")
