"""What passes between server and node: a head of names and numbers, and blocks of arrays.

On the wire a letter is a record of a text and a record of arrays, nothing else. Flower keeps every
array as an object of its own, which takes a request to bring; so there are two at most: what is
common to all clients of an exchange, which is stored once however many nodes it goes to, and all
the rest end to end. What is small goes along with the text, and costs no request at all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

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
from fedshot.tree import Tree

if TYPE_CHECKING:
    from flwr.app import RecordDict

COMMON = "common"
_REST = "rest"
_HEAD, _ARRAYS, _STYPE = "fedshot", "arrays", "safetensors"
_SMALL = 1 << 22  # bytes of blocks that go along with the text


@dataclass
class Letter:
    """A head, and blocks of which the head holds the forms.

    Clients of one exchange mostly send trees of one form, so "forms" lists the different ones and
    "form_of" says which each block has.
    """

    head: dict[str, Any]
    blocks: dict[str, bytes] = field(default_factory=dict)
    _known: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def put(self, name: str, content: Tree) -> None:
        """Add a tree."""
        form, self.blocks[name] = pack(content)
        self._note(name, form)

    def add(self, other: Letter) -> None:
        """Add the blocks of another letter."""
        self.blocks |= other.blocks
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

    def record(self, limits: Limits = LIMITS) -> RecordDict:
        """Return the letter as Flower carries it.

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
        if weight <= _SMALL:
            texts |= wire
            wire = {}
        arrays = {
            name: Array(dtype="uint8", shape=(len(data),), stype=_STYPE, data=data)
            for name, data in wire.items()
        }
        content = {_HEAD: ConfigRecord(texts)}
        return RecordDict(content | ({_ARRAYS: ArrayRecord(arrays)} if arrays else {}))


class Mail(NamedTuple):
    """What came back from a node: a letter, or why there is none that counts."""

    node: int
    letter: Letter | None
    reason: str = ""


def refusal(letter: Letter) -> str:
    """Return why a node could not do what it was asked; "" when it could."""
    for kind in ("refused", "failed"):
        if kind in letter.head:
            return f"{kind}: {short(letter.head[kind])}"
    return ""


def read_letter(record: RecordDict, limits: Limits) -> Letter:
    """Return the letter that a record holds. Raises CodecError where it holds anything else."""
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
    if not isinstance(text, str) or len(config) > 3 or not wire.keys() <= {COMMON, _REST}:
        raise CodecError("something beside a head, what is common and the rest")
    head = read_head(text, limits)
    return Letter(head, _cut(head.pop("sizes", None), wire))


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
