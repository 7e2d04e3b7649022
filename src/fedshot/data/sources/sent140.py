"""Sentiment140: tweets that are negative or positive, and who wrote them.

Source: Go, Bhayani and Huang 2009; the federated form is LEAF's (Caldas et al. 2018). Training and
test have the same two classes: what is new at test are the users, see `split_users`.

User names are real handles. They are numbered as they are read and then forgotten; no message
quotes a row of these files.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedshot.core.errors import DataError
from fedshot.core.regular_files import read_regular
from fedshot.core.seeds import Key
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset, Ints, check_classes
from fedshot.data.files.places import home
from fedshot.data.sources.embedding import embedded
from fedshot.data.sources.glove import Keep, Unknown
from fedshot.data.sources.texts import csv_rows, keys_once
from fedshot.data.sources.tokenizer import tokenize
from fedshot.data.tokens import Numbers

_FILE = "training.1600000.processed.noemoticon.csv"
_LARGEST = 1 << 29  # bytes of a file that LEAF writes; its test users have 2e7
_COLUMNS = 6  # polarity, id, date, query, user, text
_CLASSES = ("negative", "positive")
_POLARITY = {"0": 0, "4": 1, "2": None}  # 2 is neutral; only the hand-labelled test file has it


@dataclass(frozen=True)
class Sent140:
    """Tweets from `<data_dir>/sent140`, without those that are neutral or have no word left.

    Args:
        file: a csv with the publisher's six columns, or a .json that LEAF wrote. Without it the
            publisher's training file, or a csv whose name begins like it.
        min_tweets: users with fewer are left out.
        users: how many of the others take part, the same ones always; null for all.
        vectors: file of word vectors; without it GloVe 6B from the data folder.
        dim: length of those vectors; a file in `vectors` has its own.
        cut: words kept of a tweet.
        keep: "known" drops words without a vector, as FedFSL does; "all" keeps them.
        unknown: vector of words without one: "zeros", or that of the word "unk".
    """

    file: str | None = None
    min_tweets: int = 1
    users: int | None = None
    vectors: str | None = None
    dim: int = 100
    cut: int = 20
    keep: Keep = "known"
    unknown: Unknown = "zeros"

    def __post_init__(self) -> None:
        if self.min_tweets < 1:
            raise DataError(f"min_tweets is {self.min_tweets}; expected 1 or more")
        if self.users is not None and self.users < 1:
            raise DataError(f"users is {self.users}; expected 1 or more, or null for all")

    def load(self, data_dir: Path | None) -> Dataset:
        """Read the tweets; users are numbered by the first tweet that is kept."""
        path = self._path(data_dir)
        labels, users, handles = [], [], Numbers()

        def texts() -> Iterator[list[str]]:
            for user, label, text in tweets(path):
                labels.append(label)
                users.append(handles[user])
                yield tokenize(html.unescape(text))

        x = embedded(texts(), self, data_dir, path)
        who = np.array(users, dtype=np.int64)
        full = x.lengths(np.arange(len(x))) > 0
        wrote = np.bincount(who[full], minlength=len(handles))
        rows = np.flatnonzero(full & self._chosen(wrote)[who])
        if len(rows) == 0:
            raise DataError(
                f"{path}: no user has {self.min_tweets} tweets; the most is {wrote.max()}. Lower "
                "`min_tweets`."
            )
        y = np.array(labels, dtype=np.int64)[rows]
        check_classes(path, "tweets", y, _CLASSES, "Lower `min_tweets`, or fetch the file again.")
        numbered = np.unique(who[rows], return_inverse=True)[1].reshape(-1).astype(np.int64)
        return Dataset("sent140", x.only(rows), y, _CLASSES, numbered)

    def _chosen(self, wrote: Ints) -> npt.NDArray[np.bool_]:
        """Return for each user, who wrote so many tweets, whether they take part."""
        able = np.flatnonzero(wrote >= self.min_tweets)
        if self.users is not None and self.users > len(able):
            raise DataError(
                f"users is {self.users}; {len(able)} users have {self.min_tweets} tweets. Lower "
                "`users` or `min_tweets`."
            )
        if self.users is not None:
            able = Key(0).at("sent140", "users").numpy().permutation(able)[: self.users]
        return np.isin(np.arange(len(wrote)), able)

    def split(self, dataset: Dataset) -> ClassSplit | None:
        """Return None: it is users, not classes, that are split."""
        return dataset.standard

    def _path(self, data_dir: Path | None) -> Path:
        folder = home(data_dir, "sent140", "sent140", self.file or _FILE)
        if self.file is not None or (folder / _FILE).exists():
            return folder / (self.file or _FILE)
        parts = sorted(folder.glob(f"{Path(_FILE).stem}*.csv"))
        return parts[0] if parts else folder / _FILE


def split_users(
    dataset: Dataset, shares: tuple[float, float, float], key: Key
) -> tuple[Ints, Ints, Ints]:
    """Return the rows that train, choose and test; every user's rows are in one part.

    `shares` are those of the users, not of their rows, and sum to 1 or less.
    """
    if dataset.users is None:
        raise DataError(f"{dataset.name} tells no users; this split needs them. Use class splits.")
    if len(shares) != 3 or not all(s >= 0 for s in shares) or not sum(shares) <= 1 + 1e-9:
        raise DataError(
            f"shares are {shares}; expected three of at least 0 that sum to 1 or less, for "
            "training, validation and test"
        )
    everyone = key.at("users").numpy().permutation(np.unique(dataset.users))
    ends = np.floor(np.cumsum(shares) * len(everyone) + 1e-6).astype(int)
    parts = np.split(everyone, ends)[:3]
    for share, part in zip(shares, parts, strict=True):
        if share > 0 and len(part) == 0:
            raise DataError(
                f"a share of {share} of {len(everyone)} users is nobody. Raise it, or lower "
                "`min_tweets`."
            )
    train, validation, test = (np.flatnonzero(np.isin(dataset.users, part)) for part in parts)
    return train, validation, test


def tweets(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (handle, label, text) of each tweet that is not neutral; keep no handle."""
    if path.suffix.lower() == ".json":
        yield from _leaf(path)
        return
    for n, row in csv_rows(path, "latin-1"):
        if len(row) != _COLUMNS or row[0] not in _POLARITY or not row[4]:
            raise DataError(
                f"{path}, line {n}: expected six cells: polarity (0, 2 or 4), id, date, query, "
                "user, text, without a header. Fetch the file again."
            )
        label = _POLARITY[row[0]]
        if label is not None:
            yield row[4], label, row[5]


def _leaf(path: Path) -> Iterator[tuple[str, int, str]]:
    """Read `{"users": [...], "user_data": {user: {"x": [[..., text, ...]], "y": [0 or 1]}}}`."""
    try:
        content = json.loads(read_regular(path, _LARGEST), object_pairs_hook=keys_once)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}). Check the path.") from error
    except (ValueError, RecursionError):  # without its words, as below
        raise DataError(
            f"{path} is not JSON with each key once. Write it again with LEAF's scripts."
        ) from None
    try:
        for user in content["users"]:
            x, y = content["user_data"][user]["x"], content["user_data"][user]["y"]
            for row, label in zip(x, y, strict=True):
                text = row[4]
                if not (isinstance(text, str) and isinstance(user, str) and label in (0, 1)):
                    raise TypeError
                yield user, int(label), text
    except (LookupError, TypeError, ValueError) as error:
        # Without its words: a KeyError would quote a handle.
        raise DataError(
            f"{path} is not what LEAF writes ({type(error).__name__}); expected users, and "
            "user_data with rows [id, date, query, user, text, ...] as x and 0 or 1 as y."
        ) from None
