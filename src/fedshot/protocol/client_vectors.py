"""The vectors that the clients of a cohort upload, kept until all have arrived.

A robust aggregator compares the uploads of all clients, so all are kept. They are processed in
blocks of coordinates, sorted by client, so no result depends on the order of arrival.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

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
    """

    def __init__(
        self, clients: int, length: int, dtype: torch.dtype, folder: Path | None = None
    ) -> None:
        self.cohort, self.length = clients, length
        self._dtype, self._row_bytes = dtype, length * dtype.itemsize
        self._arrived: list[tuple[int, float, float]] = []  # client, weight, norm
        self._folder = folder
        self._file: FileIO | None = None
        if clients * self._row_bytes > IN_MEMORY:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        self._rows = torch.empty(0 if self._file else clients, length, dtype=dtype)

    def add(self, client: int, vector: Tensor, weight: float) -> None:
        """Add the vector [length] of one client.

        Raises OSError, which names the folder, if its disk is full.
        """
        norm = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
        row = len(self._arrived)
        if self._file is None:
            self._rows[row] = vector
        else:
            self._write(row, vector.to(self._dtype).contiguous())
        self._arrived.append((client, weight, norm))

    def _write(self, row: int, vector: Tensor) -> None:
        assert self._file is not None
        left = vector.numpy().data.cast("B")
        self._file.seek(row * self._row_bytes)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            size = megabytes(self.cohort * self._row_bytes)
            reason = f"{error.strerror} for the {size} MB of a cohort's replies"
            folder = str(self._folder or tempfile.gettempdir())
            raise OSError(error.errno, reason, folder) from None

    def __len__(self) -> int:
        return len(self._arrived)

    @property
    def order(self) -> list[int]:
        """The vectors' positions in the order of arrival, sorted by client."""
        return sorted(range(len(self)), key=lambda row: self._arrived[row])

    @property
    def clients(self) -> list[int]:
        """The ids of the clients whose vectors have arrived, sorted."""
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
        """Yield (coordinates, values [n, coordinates]) by blocks; rows are sorted by client."""
        order, width = self.order, max(1, BLOCK // (8 * max(1, len(self))))
        for first in range(0, self.length, width):
            at = slice(first, min(first + width, self.length))
            yield at, self._rows[order, at] if self._file is None else self._read(order, at)

    def _read(self, order: list[int], at: slice) -> Tensor:
        assert self._file is not None
        found = torch.empty(len(order), at.stop - at.start, dtype=self._dtype)
        for values, row in zip(found.numpy(), order, strict=True):
            self._file.seek(row * self._row_bytes + at.start * self._dtype.itemsize)
            left = memoryview(values).cast("B")
            while left:
                if not (n := self._file.readinto(left)):
                    raise OSError(f"the file of clients' vectors ends before row {row} does")
                left = left[n:]
        return found

    def mix(self, shares: Tensor) -> Tensor:
        """Return sum_k shares_k x_k [length], float64; `shares` is [n]."""
        found = torch.empty(self.length, dtype=torch.float64)
        for at, block in self.blocks():
            found[at] = shares @ block.double()
        return found

    def dots(self, vector: Tensor) -> Tensor:
        """Return the inner products of `vector` [length] and each client's vector, float64 [n]."""
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
