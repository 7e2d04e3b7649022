"""Trees of tensors: a tensor, or a dict, tuple or named tuple of trees.

Everything that is sent, averaged or stored is a tree. A leaf is named by its path, such as
`theta/body/conv1.weight`, in checkpoints, messages and error texts. No function changes its
arguments.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

# With a recursive alias mypy would reject every `tree["theta"]`.
Tree: TypeAlias = Any

_SMALL = 2**20  # elements; for larger leaves, copying takes longer than starting the copy
_OF_NUMPY = (torch.float32, torch.float64, torch.int64, torch.uint8)  # views of others are slower
_BRANCHES = (dict, tuple, Mapping)  # Mapping last: checking for it is slow


def _children(tree: Tree) -> Iterator[tuple[str, Tree]]:
    if isinstance(tree, tuple):
        names = getattr(tree, "_fields", None) or [str(i) for i in range(len(tree))]
        yield from zip(names, tree, strict=True)
    else:
        for name in sorted(tree, key=str):
            if not _is_name(name):
                raise TypeError(f"{name!r} cannot name a part of a tree: expected text without '/'")
            yield name, tree[name]


def items(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) of every leaf: dicts sorted by name, tuples in their own order."""
    if isinstance(tree, Tensor):
        yield prefix or ".", tree
    elif isinstance(tree, _BRANCHES):
        for name, child in _children(tree):
            yield from items(child, f"{prefix}/{name}" if prefix else name)
    else:
        raise TypeError(
            f"{prefix or 'the root'} is a {type(tree).__name__}; a tree holds tensors, dicts and "
            "tuples. Wrap a number with torch.tensor(...)."
        )


def leaves(tree: Tree) -> list[Tensor]:
    """Return the leaves in the order of `items`."""
    found: list[Tensor] = []
    if not _gather(tree, found):
        return [leaf for _, leaf in items(tree)]
    return found


def _gather(tree: Tree, found: list[Tensor]) -> bool:
    """Collect the leaves of dicts and tuples quickly; False if `items` has to handle the tree."""
    if isinstance(tree, Tensor):
        found.append(tree)
        return True
    if isinstance(tree, tuple):
        return all(_gather(child, found) for child in tree)
    return type(tree) is dict and all(
        _is_name(name) and _gather(tree[name], found) for name in sorted(tree, key=str)
    )


def map(fn: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Apply `fn` leaf by leaf; the result has the structure of the first tree.

    Raises ValueError with the path at which the trees differ in structure.
    """
    try:
        return _map(fn, tree, others)
    except _DifferError as error:
        path = "/".join(reversed(error.above)) or "the root"
        raise ValueError(f"trees differ at {path}: {error}") from None


class _DifferError(Exception):
    """Trees differ in structure; `above` collects the path from the difference up to the root."""

    def __init__(self, difference: str) -> None:
        super().__init__(difference)
        self.above: list[str] = []


def _map(fn: Callable[..., Any], tree: Tree, others: Sequence[Tree]) -> Tree:
    if isinstance(tree, Tensor):
        for other in others:
            if not isinstance(other, Tensor):
                raise _DifferError("a tensor in one, not in the other")
        return fn(tree, *others)
    for other in others:
        if type(other) is not type(tree) or not _alike(tree, other):
            raise _DifferError(f"{_names(tree)} against {_names(other)}")
    done = {}
    name: Any = ""
    try:
        if type(tree) is dict:  # the quick path for nearly all trees
            for name in sorted(tree, key=str):
                done[name] = _map(fn, tree[name], [other[name] for other in others])
        else:
            rest = [[child for _, child in _children(other)] for other in others]
            for (name, child), *more in zip(_children(tree), *rest, strict=True):
                done[name] = _map(fn, child, more)
    except _DifferError as error:
        error.above.append(str(name))
        raise
    if isinstance(tree, tuple):
        return type(tree)(**done) if hasattr(tree, "_fields") else tuple(done.values())
    return done


def _alike(a: Tree, b: Tree) -> bool:
    """Whether two trees of the same type have the same keys, fields or length."""
    if isinstance(a, tuple):
        return len(a) == len(b)
    return a.keys() == b.keys() if type(a) is dict else _names(a) == _names(b)


def _names(tree: Tree) -> list[str]:
    if type(tree) is dict:
        return sorted(tree, key=str)
    if isinstance(tree, Mapping | tuple):
        return [name for name, _ in _children(tree)]
    return [type(tree).__name__]


def unflatten(like: Tree, found: Iterable[Tensor]) -> Tree:
    """Return a tree with the structure of `like` from leaves in the order of `leaves`.

    Raises ValueError if `found` has more or fewer leaves than `like`.
    """
    ordered = iter(found)
    try:
        done = _fill(like, ordered)
    except StopIteration:
        raise ValueError(f"fewer leaves than the tree's {len(leaves(like))}") from None
    if next(ordered, None) is not None:
        raise ValueError(f"more leaves than the tree's {len(leaves(like))}")
    return done


def _fill(like: Tree, ordered: Iterator[Tensor]) -> Tree:
    if isinstance(like, Tensor):
        return next(ordered)
    if type(like) is dict:
        return {name: _fill(like[name], ordered) for name in sorted(like, key=str)}
    if isinstance(like, tuple):
        parts = [_fill(part, ordered) for part in like]
        return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)
    return map(lambda _: next(ordered), like)


def rebuild(like: Tree, flat: Mapping[str, Tensor]) -> Tree:
    """Return a tree with the structure of `like` from leaves named by path.

    Raises ValueError if a name, shape or dtype differs from `like`.
    """
    expected = dict(items(like))
    missing, extra = expected.keys() - flat.keys(), flat.keys() - expected.keys()
    if missing or extra:
        raise ValueError(f"missing parts {sorted(missing)}, unknown parts {sorted(extra)}")
    for path, leaf in expected.items():
        if (leaf.shape, leaf.dtype) != (flat[path].shape, flat[path].dtype):
            raise ValueError(f"{path} is {form(flat[path])}, expected {form(leaf)}")
    return unflatten(like, [flat[path] for path in expected])


def form(leaf: Tensor) -> str:
    """Describe a tensor's type and shape, as in `float32[64, 3]`."""
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"


def difference(like: Tree, other: Tree) -> str | None:
    """Describe the first difference in names, shapes or dtypes of two trees; None if they agree."""
    if _equal_form(like, other):
        return None
    try:
        given = dict(items(other))
    except (TypeError, AttributeError) as error:
        return str(error).removesuffix(".")  # part of a sentence
    expected = dict(items(like))
    for path in sorted(expected.keys() | given.keys()):
        if path not in given:
            return f"{path} is missing"
        if path not in expected:
            return f"{path} is not expected"
        a, b = given[path], expected[path]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{path} is {form(given[path])}, expected {form(expected[path])}"
    try:  # equal leaves may be in other containers, or next to empty ones
        map(lambda leaf, _: leaf, like, other)
    except ValueError as error:
        return str(error)
    return None


def _equal_form(like: Tree, other: Tree) -> bool:
    """Quick test for `difference`: True only if names, shapes and dtypes of two trees agree.

    False may also mean that the trees hold other containers than dicts and tuples, or odd names.
    """
    if isinstance(like, Tensor):
        return isinstance(other, Tensor) and (like.shape, like.dtype) == (other.shape, other.dtype)
    if type(like) is not type(other):
        return False
    if isinstance(like, tuple):
        return len(like) == len(other) and all(
            _equal_form(part, given) for part, given in zip(like, other, strict=True)
        )
    return (
        type(like) is dict
        and like.keys() == other.keys()
        and all(_is_name(name) and _equal_form(part, other[name]) for name, part in like.items())
    )


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name != "" and "/" not in name


def add(a: Tree, b: Tree) -> Tree:
    """Return a + b."""
    return map(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """Return a - b."""
    return map(torch.sub, a, b)


def zeros_like(tree: Tree) -> Tree:
    """Return a tree of zeros of the same shapes and dtypes."""
    return map(torch.zeros_like, tree)


def to(tree: Tree, device: torch.device) -> Tree:
    """Return the tree on a device; leaves that are already there are not copied.

    Small contiguous leaves of one dtype are copied as one tensor, because every copy to or from a
    GPU takes a fixed time. Each leaf has memory of its own afterwards.
    """
    joined: dict[torch.dtype, list[Tensor]] = defaultdict(list)

    def is_joined(leaf: Tensor) -> bool:
        there = leaf.device.type == device.type and device.index in (None, leaf.device.index)
        small = leaf.layout == torch.strided and leaf.is_contiguous() and leaf.numel() <= _SMALL
        return small and not there

    map(lambda leaf: joined[leaf.dtype].append(leaf) if is_joined(leaf) else None, tree)
    copies = {dtype: _joined_to(leaves, device) for dtype, leaves in joined.items()}
    return map(lambda leaf: next(copies[leaf.dtype]) if is_joined(leaf) else leaf.to(device), tree)


def _joined_to(leaves: list[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Copy leaves of one dtype to a device in a single transfer; yield the copies in order."""
    whole, end = torch.cat([leaf.reshape(-1) for leaf in leaves]).to(device), 0
    for leaf in leaves:
        first, end = end, end + leaf.numel()
        yield whole[first:end].clone().view(leaf.shape)


def flat(tree: Tree) -> Tensor:
    """Return all leaves as one vector, detached from the autograd graph."""
    return torch.cat([leaf.detach().reshape(-1) for leaf in leaves(tree)])


def shaped(vector: Tensor, like: Tree) -> Tree:
    """Return a vector as a tree with the shapes and dtypes of `like`."""
    parts = leaves(like)
    pieces = torch.split(vector, [leaf.numel() for leaf in parts])
    return unflatten(
        like, [p.view(leaf.shape).to(leaf.dtype) for p, leaf in zip(pieces, parts, strict=True)]
    )


def detach(tree: Tree) -> Tree:
    """Return the same values, detached from the autograd graph."""
    return map(Tensor.detach, tree)


def index(tree: Tree, i: int) -> Tree:
    """Return entry `i` along the first axis of every leaf."""
    return map(lambda leaf: leaf[i], tree)


def stack(trees: list[Tree]) -> Tree:
    """Stack trees of equal shapes along a new first axis."""
    return map(lambda *parts: torch.stack(parts), *trees)


def nbytes(tree: Tree) -> int:
    """Return the total size of all leaves in bytes."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def digest(tree: Tree) -> str:
    """Return the SHA-256 of the paths, types, shapes and values, as hex."""
    return digest_of(items(tree))


def digest_of(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the `digest` of leaves named by path."""
    return digest_of_bytes(
        (path, form(leaf), memory(leaf.detach().cpu().contiguous())) for path, leaf in named
    )


def digest_of_bytes(named: Iterable[tuple[str, str, memoryview]]) -> str:
    """Return the `digest` of leaves given as (path, `form`, `memory`)."""
    sha = hashlib.sha256()
    for path, kind, values in sorted(named, key=lambda item: item[0]):
        sha.update(f"{path}:{kind};".encode())
        sha.update(values)
    return sha.hexdigest()


def memory(leaf: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU that does not require a gradient."""
    if not leaf.numel():  # an empty tensor may have strides that cannot be viewed as bytes
        return memoryview(bytearray())
    flat = leaf if leaf.dtype in _OF_NUMPY else leaf.view(-1).view(torch.uint8)
    return flat.numpy().reshape(-1).data
