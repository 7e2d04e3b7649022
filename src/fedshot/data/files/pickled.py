"""The publisher's CIFAR files, which are pickles, read without running them.

This module exists because CIFAR-10 and CIFAR-100 are published in no other complete form. A pickle
is a program for a small stack machine, and Python's own `pickle` runs whatever it says: it may
import any module and call anything in it. So here is a machine of our own that knows only the
instructions those files use (Python 2, protocol 2). It has no way to import or call; the three
names of numpy that the files mention are words to it, and the one call that it understands yields
a uint8 array over bytes that are already there. Anything else is refused by name. As a second
gain the pixels are never copied. Nothing in fedshot imports `pickle`; a test looks.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from fedshot.core.errors import DataError
from fedshot.data.dataset import Pixels

LIMIT = 1 << 29  # bytes of one file; the largest that was published has 155,249,918
_STEPS = 4_000_000  # instructions; that file has about 350,000
_BIG = 1 << 16  # bytes of a text from which it is kept as a view, being an array's content
_FIX = "Fetch the file again from its publisher, and open this one with nothing else."
_NAMES = {
    "numpy.core.multiarray _reconstruct": "array",
    "numpy._core.multiarray _reconstruct": "array",
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
}
Text: TypeAlias = str | memoryview


@dataclass(frozen=True)
class _Word:
    """One of the names that may occur."""

    name: str


@dataclass
class _U8:
    """What numpy.dtype("u1") is to us: the only type there is."""


@dataclass
class _Array:
    """An array that is announced, and filled when its state arrives."""

    value: Pixels | None = None


def read(data: bytes, name: str) -> dict[str, Any]:
    """Return the dictionary in a publisher's file: texts, lists of numbers or texts, and arrays.

    Texts are decoded as latin-1. Raises DataError for anything else, whatever it is.
    """
    if len(data) > LIMIT:
        raise DataError(f"{name} has {len(data)} bytes, expected at most {LIMIT}. {_FIX}")
    try:
        content = _Machine(memoryview(data)).run()
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
    except (ValueError, IndexError, KeyError, TypeError, struct.error) as error:
        said = str(error) if isinstance(error, ValueError) else "its instructions make no sense"
        raise DataError(
            f"{name} is not one of CIFAR's pickles: {said[:200]}; expected a dictionary of lists, "
            f"numbers, texts and one array of bytes. {_FIX}"
        ) from error
    return {
        str(key): value.value if isinstance(value, _Array) else value
        for key, value in content.items()
    }


@dataclass
class _Machine:
    data: memoryview
    at: int = 0
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    copied: int = 0  # bytes of arrays that are no view of the file

    def run(self) -> Any:
        for _ in range(_STEPS):
            code = bytes(self.take(1))
            if code == b".":
                return self.stack.pop()
            self.step(code)
        raise ValueError(f"it has more than {_STEPS} instructions")

    def step(self, code: bytes) -> None:  # noqa: PLR0912  one line for each instruction
        match code:
            case b"\x80":  # PROTO
                if self.number("<B") != 2:
                    raise ValueError("its protocol is not 2")
            case b"(":  # MARK
                self.marks.append(len(self.stack))
            case b"}":
                self.stack.append({})
            case b"]":
                self.stack.append([])
            case b")":
                self.stack.append(())
            case b"t":  # TUPLE, of all since the mark
                self.stack.append(tuple(self.since_mark()))
            case b"\x85" | b"\x86" | b"\x87":  # TUPLE1, 2, 3
                self.stack.append(tuple(self.pop(code[0] - 0x84)))
            case b"a":  # APPEND
                self.extend([self.stack.pop()])
            case b"e":  # APPENDS
                self.extend(self.since_mark())
            case b"s":  # SETITEM
                self.update(self.pop(2))
            case b"u":  # SETITEMS
                self.update(self.since_mark())
            case b"q" | b"r":  # BINPUT, LONG_BINPUT
                self.memo[self.number("<B" if code == b"q" else "<I")] = self.stack[-1]
            case b"h" | b"j":  # BINGET, LONG_BINGET
                self.stack.append(self.memo[self.number("<B" if code == b"h" else "<I")])
            case b"U" | b"T":  # SHORT_BINSTRING, BINSTRING
                self.stack.append(self.text(self.number("<B" if code == b"U" else "<I")))
            case b"X":  # BINUNICODE
                self.stack.append(bytes(self.take(self.number("<I"))).decode("utf-8"))
            case b"K" | b"M" | b"J":  # BININT1, BININT2, BININT
                self.stack.append(self.number({b"K": "<B", b"M": "<H", b"J": "<i"}[code]))
            case b"N" | b"\x88" | b"\x89":  # NONE, NEWTRUE, NEWFALSE
                self.stack.append({b"N": None, b"\x88": True, b"\x89": False}[code])
            case b"c":  # GLOBAL
                name = f"{self.line()} {self.line()}"
                if name not in _NAMES:
                    raise ValueError(f"it asks for {name.replace(' ', '.')}")
                self.stack.append(_Word(_NAMES[name]))
            case b"R":  # REDUCE
                self.stack.append(_called(*self.pop(2)))
            case b"b":  # BUILD
                self.fill(*self.pop(2, keep=1))
            case _:
                raise ValueError(f"it has the instruction {code!r}")

    def take(self, n: int) -> memoryview:
        if n > len(self.data) - self.at:
            raise ValueError("it ends too early")
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self, form: str) -> int:
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def text(self, n: int) -> Text:
        raw = self.take(n)
        return raw if n >= _BIG else bytes(raw).decode("latin-1")

    def line(self) -> str:
        raw = bytes(self.data[self.at : self.at + 100])
        if b"\n" not in raw:
            raise ValueError("it has a name that does not end")
        self.at += raw.index(b"\n") + 1
        return raw[: raw.index(b"\n")].decode("latin-1")

    def pop(self, n: int, keep: int = 0) -> list[Any]:
        """Return the last n values, and leave the first `keep` of them on the stack."""
        floor = self.marks[-1] if self.marks else 0
        if len(self.stack) - n < floor:
            raise ValueError("its instructions make no sense")
        values = self.stack[-n:]
        del self.stack[len(self.stack) - n + keep :]
        return values

    def since_mark(self) -> list[Any]:
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def extend(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("it appends to something that is no list")
        self.stack[-1].extend(values)

    def update(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or not all(isinstance(key, str) for key in pairs[::2]):
            raise ValueError("it has a dictionary whose keys are not texts")
        target.update(zip(pairs[::2], pairs[1::2], strict=True))

    def fill(self, target: object, state: object) -> None:
        match target, state:
            case _U8(), tuple():  # byte order and alignment say nothing about single bytes
                return
            case _Array(), (int(), tuple(shape), _U8(), bool(fortran), str() | memoryview() as raw):
                if not all(type(n) is int and 0 <= n <= LIMIT for n in shape):
                    raise ValueError("it has an array of an impossible shape")
                flat = np.frombuffer(self.content(raw), dtype=np.uint8)
                target.value = flat.reshape(shape, order="F" if fortran else "C")
            case _:
                raise ValueError("it changes something other than an array of bytes")

    def content(self, raw: Text) -> bytes | memoryview:
        if isinstance(raw, memoryview):
            return raw
        self.copied += len(raw)  # one text may be named again and again
        if self.copied > len(self.data):
            raise ValueError("its arrays have more bytes than the file")
        return raw.encode("latin-1")


def _called(function: object, arguments: object) -> object:
    match function, arguments:
        case _Word("array"), (_Word("ndarray"), (0,), str()):
            return _Array()
        case _Word("dtype"), ("u1", *_):
            return _U8()
    raise ValueError("it calls something other than numpy's array of bytes")
