"""A cache of an encoder's features on disk: one float32 array, memory-mapped.

An entry is a folder with `features.npy` and `about.json`, beside the entries of images that
`cache.py` describes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from fedshot.core import storage
from fedshot.data.dataset import Features
from fedshot.data.files import cache


def cached_features(
    name: str, key: str, n: int, blocks: Callable[[], Iterator[Features]]
) -> Features:  # fmt: skip
    """Return features, float32 [n, d], from the cache folder; compute them if they are not there.

    Args:
        name: name of the dataset.
        key: SHA-256 of everything that the features depend on.
        n: number of examples.
        blocks: computes the features and yields them in blocks of rows, float32 [k, d].

    If the folder is not writable, the features are computed into memory.
    """
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:40]
    entry = storage.cache_folder() / f"{plain}-features-{key[:24]}"
    if (found := _read(key, n, entry)) is not None:
        return found
    if not cache.writable(entry.parent, "features are computed"):
        return in_memory(n, blocks())
    return cache.read_or_write(
        entry, lambda place: _read(key, n, place), lambda folder: _write(key, n, blocks(), folder)
    )


def in_memory(n: int, blocks: Iterator[Features]) -> Features:
    """Return blocks of features as one array [n, d]."""
    first = next(blocks)
    x, start = np.empty((n, first.shape[1]), dtype=np.float32), 0
    for block in chain([first], blocks):
        x[start : start + len(block)] = block
        start += len(block)
    return x


def _write(key: str, n: int, blocks: Iterator[Features], folder: Path) -> None:
    path, first = folder / "features.npy", next(blocks)
    cache.write_blocks(path, first.dtype, (n, first.shape[1]), chain([first], blocks))
    about = {"key": key, "features": cache.spots(path)}
    storage.write_bytes(folder / "about.json", json.dumps(about).encode(), sync=True)


def _read(key: str, n: int, entry: Path) -> Features | None:
    """Return the features in the cache entry `entry`; None if it is absent or damaged."""
    path = entry / "features.npy"
    try:
        if json.loads((entry / "about.json").read_bytes()) != {
            "key": key,
            "features": cache.spots(path),
        }:
            return None
        x = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return np.asarray(x) if x.shape[:1] == (n,) and x.ndim == 2 else None
