"""The examples of a whole test, each once: for encoders whose features do not depend on company.

A thousand episodes of 80 images are 80,000 forward passes of perhaps 4,000 images. Where batch norm
goes by running statistics, and nothing adapts, an image has one row of features in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from fedshot.learners.learner import Question

BLOCK = 100  # examples in one forward pass; fixed, since rounding may depend on it

Spread = Callable[[Callable[[int], Tensor], Sequence[int]], list[Tensor]]


class Sheet(NamedTuple):
    """A question as places in the gallery."""

    support: Tensor  # int64 [way * shot]
    support_y: Tensor  # int64 [way * shot], 0..way-1
    query: Tensor  # int64 [queries]
    way: int


@runtime_checkable
class Gallery(Protocol):
    """Questions that know which of their examples are the same."""

    def __len__(self) -> int:
        """Return the number of questions."""
        ...

    @property
    def distinct(self) -> int:
        """How many examples there are, each counted once."""
        ...

    def examples(self, first: int, last: int) -> Tensor:
        """Return the examples at the places first .. last - 1, as a model takes them."""
        ...

    def sheet(self, u: int) -> Sheet:
        """Return where the examples of question u are."""
        ...


def features_of(gallery: Gallery, embed: Callable[[Tensor], Tensor], spread: Spread) -> Tensor:
    """Return the features [distinct, d] of every example, embedded once, block by block."""

    def block(i: int) -> Tensor:
        with torch.no_grad():
            return embed(gallery.examples(i, min(i + BLOCK, gallery.distinct)))

    return torch.cat(spread(block, range(0, gallery.distinct, BLOCK)))


def pays(questions: Sequence[Question]) -> TypeGuard[Gallery]:
    """Whether embedding every example once is less than embedding each question's."""
    if not isinstance(questions, Gallery) or not len(questions):
        return False
    sheet = questions.sheet(0)
    return questions.distinct < len(questions) * (len(sheet.support) + len(sheet.query))
