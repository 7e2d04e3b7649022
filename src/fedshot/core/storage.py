"""Trees on disk: safetensors files, written atomically, with a hash inside.

A file is written under a temporary name, flushed to the disk, and renamed, so a reader sees the old
file, the new file, or none. The header holds the SHA-256 of names, types, shapes, values and notes,
which every read checks. Nothing is ever unpickled.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch
from torch import Tensor

from fedshot.core import records, tree
from fedshot.core.errors import CheckpointError
from fedshot.core.regular_files import open_regular, real_path
from fedshot.core.tree import Tree

PARTIAL = ".partial"
_METADATA = "__metadata__"
_FIRST = f'{{"{_METADATA}":'
_DTYPES = {  # by their names in safetensors
    "BOOL": torch.bool, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_Form: TypeAlias = tuple[str, torch.dtype, Sequence[int]]  # of a leaf: name, dtype and shape
_MANY = 32  # files from which flushing the whole file system is faster


def write(path: Path, content: Tree, notes: Mapping[str, Any] | None = None, *, sync: bool) -> str:
    """Write a tree and notes to `path`; return the hash of the content.

    Args:
        path: the file; its folder must exist.
        content: any tree.
        notes: anything that JSON can hold.
        sync: flush to the disk before renaming. Without it the caller must `flush` the file
            before anything relies on it.
    """
    flat = {name: leaf.detach().cpu().contiguous() for name, leaf in tree.items(content)}
    blocks = {name: tree.memory(leaf) for name, leaf in flat.items()}
    text = json.dumps(dict(notes or {}), sort_keys=True)
    sha = _hash(flat, blocks, text)
    entries, order = _entries(tuple((name, leaf.dtype, leaf.shape) for name, leaf in flat.items()))
    metadata = json.dumps({"notes": text, "sha256": sha}, separators=(",", ":"))
    head = f"{_FIRST}{metadata}{entries}}}".encode()
    head += b" " * (-len(head) % 8)
    size = len(head).to_bytes(8, "little")
    write_bytes(path, size, head, *(blocks[name] for name in order), sync=sync)
    return sha


# Cached, because the states of clients have the same form.
@lru_cache(maxsize=16)
def _entries(forms: tuple[_Form, ...]) -> tuple[str, list[str]]:
    """Return the header's entries for leaves, as JSON text, and the leaves' names in their order.

    Raises TypeError for a dtype that the format does not have.
    """
    found, order, end = "", [], 0
    # The widest types come first, so that the values of every leaf are aligned.
    for name, dtype, shape in sorted(forms, key=lambda form: (-form[1].itemsize, form[0])):
        if dtype not in _NAMES:
            raise TypeError(f"{name} is {dtype}, which safetensors files cannot hold.")
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entry = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        found += f",{json.dumps(name)}:{json.dumps(entry, separators=(',', ':'))}"
        order.append(name)
    return found, order


@lru_cache(maxsize=16)
def _forms(entries: str) -> tuple[list[_Form], int]:
    """Return the form of each leaf, in the order of their values, and the size of all values.

    Raises LookupError, ValueError, TypeError, AttributeError, ArithmeticError or RecursionError for
    entries that are invalid.
    """
    forms, end = [], 0
    found = json.loads(entries)
    for name, entry in sorted(found.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        begin, last = entry["data_offsets"]
        if begin != end or last - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"the place of {name!r} in it is not that of its values")
        forms.append((name, dtype, shape))
        end = last
    return forms, end


def write_bytes(path: Path, *data: bytes | memoryview, sync: bool, mode: int = 0o666) -> None:
    """Replace the content of the file at `path` atomically by the concatenation of `data`.

    `mode` are the file's permissions, from its creation on and before the umask.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}")
    try:
        with open(partial, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
            file.write(b"".join(data))  # one write takes half the time of one for each leaf
            if sync:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:  # a full disk, an interrupt
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:  # it names the temporary file, or none
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    if sync:
        flush(path.parent)


def deliver(path: Path, data: bytes) -> None:
    """Write `data` to a path that the user chose.

    A pipe, a device or a standard stream is written to. A regular file is replaced; for a symbolic
    link, the file that it points to is replaced.
    """
    stream = path.is_absolute() and path.parts[1] in ("dev", "proc")
    if stream or (path.exists() and not path.is_file() and not path.is_dir()):
        with path.open("ab") as file:
            file.write(data)
        return
    with suppress(FileNotFoundError):
        path.stat()  # raises OSError if symbolic links form a loop; `real_path` does not
    write_bytes(real_path(path), data, sync=False)


def flush(path: Path) -> None:
    """Flush a file to the disk; of a folder, flush the list of its files, not their content."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_all(paths: Sequence[Path], folder: Path) -> None:
    """Flush many files and folders below `folder` to the disk.

    Where the system can flush a whole file system in one call (Linux), that call replaces the calls
    for single files if there are many: for a thousand small files it takes a hundredth of the time.
    """
    if len(paths) < _MANY or not _flush_file_system(folder):
        for path in paths:
            flush(path)


def _flush_file_system(folder: Path) -> bool:
    """Flush the file system that holds a folder; return whether the system offers this call."""
    if sys.platform != "linux":
        return False
    syncfs = ctypes.CDLL(None, use_errno=True).syncfs
    handle = os.open(folder, os.O_RDONLY)
    try:
        if syncfs(handle):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    finally:
        os.close(handle)
    return True


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """Return (leaves by path, notes, hash of the content) of a file that `write` wrote.

    Raises:
        CheckpointError: the file is missing, truncated, or does not match its hash.
        OSError: the file cannot be read.
    """
    try:
        with records.refusing(path), open_regular(path) as file:
            flat, text, sha, found = _read(file)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError,
            RuntimeError) as error:  # fmt: skip
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if sha is None:
        raise CheckpointError(
            f"{path} is damaged: it holds no hash of its content, or was not written by "
            "`fedshot.core.storage.write`"
        )
    if found != sha:
        raise CheckpointError(f"{path} is damaged: its content differs from the hash inside it")
    return flat, records.parse(text.encode(), dict[str, Any], str(path)), sha


def _read(file: BinaryIO) -> tuple[dict[str, Tensor], str, str | None, str]:
    """Return the leaves by path, the notes as text, the hash in the file, and that of its content.

    Raises LookupError, ValueError, TypeError, AttributeError, ArithmeticError or RuntimeError for a
    file that is not in the format of safetensors.
    """
    rest = os.fstat(file.fileno()).st_size - 8
    length = int.from_bytes(file.read(8), "little")
    if length > rest:
        raise ValueError("it ends in its header")
    header = file.read(length).decode()
    if header.startswith(_FIRST):
        metadata, end = json.JSONDecoder().raw_decode(header, len(_FIRST))
        entries = "{" + header[end:].removeprefix(",")
    else:  # another program's file
        found = json.loads(header)
        metadata = found.pop(_METADATA, {})
        entries = json.dumps(found)
    forms, size = _forms(entries)
    if length + size != rest:
        raise ValueError(f"it has {rest - length} bytes of values, expected {size}")
    flat, blocks = {}, {}
    for name, dtype, shape in forms:
        flat[name] = torch.empty(shape, dtype=dtype, device="cpu")
        blocks[name] = tree.memory(flat[name])
        file.readinto(blocks[name])  # type: ignore[attr-defined]
    text = metadata.get("notes", "{}")
    return flat, text, metadata.get("sha256"), _hash(flat, blocks, text)


def _hash(flat: Mapping[str, Tensor], blocks: Mapping[str, memoryview], notes: str) -> str:
    named = ((name, tree.form(leaf), blocks[name]) for name, leaf in flat.items())
    return hashlib.sha256((tree.digest_of_bytes(named) + notes).encode()).hexdigest()


def cache_folder() -> Path:
    """Return $FEDSHOT_CACHE, or fedshot/ in the user's cache folder."""
    own = os.environ.get("FEDSHOT_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path("~/.cache").expanduser()) / "fedshot"
