"""Synthetic characters, a task like Omniglot's that needs no files.

All arithmetic is on integers, drawn from a bit stream that numpy keeps stable, so the images are
the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedshot.core.seeds import Key
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset, Ints, Pixels
from fedshot.data.sources.source import Source

_CLASSES = 200
_DRAWINGS = 20  # drawings of each class
_SIZE = 20  # side length in pixels
_STROKES = 4  # maximum number of strokes of a character; the minimum is 2
_STEPS = 32  # a stroke is drawn at _STEPS + 1 points

# Lengths are in sixteenths of a pixel. A linear map stretches and slants; its entries are 256ths.
_PIXEL = 16
_REACH = 104  # maximum distance of a control point from the centre, along each axis
_WOBBLE = 12  # maximum shift of a control point in a drawing
_SHIFT = 40  # maximum shift of the whole character
_STRETCH = 48  # maximum change of the map's diagonal
_SLANT = 64  # maximum of the map's other entries
_PEN = (9, 14)  # range of the radius within which the ink is full
_EDGE = 10  # width over which the ink fades


@dataclass(frozen=True)
class Glyphs(Source):
    """Synthetic characters drawn by fedshot: 200 classes, 20 drawings of each, 20 x 20 pixels.

    A character is two to four curved strokes between random points; ink is 255, paper 0. Each
    drawing moves the points, stretches, slants and shifts the character, and has its own stroke
    width. 120 classes are base, 30 validation, 50 novel.
    """

    def load(self, data_dir: Path | None) -> Dataset:
        """Draw all images; no file is needed."""
        del data_dir
        y = np.arange(_CLASSES, dtype=np.int64).repeat(_DRAWINGS)
        names = tuple(f"glyph{number:03}" for number in range(_CLASSES))
        classes = tuple(range(_CLASSES))
        split = ClassSplit(base=classes[:120], validation=classes[120:150], novel=classes[150:])
        return Dataset("glyphs", _drawn(*_curves(y)), y, names, standard=split)


def _whole(name: str, low: int, high: int, *shape: int) -> Ints:
    """Draw an array of integers, uniform from `low` to `high` up to a bias of 2^-32.

    `name` selects the bit stream.
    """
    raw = Key(0).at("glyphs", name).numpy().bit_generator.random_raw(int(np.prod(shape)))
    numbers = (raw >> np.uint64(32)) * np.uint64(high - low + 1) >> np.uint64(32)
    return low + numbers.astype(np.int64).reshape(shape)


def _curves(y: Ints) -> tuple[Ints, Ints]:
    """Return points [n, strokes, steps + 1, 2] on the strokes of n drawings, and pen radii [n].

    `y` [n] are the characters that are drawn, and points are (row, column) in fractions of a pixel.
    A stroke is a quadratic Bezier curve. A character with fewer strokes repeats its first stroke.
    """
    n = len(y)
    controls = _whole("controls", -_REACH, _REACH, _CLASSES, _STROKES, 3, 2)
    for stroke in range(1, _STROKES):  # half of the strokes start where the last one ends
        joined = _whole(f"joined{stroke}", 0, 1, _CLASSES) == 1
        controls[joined, stroke, 0] = controls[joined, stroke - 1, 2]
    count = _whole("strokes", 2, _STROKES, _CLASSES)
    controls = controls[y] + _whole("wobble", -_WOBBLE, _WOBBLE, n, _STROKES, 3, 2)
    spare = np.arange(_STROKES) >= count[y, None]
    controls = np.where(spare[:, :, None, None], controls[:, :1], controls)
    linear = _whole("slant", -_SLANT, _SLANT, n, 2, 2)
    linear[:, (0, 1), (0, 1)] = 256 + _whole("stretch", -_STRETCH, _STRETCH, n, 2)
    controls = np.einsum("nij,nspj->nspi", linear, controls) // 256
    controls += _whole("shift", -_SHIFT, _SHIFT, n, 1, 1, 2) + _SIZE * _PIXEL // 2
    t = np.arange(_STEPS + 1)
    weights = np.stack([(_STEPS - t) ** 2, 2 * t * (_STEPS - t), t**2], axis=1)
    points = np.einsum("tp,nspj->nstj", weights, controls) // _STEPS**2
    return points, _whole("pen", *_PEN, n)


def _drawn(points: Ints, pen: Ints) -> Pixels:
    """Return images [n, size, size, 1] with a soft-edged disc of radius `pen` at each point."""
    n = len(points)
    side = _SIZE + 2  # one pixel of margin, for ink beyond the border
    images = np.zeros((n, side * side), dtype=np.uint8)
    full, reach = pen[:, None, None] ** 2, (pen[:, None, None] + _EDGE) ** 2
    window = np.arange(-1, 3)  # offsets of pixels whose centre may lie within the disc
    each = np.arange(n)[:, None]
    for at in points.reshape(n, -1, 2).swapaxes(0, 1):
        pixels = ((at - _PIXEL // 2) // _PIXEL)[:, :, None] + window
        away = (pixels * _PIXEL + _PIXEL // 2 - at[:, :, None]) ** 2
        ink = 255 * (reach - away[:, 0, :, None] - away[:, 1, None]) // (reach - full)
        row, column = (pixels.clip(-1, _SIZE) + 1).swapaxes(0, 1)
        place = (row[:, :, None] * side + column[:, None]).reshape(n, -1)
        stamp = ink.clip(0, 255).astype(np.uint8).reshape(n, -1)
        images[each, place] = np.maximum(images[each, place], stamp)
    return np.ascontiguousarray(images.reshape(n, side, side, 1)[:, 1:-1, 1:-1])
