"""Messages between server and node: a head (JSON header) and blocks (serialised trees).

`fedshot.core.serialised` turns a tree into its form, which the head holds, and a block.

In Flower's format a message is one record of text and one record of arrays. Flower transfers every
array with a separate request. So a message has at most two arrays: the block that is common to all
clients of an exchange, which is stored once for all nodes, and all other blocks concatenated. Small
blocks are sent in the text record and cost no extra request.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from fedshot.core.serialised import (
    LIMITS,
    CodecError,
    Form,
    Limits,
    pack,
    short,
    unpack,
)
from fedshot.core.tree import Tree

if TYPE_CHECKING:
    from flwr.app import RecordDict

COMMON = "common"
LATE = "no reply within"  # beginning of the reason of a client whose node has not replied in time
_REST = "rest"
_HEAD, _ARRAYS, _STYPE = "fedshot", "arrays", "safetensors"
_PROOF = "proof"
_SIGNED = b"fedshot letter 1"  # prefix of signed bytes: signatures are valid for messages only
SMALL = 1 << 22  # maximum bytes of blocks that are sent in the text record, each time anew


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
        if n_bytes <= SMALL:
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
