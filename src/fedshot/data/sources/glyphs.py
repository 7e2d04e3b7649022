"""Synthetic characters in the shape of Omniglot's task, drawn by this module and read from no file.

Every number is a whole one and comes from a stream of bits that numpy promises to keep, so the
images are the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedshot.core.seeds import Key
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset, Ints, Pixels

_CLASSES = 200
_DRAWINGS = 20  # of each class
_SIZE = 20  # pixels a side
_STROKES = 4  # the most that a character has; the fewest are two
_STEPS = 32  # a stroke is stamped at so many points and one

# Lengths are in sixteenths of a pixel, the entries of a linear map in 256ths.
_PIXEL = 16
_REACH = 104  # of a control point from the middle, each way
_WOBBLE = 12  # the most that a drawing moves a control point, each way
_SHIFT = 40  # the most that it moves the whole character
_STRETCH = 48  # the most that it changes a map's diagonal
_SLANT = 64  # the most that it changes the rest of the map
_PEN = (9, 14)  # radius of full ink
_EDGE = 10  # ink fades out over so much more


@dataclass(frozen=True)
class Glyphs:
    """Synthetic characters that fedshot draws itself: 200, 20 drawings of each, 20 x 20 pixels.

    A character is two to four curved strokes between random points, ink 255 on 0. Each of its
    drawings moves the points, stretches, slants and shifts the whole, and has a pen of its own
    width. The images are the same on every machine.
    """

    def load(self, data_dir: Path | None) -> Dataset:
        """Draw all of them; no file is needed."""
        del data_dir
        y = np.arange(_CLASSES, dtype=np.int64).repeat(_DRAWINGS)
        names = tuple(f"glyph{number:03}" for number in range(_CLASSES))
        classes = tuple(range(_CLASSES))
        split = ClassSplit(base=classes[:120], validation=classes[120:150], novel=classes[150:])
        return Dataset("glyphs", _drawn(*_curves(y)), y, names, standard=split)

    def split(self, dataset: Dataset) -> ClassSplit | None:
        """Return 120 / 30 / 50 classes for base, validation, novel."""
        return dataset.standard


def _whole(name: str, low: int, high: int, *shape: int) -> Ints:
    """Draw whole numbers from `low` to `high`, each as likely (but for 2^-32 of it)."""
    raw = Key(0).at("glyphs", name).numpy().bit_generator.random_raw(int(np.prod(shape)))
    numbers = (raw >> np.uint64(32)) * np.uint64(high - low + 1) >> np.uint64(32)
    return low + numbers.astype(np.int64).reshape(shape)


def _curves(y: Ints) -> tuple[Ints, Ints]:
    """Return points [n, strokes, steps + 1, 2] on the strokes of drawings, and pens' radii [n].

    A stroke is a quadratic Bezier curve. The strokes that a character does not have lie on its
    first one.
    """
    n = len(y)
    controls = _whole("controls", -_REACH, _REACH, _CLASSES, _STROKES, 3, 2)
    for stroke in range(1, _STROKES):  # half of the strokes begin where the one before ends
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
    """Return images [n, size, size, 1]: at each point a disc that fades at its edge."""
    n = len(points)
    side = _SIZE + 2  # one pixel around, for what reaches over the border
    images = np.zeros((n, side * side), dtype=np.uint8)
    full, reach = pen[:, None, None] ** 2, (pen[:, None, None] + _EDGE) ** 2
    window = np.arange(-1, 3)  # the pixels whose centre may lie within reach, each way
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
