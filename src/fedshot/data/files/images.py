"""Decodes image files to uint8 arrays, with errors that name the file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from fedshot.core.errors import DataError
from fedshot.core.regular_files import open_regular
from fedshot.data.dataset import Pixels
from fedshot.data.files.archives import Archive
from fedshot.data.files.bounded import DAMAGE

# Pillow chooses a decoder by content, not by suffix. Other formats are refused, such as PostScript,
# for which it would start Ghostscript.
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF", "PPM")
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm"})

Aspect: TypeAlias = Literal["squeeze", "crop", "pad"]
_RESIZE: dict[Aspect, Callable[..., Image.Image]] = {
    "squeeze": Image.Image.resize,
    "crop": ImageOps.fit,
    "pad": ImageOps.pad,
}
_BLOCK, _JOB = 1024, 32  # images in memory at once, and in one task of a thread
_MAX_PIXELS = 1 << 26
_MAX_SIDE = 1 << 13  # pixels; a square of this side has _MAX_PIXELS
_LARGE = 1 << 24  # pixels above which images are decoded one at a time, each in up to 1.3 GB
_DEEP = re.compile(r";16[BLN]")  # Pillow's raw modes of 16 bits a channel; BGR;16 has 5 or 6


def check_side(size: int | None) -> None:
    """Raise DataError unless a side length in pixels is None or in 1..8192."""
    if size is not None and not (type(size) is int and 1 <= size <= _MAX_SIDE):
        raise DataError(f"size is {size!r}; expected 1 to {_MAX_SIDE} pixels, or none")


def check_layout(shape: Sequence[int], name: str) -> None:
    """Raise DataError if images [..., H, W, C] look like images with channels first."""
    if len(shape) > 2 and shape[-3] in (1, 3) and shape[-2] == shape[-1] > 4:
        raise DataError(
            f"{name}: images are {list(shape)}, channels first; expected [..., height, "
            "width, channels]. Write np.moveaxis(x, -3, -1)."
        )


def check_channels(channels: int) -> None:
    """Raise DataError unless the number of channels is 1 or 3."""
    if channels not in (1, 3):
        raise DataError(f"channels is {channels}; expected 1 (grey) or 3 (colour)")


def workers() -> ThreadPoolExecutor:
    """Return a pool of threads for decoding; decoders release the GIL for most of their time."""
    return ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))


@contextmanager
def readable(name: object) -> Iterator[None]:
    """Turn an exception about a damaged image into a DataError that names the image."""
    try:
        yield
    except Image.DecompressionBombError as error:
        raise DataError(
            f"image {name} is larger than Pillow's safety limit ({error}). Remove it, or scale it "
            "down first."
        ) from error
    except DAMAGE as error:
        reason = getattr(error, "strerror", None) or error
        if isinstance(error, UnidentifiedImageError):  # it would name an object in memory
            reason = f"it is none of {', '.join(FORMATS)}"
        raise DataError(
            f"image {name} cannot be read ({reason}). Replace it, or remove it."
        ) from error


def decoded(
    members: Sequence[tuple[Archive, str]],
    shape: tuple[int, int, int],
    convert: Callable[[bytes, str], Pixels],
) -> Iterator[Pixels]:
    """Decode images in threads; yield them in order, in blocks uint8 [k, H, W, C].

    All blocks share memory, so each one must be used before the next is requested.

    Args:
        members: the archive of each image, and its name in the archive.
        shape: (height, width, channels) of every image.
        convert: returns an image, given its bytes and a name for errors.

    Threads suffice, since Pillow and zlib release the GIL.
    """
    block = np.empty((min(_BLOCK, len(members)), *shape), dtype=np.uint8)

    def fill(start: int, first: int, last: int) -> None:
        for i in range(first, last):
            archive, name = members[start + i]
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
    """Return a colour image as uint8 [size, size, 3].

    With `resize` an image of another size is resized; otherwise it raises DataError, with `remedy`
    as the last sentence of the message.
    """
    with open_image(data, name, ("PNG", "JPEG")) as image:
        check_image(image, name)
        if image.size == (size, size):
            return np.asarray(image.convert("RGB"))
        if not resize:
            w, h = image.size
            raise DataError(f"image {name} is {w}x{h} pixels; expected {size}x{size}. {remedy}")
        return _bounded(
            image,
            lambda: np.asarray(
                image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
            ),
        )


def decode(
    source: Path | bytes, name: object, channels: int, size: int | None, aspect: Aspect = "squeeze"
) -> Pixels:
    """Return an image as uint8 [H, W, channels], resized to a square of `size` pixels if given."""
    with open_image(source, name) as image:
        square = None if size is None else (size, size)
        return to_array(image, name, channels, square, aspect=aspect)


@contextmanager
def open_image(
    source: Path | bytes, name: object, formats: tuple[str, ...] = FORMATS
) -> Iterator[Image.Image]:
    """Open an image. Raises DataError, which names it, if opening or later decoding fails."""
    with (
        readable(name),
        BytesIO(source) if isinstance(source, bytes) else open_regular(source) as file,
        Image.open(file, formats=formats) as image,
    ):
        yield image


def check_image(image: Image.Image, name: object) -> None:
    """Raise DataError for an opened image that is too large, or has over 8 bits per channel.

    Call it before Pillow loads the pixels; afterwards the bit depth is not known.
    """
    limit = min(_MAX_PIXELS, Image.MAX_IMAGE_PIXELS or _MAX_PIXELS)
    if image.width * image.height > limit:
        raise DataError(
            f"image {name} has {image.width}x{image.height} pixels, more than the safety limit of "
            f"{limit}. Remove it, or scale it down first."
        )
    if image.mode.startswith(("I", "F")) or any(map(_is_deep, getattr(image, "tile", ()))):
        raise DataError(
            f"image {name} has pixels of mode {image.mode}, deeper than 8 bits. Convert it to "
            "8 bits first, so that the scaling is your choice."
        )


def _bounded(image: Image.Image, read: Callable[[], Pixels]) -> Pixels:
    """Call `read` and return the image; large images are read one at a time, in one thread."""
    large = image.width * image.height > _LARGE
    return _one_thread().submit(read).result() if large else read()


@cache
def _one_thread() -> ThreadPoolExecutor:
    """Return the only thread for large images.

    There is one, because the C library keeps freed memory for each thread that decoded.
    """
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-images")


def _restart() -> None:
    _one_thread.cache_clear()
    _one_thread()


_one_thread()  # now, since two threads that make it at once would get one each
if hasattr(os, "register_at_fork"):  # a forked process inherits the pool without its thread
    os.register_at_fork(after_in_child=_restart)


def _is_deep(tile: Any) -> bool:
    """Whether this tile, a part of an image in Pillow, has more than 8 bits per channel."""
    codec, _, _, arguments = tile
    values = arguments if isinstance(arguments, tuple) else (arguments,)
    if codec.startswith("ppm"):  # (mode, largest value)
        return len(values) > 1 and values[1] > 255
    return bool(values) and bool(_DEEP.search(str(values[0])))


def _is_drawn_in_alpha(image: Image.Image, pixels: Pixels) -> bool:
    """Whether only the transparency varies, so that the image is blank without it."""
    if pixels.min() != pixels.max() or not image.has_transparency_data:
        return False
    if "A" not in image.getbands():
        image = image.convert("RGBA")
    least, most = image.getchannel("A").getextrema()
    return least != most


def to_array(
    image: Image.Image,
    name: object,
    channels: int,
    size: tuple[int, int] | None,
    resample: Image.Resampling = Image.Resampling.BILINEAR,  # antialiased
    aspect: Aspect = "squeeze",
) -> Pixels:
    """Return an opened image as uint8 [H, W, channels], of `size` (width, height) if given.

    `aspect` is how the image is resized: "squeeze" changes its aspect ratio, "crop" keeps the
    middle, "pad" adds black. Transparency is dropped. Raises DataError for an image that would be
    blank without transparency.
    """
    check_image(image, name)

    def read() -> Pixels:
        # Cameras store the pixels unrotated, and the orientation in a tag.
        upright = ImageOps.exif_transpose(image)
        if "transparency" in upright.info:
            upright = upright.convert("RGBA")
        flat = upright.convert("RGB" if channels == 3 else "L")
        pixels = np.asarray(flat if size is None else _RESIZE[aspect](flat, size, resample))
        if _is_drawn_in_alpha(image, pixels):
            raise DataError(
                f"image {name} varies only in its transparency; without it there is one colour. "
                "Flatten it on a background first."
            )
        return pixels.reshape(*pixels.shape[:2], channels)

    return _bounded(image, read)
