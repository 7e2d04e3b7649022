"""20 Newsgroups: 18,846 messages to 20 discussion groups.

Source: Lang 1995, in the "bydate" form of J. Rennie. Training and test halves are pooled, since
few-shot tests use other groups, not other messages. Split: Bao et al. 2020 and F2L: sci and rec are
base classes, comp validation classes, the others novel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fedshot.core.errors import DataError, nearest
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset, check_classes
from fedshot.data.files.tars import opened_tar
from fedshot.data.sources.embedding import TextSource
from fedshot.data.sources.source import dataset_folder

_FILE = "20news-bydate.tar.gz"
_MEMBER = re.compile(r"(?:\./)?20news-bydate-(train|test)/([^/]+)/(\d{1,9})")
_LIMIT = 1 << 28  # bytes of all messages, unpacked; there are 3.6e7
_BASE = ["rec.autos", "rec.motorcycles", "rec.sport.baseball", "rec.sport.hockey",
         "sci.crypt", "sci.electronics", "sci.med", "sci.space"]  # fmt: skip
_VALIDATION = ["comp.graphics", "comp.os.ms-windows.misc", "comp.sys.ibm.pc.hardware",
               "comp.sys.mac.hardware", "comp.windows.x"]  # fmt: skip
_NOVEL = ["alt.atheism", "misc.forsale", "soc.religion.christian", "talk.politics.guns",
          "talk.politics.mideast", "talk.politics.misc", "talk.religion.misc"]  # fmt: skip
GROUPS = tuple(sorted(_BASE + _VALIDATION + _NOVEL))
_NUMBERS = {group: c for c, group in enumerate(GROUPS)}


@dataclass(frozen=True, kw_only=True)
class News20(TextSource):
    """Messages from `<data_dir>/20newsgroups/20news-bydate.tar.gz`, read as latin-1.

    Quotes and signatures are kept, and so are messages without words: the counts are the
    publisher's.

    Args:
        headers: which part of a message is read. "subject": the subject, then the body. "none": the
            body alone. "all": the whole message. Headers other than the subject reveal the group
            (`Newsgroups:`) or its members (`From:`).
    """

    cut: int = 500
    headers: Literal["subject", "none", "all"] = "subject"

    def _load(self, data_dir: Path | None, *, raw: bool) -> Dataset:
        """Read all messages, sorted by half, group and number."""
        path = dataset_folder(data_dir, "news20", _FILE) / _FILE
        x, labels = self.read(self._rows(path), data_dir, path, raw=raw)
        y = np.array(labels, dtype=np.int64)
        check_classes(path, "messages", y, GROUPS, "Fetch the file again.")
        parts = (tuple(_NUMBERS[g] for g in part) for part in (_BASE, _VALIDATION, _NOVEL))
        return Dataset("news20", x, y, GROUPS, standard=ClassSplit(*parts))

    def _rows(self, path: Path) -> Iterator[tuple[int, str]]:
        for group, text in messages(path):
            yield _NUMBERS[group], readable_part(text, self.headers)


def readable_part(message: str, headers: Literal["subject", "none", "all"]) -> str:
    """Return the parts of a message that `headers` selects.

    The headers end at the first blank line; a message without a blank line has no headers.
    """
    if headers == "all":
        return message
    head, blank, body = message.partition("\n\n")
    if not blank:
        head, body = "", message
    if headers == "none":
        return body
    # A header continues on lines that begin with whitespace.
    subject = re.search(r"^subject:(.*(?:\n[ \t].*)*)", head, re.IGNORECASE | re.MULTILINE)
    return f"{subject[1]}\n{body}" if subject else body


def messages(path: Path) -> list[tuple[str, str]]:
    """Return (group, message) of every member, sorted by name; nothing is unpacked to disk."""
    found: dict[tuple[str, str, int], str] = {}
    left = _LIMIT
    with opened_tar(path) as tar:
        # Read in the order of the file: for an earlier member, gzip would start over.
        for member in tar.members():
            left -= member.size
            if left < 0:
                raise DataError(
                    f"{path} unpacks to more than {_LIMIT} bytes; 20 Newsgroups has 3.6e7. Fetch "
                    "the file again from its publisher."
                )
            match = _MEMBER.fullmatch(member.name)
            if match is None:
                continue
            half, group, number = match.groups()
            if group not in GROUPS:
                raise DataError(
                    f"{path}: {member.name!r} belongs to none of the 20 groups. "
                    f"{nearest(group, GROUPS)}"
                )
            key = (half, group, int(number))
            if key in found:
                raise DataError(f"{path} holds {member.name!r} twice. Fetch the file again.")
            text = tar.read(member, _LIMIT).decode("latin-1")
            found[key] = text.replace("\r\n", "\n")
    if not found:
        raise DataError(
            f"{path} holds no messages; expected members such as 20news-bydate-train/sci.med/58045."
            " Fetch the file again."
        )
    return [(group, text) for (_, group, _), text in sorted(found.items())]
