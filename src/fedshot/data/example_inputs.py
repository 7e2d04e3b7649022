"""Examples of one's own, made into what a trained model takes just as its training data were.

Pictures go the way of the run's source: Omniglot's drawings are averaged down and turned to ink on
0, all others are squeezed as a folder's are. Texts are cut into words as the source cuts them.
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
from fedshot.data.files.images import Aspect, picture, plain, readable
from fedshot.data.sources.huffpost import HuffPost
from fedshot.data.sources.omniglot import Omniglot
from fedshot.data.sources.sent140 import Sent140
from fedshot.data.sources.source import Source
from fedshot.data.sources.tokenizer import tokenize
from fedshot.data.tokens import UNKNOWN, Words

Picture: TypeAlias = Path | bytes | Image.Image | Pixels

_LONGEST = 1 << 20  # bytes of a file of text
_SCALABLE = (1, 3)  # channels that a picture can be converted to


@dataclass(frozen=True)
class Pictures:
    """How pictures become uint8 arrays of one shape (height, width, channels).

    A file, its bytes or an opened picture goes the way of the training data, and may be grey,
    colour, with a palette or with transparency, which is dropped. An array is taken as the data
    set has its images, and only squeezed where its size or channels differ.
    """

    shape: tuple[int, int, int]
    ink: bool = False  # dark on light becomes light on 0, averaged down, as Omniglot's
    aspect: Aspect = "squeeze"

    @classmethod
    def like(cls, source: Source, shape: tuple[int, ...]) -> Pictures:
        """Return what a source does to its pictures."""
        height, width, channels = shape
        aspect: Aspect = getattr(source, "aspect", "squeeze")
        return cls((height, width, channels), isinstance(source, Omniglot), aspect)

    def read(self, one: Picture, name: object) -> Pixels:
        """Return one picture as uint8 [H, W, C]. Raises DataError, naming it, if it cannot be."""
        if isinstance(one, np.ndarray):
            return self._from_array(one, name)
        if isinstance(one, Image.Image):
            with readable(name):
                return self._flat(one, name)
        with picture(one, name) as image:
            return self._flat(image, name)

    def _from_array(self, pixels: Pixels, name: object) -> Pixels:
        if pixels.ndim == 2:
            pixels = pixels[..., None]
        if pixels.shape == self.shape:
            return pixels
        if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4) or pixels.size == 0:
            raise DataError(
                f"image {name} has shape {list(pixels.shape)}; expected [H, W] or [H, W, C] with 1 "
                "(grey), 3 (colour) or 4 (and transparency) channels."
            )
        grey = pixels[..., 0] if pixels.shape[2] == 1 else pixels
        image = Image.fromarray(np.ascontiguousarray(grey))
        return self._sized(image, name, Image.Resampling.BILINEAR)

    def _flat(self, image: Image.Image, name: object) -> Pixels:
        if not self.ink:
            return self._sized(image, name, Image.Resampling.BILINEAR)
        return 255 - self._sized(image, name, Image.Resampling.BOX)

    def _sized(self, image: Image.Image, name: object, how: Image.Resampling) -> Pixels:
        height, width, channels = self.shape
        if channels not in _SCALABLE:
            raise DataError(
                f"image {name} cannot become one of {channels} channels, which this run's data "
                f"have. Pass arrays of shape {list(self.shape)}."
            )
        return plain(image, name, channels, (width, height), how, self.aspect)


@dataclass(frozen=True)
class Sentences:
    """How texts become rows of word numbers.

    Args:
        numbers: the row of every word that has a vector.
        cut: words kept of a text.
        keep: whether words without a vector stay, as "all" or "known".
        source: whose way of cutting texts into words it is.
    """

    numbers: Mapping[str, int]
    cut: int
    keep: str
    source: Source

    def read(self, text: str | Path | Sequence[str], name: object) -> Words:
        """Return int32 [L] of a text, of a file of text, or of words that are cut already.

        Raises DataError, naming the text, when nothing of it is known.
        """
        words = self._words(read_text(text) if isinstance(text, Path) else text)
        if not words:
            raise DataError(f"text {name} has no words. Remove it, or check what it should hold.")
        found = [self.numbers.get(word, UNKNOWN) for word in words]
        if max(found) <= UNKNOWN:
            raise DataError(
                f"text {name}: none of its {len(words)} words is known to this run. Is it in "
                "another language than the training data?"
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
        # Its headlines come cut into words, "it 's": one that is known stays as it is.
        each = ([w] if w in self.numbers else tokenize(w) for w in text.lower().split())
        return [word for words in each for word in words]


def read_text(path: Path) -> str:
    """Return a file of text in UTF-8. Raises DataError, naming it, if it is none."""
    try:
        return read_regular(path, _LONGEST).decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"text {path} cannot be read ({error.strerror}). Check it.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"text {path} is not text in UTF-8. Write it again.") from error
