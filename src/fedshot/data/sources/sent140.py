"""Sentiment140: tweets that are negative or positive, with their users.

Source: Go, Bhayani and Huang 2009; its use in federated learning follows LEAF (Caldas et al. 2018).
Training and test have the same two classes and different users: see `split_users`.

User names are real Twitter handles. They are replaced by numbers on reading and never stored; no
error message quotes a row of these files.
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
from fedshot.core.ranges import AtLeast1
from fedshot.core.regular_files import read_regular
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset, Ints, check_classes
from fedshot.data.sources.embedding import Keep, TextSource
from fedshot.data.sources.source import dataset_folder
from fedshot.data.sources.texts import csv_rows, readable, unique_keys
from fedshot.data.sources.tokenizer import tokenize
from fedshot.data.tokens import Numbers, RawTexts

_FILE = "training.1600000.processed.noemoticon.csv"
_LIMIT = 1 << 29  # bytes of a file written by LEAF; its test users have 2e7
_COLUMNS = 6  # polarity, id, date, query, user, text
_CLASSES = ("negative", "positive")
_POLARITY = {"0": 0, "4": 1, "2": None}  # 2 is neutral; only the hand-labelled test file has it


@dataclass(frozen=True, kw_only=True)
class Sent140(TextSource):
    """Tweets from `<data_dir>/sent140`, without those that are neutral or have no word left.

    Args:
        file: a csv with the publisher's six columns, or a .json written by LEAF. Null looks for the
            publisher's training file, training.1600000.processed.noemoticon.csv, and then for any
            training.1600000.processed.noemoticon*.csv.
        min_tweets: minimum number of tweets of a user; users with fewer are left out.
        users: number of users to take from those with enough tweets, the same in every run; null
            for all.
        keep: "known" drops words that have no vector, as FedFSL does; "all" keeps them.
    """

    file: str | None = None
    min_tweets: AtLeast1 = 1
    users: AtLeast1 | None = None
    cut: int = 20
    keep: Keep = "known"

    def _load(self, data_dir: Path | None, *, raw: bool) -> Dataset:
        """Read the tweets that have words; users are numbered in the order of first tweets."""
        path = self._path(data_dir)
        x, pairs = self.read(_rows(path), data_dir, path, raw=raw)
        if isinstance(x, RawTexts):
            not_empty = np.array([bool(tokenize(text)) for text in x.texts])
        else:
            not_empty = x.lengths(np.arange(len(x))) > 0
        labels, user_of = np.array(pairs, dtype=np.int64).T
        n_tweets = np.bincount(user_of[not_empty], minlength=user_of.max() + 1)
        kept = np.flatnonzero(not_empty & self._chosen(n_tweets)[user_of])
        if len(kept) == 0:
            raise DataError(
                f"{path}: no user has {self.min_tweets} tweets; the most is {n_tweets.max()}. "
                "Lower `min_tweets`."
            )
        y = labels[kept]
        check_classes(path, "tweets", y, _CLASSES, "Lower `min_tweets`, or fetch the file again.")
        users = np.unique(user_of[kept], return_inverse=True)[1].reshape(-1).astype(np.int64)
        x = RawTexts(tuple(x.texts[i] for i in kept)) if isinstance(x, RawTexts) else x.only(kept)
        return Dataset("sent140", x, y, _CLASSES, users)

    def _chosen(self, n_tweets: Ints) -> npt.NDArray[np.bool_]:
        """Return, for each user, whether the user is used, given each user's number of tweets."""
        enough = np.flatnonzero(n_tweets >= self.min_tweets)
        if self.users is not None and self.users > len(enough):
            raise DataError(
                f"users is {self.users}; {len(enough)} users have {self.min_tweets} tweets. Lower "
                "`users` or `min_tweets`."
            )
        if self.users is not None:
            enough = Key(0).at("sent140", "users").numpy().permutation(enough)[: self.users]
        return np.isin(np.arange(len(n_tweets)), enough)

    def _path(self, data_dir: Path | None) -> Path:
        folder = dataset_folder(data_dir, "sent140", self.file or _FILE)
        if self.file is not None or (folder / _FILE).exists():
            return folder / (self.file or _FILE)
        parts = sorted(folder.glob(f"{Path(_FILE).stem}*.csv"))
        return parts[0] if parts else folder / _FILE


def split_users(
    dataset: Dataset, shares: tuple[float, float, float], key: Key
) -> tuple[Ints, Ints, Ints]:
    """Return the rows for training, validation and test; each user's rows are in one part.

    `shares` are fractions of the users, not of their rows, and sum to 1 or less.
    """
    if dataset.users is None:
        raise DataError(f"{dataset.name} has no users, which this split needs. Split by classes.")
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
                f"a share of {share} of {len(everyone)} users is less than one user. Raise it, or "
                "lower `min_tweets`."
            )
    train, validation, test = (np.flatnonzero(np.isin(dataset.users, part)) for part in parts)
    return train, validation, test


def _rows(path: Path) -> Iterator[tuple[tuple[int, int], str]]:
    """Yield ((class, user), text) of each tweet; users are numbered as they first occur."""
    handles = Numbers()
    for user, label, text in tweets(path):
        yield (label, handles[user]), html.unescape(text)


def tweets(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (handle, label, text) of each tweet that is not neutral; never store the handle."""
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
    """Yield (handle, label, text) of each tweet in a file written by LEAF.

    It has `{"users": [...], "user_data": {user: {"x": [[..., text, ...]], "y": [0 or 1]}}}`.
    """
    try:
        with readable(path):
            content = json.loads(read_regular(path, _LIMIT), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError):  # the error's own text would quote the file
        raise DataError(
            f"{path} is not JSON with unique keys. Write it again with LEAF's scripts."
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
        # Without the text of the error: a KeyError would quote a handle.
        raise DataError(
            f"{path} is not a file of LEAF ({type(error).__name__}); expected users, and "
            "user_data with rows [id, date, query, user, text, ...] as x and 0 or 1 as y."
        ) from None
