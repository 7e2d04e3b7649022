"""Trees as bytes, for other processes and hosts.

The leaves of a tree become one safetensors block, named by their paths. The tree's structure
becomes its form, a JSON value: 0 for a leaf, a dict for a dict, a list for a tuple. The list's
first entry names the class of a named tuple, and is "" for a plain tuple. The class must be a named
tuple in a module that is already loaded, and unless the sender is trusted a module of fedshot;
decoding a name imports nothing and runs no module's `__getattr__`. Sizes, the number of leaves and
the depth are checked before decoding.
"""

from __future__ import annotations

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
_MAX_PATH = 500  # maximum length of a leaf's path

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
        head: bytes of a message's head, i.e. its JSON header.
        leaves: number of arrays in one tree.
        depth: number of levels of nested containers.
    """

    message: int = 512 * _MB
    head: int = 4 * _MB
    leaves: int = 20_000
    depth: int = 32


LIMITS = Limits()


def short(value: object, most: int = 500) -> str:
    """Return the start of a received value's text, with spaces for unprintable characters."""
    text = str(value)
    kept = "".join(c if c.isprintable() else " " for c in text[:most])
    return kept if len(text) <= most else f"{kept}..."


def pack(content: Tree) -> tuple[Form, bytes]:
    """Return a tree's structure, as a JSON value (its form), and its leaves as safetensors."""
    flat = {
        path: leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
        for path, leaf in tree.items(content)
    }
    return form_of(content), save(flat)


def unpack(form: Form, data: bytes | memoryview, limits: Limits, *, trusted: bool = False) -> Tree:
    """Return the tree that `pack` serialised; `form` is the tree's structure.

    With `trusted`, named tuples may be those of any loaded module.

    Raises CodecError for invalid data.
    """
    if len(data) > limits.message:
        raise CodecError(f"{len(data)} bytes; at most {limits.message} are accepted")
    header = int.from_bytes(data[:8], "little")
    if header > min(limits.head, len(data)):
        raise CodecError(f"a header of {header} bytes; at most {limits.head} are accepted")
    data = bytes(data)  # of a block of a large message, its only copy
    if data.count(b'"dtype"', 8, 8 + header) > limits.leaves:
        raise CodecError(f"more than {limits.leaves} arrays")
    try:
        flat = load(data)  # checks every shape against the number of bytes
    except (SafetensorError, ValueError, KeyError, OverflowError) as error:
        raise CodecError(short(f"arrays that cannot be read: {error}")) from None
    for name, leaf in flat.items():
        if leaf.dtype not in _TYPES and not trusted:
            raise CodecError(f"{short(name)} is {tree.form(leaf)}, a dtype that is not accepted")
    made = build(form, flat, "", limits.depth, trusted=trusted)
    if flat:
        raise CodecError(short(f"arrays that are not in the form: {sorted(flat)[:3]}"))
    return made


def form_of(content: Tree) -> Form:
    """Return the structure of a tree as a JSON value, in the format of the module's docstring.

    Raises TypeError if `content` is not a tree.
    """
    if isinstance(content, Tensor):
        return 0
    if isinstance(content, tuple):
        kind = type(content)
        name = "" if kind is tuple else f"{kind.__module__}:{kind.__qualname__}"
        return [name, *(form_of(child) for child in content)]
    if isinstance(content, Mapping):
        return {name: form_of(child) for name, child in content.items()}
    raise TypeError(f"{type(content).__name__} is not a tree")


def build(
    form: Form, flat: dict[str, Tensor], path: str, depth: int, *, trusted: bool = False
) -> Tree:
    """Return the tree of this form; its leaves, at paths below `path`, are removed from `flat`.

    Raises CodecError for a form that is invalid, lacks leaves or is deeper than `depth`.
    """
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
            name: build(child, flat, _below(path, name), depth - 1, trusted=trusted)
            for name, child in form.items()
        }
    if not isinstance(form, list) or not form or not isinstance(form[0], str):
        raise CodecError(f"{path or 'the root'} has no valid form")
    kind = _named_tuple(form[0], trusted) if form[0] else None
    names = kind._fields if kind else [str(i) for i in range(len(form) - 1)]
    if len(names) != len(form) - 1:
        raise CodecError(
            f"{path or 'the root'} has {len(form) - 1} parts, {form[0][:100]} {len(names)}"
        )
    parts = [
        build(child, flat, _below(path, name), depth - 1, trusted=trusted)
        for name, child in zip(names, form[1:], strict=True)
    ]
    return kind(*parts) if kind else tuple(parts)


def _below(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _named_tuple(text: str, trusted: bool) -> Any:
    module, _, name = text.partition(":")
    loaded = sys.modules.get(module) if trusted or module.startswith("fedshot.") else None
    found: Any = loaded
    for part in name.split(".") if trusted else [name]:
        # Not getattr: a module's __getattr__ may import.
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    named = isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")
    if not named or found.__module__ != module:
        raise CodecError(f"{short(text, 100)!r} is not a named tuple of fedshot")
    return found
