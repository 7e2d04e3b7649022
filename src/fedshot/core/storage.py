"""Trees on disk: safetensors files, written atomically, with a hash inside.

A file is written under a temporary name, flushed to the disk, and renamed, so a reader sees the old
file, the new file, or none. The header holds the SHA-256 of names, types, shapes, values and notes,
which every read checks. Nothing is ever unpickled.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedshot.core import records, tree
from fedshot.core.errors import CheckpointError
from fedshot.core.tree import Tree

PARTIAL = ".partial"
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
    # Leaves are copied, because safetensors refuses tensors that share memory.
    flat = {
        name: leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, leaf in tree.items(content)
    }
    text = json.dumps(dict(notes or {}), sort_keys=True)
    sha = _hash(flat, text)
    data = save(flat, metadata={"notes": text, "sha256": sha})
    write_bytes(path, *_with_sorted_header(data), sync=sync)
    return sha


def _with_sorted_header(data: bytes) -> tuple[bytes, memoryview]:
    """Return (header with sorted keys, tensor data): equal content then gives equal bytes."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # padding keeps the values aligned
    return len(header).to_bytes(8, "little") + header, memoryview(data)[end:]


def write_bytes(path: Path, *data: bytes | memoryview, sync: bool) -> None:
    """Replace the content of the file at `path` atomically by the concatenation of `data`."""
    partial = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            file.writelines(data)
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
    try:
        write_bytes(path.resolve(), data, sync=False)
    except RuntimeError:
        raise OSError(errno.ELOOP, "Symbolic links form a loop", str(path)) from None


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
        data = records.content(path, None)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    try:
        # Not `safe_open`, which leaks two objects for every tensor. Tensors are copied, because
        # results may depend on where in memory a tensor begins.
        loaded, header = load(data), data[8 : 8 + int.from_bytes(data[:8], "little")]
        del data  # so that memory holds the content twice, not three times, while it is copied
        flat = {name: loaded.pop(name).clone() for name in list(loaded)}
    except (SafetensorError, LookupError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    metadata = records.parse(header, dict[str, Any], str(path)).get("__metadata__") or {}
    text, sha = metadata.get("notes", "{}"), metadata.get("sha256")
    if sha is None:
        raise CheckpointError(
            f"{path} is damaged: it holds no hash of its content, or was not written by "
            "`fedshot.core.storage.write`"
        )
    if _hash(flat, text) != sha:
        raise CheckpointError(f"{path} is damaged: its content differs from the hash inside it")
    return flat, records.parse(text.encode(), dict[str, Any], str(path)), sha


def _hash(flat: Mapping[str, Tensor], notes: str) -> str:
    return hashlib.sha256((tree.digest_of(flat.items()) + notes).encode()).hexdigest()


def cache_folder() -> Path:
    """Return $FEDSHOT_CACHE, or fedshot/ in the user's cache folder."""
    own = os.environ.get("FEDSHOT_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path("~/.cache").expanduser()) / "fedshot"
