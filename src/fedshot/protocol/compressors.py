"""Compressors, which encode the tensors of a message in fewer bytes.

Only float tensors with two or more axes are encoded: weights of layers. Vectors and scalars, such
as biases and batch-norm statistics, are sent as they are, as in PowerSGD (Vogels et al. 2019): they
are few, and a variance that is rounded to 0 would do harm. An encoded tensor is a named tuple of
tensors, so that it is counted and sent as any tree is.

Sources. int8 and int4: QSGD (Alistarh et al. 2017), scaled by the largest |x| of the tensor, as in
its experiments. Stochastic rounding is unbiased. Rounding to nearest has half the largest error,
and is a contraction, as error feedback requires. topk: Stich et al. 2018.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedshot.core import tree
from fedshot.core.tree import Tree
from fedshot.protocol.reducers import Mean, Reducer

Kept: TypeAlias = Annotated[float, Field(gt=0, le=1)]
Random: TypeAlias = np.random.Generator | None
_BLOCK = 1 << 16  # entries whose place fits in 16 bits


class Quantised(NamedTuple):
    """A tensor in 8 bits an entry: x = codes * scale."""

    codes: Tensor  # int8, in the tensor's shape
    scale: Tensor  # scalar of the tensor's dtype

    def decode(self, like: Tensor | None) -> Tensor:
        """Return the tensor. Raises ValueError for invalid codes or scale."""
        del like
        if self.codes.dtype != torch.int8 or not _is_scale(self.scale):
            raise ValueError("its codes are not int8, or its scale is not one float")
        return self.codes.to(self.scale.dtype) * self.scale


class Nibbles(NamedTuple):
    """A tensor in 4 bits an entry: x = (nibble - 8) * scale, the lower nibble of a byte first."""

    codes: Tensor  # uint8 [ceil(n / 2)]
    scale: Tensor  # scalar of the tensor's dtype

    def decode(self, like: Tensor | None) -> Tensor:
        """Return the tensor, in the shape of `like`. Raises ValueError if the codes do not fit."""
        n = -1 if like is None else like.numel()
        expected = (torch.uint8, ((n + 1) // 2,))
        if like is None or (self.codes.dtype, self.codes.shape) != expected:
            raise ValueError(f"its codes are {tree.form(self.codes)}, not {n} packed in bytes")
        if not _is_scale(self.scale):
            raise ValueError("its scale is not one float")
        nibbles = torch.stack([self.codes & 15, self.codes >> 4], 1).flatten()[:n].view(like.shape)
        return (nibbles.to(torch.int8) - 8).to(self.scale.dtype) * self.scale


class Cast(NamedTuple):
    """A tensor in a shorter float type."""

    values: Tensor  # float16 or bfloat16, in the tensor's shape
    empty: Tensor  # [0] of the tensor's dtype

    def decode(self, like: Tensor | None) -> Tensor:
        """Return the tensor."""
        del like
        return self.values.to(self.empty.dtype)


class Sparse(NamedTuple):
    """The entries of a flattened tensor that are not left out, in order.

    A place is the lower 16 bits of an entry's index; `counts` says how many of the entries are in
    each block of 2**16. So an index takes 2 bytes.
    """

    values: Tensor  # [k] of the tensor's dtype
    places: Tensor  # int16 [k]
    counts: Tensor  # int32 [ceil(n / 2**16)]

    def decode(self, like: Tensor | None) -> Tensor:
        """Return the tensor, in the shape of `like`, with zeros where entries were left out.

        Raises ValueError for places that do not fit.
        """
        values, places, counts = self
        k, n = values.numel(), 0 if like is None else like.numel()
        forms = [(leaf.dtype, leaf.shape) for leaf in (places, counts)]
        if like is None or forms != [(torch.int16, (k,)), (torch.int32, (-(-n // _BLOCK),))]:
            raise ValueError("its places and counts do not have the form of a sparse tensor")
        if bool((counts < 0).any()) or int(counts.sum()) != k:
            raise ValueError("its counts do not add up to its values")
        first = torch.arange(len(counts)) * _BLOCK
        index = first.repeat_interleave(counts.long()) + (places.long() & (_BLOCK - 1))
        if bool((index.diff() <= 0).any()) or (k and int(index[-1]) >= n):
            raise ValueError("its places are not in order, or beyond its end")
        full = torch.zeros(n, dtype=values.dtype)
        full[index] = values.flatten()
        return full.view(like.shape)


ENCODED = (Quantised, Nibbles, Cast, Sparse)


@dataclass(frozen=True)
class Compressor(ABC):
    """Base of the compressors.

    Args:
        parts: names of the parts to compress, such as [theta]; null: of uploads the parts that the
            server averages, of the server's messages all.
    """

    changes_only: ClassVar[bool] = False  # leaves entries out, which only a sum over rounds allows
    most: ClassVar[int | None] = None  # largest integer of an entry; None: not one integer for each

    parts: tuple[str, ...] | None = None

    @abstractmethod
    def encode(self, leaf: Tensor, rng: Random = None) -> tuple[Tensor, ...]:
        """Return the encoded tensor, on the CPU; with `rng`, int8 and int4 round stochastically."""

    def uploads(self, name: str, reducer: Reducer | None) -> bool:
        """Whether the part `name` of an upload, which `reducer` combines, is compressed."""
        if self.parts is not None:
            return name in self.parts
        return isinstance(reducer, Mean) and not reducer.by_class

    def sends(self, name: str) -> bool:
        """Whether the part `name` of a server's message is compressed."""
        return self.parts is None or name in self.parts

    def encoded(self, part: Tree) -> Tree:
        """Return a tree with its large tensors encoded, rounded to nearest."""
        return tree.map(lambda leaf: self.encode(leaf) if is_large(leaf) else leaf, part)


@dataclass(frozen=True)
class Int8(Compressor):
    """One byte an entry, and a scale for each tensor; the largest error is scale / 2.

    In secure sums all clients share the scale of a tensor, what exceeds it is cut off, and an entry
    takes as many bits as the sum needs: 12 for 10 clients.
    """

    most: ClassVar[int | None] = 127

    def encode(self, leaf: Tensor, rng: Random = None) -> Quantised:
        """Return codes from -127 to 127."""
        codes, scale = _quantised(leaf, 127, rng)
        return Quantised(codes, scale)


@dataclass(frozen=True)
class Int4(Compressor):
    """Half a byte an entry, and a scale for each tensor.

    In secure sums all clients share the scale of a tensor, what exceeds it is cut off, and an entry
    takes as many bits as the sum needs: 8 for 10 clients.
    """

    most: ClassVar[int | None] = 7

    def encode(self, leaf: Tensor, rng: Random = None) -> Nibbles:
        """Return codes from -7 to 7, two in a byte."""
        codes, scale = _quantised(leaf, 7, rng)
        nibbles = (codes.flatten() + 8).to(torch.uint8)
        low, high = torch.nn.functional.pad(nibbles, (0, len(nibbles) % 2)).view(-1, 2).unbind(1)
        return Nibbles(low | high << 4, scale)


@dataclass(frozen=True)
class Float16(Compressor):
    """IEEE half precision: 11 bits of precision, values up to 65,504."""

    def encode(self, leaf: Tensor, rng: Random = None) -> Cast:
        """Return the values rounded to nearest; those beyond the range become its ends."""
        del rng
        most = torch.finfo(torch.float16).max
        short = leaf.detach().cpu().clamp(-most, most).half()
        return Cast(short, torch.empty(0, dtype=leaf.dtype))


@dataclass(frozen=True)
class BFloat16(Compressor):
    """The range of float32 with 8 bits of precision."""

    def encode(self, leaf: Tensor, rng: Random = None) -> Cast:
        """Return the values rounded to nearest."""
        del rng
        return Cast(leaf.detach().cpu().bfloat16(), torch.empty(0, dtype=leaf.dtype))


@dataclass(frozen=True)
class TopK(Compressor):
    """The entries of largest |x| of each tensor, exact, in 2 bytes an index beside the value.

    Args:
        share: share of a tensor's entries that is sent; at least one is.
    """

    changes_only: ClassVar[bool] = True

    share: Kept = 0.05

    def encode(self, leaf: Tensor, rng: Random = None) -> Sparse:
        """Return the largest entries; of equal ones, those that come first."""
        del rng
        flat = leaf.detach().cpu().flatten()
        k = max(1, round(self.share * len(flat)))
        index = torch.sort(flat.abs(), descending=True, stable=True).indices[:k].sort().values
        counts = torch.bincount(index // _BLOCK, minlength=-(-len(flat) // _BLOCK))
        places = (index % _BLOCK).to(torch.int32).to(torch.int16)
        return Sparse(flat[index], places, counts.to(torch.int32))


UPLOADS: dict[str, type[Compressor]] = {
    "int8": Int8, "int4": Int4, "fp16": Float16, "bf16": BFloat16, "topk": TopK,
}  # fmt: skip
"""The values of `compress.up.name`."""

DOWNLOADS: dict[str, type[Compressor]] = {"int8": Int8, "fp16": Float16, "bf16": BFloat16}
"""The values of `compress.down.name`: the server sends weights, not changes."""


@dataclass(frozen=True)
class Compression:
    """Shorter messages in training: what clients upload, and what the server sends.

    Args:
        up: compressor of the uploads; None: uploads are not compressed.
        down: compressor of the server's messages; None: they are not compressed.
        error_feedback: whether a client keeps what compression took from its last upload of an
            averaged part, and adds it to its next one; int8 and int4 then round to nearest. false:
            they round at random, without bias. Uploads that are not averaged always do. In secure
            sums the errors include what was above the public range; with false it is lost.
    """

    up: Compressor | None = None
    down: Compressor | None = None
    error_feedback: bool = True

    @property
    def remembers(self) -> bool:
        """Whether clients keep what compression has taken from their uploads."""
        return self.up is not None and self.error_feedback


def is_large(leaf: Tensor) -> bool:
    """Whether a tensor is compressed, if its part is: floats with two or more axes."""
    return leaf.is_floating_point() and leaf.dim() > 1 and leaf.numel() > 0


def decoded(part: Tree, like: Tree = None) -> Tree:
    """Return a tree with its encoded tensors decoded; `like` is a tree of the shape expected.

    Raises ValueError for an encoded tensor that is invalid, or does not fit in `like`.
    """
    if isinstance(part, ENCODED):
        return part.decode(like if isinstance(like, Tensor) else None)
    if isinstance(part, tuple):
        fits = isinstance(like, tuple) and len(like) == len(part)
        made = [decoded(child, like[i] if fits else None) for i, child in enumerate(part)]
        return type(part)(*made) if hasattr(part, "_fields") else tuple(made)
    if isinstance(part, Mapping):
        parts = like if isinstance(like, Mapping) else {}
        return {name: decoded(child, parts.get(name)) for name, child in part.items()}
    return part


def _quantised(leaf: Tensor, most: int, rng: Random) -> tuple[Tensor, Tensor]:
    """Return codes from -most to most, int8, and the scale, max |x| / most."""
    leaf = leaf.detach().cpu()
    scale = leaf.abs().max() / most
    steps = torch.nan_to_num(leaf.double() / scale.double())  # of zeros, which have scale 0
    if rng is None:
        codes = steps.round()
    else:
        codes = (steps + torch.from_numpy(rng.random(leaf.numel())).view(leaf.shape)).floor()
    return codes.clamp(-most, most).to(torch.int8), scale


def _is_scale(scale: Tensor) -> bool:
    return scale.dim() == 0 and scale.is_floating_point()
