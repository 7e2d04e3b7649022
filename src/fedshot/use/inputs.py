"""Convert a user's examples to inputs of a model.

Invalid examples raise InputError, which is a ValueError, as scikit-learn expects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedshot.config.load import Config
from fedshot.core.errors import DataError, InputError
from fedshot.data.dataset import Features
from fedshot.data.encoders.frozen import Block
from fedshot.data.example_inputs import Pictures, Sentences, read_raw, read_text
from fedshot.data.files.images import check_layout
from fedshot.data.tokens import FIRST_WORD, PADDING
from fedshot.runs.dataset_info import DatasetInfo

_PICTURES = "arrays [n, H, W, C] or [n, H, W], paths of picture files, their bytes, or PIL images"
_ARRAY_DIMS = (3, 4)
_WORKERS = 4  # threads; decoding releases the GIL


class Inputs:
    """Converts examples to inputs of a model in the same way as the run's training data.

    Args:
        info: information about the dataset.
        config: configuration of the run.
        encode: computes features of images or raw texts, if the run has a frozen encoder.
    """

    def __init__(
        self, info: DatasetInfo, config: Config, encode: Callable[[Block], Features]
    ) -> None:
        self._info, self._encode = info, encode
        self._source = config.data
        self._pictures = None
        if info.example_kind == "images":
            self._pictures = Pictures.like(config.data, info.original or info.shape)
        self._sentences = None
        if info.is_text:
            rows = {word: row for row, word in enumerate(info.words, start=FIRST_WORD)}
            keep = getattr(config.data, "keep", "all")
            self._sentences = Sentences(rows, info.shape[0], keep, config.data)

    def __call__(self, x: Any) -> Tensor:
        """Return images as uint8 [n, H, W, C], texts as int32 [n, L], or features, float32 [n, d].

        Texts are padded to the longest.

        Raises InputError, which names the example, if an example is invalid.
        """
        x = _listed(x)
        if isinstance(x, Tensor) and self._pictures is None:
            x = array_of(x, "the examples")
        try:
            if self._info.original is not None:
                return self._encoded(x)
            if self._info.kind == "features":
                return self._features(x)
            return self._texts(x) if self._pictures is None else self._images(x, self._pictures)
        except InputError:
            raise
        except DataError as error:
            raise InputError(str(error)) from error

    def one(self, path: Path) -> Tensor | str:
        """Return the example in a file; `__call__` accepts a list of such examples.

        Raises DataError, which names the file, if it is unreadable.
        """
        if self._info.example_kind == "raw text":
            return read_raw(read_text(path), path, self._source)
        if self._info.example_kind == "features":
            raise DataError(
                f"{path}: this run was trained on features, which have no files of their own. Pass "
                "them to FewShotClassifier in Python, as an array [n, d]."
            )
        if self._pictures is not None:
            return torch.from_numpy(self._pictures.read(path, path).copy())
        assert self._sentences is not None
        return torch.from_numpy(self._sentences.read(path, path))

    def text(self, text: str, name: object) -> Tensor | str:
        """Convert a text to an example.

        Raises DataError, which gives `name`, if no word of the text is in the vocabulary.
        """
        if self._info.example_kind == "raw text":
            return read_raw(text, name, self._source)
        assert self._sentences is not None
        return torch.from_numpy(self._sentences.read(text, name))

    def _encoded(self, x: Any) -> Tensor:
        """Return the features of images or texts, float32 [n, d]."""
        if self._pictures is not None:
            examples: Any = self._images(x, self._pictures).numpy()
        else:
            _check_texts(x)
            examples = tuple(
                read_raw(read_text(one) if isinstance(one, Path) else one, i, self._source)
                for i, one in enumerate(x)
            )
        if len(examples) == 0:
            return torch.empty((0, *self._info.shape))
        found = self._encode(examples)
        bad = np.flatnonzero(~np.isfinite(found).all(axis=1))
        if len(bad):
            raise InputError(
                f"model.encoder gives NaN or infinity for example {bad[0]}. Remove it."
            )
        return torch.from_numpy(found)

    def _features(self, x: Any) -> Tensor:
        d = self._info.shape[0]
        try:
            rows = [array_of(row, "the features") if isinstance(row, Tensor) else row
                    for row in x] if _is_list(x) else x  # fmt: skip
            array = np.asarray(rows)
            if array.dtype.kind not in "fiu":
                raise ValueError(f"they are {array.dtype}")
        except (ValueError, TypeError) as error:
            raise InputError(
                f"the features are not an array of numbers: {error}. Expected float [n, {d}]."
            ) from None
        if array.size == 0:
            return torch.empty((0, d))
        if array.ndim != 2 or array.shape[1] != d:
            raise InputError(
                f"the features are an array of shape {list(array.shape)}; expected [n, {d}], as in "
                "the run's data. Put a single row into a list."
            )
        with np.errstate(over="ignore"):  # infinity is refused below
            array = array.astype(np.float32)
        bad = np.flatnonzero(~np.isfinite(array).all(axis=1))
        if len(bad):
            raise InputError(f"row {bad[0]} of the features holds NaN or infinity. Remove it.")
        return torch.from_numpy(array)

    def _images(self, x: Any, pictures: Pictures) -> Tensor:
        if isinstance(x, Tensor):
            x = array_of(x, "the examples")
            x = channels_last(x) if x.ndim == 4 else x
        elif _is_list(x):
            x = [channels_last(array_of(one, f"image {i}")) if isinstance(one, Tensor) else one
                 for i, one in enumerate(x)]  # fmt: skip
        array = x if isinstance(x, np.ndarray) else None
        arrays = _is_list(x) and all(isinstance(one, np.ndarray) for one in x)
        if arrays and len({one.shape for one in x}) == 1:
            array = np.stack(x)
        if array is not None and array.dtype != object and array.dtype.kind not in "US":
            if array.ndim not in _ARRAY_DIMS:
                raise InputError(
                    f"images are an array of shape {list(array.shape)}; expected [n, H, W, C] or "
                    "[n, H, W]. Put a single image into a list; reshape rows of pixels to images."
                )
            if (array.ndim == 4 and array.shape[-1] == 0) or 0 in array.shape[1:]:
                raise InputError(
                    f"images are an array of shape {list(array.shape)}, without pixels. Remove "
                    "empty images."
                )
            if array.ndim == 3 and array.shape[-1] in (1, 3, 4):
                n, h, w = array.shape
                raise InputError(
                    f"images are an array of shape [{n}, {h}, {w}], which is either one image with "
                    f"{w} channels or {n} grey images of {h} x {w} pixels. Put a single image into "
                    f"a list; give grey images the shape [{n}, {h}, {w}, 1]."
                )
            array = as_bytes(array, "the images")
            if array.ndim == 3:
                array = array[..., None]
            if array.shape[1:] == pictures.shape:
                return torch.from_numpy(np.array(array, order="C"))  # a copy that torch may own
            check_layout(array.shape, "the examples")
            items: Sequence[Any] = list(array)
        elif _is_list(x) or (isinstance(x, np.ndarray) and x.ndim):
            items = list(x)
        else:
            raise InputError(f"the examples are {_kind(x)}; expected {_PICTURES}.{_column(x)}")

        def read(i: int) -> np.ndarray[Any, Any]:
            return pictures.read(_picture(items[i], i), _named(items[i], i))

        if not items:
            return torch.empty((0, *pictures.shape), dtype=torch.uint8)
        with ThreadPoolExecutor(_WORKERS) as pool:
            return torch.from_numpy(np.stack(list(pool.map(read, range(len(items))))))

    def _texts(self, x: Any) -> Tensor:
        assert self._sentences is not None
        if isinstance(x, np.ndarray) and x.ndim == 2 and x.dtype.kind in "iu":
            return self._rows(x)
        _check_texts(x)
        rows = []
        for i, one in enumerate(x):
            words = _is_list(one) and all(isinstance(word, str) for word in one)
            if not (isinstance(one, str | Path) or words):
                raise InputError(
                    f"text {i} is {_kind(one)}; this run's examples are texts. Expected a string, "
                    f"a path (pathlib.Path), or a list of words.{_pairs(one)}"
                )
            rows.append(self._sentences.read(one, one if isinstance(one, Path) else i))
        return padded([torch.from_numpy(row) for row in rows])

    def _rows(self, x: np.ndarray[Any, Any]) -> Tensor:
        """Return texts given as rows of word numbers, int32 [n, L].

        A word number is a row of the run's word vectors; 0 is padding. Raises InputError for a
        number outside the vocabulary, and for rows that are empty or too long.
        """
        most = FIRST_WORD + len(self._info.words)
        if x.size and (x.min() < PADDING or x.max() >= most):
            raise InputError(
                f"word numbers range from {x.min()} to {x.max()}; expected 0 to {most - 1}, rows "
                "of the run's word vectors."
            )
        if x.shape[1] > self._info.shape[0] or not x.shape[1]:
            raise InputError(
                f"rows have {x.shape[1]} words; expected 1 to {self._info.shape[0]}. Shorten them."
            )
        empty = np.flatnonzero((x == PADDING).all(axis=1))
        if len(empty):
            raise InputError(
                f"text {empty[0]} has no words: its row holds {PADDING} alone, which is padding. "
                "Remove it."
            )
        return torch.from_numpy(np.array(x, dtype=np.int32, order="C"))


def _check_texts(x: Any) -> None:
    """Raise InputError unless x is a list or an array."""
    if not (_is_list(x) or (isinstance(x, np.ndarray) and x.ndim)):
        raise InputError(
            f"the texts are {_kind(x)}; expected a list of strings, of paths of text files "
            f"(pathlib.Path), or of lists of words.{_column(x)}"
        )


def padded(rows: Sequence[Tensor]) -> Tensor:
    """Return examples as one tensor: images stacked, texts padded with 0 to the longest."""
    if not rows:
        return torch.empty((0, 1), dtype=torch.int32)
    if rows[0].ndim > 1:
        return torch.stack(list(rows))
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=PADDING)


def joined(a: Tensor, b: Tensor) -> Tensor:
    """Return the examples of `a` and `b`; texts, int32, are padded to the longest."""
    return padded([*a, *b]) if a.dtype == torch.int32 else torch.cat([a, b])


def as_bytes(array: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """Convert pixels, booleans, integers 0..255 or floats in [0, 1], to uint8.

    Raises InputError, which begins with `name`, for other values.
    """
    kind = array.dtype.kind
    if array.dtype == np.uint8 or array.size == 0:
        return array.astype(np.uint8, copy=False)
    low, high = array.min(), array.max()
    if kind == "b":
        return array.astype(np.uint8) * 255
    if kind == "f":
        if not (np.isfinite(low) and np.isfinite(high)):
            raise InputError(f"{name} hold NaN or infinity; expected finite numbers in [0, 1].")
        if low < 0 or high > 1:
            raise InputError(
                f"{name} are {array.dtype} from {low:g} to {high:g}; expected floating point "
                "pixels in [0, 1]. Scale them to that range, or pass uint8."
            )
        rounded: np.ndarray[Any, Any] = np.rint(array.astype(np.float64) * 255).astype(np.uint8)
        return rounded
    if kind in "iu" and array.dtype.itemsize == 2:
        raise InputError(
            f"{name} are {array.dtype}, with more than 8 bits. Convert them to uint8 first, with a "
            "scaling of your choice."
        )
    if kind in "iu" and low >= 0 and high <= 255:
        return array.astype(np.uint8)
    raise InputError(
        f"{name} are {array.dtype} from {low} to {high}; expected uint8, or floating point in "
        "[0, 1]."
    )


def _picture(one: Any, i: int) -> Any:
    if isinstance(one, str):
        return Path(one)
    if isinstance(one, np.ndarray):
        return as_bytes(one, f"the pixels of image {i}")
    if isinstance(one, Path | bytes | Image.Image):
        return one
    raise InputError(
        f"example {i} is {_kind(one)}; this run's examples are images: {_PICTURES}.{_pairs(one)}"
    )


def _named(one: Any, i: int) -> object:
    return one if isinstance(one, str | Path) else i


def array_of(tensor: Tensor, name: str) -> np.ndarray[Any, Any]:
    """Return the values of a tensor as a numpy array; bfloat16 is converted to float32."""
    try:
        values = tensor.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    except (RuntimeError, TypeError) as error:  # sparse, quantised, of the meta device
        raise InputError(f"{name} are a tensor that numpy cannot represent: {error}") from None


def channels_last(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return images with channels last: [..., C, H, W] is transposed if C is 1 or 3 and W not."""
    if array.ndim > 2 and array.shape[-3] in (1, 3) and array.shape[-1] not in (1, 3):
        return np.moveaxis(array, -3, -1)
    return array


def _listed(x: Any) -> Any:
    """Convert a sequence, such as a pandas column or a torch Dataset, to a list of examples.

    Other values are returned unchanged.
    """
    known = isinstance(x, str | bytes | list | tuple | np.ndarray | Tensor | Mapping | Set)
    if known or hasattr(x, "columns") or not hasattr(x, "__len__"):
        return x
    if hasattr(type(x), "__iter__"):
        return list(x)
    return [x[i] for i in range(len(x))] if hasattr(x, "__getitem__") else x


def _column(x: Any) -> str:
    return " Choose the one column that holds them." if hasattr(x, "columns") else ""


def _pairs(one: Any) -> str:
    if not _is_list(one) or len(one) != 2:
        return ""
    return " For pairs (example, label), pass [x for x, _ in data] and [y for _, y in data]."


def _is_list(x: Any) -> bool:
    return isinstance(x, list | tuple)


def _kind(x: Any) -> str:
    return "a string" if isinstance(x, str) else f"of type {type(x).__name__}"
