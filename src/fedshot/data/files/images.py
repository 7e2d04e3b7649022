"""Picture files to bytes, and what is said when one cannot be read."""

from __future__ import annotations

import os
import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from PIL import Image, ImageOps

from fedshot.core.errors import DataError
from fedshot.core.regular_files import open_regular
from fedshot.data.dataset import Pixels
from fedshot.data.files.archives import Archive

FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF", "PPM")  # of the suffixes, and no others:
# Pillow goes by content, and would start Ghostscript for what is PostScript
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
Aspect: TypeAlias = Literal["squeeze", "crop", "pad"]
_SIZED: dict[Aspect, Callable[..., Image.Image]] = {
    "squeeze": Image.Image.resize,
    "crop": ImageOps.fit,
    "pad": ImageOps.pad,
}
_BLOCK, _JOB = 1024, 32  # pictures held in memory at once, and handed to a thread at once
_LARGEST = 1 << 26  # pixels of a picture
_LONGEST_SIDE = 1 << 13  # pixels; its square is as large
_LARGE = 1 << 24  # pixels from which pictures are decoded one at a time, each up to 0.5 GB
_one_large = threading.Lock()
_DEEP = re.compile(r";16[BLN]")  # of Pillow's raw modes, 16 bits a channel; BGR;16 has 5 or 6


def check_side(size: int | None) -> None:
    """Raise DataError for a side of squares, in pixels, that no picture can have."""
    if size is not None and not 1 <= size <= _LONGEST_SIDE:
        raise DataError(f"size is {size}; expected 1 to {_LONGEST_SIDE} pixels, or none")


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


def decoded(
    archive: Archive,
    members: Sequence[str],
    shape: tuple[int, int, int],
    convert: Callable[[bytes, str], Pixels],
) -> Iterator[Pixels]:
    """Yield the pictures' rows in order, a block at a time; a block is overwritten by the next.

    Threads, not processes: Pillow and zlib release Python's lock on pictures of 84 pixels, where
    the work is; 24,000 pictures of 32 pixels take 2 s either way, less than processes need to
    start and to send their rows back.
    """
    block = np.empty((min(_BLOCK, len(members)), *shape), dtype=np.uint8)

    def fill(start: int, first: int, last: int) -> None:
        for i in range(first, last):
            name = members[start + i]
            block[i] = convert(archive.read(name), f"{archive.path}: {name}")

    with workers() as pool:
        for start in range(0, len(members), len(block)):
            n = min(len(block), len(members) - start)
            jobs = [pool.submit(fill, start, i, min(i + _JOB, n)) for i in range(0, n, _JOB)]
            try:
                for job in jobs:
                    job.result()
            finally:
                for job in jobs:
                    job.cancel()
            yield block[:n]


def photo(data: bytes, name: str, size: int, resize: bool, remedy: str) -> Pixels:
    """Return a square colour picture as uint8 [size, size, 3]; `remedy` ends the refusal."""
    with readable(name), Image.open(BytesIO(data), formats=["PNG", "JPEG"]) as image:
        check_picture(image, name)
        if image.size != (size, size):
            if not resize:
                w, h = image.size
                raise DataError(f"image {name} is {w}x{h} pixels; expected {size}x{size}. {remedy}")
            with _turn(image):
                plain = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
            return np.asarray(plain)
        return np.asarray(image.convert("RGB"))


def decode(
    source: Path | bytes,
    name: object,
    channels: int,
    size: int | None,
    aspect: Aspect = "squeeze",
) -> Pixels:
    """Return the picture as uint8 [H, W, channels]; `size` makes it a square."""
    with picture(source, name) as image:
        square = None if size is None else (size, size)
        return plain(image, name, channels, square, aspect=aspect)


@contextmanager
def picture(source: Path | bytes, name: object) -> Iterator[Image.Image]:
    """Open a picture file; what cannot be read in it is refused by name, also later on."""
    try:
        opened = BytesIO(source) if isinstance(source, bytes) else open_regular(source)
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise DataError(
            f"image {name} cannot be read ({said}). Replace it, or remove it."
        ) from error
    with opened, readable(name), Image.open(opened, formats=FORMATS) as image:
        yield image


def check_picture(image: Image.Image, name: object) -> None:
    """Refuse a picture that is too large, or that Pillow would cut to 8 bits; before it is loaded.

    Of a picture that was loaded elsewhere Pillow does not tell how deep its file was.
    """
    most = min(_LARGEST, Image.MAX_IMAGE_PIXELS or _LARGEST)
    if image.width * image.height > most:
        raise DataError(
            f"image {name} has {image.width}x{image.height} pixels, more than the safety limit of "
            f"{most}. Remove it, or scale it down first."
        )
    if image.mode.startswith(("I", "F")) or any(map(_is_deep, getattr(image, "tile", ()))):
        raise DataError(
            f"image {name} has pixels of mode {image.mode}, deeper than 8 bits. Convert it to "
            "8 bits first, so that the scaling is your choice."
        )


def _turn(image: Image.Image) -> AbstractContextManager[object]:
    """Return what to decode a picture within, so that large ones are decoded one at a time."""
    return _one_large if image.width * image.height > _LARGE else nullcontext()


def _is_deep(tile: Any) -> bool:
    """Whether Pillow decodes more than 8 bits a channel for this part of a picture."""
    codec, _, _, arguments = tile
    told = arguments if isinstance(arguments, tuple) else (arguments,)
    if codec.startswith("ppm"):  # (mode, largest value)
        return len(told) > 1 and told[1] > 255
    return bool(told) and bool(_DEEP.search(str(told[0])))


def _lost_in_transparency(image: Image.Image, pixels: Pixels) -> bool:
    if pixels.min() != pixels.max() or not image.has_transparency_data:
        return False
    if "A" not in image.getbands():
        image = image.convert("RGBA")
    least, most = image.getchannel("A").getextrema()
    return least != most


def plain(
    image: Image.Image,
    name: object,
    channels: int,
    size: tuple[int, int] | None,
    resample: Image.Resampling = Image.Resampling.BILINEAR,  # antialiased
    aspect: Aspect = "squeeze",
) -> Pixels:
    """Return the picture as uint8 [H, W, channels], of `size` (width, height) if given.

    `aspect` says how: "squeeze" changes its aspect, "crop" keeps its middle, "pad" adds black.

    Transparency is left out; a picture that is drawn in nothing else is refused.
    """
    check_picture(image, name)
    with _turn(image):
        pixels = _converted(image, channels, size, resample, aspect)
        if _lost_in_transparency(image, pixels):
            raise DataError(
                f"image {name} is drawn in its transparency alone: without it there is one "
                "colour. Flatten it on a ground of your choice first."
            )
    return pixels.reshape(*pixels.shape[:2], channels)


def _converted(
    image: Image.Image,
    channels: int,
    size: tuple[int, int] | None,
    resample: Image.Resampling,
    aspect: Aspect,
) -> Pixels:
    # Cameras store a turned picture as it is, with a note; viewers and we follow the note.
    upright = ImageOps.exif_transpose(image)
    if "transparency" in upright.info:
        upright = upright.convert("RGBA")
    flat = upright.convert("RGB" if channels == 3 else "L")
    if size is not None:
        flat = _SIZED[aspect](flat, size, resample)
    return np.asarray(flat)
