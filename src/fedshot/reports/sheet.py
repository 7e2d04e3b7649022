"""A contact sheet of a dataset: one row of images for each class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from fedshot.core.errors import DataError
from fedshot.core.text import shortened
from fedshot.data.dataset import Dataset, Pixels

_MOST = 10  # maximum number of images in a row
_GAP = 4  # pixels between two images
_TEXT = 13  # height of the names in pixels
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def contact_sheet(dataset: Dataset, classes: Sequence[int], scale: int) -> Image.Image:
    """Return the first images of each class, with the class name to the left.

    Args:
        dataset: the dataset.
        classes: class numbers, from top to bottom.
        scale: factor by which images are enlarged, without smoothing.

    Raises DataError if the number of channels is not 1, 3 or 4.
    """
    pixels = dataset.pixels
    h, w, channels = dataset.shape
    if channels not in _MODES:
        raise DataError(
            f"{dataset.name}: images have {channels} channels; a contact sheet shows 1, 3 or 4"
        )
    font = ImageFont.truetype(_font(), _TEXT)
    names = [shortened(dataset.class_names[c], 24) for c in classes]
    left = round(max(font.getlength(name) for name in names)) + 3 * _GAP
    cell_w, cell_h = w * scale + _GAP, max(h * scale, _TEXT + 3) + _GAP
    sheet = Image.new("RGB", (left + _MOST * cell_w + _GAP, len(classes) * cell_h + _GAP), "white")
    pen = ImageDraw.Draw(sheet)
    for row, (c, name) in enumerate(zip(classes, names, strict=True)):
        top = _GAP + row * cell_h
        pen.text((_GAP, top + (cell_h - _GAP) / 2), name, fill="#33363c", font=font, anchor="lm")
        for column, i in enumerate(dataset.images_of([c])[:_MOST].tolist()):
            sheet.paste(_image(pixels[i], scale), (left + column * cell_w, top))
    return sheet


def _image(x: Pixels, scale: int) -> Image.Image:
    h, w, channels = x.shape
    pixels = np.ascontiguousarray(x[..., 0] if channels == 1 else x)
    return (
        Image.frombytes(_MODES[channels], (w, h), pixels.tobytes())
        .convert("RGB")
        .resize((w * scale, h * scale), Image.Resampling.NEAREST)
    )


def _font() -> str:
    """Return the path of matplotlib's font, so that sheets look the same on every machine."""
    return str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf")
