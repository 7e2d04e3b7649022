"""Makes datasets from data in memory: arrays, tables, or datasets of other libraries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image
from torch import Tensor

from fedshot.core.errors import DataError, InputError, nearest
from fedshot.data.dataset import Dataset, Features, Ints, Pixels, first_twice
from fedshot.data.example_inputs import Pictures, read_text
from fedshot.data.files.images import (
    SUFFIXES,
    check_channels,
    check_layout,
    check_side,
    decode,
    to_array,
)
from fedshot.data.files.places import find_data_dir
from fedshot.data.sources.embedding import TextOptions
from fedshot.data.sources.tokenizer import tokenize
from fedshot.data.tokens import RawTexts, Tokens
from fedshot.use.inputs import array_of, as_bytes, channels_last
from fedshot.use.labels import encoded, labels_of

_COLUMNS = ("text", "image", "path")
_KINDS = (
    "a pair (X, y), (X, y, client), a pandas DataFrame, a torch or Hugging Face dataset, or a "
    "mapping from each client to one of these"
)


@dataclass(frozen=True)
class _Examples:
    """Examples with one label each and, if known, one client each."""

    x: Any
    labels: Any
    clients: Any = None
    client_names: tuple[str, ...] = ()


def as_dataset(
    data: Any,
    *,
    name: str = "memory",
    column: str | None = None,
    label: str = "label",
    client: str | None = None,
    size: int | None = None,
    channels: Literal[1, 3] | None = None,
    vectors: str | None = None,
    dim: int = 100,
    cut: int = 100,
    data_dir: str | None = None,
    raw: bool = False,
) -> Dataset:
    """Return data in memory as a dataset that `fedshot.train` takes as `data`.

    The data are one of these:

    - `(X, y)` or `(X, y, client)`: examples, their classes, and the client of each example. A
      DataFrame as X holds features. Client k is the k-th name or number in sorted order.
    - a pandas DataFrame or a Hugging Face `Dataset`, whose columns are named below.
    - a torch `Dataset` of pairs (example, class); its `classes`, if any, name the classes.
    - a mapping `{client: data}`, where the data of each client are any of the above, without a
      client for each example. Client k is the k-th key of the mapping.

    Images are an array [n, H, W, C] or [n, H, W] of uint8, or of floats in [0, 1], which are
    rounded to 8 bits; a tensor may also be [n, C, H, W]. They can also be a sequence of arrays, PIL
    images, paths, or the bytes of image files. Texts are strings, or paths of files that are not
    images. They need a file of word vectors, or `raw=True`. Features that an encoder has computed
    are an array [n, d].

    A run records only the SHA-256 of the data. To resume it, pass the same data again.

    Args:
        data: the data, as above.
        name: name of the dataset in tables.
        column: column of the examples; by default "text", "image" or "path".
        label: column of the classes.
        client: column of the clients, which are numbered in sorted order; by default "client", if
            there is one.
        size: side in pixels of the square that images are resized to; None to keep their size,
            which must then be the same for all images.
        channels: 1 (grey) or 3 (colour). By default arrays keep their channels, and PIL images and
            image files become colour.
        vectors: file of word vectors in GloVe's format; None for GloVe 6B from the data folder.
        dim: dimension of the GloVe 6B vectors, if `vectors` names no other file.
        cut: maximum number of words per text; later words are dropped.
        data_dir: folder of downloaded datasets, to find GloVe; by default $FEDSHOT_DATA.
        raw: whether to keep texts as strings, for `model.encoder`, instead of using word vectors.

    Raises:
        DataError: the examples cannot be read, a label is missing, images differ in size, or the
            word vectors are missing.

    Example:
        ```python
        data = fs.as_dataset((images, labels), name="birds", size=32)
        run = fs.train(data=data, method="fl_proto", clients=10)
        ```
    """
    if isinstance(data, Dataset):
        return data
    found = _examples(data, column, label, client)
    n = len(found.x)
    if not n:
        raise DataError("the data have no examples; expected at least one.")
    classes, y = encoded(labels_of(found.labels, n))
    named, users = found.client_names, None
    if found.clients is not None:
        held, users = _numbered(found.clients, n)
        named = named or _texts_alone(held)
    texts = _texts(found.x)
    x: Pixels | Tokens | RawTexts | Features
    if texts is None:
        features = _features(found.x)
        x = _pixels(found.x, size, channels) if features is None else features
    elif raw:
        x = RawTexts(tuple(texts))
    else:
        options = TextOptions(vectors=vectors, dim=dim, cut=cut)
        rows = ((i, tokenize(text)) for i, text in enumerate(texts))
        x = options.embed(rows, find_data_dir(data_dir), name)[0]
        x.check_known(name)
    names = tuple(str(one) for one in classes.tolist())
    if (twice := first_twice(names)) is not None:
        kinds = {type(one).__name__ for one in classes.tolist() if str(one) == twice}
        raise DataError(
            f"label {twice} is of the types {' and '.join(sorted(kinds))}. Convert all labels to "
            "one type."
        )
    return Dataset(name, x, y.astype(np.int64), names, users, user_names=named)


def _examples(data: Any, column: str | None, label: str, client: str | None) -> _Examples:
    if isinstance(data, Dataset):
        names = np.array(data.class_names, dtype=object)
        x = data.x if data.kind == "features" else data.pixels
        return _Examples(x, names[data.y], data.users)
    if isinstance(data, Mapping):
        return _of_clients(
            {key: _examples(one, column, label, client) for key, one in data.items()}
        )
    if isinstance(data, tuple) and len(data) in (2, 3):
        x, *labels = data
        if labels[0] is None:
            raise DataError("y is None; expected the class of each example, as in data=(X, y).")
        if hasattr(x, "columns"):  # a DataFrame of features
            x = x.to_numpy()
        listed = hasattr(x, "__len__") and hasattr(x, "__iter__") and not isinstance(x, str | bytes)
        if not listed or hasattr(x, "nnz"):
            raise DataError(
                f"the examples X are of type {type(x).__name__}; expected an array, or a list of "
                "images or texts."
            )
        return _Examples(_array(x) if isinstance(x, Tensor) else x, *labels)
    if hasattr(data, "column_names") or hasattr(data, "columns"):
        return _of_table(data, column, label, client)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str):
        return _of_pairs(data)
    raise DataError(f"data is of type {type(data).__name__}; expected {_KINDS}.")


def _of_clients(held: Mapping[Any, _Examples]) -> _Examples:
    """Return the examples of all clients as one; those of the k-th key belong to client k."""
    if not held:
        raise DataError("data is an empty mapping; expected a dataset for each client.")
    for key, part in held.items():
        if not len(part.x):
            raise DataError(f"client {key!r} has no examples. Leave it out of the mapping.")
    parts = list(held.values())
    if any(part.clients is not None for part in parts):
        raise DataError(
            "data is a mapping from clients to datasets, and one of these names clients itself. "
            "Leave these clients out, or pass one dataset with all clients."
        )
    examples = [part.x for part in parts]
    forms = {(x.dtype, x.shape[1:]) if isinstance(x, np.ndarray) else None for x in examples}
    stackable = len(forms) == 1 and None not in forms
    x = np.concatenate(examples) if stackable else list(chain.from_iterable(examples))
    clients = np.repeat(np.arange(len(parts)), [len(part.x) for part in parts])
    labels = list(chain.from_iterable(part.labels for part in parts))
    return _Examples(x, labels, clients, _texts_alone(held))


def _of_table(table: Any, column: str | None, label: str, client: str | None) -> _Examples:
    """Return the examples of a pandas DataFrame or a Hugging Face dataset."""
    names = [str(one) for one in getattr(table, "column_names", None) or table.columns]
    if column is None:
        column = next((one for one in _COLUMNS if one in names), None)
        if column is None:
            raise DataError(
                f"the table has the columns {', '.join(names)}, and none is named 'text', 'image' "
                "or 'path'. Name the column of the examples with as_dataset(..., column=...), or "
                "pass features as (table[columns], table[label])."
            )
    if client is None and "client" in names:
        client = "client"
    for one in filter(None, (column, label, client)):
        if one not in names:
            raise DataError(f"the table has no column {one!r}. {nearest(one, names)}")
    labels = list(table[label])
    feature: Any = (getattr(table, "features", None) or {}).get(label)
    if hasattr(feature, "int2str"):  # named classes are stored as numbers
        labels = [None if c in (None, -1) else feature.int2str(c) for c in labels]
    x = list(table[column])
    if column == "path":
        x = [Path(one) for one in x]
    return _Examples(x, labels, None if client is None else list(table[client]))


def _of_pairs(data: Any) -> _Examples:
    """Return the examples of a torch dataset, or of any sequence of pairs (example, class)."""
    pairs = [_item(data, i) for i in range(len(data))]
    paired = all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs)
    labels = [_scalar(y) for _, y in pairs] if paired else []
    if not paired or any(isinstance(y, np.ndarray | Tensor) for y in labels):
        raise DataError(
            f"data is a {type(data).__name__} whose items are not pairs (example, class). Expected "
            f"{_KINDS}."
        )
    names = getattr(data, "classes", None)
    if isinstance(names, list | tuple) and all(isinstance(y, int) for y in labels):
        if labels and not 0 <= min(labels) <= max(labels) < len(names):
            raise DataError(
                f"classes run from {min(labels)} to {max(labels)}, and data.classes has "
                f"{len(names)} names; expected classes 0..{len(names) - 1}."
            )
        labels = [names[y] for y in labels]
    return _Examples([x for x, _ in pairs], labels)


def _item(data: Any, i: int) -> Any:
    try:
        return data[i]
    except Exception as error:
        raise DataError(
            f"item {i} of the {type(data).__name__} cannot be read: {type(error).__name__}: {error}"
        ) from error


def _scalar(y: Any) -> Any:
    return y.item() if hasattr(y, "item") and y.reshape(-1).shape == (1,) else y


def _texts_alone(clients: Iterable[Any]) -> tuple[str, ...]:
    """Return the clients if all are texts, which name them; else ()."""
    clients = tuple(clients)
    return clients if all(isinstance(one, str) for one in clients) else ()


def _numbered(clients: Sequence[Any], n: int) -> tuple[list[Any], Ints]:
    """Return the sorted clients, and the number of each example's client, int64 [n]."""
    try:
        named, numbers = encoded(labels_of(clients, n, "client"))
    except InputError as error:
        raise DataError(str(error)) from None
    return named.tolist(), numbers.astype(np.int64)


def _texts(x: Any) -> list[str] | None:
    """Return the examples as texts; None if they are images."""
    if isinstance(x, np.ndarray) and x.dtype.kind not in "OU":
        return None
    if all(Path(one).suffix.lower() in SUFFIXES for one in x if isinstance(one, str | Path)):
        return None
    for i, one in enumerate(x):
        if not isinstance(one, str | Path):
            raise DataError(
                f"example {i} is {_kind(one)}, and others are texts. Leave it out, or make it a "
                "text."
            )
    return [read_text(one) if isinstance(one, Path) else one for one in x]


def _features(x: Any) -> Features | None:
    """Return features as float32 [n, d]; None if the examples are not rows of numbers."""
    if isinstance(x, np.ndarray):
        rows = x
    else:
        if not all(isinstance(one, np.ndarray | Tensor) and one.ndim == 1 for one in x):
            return None
        widths = sorted({len(row) for row in x})
        if len(widths) > 1:
            raise DataError(
                f"rows of features have {widths[0]} to {widths[-1]} numbers; expected the same "
                "number in every row."
            )
        rows = np.stack([array_of(r, "the features") if isinstance(r, Tensor) else r for r in x])
    if rows.ndim != 2 or rows.dtype.kind not in "fiu":
        return None
    with np.errstate(over="ignore"):  # `Dataset` refuses infinity
        return np.ascontiguousarray(rows, dtype=np.float32)


def _pixels(x: Any, size: int | None, channels: int | None) -> Pixels:
    """Return images as uint8 [n, H, W, C]."""
    if channels is not None:
        check_channels(channels)
    check_side(size)
    if isinstance(x, np.ndarray) and x.dtype != object and x.ndim in (3, 4):
        x = as_bytes(x, "the images")
        x = x[..., None] if x.ndim == 3 else x
        check_layout(x.shape, "the images")
        if size is None and channels in (None, x.shape[-1]):
            return np.ascontiguousarray(x)
    images = [_image(one, i, size, channels) for i, one in enumerate(x)]
    first = images[0].shape
    for i, image in enumerate(images):
        if image.shape != first:
            raise DataError(
                f"images differ in shape: image 0 has {list(first)}, image {i} has "
                f"{list(image.shape)}. Resize them with as_dataset(..., size=...), and set "
                "`channels` if some are grey."
            )
    return np.stack(images)


def _image(one: Any, i: int, size: int | None, channels: int | None) -> Pixels:
    """Return one image as uint8 [H, W, C]."""
    name = one if isinstance(one, str | Path) else i
    if isinstance(one, str | Path | bytes):
        source = Path(one) if isinstance(one, str) else one
        return decode(source, name, channels or 3, size)
    if isinstance(one, Tensor):
        one = channels_last(array_of(one, f"image {i}"))
    square = None if size is None else (size, size)
    if isinstance(one, Image.Image):
        return to_array(one, name, channels or 3, square)
    if not isinstance(one, np.ndarray) or one.ndim not in (2, 3):
        raise DataError(
            f"example {i} is {_kind(one)}; expected an image (an array [H, W] or [H, W, C], a PIL "
            "image, a path, or bytes of a file), a text, or features (an array of numbers, [d])."
        )
    pixels = as_bytes(one, f"the pixels of image {i}")
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    check_layout(pixels.shape, f"image {i}")
    held = channels or (3 if size and pixels.shape[-1] == 4 else pixels.shape[-1])
    return Pictures((*(square or pixels.shape[:2]), held)).read(np.ascontiguousarray(pixels), i)


def _kind(one: Any) -> str:
    if isinstance(one, np.ndarray):
        return f"an array {one.dtype}{list(one.shape)}"
    return f"of type {type(one).__name__}"


def _array(images: Tensor) -> np.ndarray[Any, Any]:
    """Return images [n, C, H, W], [n, H, W, C] or [n, H, W] as an array with channels last."""
    array = array_of(images, "the images")
    return channels_last(array) if array.ndim == 4 else array
