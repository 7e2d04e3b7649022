"""Converts a user's examples to model inputs in the same way as the training data.

Images are processed as the run's data source does: for Omniglot they are scaled down by averaging
and inverted, for other sources they are resized as in `ImageFolder`. Texts are tokenised as the
source does.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image

from fedshot.core.errors import DataError
from fedshot.core.regular_files import read_regular
from fedshot.data.dataset import Pixels
from fedshot.data.files.images import Aspect, open_image, readable, to_array
from fedshot.data.sources.huffpost import HuffPost
from fedshot.data.sources.omniglot import Omniglot
from fedshot.data.sources.sent140 import Sent140
from fedshot.data.sources.source import Source
from fedshot.data.sources.tokenizer import tokenize
from fedshot.data.tokens import UNKNOWN, Words

Picture: TypeAlias = Path | bytes | Image.Image | Pixels

_LIMIT = 1 << 20  # bytes of a text file


@dataclass(frozen=True)
class Pictures:
    """Converts images to uint8 arrays of one shape (height, width, channels).

    A path, the bytes of an image file, or an opened image is processed as the training data were.
    It may be grey or in colour, and may use a palette. Transparency is dropped. An array must hold
    pixels in the format of the dataset; it is resized or converted if its size or channels differ.
    """

    shape: tuple[int, int, int]
    ink: bool = False  # invert and scale down by averaging, as for Omniglot
    aspect: Aspect = "squeeze"

    @classmethod
    def like(cls, source: Source, shape: tuple[int, ...]) -> Pictures:
        """Return the conversion that a data source uses, to images of `shape` [H, W, C]."""
        height, width, channels = shape
        aspect: Aspect = getattr(source, "aspect", "squeeze")
        return cls((height, width, channels), isinstance(source, Omniglot), aspect)

    def read(self, source: Picture, name: object) -> Pixels:
        """Return one image as uint8 [H, W, C]. Raises DataError if it cannot be read."""
        if isinstance(source, np.ndarray):
            return self._from_array(source, name)
        if isinstance(source, Image.Image):
            with readable(name):
                return self._flat(source, name)
        with open_image(source, name) as image:
            return self._flat(image, name)

    def _from_array(self, pixels: Pixels, name: object) -> Pixels:
        if pixels.ndim == 2:
            pixels = pixels[..., None]
        if pixels.shape == self.shape:
            return pixels
        if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4) or pixels.size == 0:
            raise DataError(
                f"image {name} has shape {list(pixels.shape)}; expected [H, W] or [H, W, C] with 1 "
                "(grey), 3 (colour) or 4 (with transparency) channels."
            )
        grey = pixels[..., 0] if pixels.shape[2] == 1 else pixels
        return self._sized(Image.fromarray(np.ascontiguousarray(grey)), name)

    def _flat(self, image: Image.Image, name: object) -> Pixels:
        if not self.ink:
            return self._sized(image, name)
        return 255 - self._sized(image, name, Image.Resampling.BOX)

    def _sized(
        self, image: Image.Image, name: object, how: Image.Resampling = Image.Resampling.BILINEAR
    ) -> Pixels:
        height, width, channels = self.shape
        if channels not in (1, 3):
            raise DataError(
                f"image {name} cannot be converted to the {channels} channels of this run's data. "
                f"Pass arrays of shape {list(self.shape)}."
            )
        return to_array(image, name, channels, (width, height), how, self.aspect)


@dataclass(frozen=True)
class Sentences:
    """Converts texts to word numbers.

    Args:
        numbers: word -> row of the table of vectors, for every word that has a vector.
        cut: maximum number of words of a text.
        keep: "all", or "known" to drop words that have no vector.
        source: the data source whose tokenisation is used.
    """

    numbers: Mapping[str, int]
    cut: int
    keep: str
    source: Source

    def read(self, text: str | Path | Sequence[str], name: object) -> Words:
        """Return the word numbers, int32 [L], of a text, a text file, or a sequence of tokens.

        Raises DataError, which names the text, if none of its words has a vector.
        """
        words = self._words(read_text(text) if isinstance(text, Path) else text)
        if not words:
            raise DataError(f"text {name} has no words. Remove it, or correct it.")
        found = [self.numbers.get(word, UNKNOWN) for word in words]
        if max(found) <= UNKNOWN:
            raise DataError(
                f"text {name}: none of its {len(words)} words is known to this run. Is it in "
                "the language of the training data?"
            )
        if self.keep == "known":
            found = [number for number in found if number > UNKNOWN]
        return np.array(found[: self.cut], dtype=np.int32)

    def _words(self, text: str | Sequence[str]) -> list[str]:
        if not isinstance(text, str):
            return list(text)
        if isinstance(self.source, Sent140):
            return tokenize(html.unescape(text))
        if not isinstance(self.source, HuffPost):
            return tokenize(text)
        # HuffPost's headlines come tokenised, as in "it 's"; words with a vector are not split.
        each = ([w] if w in self.numbers else tokenize(w) for w in text.lower().split())
        return [word for words in each for word in words]


def read_raw(text: str | Sequence[str], name: object, source: Source) -> str:
    """Return a text, or words joined by spaces, as the data source would load it for an encoder.

    Raises DataError, which names the text, if it is empty or not text.
    """
    if not isinstance(text, str):
        if not (isinstance(text, list | tuple) and all(isinstance(word, str) for word in text)):
            raise DataError(
                f"text {name} is of type {type(text).__name__}; this run's examples are texts. "
                "Expected a string, a path (pathlib.Path), or a list of words."
            )
        text = " ".join(text)
    text = html.unescape(text) if isinstance(source, Sent140) else text
    if not text.strip():
        raise DataError(f"text {name} has no words. Remove it, or correct it.")
    return text


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 text file. Raises DataError if it cannot be read."""
    try:
        return read_regular(path, _LIMIT).decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"text {path} cannot be read ({error.strerror}). Check it.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"text {path} is not UTF-8. Save it as UTF-8.") from error
