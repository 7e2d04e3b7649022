"""What passes between server and node: a head of names and numbers, and blocks of arrays.

On the wire a letter is a record of a text and a record of arrays, nothing else. Flower keeps every
array as an object of its own, which takes a request to bring; so there are two at most: what is
common to all clients of an exchange, which is stored once however many nodes it goes to, and all
the rest end to end. What is small goes along with the text, and costs no request at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from fedshot.core.tree import Tree
from fedshot.deploy.flower.codec import (
    LIMITS,
    CodecError,
    Form,
    Limits,
    pack,
    read_head,
    short,
    unpack,
)

if TYPE_CHECKING:
    from flwr.app import RecordDict

COMMON = "common"
_REST = "rest"
_HEAD, _ARRAYS, _STYPE = "fedshot", "arrays", "safetensors"
_PROOF = "proof"
_SIGNED = b"fedshot letter 1"  # what a signature is about, so that it is good for nothing else
_SMALL = 1 << 22  # bytes of blocks that go along with the text


@dataclass
class WireMessage:
    """A head, and blocks of which the head holds the forms.

    Clients of one exchange mostly send trees of one form, so "forms" lists the different ones and
    "form_of" says which each block has.
    """

    head: dict[str, Any]
    blocks: dict[str, bytes] = field(default_factory=dict)
    _known: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _hashes: dict[str, bytes] = field(default_factory=dict, init=False, repr=False, compare=False)

    def put(self, name: str, content: Tree) -> None:
        """Add a tree."""
        form, self.blocks[name] = pack(content)
        self._note(name, form)

    def add(self, other: WireMessage) -> None:
        """Add the blocks of another letter."""
        self.blocks |= other.blocks
        self._hashes |= {name: other._hash(name, data) for name, data in other.blocks.items()}
        for name, i in other.head.get("form_of", {}).items():
            self._note(name, other.head["forms"][i])

    def get(self, name: str, limits: Limits) -> Tree:
        """Return a tree. Raises CodecError."""
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

    def _note(self, name: str, form: Form) -> None:
        forms: list[Form] = self.head.setdefault("forms", [])
        # Known by its text, of which the order of names is a part, as it is of the form.
        i = self._known.setdefault(json.dumps(form), len(forms))
        if i == len(forms):
            forms.append(form)
        self.head.setdefault("form_of", {})[name] = i

    def _hash(self, name: str, data: bytes) -> bytes:
        """Return the hash of a block, which is taken once however many letters hold it."""
        if name not in self._hashes:
            self._hashes[name] = hashlib.sha256(data).digest()
        return self._hashes[name]

    def record(
        self, limits: Limits = LIMITS, sign: Callable[[bytes], str] | None = None
    ) -> RecordDict:
        """Return the letter as Flower carries it.

        Args:
            limits: what the other side takes in.
            sign: returns the proof of who sends what has this hash; None to send no proof.

        Raises CodecError for one that the other side would refuse.
        """
        from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

        rest = {name: data for name, data in self.blocks.items() if name != COMMON}
        wire = {COMMON: self.blocks[COMMON]} if COMMON in self.blocks else {}
        if rest:
            wire[_REST] = b"".join(rest.values())
        sizes = {name: len(data) for name, data in rest.items()}
        text, weight = json.dumps(self.head | {"sizes": sizes}), sum(map(len, wire.values()))
        if len(text) > limits.head:
            raise CodecError(
                f"names and numbers of {len(text)} characters for {len(sizes)} clients; at most "
                f"{limits.head} are taken. Let the node hold fewer clients, or send trees of fewer "
                "parts"
            )
        if weight > limits.message:
            raise CodecError(
                f"{weight} bytes of arrays; at most {limits.message} are taken. Raise --most-mb on "
                "both sides, or let the node hold fewer clients"
            )
        texts: dict[str, Any] = {"head": text}
        if sign is not None:
            hashes = {name: self._hash(name, data) for name, data in wire.items()}
            texts[_PROOF] = sign(_digest(text, hashes))
        if weight <= _SMALL:
            texts |= wire
            wire = {}
        arrays = {
            name: Array(dtype="uint8", shape=(len(data),), stype=_STYPE, data=data)
            for name, data in wire.items()
        }
        content = {_HEAD: ConfigRecord(texts)}
        return RecordDict(content | ({_ARRAYS: ArrayRecord(arrays)} if arrays else {}))


class Incoming(NamedTuple):
    """What came back from a node: a letter, or why there is none that counts."""

    node: int
    wire_message: WireMessage | None
    reason: str = ""


def refusal(wire_message: WireMessage) -> str:
    """Return why a node could not do what it was asked; "" when it could."""
    for kind in ("refused", "failed"):
        if kind in wire_message.head:
            return f"{kind}: {short(wire_message.head[kind])}"
    return ""


def read_message(
    record: RecordDict, limits: Limits, check: Callable[[bytes, str], None] | None = None
) -> WireMessage:
    """Return the letter that a record holds.

    `check` gets the hash of what came, and the proof of who sent it, "" for none, before anything
    is read; it raises CodecError, as this function does where a record holds anything else.
    """
    from flwr.app import ArrayRecord, ConfigRecord

    if not {_HEAD} <= set(record) <= {_HEAD, _ARRAYS}:
        raise CodecError(short(f"records {sorted(record)[:5]}; expected {[_ARRAYS, _HEAD]}"))
    config, arrays = record[_HEAD], record.get(_ARRAYS, ArrayRecord())
    if not isinstance(config, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise CodecError("records of other kinds than text and arrays")
    if any(array.stype != _STYPE for array in arrays.values()):
        raise CodecError("an array that is no safetensors")
    wire = {name: array.data for name, array in arrays.items()}
    wire |= {name: data for name, data in config.items() if isinstance(data, bytes)}
    if sum(map(len, wire.values())) > limits.message:
        raise CodecError(f"more than {limits.message} bytes")
    text = config.get("head")
    if not isinstance(text, str) or len(config) > 4 or not wire.keys() <= {COMMON, _REST}:
        raise CodecError("something beside a head, what is common and the rest")
    if check is not None:
        hashes = {name: hashlib.sha256(data).digest() for name, data in wire.items()}
        check(_digest(text, hashes), str(config.get(_PROOF, "")))
    head = read_head(text, limits)
    return WireMessage(head, _cut(head.pop("sizes", None), wire))


def _digest(text: str, hashes: Mapping[str, bytes]) -> bytes:
    """Return the hash of a letter on the wire: of its text and, by name, of its arrays' hashes."""
    sha = hashlib.sha256(_SIGNED + hashlib.sha256(text.encode()).digest())
    for name in sorted(hashes):
        sha.update(hashlib.sha256(name.encode()).digest() + hashes[name])
    return sha.digest()


def _cut(sizes: Any, wire: dict[str, bytes]) -> dict[str, bytes]:
    """Return the blocks by name."""
    rest = memoryview(wire.pop(_REST, b""))
    if not isinstance(sizes, dict) or not all(type(n) is int and n >= 0 for n in sizes.values()):
        raise CodecError("the blocks have no sizes")
    if sum(sizes.values()) != len(rest) or COMMON in sizes:
        raise CodecError(f"blocks of {sum(sizes.values())} bytes in all; {len(rest)} came")
    start, found = 0, dict(wire)
    for name, size in sizes.items():
        found[name] = bytes(rest[start : start + size])
        start += size
    return found
