"""Questions as features of the server's encoder, and answers read out of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import overload

import torch
from torch import Tensor

from fedshot.core.tree import Tree
from fedshot.learners.classification import Classifier
from fedshot.learners.feature_cache import Gallery, features_of, pays
from fedshot.learners.learner import Question
from fedshot.learners.probe import Readout
from fedshot.protocol.clients import Clients
from fedshot.protocol.method import Answer, answer_at_server, answer_from_features


def answer_by_readout(
    learner: Classifier,
    params: Tree,
    stats: Tree,
    readout: Readout,
    questions: Sequence[Question],
    clients: Clients,
) -> list[Answer]:
    """Let the server's encoder and a readout answer every question; its classifier has no part.

    Each example is embedded once, where its features do not depend on its company.
    """
    if learner.model.norm_policy == "running" and pays(questions):
        embed = partial(learner.embed, params, stats)
        return answer_from_features(embed, readout, questions, clients)

    def answer(question: Question) -> Tensor:
        support, query = learner.encode(params, stats, question)
        return readout(support, question.support_y, query, len(question.classes))

    return answer_at_server(answer, questions, clients)


def embedded(
    learner: Classifier,
    params: Tree,
    stats: Tree,
    questions: Sequence[Question],
    clients: Clients,
) -> Sequence[Question]:
    """Return the questions with features of the server's encoder in the place of examples.

    Any client that has the encoder would find the same. Each example is embedded once, where its
    features do not depend on its company; classes are then numbered from 0. Questions that have
    owners keep them.
    """
    n, owners = len(questions), getattr(questions, "owners", None)
    if learner.model.norm_policy == "running" and pays(questions):
        h = features_of(questions, partial(learner.embed, params, stats), clients.spread)
        return _Embedded(n, owners, partial(_of_rows, questions, h))

    def one(u: int) -> Question:
        support, query = learner.encode(params, stats, questions[u])
        return questions[u]._replace(support_x=support, query_x=query)

    return _Embedded(n, owners, clients.spread(one, range(n)).__getitem__)


def _of_rows(gallery: Gallery, h: Tensor, u: int) -> Question:
    """Return question u of the rows of one block of features."""
    sheet = gallery.sheet(u)
    return Question(h[sheet.support], sheet.support_y, h[sheet.query], torch.arange(sheet.way))


class _Embedded(Sequence[Question]):
    """Questions that are made when they are asked for, and whose they are."""

    def __init__(
        self, n: int, owners: tuple[int, ...] | None, make: Callable[[int], Question]
    ) -> None:
        self._n, self._make, self.owners = n, make, owners

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, u: int) -> Question: ...
    @overload
    def __getitem__(self, u: slice) -> list[Question]: ...
    def __getitem__(self, u: int | slice) -> Question | list[Question]:
        if isinstance(u, slice):
            return [self[i] for i in range(*u.indices(len(self)))]
        if not 0 <= u < len(self):
            raise IndexError(u)
        return self._make(u)
