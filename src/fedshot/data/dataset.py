"""Labelled images, texts or features in memory.

A dataset is a few arrays, never a list of objects. The arrays may be memory-mapped. Clients store
row numbers, not copies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedshot.core.errors import DataError
from fedshot.core.text import spelt_alike
from fedshot.data.tokens import RawTexts, Tokens

if TYPE_CHECKING:  # class_split imports this module
    from fedshot.data.class_split import ClassSplit

Ints: TypeAlias = npt.NDArray[np.int64]
Pixels: TypeAlias = npt.NDArray[np.uint8]
Features: TypeAlias = npt.NDArray[np.float32]
Kind: TypeAlias = Literal["images", "text", "raw text", "features"]
T = TypeVar("T")

_CHUNK = 1 << 24  # bytes of images or features hashed at a time
_FEW = 5  # maximum number of classes in an error
_NOUNS = {"images": "image", "text": "text", "raw text": "text", "features": "row of features"}


@dataclass(frozen=True, eq=False)
class Encoding:
    """How features were computed.

    Args:
        encoder: SHA-256 of the encoder.
        shape: shape of an example before encoding: that of an image, or () for a text.
        original: the dataset before encoding, if it is in memory.
    """

    encoder: str
    shape: tuple[int, ...]
    original: Dataset | None = None


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples `x` and their class numbers `y` (int64 [n]).

    Examples are images (uint8 [n, H, W, C]), texts (`Tokens`, or `RawTexts` for an encoder), or
    features that an encoder has computed (float32 [n, d]).

    `users` are user numbers starting at 0 (int64 [n]). `user_names` are their names, if the data
    were passed with names; a run stores and shows them. `standard` is the class split
    that the data define, if any. `skipped` describes the files that were skipped. `encoding` says
    how `model.encoder` computed the features.

    `groups` are group numbers (int64 [n]). Examples of one group, such as frames of a video or
    images of a patient, are nearly alike. Within a class, an episode never has examples of one
    group in both support and query set.

    Raises DataError if shapes, types or numbers do not fit each other.
    """

    name: str
    x: Pixels | Tokens | RawTexts | Features
    y: Ints
    class_names: tuple[str, ...]
    users: Ints | None = None
    standard: ClassSplit | None = None
    skipped: str = ""
    known_digest: str | None = None  # set by the cache, which stores it
    groups: Ints | None = None
    resident: Tensor | None = None  # a copy of `x` on a GPU: see `on_gpu`
    encoding: Encoding | None = None
    user_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for given in (self.x, self.y, self.users, self.groups):
            if not isinstance(given, np.ndarray | Tokens | RawTexts | None):
                raise DataError(
                    f"{self.name}: a {type(given).__name__} was given; expected numpy arrays. Make "
                    "the dataset with fedshot.as_dataset, which also takes lists and tensors."
                )
        if not isinstance(self.x, Tokens | RawTexts):
            _check_array(self.name, self.x)
        y, n = self.y, len(self.x)
        noun = _NOUNS[self.kind]
        for name, numbers in (("labels", y), ("users", self.users), ("groups", self.groups)):
            if numbers is not None and (numbers.dtype != np.int64 or numbers.shape != (n,)):
                raise DataError(
                    f"{self.name}: {name} are {numbers.dtype}{list(numbers.shape)}; expected "
                    f"int64[{n}], one for each {noun}"
                )
        if y.min() < 0 or y.max() >= self.n_classes:
            raise DataError(
                f"{self.name}: labels run from {y.min()} to {y.max()}; with {self.n_classes} class "
                f"names they must lie in 0..{self.n_classes - 1}"
            )
        twice = first_twice(self.class_names)
        if twice is not None:
            raise DataError(f"{self.name}: class name {twice!r} occurs twice; names must differ")
        check_spellings(self.name, self.class_names)
        if self.users is not None and self.users.min() < 0:
            raise DataError(
                f"{self.name}: user number {self.users.min()} is negative; number users from 0"
            )
        named = len(self.user_names)
        if named and (self.users is None or self.users.max() >= named):
            raise DataError(
                f"{self.name}: there are {named} user names; expected one for each user number"
            )
        twice = first_twice(self.user_names)
        if twice is not None:
            raise DataError(f"{self.name}: user name {twice!r} occurs twice; names must differ")
        if self.standard is not None:
            self.standard.check(self)

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:  # without the examples, which may be private
        examples = f"{len(self)} examples ({self.kind}, {list(self.shape)})"
        return f"<Dataset {self.name}: {examples} of {self.n_classes} classes>"

    @property
    def n_classes(self) -> int:
        """The number of classes, including classes without examples."""
        return len(self.class_names)

    @property
    def kind(self) -> Kind:
        """The kind of the examples: "images", "text" (`Tokens`), "raw text" or "features"."""
        if isinstance(self.x, Tokens | RawTexts):
            return "text" if isinstance(self.x, Tokens) else "raw text"
        return "images" if self.x.ndim == 4 else "features"

    @property
    def is_text(self) -> bool:
        """Whether the examples are texts stored as word numbers."""
        return self.kind == "text"

    @property
    def remarks(self) -> list[str]:
        """Remarks on the data: skipped files, and words without a vector."""
        lacking = self.x.lacking if isinstance(self.x, Tokens) else ""
        return [text for text in (self.skipped, lacking) if text]

    @property
    def pixels(self) -> Pixels:
        """The images; raises DataError for texts and features."""
        if self.kind != "images":
            noun = "features" if self.kind == "features" else "texts"
            raise DataError(f"{self.name} holds {noun}; this needs images")
        return self.x  # type: ignore[return-value]

    @property
    def array(self) -> Pixels | Features:
        """The images or features; raises DataError for texts."""
        if isinstance(self.x, Tokens | RawTexts):
            raise DataError(f"{self.name} holds texts; this needs images or features")
        return self.x

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an example.

        It is (height, width, channels) for images, (longest length, vector size) for texts, () for
        raw texts, and (number of features,) for features.
        """
        if isinstance(self.x, Tokens):
            return self.x.cut, self.x.dim
        if isinstance(self.x, RawTexts):
            return ()
        return self.x.shape[1:]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of shapes, types, values and class names, as hex."""
        if self.known_digest is not None:
            return self.known_digest
        sha = hashlib.sha256()
        if isinstance(self.x, Tokens | RawTexts):
            self.x.hash_into(sha)
        else:
            sha.update(f"x:{self.x.dtype}{self.x.shape};y:{self.y.dtype}{self.y.shape};".encode())
            rows = max(1, _CHUNK // max(1, self.x[0].nbytes))
            for start in range(0, len(self.x), rows):
                sha.update(self.x[start : start + rows].data)
        sha.update(np.ascontiguousarray(self.y).data)
        for label, numbers in ((b"users", self.users), (b"groups", self.groups)):
            if numbers is not None:
                sha.update(label)
                sha.update(np.ascontiguousarray(numbers).data)
        for name in self.class_names:
            sha.update(f"{len(name)}:{name}".encode("utf-8", "surrogateescape"))
        return sha.hexdigest()

    def on_gpu(self, device: torch.device) -> Dataset:
        """Return a dataset whose images or features are read from a copy on a GPU.

        Texts, and data that take more than a quarter of the GPU's memory, stay where they are.
        """
        memory = torch.cuda.mem_get_info(device)[1]
        if isinstance(self.x, Tokens | RawTexts) or self.x.nbytes > memory / 4:
            return self
        dtype = torch.uint8 if self.kind == "images" else torch.float32
        copy = torch.empty(self.x.shape, dtype=dtype, device=device)
        rows = max(1, _CHUNK // self.x[0].nbytes)
        for start in range(0, len(self.x), rows):
            part = np.array(self.x[start : start + rows])
            copy[start : start + rows].copy_(torch.from_numpy(part))
        return replace(self, resident=copy, known_digest=self.digest)

    def images_of(self, classes: Iterable[int]) -> Ints:
        """Return the sorted row numbers of all examples of these classes, int64 [m].

        Raises DataError if a class number does not exist.
        """
        wanted = np.zeros(self.n_classes, dtype=bool)
        for c in classes:
            if not 0 <= c < self.n_classes:
                raise DataError(
                    f"{self.name}: class number {c} does not exist; expected "
                    f"0..{self.n_classes - 1}"
                )
            wanted[c] = True
        return np.flatnonzero(wanted[self.y]).astype(np.int64, copy=False)


def _check_array(name: str, x: npt.NDArray[Any]) -> None:
    """Raise DataError unless an array is uint8 [n, H, W, C], or float32 [n, d] and finite."""
    is_features = x.dtype.kind == "f" and x.ndim == 2
    noun = "features" if is_features else "images"
    if is_features and (x.dtype != np.float32 or x.size == 0):
        raise DataError(
            f"{name}: features are {x.dtype}{list(x.shape)}; expected float32[n, d], with at least "
            "one row and one column. Reshape and cast them first."
        )
    if not is_features and (x.dtype != np.uint8 or x.ndim != 4):
        raise DataError(
            f"{name}: images are {x.dtype}{list(x.shape)}; expected uint8[n, H, W, C], "
            "values 0 to 255. Scale and cast them first."
        )
    if not x.flags.c_contiguous:
        raise DataError(
            f"{name}: {noun} are not contiguous in memory; expected C order. "
            "Pass np.ascontiguousarray(x)."
        )
    if x.size == 0:
        raise DataError(f"{name}: images are {list(x.shape)}; expected at least one image")
    if not is_features:
        return
    rows = max(1, _CHUNK // x[0].nbytes)
    for start in range(0, len(x), rows):
        bad = np.flatnonzero(~np.isfinite(x[start : start + rows]).all(axis=1))
        if len(bad):
            raise DataError(
                f"{name}: row {start + bad[0]} holds NaN or infinity; expected finite features. "
                "Remove the row, or compute its features again."
            )


def check_classes(where: object, noun: str, y: Ints, names: Sequence[str], fix: str) -> None:
    """Raise DataError if one of the classes `names` does not occur in the labels `y`.

    The message names `where`, the file or folder of the data, calls the examples `noun`, such as
    "tweets", and ends with the sentence `fix`.
    """
    missing = np.flatnonzero(np.bincount(y, minlength=len(names)) == 0).tolist()
    if missing:
        first = ", ".join(repr(names[c]) for c in missing[:_FEW])
        more = f" and {len(missing) - _FEW} more" if len(missing) > _FEW else ""
        raise DataError(
            f"{where} holds {noun} of {len(names) - len(missing)} of its {len(names)} classes, "
            f"and none of {first}{more}. {fix}"
        )


def check_spellings(where: object, names: Iterable[str]) -> None:
    """Raise DataError if names of classes differ only in whitespace or normalisation (NFC)."""
    alike = spelt_alike(names)
    if alike is not None:
        raise DataError(
            f"{where}: classes {alike[0]!a} and {alike[1]!a} differ only in whitespace or in how "
            "their characters are encoded. Spell them the same, or rename one."
        )


def first_twice(values: Iterable[T]) -> T | None:
    """Return the first value that repeats an earlier one; None if all are distinct."""
    seen: set[T] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None
