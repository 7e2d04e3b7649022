"""Numbers of any width as bytes without gaps, against Python's integers."""

from __future__ import annotations

import numpy as np
import pytest

from fedshot.core.seeds import Key
from fedshot.privacy.secure_sums.packed_integers import n_bytes, pack, unpack


@pytest.mark.parametrize("bits", [1, 7, 8, 12, 16, 17, 33, 56])
def test_packed_numbers_are_the_digits_of_one_integer(bits: int) -> None:
    for n in (0, 1, 8, 21):
        numbers = Key(n).at(bits).numpy().integers(-(2**62), 2**62, n)
        packed, kept = pack(numbers, bits), [one % 2**bits for one in numbers.tolist()]
        assert len(packed) == n_bytes(n, bits) == -(-n * bits // 8)
        whole = sum(one << i * bits for i, one in enumerate(kept))
        assert int.from_bytes(packed.tobytes(), "little") == whole
        np.testing.assert_array_equal(unpack(packed, n, bits), kept)


def test_many_numbers_are_packed_in_blocks() -> None:
    numbers = Key(0).numpy().integers(0, 2**17, 2**17 + 5)
    packed = pack(numbers, 17)
    np.testing.assert_array_equal(unpack(packed, len(numbers), 17), numbers)
    parts = [pack(part, 17) for part in (numbers[:40_000], numbers[40_000:])]
    assert packed.tobytes() == b"".join(part.tobytes() for part in parts)
