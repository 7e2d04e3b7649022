"""How near numbers in float32 have to be to those of float64."""

from __future__ import annotations

from torch import Tensor


def close(found: Tensor, wanted: Tensor) -> None:
    """Of float64, to what float32 can do."""
    assert found.shape == wanted.shape
    scale = float(wanted.abs().max()) + 1e-6
    assert float((found.double() - wanted).abs().max()) < 1e-5 * scale
