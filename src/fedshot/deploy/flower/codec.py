"""Serialisation of trees as arrays and JSON, without code.

The leaves of a tree become one safetensors block, named by their paths. The tree's structure
becomes its form, a JSON value: 0 for a leaf, a dict for a dict, a list for a tuple. The first entry
of the list names the class of a named tuple, and is "" for a plain tuple. The class must be a named
tuple of a fedshot module that is already loaded; decoding a name imports nothing and runs no
module's `__getattr__`.

Sizes, the number of leaves and the depth are checked before anything is decoded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedshot.core import tree
from fedshot.core.tree import Tree

Form: TypeAlias = Any
_MB = 1 << 20
_MAX_PATH = 500  # most characters of a leaf's path

# Dense real dtypes, whose largest value the guard can compute.
_TYPES = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
})  # fmt: skip


class CodecError(Exception):
    """Received data are invalid; the error's text says why."""


@dataclass(frozen=True)
class Limits:
    """Upper bounds on received data.

    Args:
        message: bytes of a message.
        head: bytes of a message's head, its JSON header.
        leaves: arrays in one tree.
        depth: levels of nested containers.
    """

    message: int = 512 * _MB
    head: int = 4 * _MB
    leaves: int = 20_000
    depth: int = 32


LIMITS = Limits()


def short(value: object, most: int = 500) -> str:
    """Return the first characters of a received value's text, with unprintable ones as spaces."""
    text = str(value)
    kept = "".join(c if c.isprintable() else " " for c in text[:most])
    return kept if len(text) <= most else f"{kept}..."


def pack(content: Tree) -> tuple[Form, bytes]:
    """Return the form (structure) of a tree, and its leaves as safetensors."""
    flat = {
        path: leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
        for path, leaf in tree.items(content)
    }
    return form_of(content), save(flat)


def unpack(form: Form, data: bytes, limits: Limits) -> Tree:
    """Return the tree that `pack` serialised. Raises CodecError."""
    if len(data) > limits.message:
        raise CodecError(f"{len(data)} bytes; at most {limits.message} are accepted")
    header = int.from_bytes(data[:8], "little")
    if header > min(limits.head, len(data)):
        raise CodecError(f"a header of {header} bytes; at most {limits.head} are accepted")
    if data.count(b'"dtype"', 8, 8 + header) > limits.leaves:
        raise CodecError(f"more than {limits.leaves} arrays")
    try:
        flat = load(data)  # checks every shape against the number of bytes
    except (SafetensorError, ValueError, KeyError, OverflowError) as error:
        raise CodecError(short(f"arrays that cannot be read: {error}")) from None
    for name, leaf in flat.items():
        if leaf.dtype not in _TYPES:
            raise CodecError(f"{short(name)} is {tree.form(leaf)}, a dtype that is not accepted")
    made = _build(form, flat, "", limits.depth)
    if flat:
        raise CodecError(short(f"arrays that are not in the form: {sorted(flat)[:3]}"))
    return made


def form_of(content: Tree) -> Form:
    """Return the form of a tree. Raises TypeError for anything else."""
    if isinstance(content, Tensor):
        return 0
    if isinstance(content, tuple):
        kind = type(content)
        name = "" if kind is tuple else f"{kind.__module__}:{kind.__qualname__}"
        return [name, *(form_of(child) for child in content)]
    if isinstance(content, Mapping):
        return {name: form_of(child) for name, child in content.items()}
    raise TypeError(f"{type(content).__name__} is not a tree")


def _build(form: Form, flat: dict[str, Tensor], path: str, depth: int) -> Tree:
    if depth < 0:
        raise CodecError("containers nested too deeply")
    if len(path) > _MAX_PATH or not path.isprintable():
        raise CodecError(f"a path is too long or not printable: {short(path, 60)}")
    if type(form) is int and form == 0:
        leaf = flat.pop(path or ".", None)
        if leaf is None:
            raise CodecError(f"{path or 'the root'} is missing")
        return leaf
    if isinstance(form, dict):
        if any("/" in name or not name for name in form):
            raise CodecError(
                f"a part below {path or 'the root'} has an empty name or a name with '/'"
            )
        return {
            name: _build(child, flat, _below(path, name), depth - 1) for name, child in form.items()
        }
    if not isinstance(form, list) or not form or not isinstance(form[0], str):
        raise CodecError(f"{path or 'the root'} has no valid form")
    kind = _named_tuple(form[0]) if form[0] else None
    names = kind._fields if kind else [str(i) for i in range(len(form) - 1)]
    if len(names) != len(form) - 1:
        raise CodecError(
            f"{path or 'the root'} has {len(form) - 1} parts, {form[0][:100]} {len(names)}"
        )
    parts = [
        _build(child, flat, _below(path, name), depth - 1)
        for name, child in zip(names, form[1:], strict=True)
    ]
    return kind(*parts) if kind else tuple(parts)


def _below(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _named_tuple(text: str) -> Any:
    module, _, name = text.partition(":")
    loaded = sys.modules.get(module) if module.startswith("fedshot.") else None
    # Not getattr: a module's __getattr__ may import.
    found = vars(loaded).get(name) if loaded is not None else None
    named = isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")
    if not named or found.__module__ != module:
        raise CodecError(f"{short(text, 100)!r} is not a named tuple of fedshot")
    return found


def read_head(text: str, limits: Limits) -> dict[str, Any]:
    """Parse the head (JSON header) of a message. Raises CodecError."""
    if len(text) > limits.head:
        raise CodecError(f"a head of {len(text)} characters; at most {limits.head} are accepted")
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CodecError(short(f"the head is not JSON: {error}")) from None
    if not isinstance(found, dict):
        raise CodecError("the head is not a JSON object")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")
