"""F2L's client-model: a set Transformer and an N-way head on the features of a task.

Source: Wang et al., Federated Few-shot Learning, KDD 2023, section 3.1, eq. (3), eq. (22).
Symbols: psi its parameters; psi~ the same after fine-tuning on the support; h the features of the
server-model, g those of the client-model; s and q stand for support and queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.learners.learner import EvalEpisode
from fedshot.learners.maml import InnerLoop
from fedshot.methods.f2l.set_transformer import Queries, SetTransformer
from fedshot.nn.gradients import descend
from fedshot.nn.losses import cross_entropy
from fedshot.nn.models.layers import linear
from fedshot.nn.models.mode import Mode
from fedshot.nn.prototypes import class_means

HeadStart = Literal["zero", "prototypes"]


class Task(NamedTuple):
    """A task, as features of the server-model."""

    s: Tensor  # [D, d]: features of the support
    q: Tensor  # [queries, d]: of the queries
    y: Tensor  # int64 [D], 0..way-1: labels of the support
    way: int

    def detached(self) -> Task:
        """Return the task with features that carry no gradient."""
        return self._replace(s=self.s.detach(), q=self.q.detach())


class View(NamedTuple):
    """Features and logits of a task under the client-model."""

    s: Tensor  # [D, d]: features of the support
    z_s: Tensor  # [D, way]: their logits
    z_q: Tensor  # [queries, way]: logits of the queries


@dataclass(frozen=True)
class ClientModel:
    """A set Transformer and a linear head that adapt to a task.

    Args:
        transformer: the encoder.
        way: width of the head; a task of fewer classes uses its first outputs.
        d: length of a feature row.
        inner: how psi is fine-tuned.
        queries: what a query attends to: see `SetTransformer.apply`.
        head_start: the head that fine-tuning starts from. "zero": a head in psi, which is learned
            and is zero before training. "prototypes": a head computed from the prototypes of each
            task (Proto-MAML, Triantafillou et al. 2020); then psi has no head.
    """

    transformer: SetTransformer
    way: int
    d: int
    inner: InnerLoop
    queries: Queries = "support_context"
    head_start: HeadStart = "zero"

    def init(self, key: Key, dtype: torch.dtype) -> Tree:
        """Return initial parameters psi: a random "encoder", and a "head" of zeros.

        There is no "head" if `head_start` is "prototypes".
        """
        psi = {"encoder": self.transformer.init(key.at("encoder"), self.d, dtype)}
        if self.head_start == "prototypes":
            return psi
        zero = torch.zeros(self.way, self.d, dtype=dtype)
        return psi | {"head": {"weight": zero, "bias": torch.zeros(self.way, dtype=dtype)}}

    def start(self, psi: Tree, task: Task, mode: Mode) -> Tree:
        """Return psi with the head that fine-tuning starts from.

        A head made of prototypes c gives the logits 2 <c, g> - |c|^2: minus the squared distances,
        up to a term that is the same for all classes.
        """
        if self.head_start == "zero":
            return psi
        c = class_means(self._support(psi, task.s, mode), task.y, task.way)
        # Views, because fine-tuning treats encoder and head as independent, although this head has
        # a graph back to the encoder.
        encoder = tree.map(lambda w: w.view_as(w), psi["encoder"])
        return {"encoder": encoder, "head": {"weight": 2 * c, "bias": -c.square().sum(-1)}}

    def tune(self, psi: Tree, task: Task, mode: Mode) -> Tree:
        """Return psi~, eq. (3): psi after `inner.steps` fine-tuning steps on the support."""
        second = self.inner.order == "second"
        return self._tune(psi, task, mode, self.inner.steps, second)

    def view(self, psi: Tree, task: Task, mode: Mode) -> View:
        """Return features and logits of a task under psi, which must have a "head"."""
        g_s, g_q = self.transformer.apply(psi["encoder"], task.s, task.q, mode, self.queries)
        return View(g_s, self._logits(psi, g_s, task.way), self._logits(psi, g_q, task.way))

    def answer(self, psi: Tree, eval_episode: EvalEpisode) -> Tensor:
        """Return the logits [queries, way] after fine-tuning on the support, without dropout.

        `eval_episode` contains features of the server-model in place of examples.
        """
        way = len(eval_episode.classes)
        task = Task(eval_episode.support_x, eval_episode.query_x, eval_episode.support_y, way)
        tuned = self._tune(psi, task, Mode(), self.inner.test_steps, False)
        with torch.no_grad():
            return self.view(tuned, task, Mode()).z_q

    def _tune(self, psi: Tree, task: Task, mode: Mode, steps: int, second: bool) -> Tree:
        psi = self.start(psi, task, mode.layer(-1))
        lr = self.inner.lr
        if self.inner.adapts == "all":

            def loss(w: Tree, step: int) -> Tensor:
                g = self._support(w, task.s, mode.layer(step))
                return cross_entropy(self._logits(w, g, task.way), task.y)

            return descend(loss, psi, lr=lr, steps=steps, second_order=second)

        g = self._support(psi, task.s, mode.layer(0))
        g = g if second else g.detach()

        def head_loss(head: Tree, step: int) -> Tensor:
            del step
            return cross_entropy(self._logits({"head": head}, g, task.way), task.y)

        head = descend(head_loss, psi["head"], lr=lr, steps=steps, second_order=second)
        return psi | {"head": head}

    def _support(self, psi: Tree, h: Tensor, mode: Mode) -> Tensor:
        return self.transformer.apply(psi["encoder"], h, h[:0], mode, self.queries)[0]

    def _logits(self, psi: Tree, g: Tensor, way: int) -> Tensor:
        return linear(psi["head"], g)[:, :way]
