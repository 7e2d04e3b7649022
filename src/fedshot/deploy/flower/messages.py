"""Messages between server and node: a head (JSON header) and blocks (serialised trees).

The leaves of a tree become one safetensors block, named by their paths. The tree's structure
becomes its form, a JSON value: 0 for a leaf, a dict for a dict, a list for a tuple. The list's
first entry names the class of a named tuple, and is "" for a plain tuple. The class must be a named
tuple in a fedshot module that is already loaded; decoding a name imports nothing and runs no
module's `__getattr__`. Sizes, the number of leaves and the depth are checked before decoding.

In Flower's format a message is one record of text and one record of arrays. Flower transfers every
array with a separate request. So a message has at most two arrays: the block that is common to all
clients of an exchange, which is stored once for all nodes, and all other blocks concatenated. Small
blocks are sent in the text record and cost no extra request.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedshot.core import tree
from fedshot.core.tree import Tree

if TYPE_CHECKING:
    from flwr.app import RecordDict

Form: TypeAlias = Any
_MB = 1 << 20
_MAX_PATH = 500  # maximum length of a leaf's path
COMMON = "common"
LATE = "no reply within"  # beginning of the reason of a client whose node has not replied in time
_REST = "rest"
_HEAD, _ARRAYS, _STYPE = "fedshot", "arrays", "safetensors"
_PROOF = "proof"
_SIGNED = b"fedshot letter 1"  # prefix of signed bytes: signatures are valid for messages only
_SMALL = 1 << 22  # maximum bytes of blocks that are sent in the text record

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


def unpack(form: Form, data: bytes | memoryview, limits: Limits) -> Tree:
    """Return the tree that `pack` serialised; `form` is the tree's structure.

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
        if leaf.dtype not in _TYPES:
            raise CodecError(f"{short(name)} is {tree.form(leaf)}, a dtype that is not accepted")
    made = build(form, flat, "", limits.depth)
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


def build(form: Form, flat: dict[str, Tensor], path: str, depth: int) -> Tree:
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
            name: build(child, flat, _below(path, name), depth - 1) for name, child in form.items()
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
        build(child, flat, _below(path, name), depth - 1)
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
    """Parse the head (JSON header) of a message. Raises CodecError if it is invalid."""
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


@dataclass
class WireMessage:
    """A message: a head, and blocks of serialised trees.

    Most trees of an exchange have the same form (structure). In the head, "forms" lists the
    different forms and "form_of" gives the index of each block's form.
    """

    head: dict[str, Any]
    blocks: dict[str, bytes | memoryview] = field(default_factory=dict)
    _form_index: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _hashes: dict[str, bytes] = field(default_factory=dict, init=False, repr=False, compare=False)

    def put(self, name: str, content: Tree) -> None:
        """Add a tree as the block `name`."""
        form, self.blocks[name] = pack(content)
        self._add_form(name, form)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(map(len, self.blocks.values()))

    def add(self, other: WireMessage) -> None:
        """Add the blocks of another message."""
        self.blocks |= other.blocks
        self._hashes |= {name: other._hash(name, data) for name, data in other.blocks.items()}
        for name, i in other.head.get("form_of", {}).items():
            self._add_form(name, other.head["forms"][i])

    def get(self, name: str, limits: Limits) -> Tree:
        """Return the tree of the block `name`. Raises CodecError if it is missing or invalid."""
        forms, form_of = self.head.get("forms"), self.head.get("form_of")
        i = form_of.get(name) if isinstance(form_of, dict) else None
        if (
            name not in self.blocks
            or not isinstance(forms, list)
            or type(i) is not int
            or not 0 <= i < len(forms)
        ):
            raise CodecError(f"there is no block {name!r}")
        return unpack(forms[i], self.blocks[name], limits)

    def _add_form(self, name: str, form: Form) -> None:
        forms: list[Form] = self.head.setdefault("forms", [])
        # Keys are not sorted, since the order of names is part of a form.
        i = self._form_index.setdefault(json.dumps(form), len(forms))
        if i == len(forms):
            forms.append(form)
        self.head.setdefault("form_of", {})[name] = i

    def _hash(self, name: str, data: bytes | memoryview) -> bytes:
        if name not in self._hashes:
            self._hashes[name] = hashlib.sha256(data).digest()
        return self._hashes[name]

    def record(
        self, limits: Limits = LIMITS, sign: Callable[[bytes], str] | None = None
    ) -> RecordDict:
        """Return the message in Flower's format.

        Args:
            limits: the receiver's bounds.
            sign: returns the proof of origin for a hash; None to send no proof.

        Raises CodecError for a message that exceeds the bounds.
        """
        from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

        rest = {name: data for name, data in self.blocks.items() if name != COMMON}
        wire = {COMMON: bytes(self.blocks[COMMON])} if COMMON in self.blocks else {}
        if rest:
            wire[_REST] = b"".join(rest.values())
        sizes = {name: len(data) for name, data in rest.items()}
        text, n_bytes = json.dumps(self.head | {"sizes": sizes}), sum(map(len, wire.values()))
        if len(text) > limits.head:
            raise CodecError(
                f"a head of {len(text)} characters for {len(sizes)} clients; at most {limits.head} "
                "are accepted. Let the node hold fewer clients, or send trees of fewer parts"
            )
        if n_bytes > limits.message:
            raise CodecError(
                f"{n_bytes} bytes of arrays; at most {limits.message} are accepted. Raise "
                "--most-mb on both sides"
            )
        texts: dict[str, Any] = {"head": text}
        if sign is not None:
            hashes = {name: self._hash(name, data) for name, data in wire.items()}
            texts[_PROOF] = sign(_digest(text, hashes))
        if n_bytes <= _SMALL:
            return RecordDict({_HEAD: ConfigRecord(texts | wire)})
        arrays = {
            name: Array(dtype="uint8", shape=(len(data),), stype=_STYPE, data=data)
            for name, data in wire.items()
        }
        return RecordDict({_HEAD: ConfigRecord(texts), _ARRAYS: ArrayRecord(arrays)})


class Incoming(NamedTuple):
    """A node's reply, or the reason why there is no valid reply."""

    node: int
    wire_message: WireMessage | None
    reason: str = ""


def refusal(wire_message: WireMessage) -> str:
    """Return why a node did not do what a message requested; "" if it did."""
    for kind in ("refused", "failed"):
        if kind in wire_message.head:
            return f"{kind}: {short(wire_message.head[kind])}"
    return ""


def read_message(
    record: RecordDict, limits: Limits, check: Callable[[bytes, str], None] | None = None
) -> WireMessage:
    """Parse a message in Flower's format. Raises CodecError if it is invalid.

    `check(hash, proof)` is called before the head is parsed and raises CodecError for a message
    that the server has not signed; without a signature, the proof is "".
    """
    from flwr.app import ArrayRecord, ConfigRecord

    if not {_HEAD} <= set(record) <= {_HEAD, _ARRAYS}:
        raise CodecError(short(f"records {sorted(record)[:5]}; expected {[_ARRAYS, _HEAD]}"))
    config, arrays = record[_HEAD], record.get(_ARRAYS, ArrayRecord())
    if not isinstance(config, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise CodecError("a record that holds neither text nor arrays")
    if any(array.stype != _STYPE for array in arrays.values()):
        raise CodecError("an array that is not in safetensors format")
    wire = {name: array.data for name, array in arrays.items()}
    wire |= {name: data for name, data in config.items() if isinstance(data, bytes)}
    if sum(map(len, wire.values())) > limits.message:
        raise CodecError(f"more than {limits.message} bytes")
    text = config.get("head")
    if not isinstance(text, str) or len(config) > 4 or not wire.keys() <= {COMMON, _REST}:
        raise CodecError("no head, or entries besides head, common and rest")
    if check is not None:
        hashes = {name: hashlib.sha256(data).digest() for name, data in wire.items()}
        check(_digest(text, hashes), str(config.get(_PROOF, "")))
    head = read_head(text, limits)
    return WireMessage(head, _split_blocks(head.pop("sizes", None), wire))


def _digest(text: str, hashes: Mapping[str, bytes]) -> bytes:
    """Return the hash to sign, of the text and of the arrays' names and hashes."""
    sha = hashlib.sha256(_SIGNED + hashlib.sha256(text.encode()).digest())
    for name in sorted(hashes):
        sha.update(hashlib.sha256(name.encode()).digest() + hashes[name])
    return sha.digest()


def _split_blocks(sizes: Any, wire: dict[str, bytes]) -> dict[str, bytes | memoryview]:
    rest = memoryview(wire.pop(_REST, b""))
    if not isinstance(sizes, dict) or not all(type(n) is int and n >= 0 for n in sizes.values()):
        raise CodecError("the blocks have no sizes")
    if sum(sizes.values()) != len(rest) or COMMON in sizes:
        raise CodecError(
            f"the head announces blocks of other sizes than the {len(rest)} bytes sent"
        )
    start, found = 0, dict[str, bytes | memoryview](wire)
    for name, size in sizes.items():
        found[name] = rest[start : start + size]
        start += size
    return found
