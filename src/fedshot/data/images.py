"""Picture files to bytes, and what is said when one cannot be read."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from fedshot.data.dataset import Pixels
from fedshot.errors import DataError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm"})

# Decoders raise whatever their arithmetic ran into; on a damaged file any of these is expected.
_UNREADABLE = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    TypeError,
    LookupError,
    OverflowError,
    struct.error,
    zlib.error,
)
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, struct.error)


def workers() -> ThreadPoolExecutor:
    """Return threads for decoding, which releases Python's lock for much of its time."""
    return ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))


@contextmanager
def readable(name: object) -> Iterator[None]:
    """Turn what Pillow raises about a bad file into a DataError that names the file."""
    try:
        yield
    except Image.DecompressionBombError as error:
        raise DataError(
            f"image {name} is larger than Pillow's safety limit ({error}). Remove it, or scale it "
            "down first."
        ) from error
    except _UNREADABLE as error:
        raise DataError(
            f"image {name} cannot be read ({error}). Replace it, or remove it from the folder."
        ) from error


def decode(source: Path | bytes, name: object, channels: int, size: int | None) -> Pixels:
    """Return the picture as uint8 [H, W, channels]; `size` squeezes it to a square."""
    with (
        readable(name),
        Image.open(BytesIO(source) if isinstance(source, bytes) else source) as image,
    ):
        limit = Image.MAX_IMAGE_PIXELS
        if limit is not None and image.width * image.height > limit:
            raise DataError(
                f"image {name} has {image.width}x{image.height} pixels, more than Pillow's safety "
                f"limit of {limit}. Remove it, or scale it down first."
            )
        if image.mode.startswith(("I", "F")):
            raise DataError(
                f"image {name} has pixels of mode {image.mode}, deeper than 8 bits. Convert it to "
                "8 bits first, so that the scaling is your choice."
            )
        # Cameras store a turned picture as it is, with a note; viewers and we follow the note.
        upright = ImageOps.exif_transpose(image)
        if "transparency" in upright.info:
            upright = upright.convert("RGBA")
        plain = upright.convert("RGB" if channels == 3 else "L")
        if size is not None:
            plain = plain.resize((size, size), Image.Resampling.BILINEAR)  # antialiased
        pixels = np.asarray(plain)
    return pixels.reshape(*pixels.shape[:2], channels)


@contextmanager
def opened_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip file; a damaged one is a DataError that names it."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except DAMAGE as error:
        raise DataError(
            f"{path} is not a whole zip file ({error}). It was probably cut off; fetch or write it "
            "again."
        ) from error
