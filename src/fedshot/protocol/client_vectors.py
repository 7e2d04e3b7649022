"""The vectors that the clients of a cohort upload, kept until all have arrived.

A robust aggregator compares the uploads of all clients, so all are kept. They are processed in
blocks of coordinates, sorted by client, so no result depends on the order of arrival.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from fedshot.core.text import megabytes

IN_MEMORY = 1 << 30  # bytes of a cohort's vectors above which they are kept in a file
BLOCK = 1 << 25  # bytes of a block, in float64


class ClientVectors:
    """A vector for each client of a cohort, with its weight and its Euclidean norm.

    Args:
        clients: largest number of clients.
        length: length of a vector.
        dtype: float32 or float64.
        folder: where vectors of more than `IN_MEMORY` bytes are kept, in a file without a name that
            vanishes with the process; None for the system's folder of temporary files.

    Raises OSError, which names the folder, if its disk has no room for the file.
    """

    def __init__(
        self, clients: int, length: int, dtype: torch.dtype, folder: Path | None = None
    ) -> None:
        self.cohort, self.length = clients, length
        self._rows: Tensor
        if (size := clients * length * dtype.itemsize) > IN_MEMORY:
            shape, kind = (clients, length), np.dtype(str(dtype).removeprefix("torch."))
            with tempfile.TemporaryFile(dir=folder) as file:
                try:
                    reserve(file, size)
                except OSError as error:
                    reason = f"{error.strerror} for the {megabytes(size)} MB of a cohort's replies"
                    place = str(folder or tempfile.gettempdir())
                    raise OSError(error.errno, reason, place) from None
                self._rows = torch.from_numpy(np.memmap(file, kind, "w+", shape=shape))
        else:
            self._rows = torch.empty(clients, length, dtype=dtype)
        self._arrived: list[tuple[int, float, float]] = []  # client, weight, norm

    def add(self, client: int, vector: Tensor, weight: float) -> None:
        """Add the vector [length] of one client."""
        norm = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
        self._rows[len(self._arrived)] = vector
        self._arrived.append((client, weight, norm))

    def __len__(self) -> int:
        return len(self._arrived)

    @property
    def order(self) -> list[int]:
        """The rows, sorted by client."""
        return sorted(range(len(self)), key=lambda row: self._arrived[row])

    @property
    def clients(self) -> list[int]:
        """The clients, sorted."""
        return [self._arrived[row][0] for row in self.order]

    @property
    def weights(self) -> Tensor:
        """The weights [n] in the order of the clients, float64."""
        return torch.tensor([self._arrived[row][1] for row in self.order], dtype=torch.float64)

    @property
    def norms(self) -> Tensor:
        """The norms [n] in the order of the clients, float64."""
        return torch.tensor([self._arrived[row][2] for row in self.order], dtype=torch.float64)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (coordinates, values [n, coordinates]) block by block, in the order of clients."""
        order, width = self.order, max(1, BLOCK // (8 * max(1, len(self))))
        for first in range(0, self.length, width):
            at = slice(first, min(first + width, self.length))
            yield at, self._rows[order, at]

    def mix(self, shares: Tensor) -> Tensor:
        """Return sum_k shares_k x_k [length], float64; `shares` is [n]."""
        found = torch.empty(self.length, dtype=torch.float64)
        for at, block in self.blocks():
            found[at] = shares @ block.double()
        return found

    def dots(self, vector: Tensor) -> Tensor:
        """Return the products of `vector` [length] with each client's vector, [n] in float64."""
        found = torch.zeros(len(self), dtype=torch.float64)
        for at, block in self.blocks():
            found += block.double() @ vector[at]
        return found

    def products(self) -> Tensor:
        """Return the Gram matrix [n, n] of x_k - x_m in float64.

        x_m has the median norm. If less than half of the clients send huge vectors, it is not one
        of these, and the distances between the other vectors keep their digits.
        """
        middle = int(self.norms.argsort(stable=True)[(len(self) - 1) // 2])
        found = torch.zeros(len(self), len(self), dtype=torch.float64)
        for _, block in self.blocks():
            centred = block.double()
            centred = centred - centred[middle]
            found += centred @ centred.T
        return found


def reserve(file: IO[bytes], size: int) -> None:
    """Allocate the disk blocks of an empty file; without them, a full disk kills the process.

    The system ends a process that writes to a memory map for which the disk has no room. Raises
    OSError if the disk has too little room.
    """
    if sys.platform == "linux":
        os.posix_fallocate(file.fileno(), 0, size)
        return
    for start in range(0, size, BLOCK):
        file.write(bytes(min(BLOCK, size - start)))
    file.flush()
