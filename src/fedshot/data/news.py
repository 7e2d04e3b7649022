"""20 Newsgroups: 18,846 messages to 20 discussion groups.

Source: Lang 1995, in the "bydate" form of J. Rennie. Training and test halves are pooled, since
few-shot tests are on other groups, not on other messages. Split: Bao et al. 2020 and F2L, sci and
rec train, comp validates, the others test.
"""

from __future__ import annotations

import gzip
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, cast

import numpy as np

from fedshot.data.archives import DAMAGE, check_name, home
from fedshot.data.dataset import ClassSplit, Dataset
from fedshot.data.glove import Keep, Unknown, embed, find_vectors
from fedshot.data.tokenizer import tokenize
from fedshot.errors import DataError, nearest

_FILE = "20news-bydate.tar.gz"
_MEMBER = re.compile(r"(?:\./)?20news-bydate-(train|test)/([^/]+)/(\d{1,9})")
_LARGEST = 1 << 28  # bytes of all messages, unpacked; there are 3.6e7
_BASE = (
    "rec.autos",
    "rec.motorcycles",
    "rec.sport.baseball",
    "rec.sport.hockey",
    "sci.crypt",
    "sci.electronics",
    "sci.med",
    "sci.space",
)
_VALIDATION = (
    "comp.graphics",
    "comp.os.ms-windows.misc",
    "comp.sys.ibm.pc.hardware",
    "comp.sys.mac.hardware",
    "comp.windows.x",
)
_NOVEL = (
    "alt.atheism",
    "misc.forsale",
    "soc.religion.christian",
    "talk.politics.guns",
    "talk.politics.mideast",
    "talk.politics.misc",
    "talk.religion.misc",
)
GROUPS = tuple(sorted(_BASE + _VALIDATION + _NOVEL))


@dataclass(frozen=True)
class News20:
    """Messages from `<data_dir>/20newsgroups/20news-bydate.tar.gz`, read as latin-1.

    Quotes and signatures stay. A message may end up without words; it is kept, so that counts are
    those of the publisher.

    Args:
        vectors: file of word vectors; without it GloVe 6B from the data folder.
        dim: length of those vectors.
        cut: words kept of a message.
        headers: "subject" puts the subject before the body, "none" leaves the body, "all" keeps
            everything. The other headers name the group (`Newsgroups:`) or its regulars (`From:`).
        keep: "known" drops words without a vector.
        unknown: vector of words without one: "zeros", or that of the word "unk".
    """

    vectors: str | None = None
    dim: int = 100
    cut: int = 500
    headers: Literal["subject", "none", "all"] = "subject"
    keep: Keep = "all"
    unknown: Unknown = "zeros"

    def __post_init__(self) -> None:
        if self.headers not in ("subject", "none", "all"):
            raise DataError(f"headers is {self.headers!r}; expected 'subject', 'none' or 'all'")

    def load(self, data_dir: Path | None) -> Dataset:
        """Read and tokenise all messages, by half, group and number."""
        path = home(data_dir, "news20", "20newsgroups", _FILE) / _FILE
        vectors = find_vectors(self.vectors, self.dim, data_dir)
        found = messages(path)
        numbers = {group: c for c, group in enumerate(GROUPS)}
        y = np.array([numbers[group] for group, _ in found], dtype=np.int64)
        x = embed(
            (tokenize(readable_part(text, self.headers)) for _, text in found),
            vectors,
            name=path,
            cut=self.cut,
            dim=self.dim,
            keep=self.keep,
            unknown=self.unknown,
        )
        parts = (tuple(numbers[g] for g in part) for part in (_BASE, _VALIDATION, _NOVEL))
        return Dataset("news20", x, y, GROUPS, standard=ClassSplit(*parts))

    def split(self, dataset: Dataset) -> ClassSplit | None:
        """Return the split of Bao et al.: 8, 5 and 7 groups."""
        return dataset.standard


def readable_part(message: str, headers: Literal["subject", "none", "all"]) -> str:
    """Return what is kept of a message; without a blank line all of it is body."""
    if headers == "all":
        return message
    head, blank, body = message.partition("\n\n")
    if not blank:
        head, body = "", message
    if headers == "none":
        return body
    # A header goes on in lines that begin with a blank.
    subject = re.search(r"^subject:(.*(?:\n[ \t].*)*)", head, re.IGNORECASE | re.MULTILINE)
    return f"{subject[1]}\n{body}" if subject else body


def messages(path: Path) -> list[tuple[str, str]]:
    """Return (group, message) of every member, sorted by name; nothing is unpacked to disk."""
    found: dict[tuple[str, str, int], str] = {}
    try:
        # As a stream: a tar is in no order, and going back in a gzip means starting over.
        with (
            path.open("rb") as file,
            gzip.open(file) as plain,
            tarfile.open(fileobj=cast(IO[bytes], _Bounded(path, plain)), mode="r|") as tar,
        ):
            for member in tar:
                named = _named(path, member)
                if named is None:
                    continue
                if named in found:
                    raise DataError(f"{path} holds {member.name!r} twice. Fetch the file again.")
                content = tar.extractfile(member)
                assert content is not None  # it is a regular file
                data = content.read()
                if len(data) != member.size:
                    raise EOFError(f"{member.name} is cut off")
                found[named] = data.decode("latin-1").replace("\r\n", "\n")
    except FileNotFoundError:
        raise DataError(f"{path} is missing. Put the file {_FILE} there.") from None
    except DAMAGE as error:
        raise DataError(
            f"{path} is not a whole .tar.gz file ({error}). It was probably cut off; fetch it "
            "again."
        ) from error
    if not found:
        raise DataError(
            f"{path} holds no messages; expected members such as 20news-bydate-train/sci.med/58045."
            " Fetch the file again."
        )
    return [(group, found[part, group, n]) for part, group, n in sorted(found)]


def _named(path: Path, member: tarfile.TarInfo) -> tuple[str, str, int] | None:
    """Return (half, group, number) of a message, None for what is none."""
    check_name(path, member.name)
    if not (member.isfile() or member.isdir()):
        raise DataError(
            f"{path}: {member.name!r} is a link or device; expected files only. Fetch the file "
            "again from its publisher."
        )
    match = _MEMBER.fullmatch(member.name)
    if match is None or not member.isfile():
        return None
    part, group, number = match.groups()
    if group not in GROUPS:
        raise DataError(
            f"{path}: {member.name!r} belongs to none of the 20 groups. {nearest(group, GROUPS)}"
        )
    return part, group, int(number)


class _Bounded:
    """A stream that ends in an error, not in all of memory, when it goes on for too long."""

    def __init__(self, path: Path, stream: gzip.GzipFile) -> None:
        self._path, self._stream, self._left = path, stream, _LARGEST

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size if 0 <= size <= self._left else self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise DataError(
                f"{self._path} unpacks to more than {_LARGEST} bytes; 20 Newsgroups has 3.6e7. "
                "Fetch the file again from its publisher."
            )
        return data
