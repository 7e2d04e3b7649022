"""A run's encoder as one `torch.nn.Module` of plain operations, which exporters can follow.

It calls the functions that training calls; while it is traced these leave their compiled kernels
aside, and recurrent nets take their cells, of which one step is traced for all words.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fedshot.core import tree
from fedshot.core.tree import Tree
from fedshot.learners.learner import test_modes
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model


class Encoder(nn.Module):
    """Examples in, features out, under running statistics or in one batch.

    Takes uint8 [n, H, W, C], or int32 [n, L] of texts, and gives float [n, d]. Under the batch-norm
    policy "transductive" the rows depend on each other.
    """

    def __init__(self, model: Model, body: Tree, stats: Tree) -> None:
        super().__init__()
        self.model = traceable(model)
        if model.table is not None:
            # The model keeps its table once made; made while being traced, it would be no numbers.
            self.model.prepare(torch.zeros(1, 1, dtype=torch.int32))
        self._like, self._stats_like = body, stats
        self._names = [_put(self, "body", body), _put(self, "stats", stats)]

    def forward(self, examples: Tensor) -> Tensor:
        """Return the features of examples."""
        _, query = test_modes(self.model)
        return self._features(examples, self._read()[1], query)[0]

    def _features(self, x: Tensor, stats: Tree, mode: Mode) -> tuple[Tensor, Tree]:
        body, _ = self._read()
        return self.model.features({"body": body}, stats, x, mode)

    def _read(self) -> tuple[Tree, Tree]:
        """Return the trees again that the buffers were made of."""
        likes = (self._like, self._stats_like)
        flat = [
            {path: self.get_buffer(name) for path, name in names.items()} for names in self._names
        ]
        body, stats = (tree.rebuild(like, leaves) for like, leaves in zip(likes, flat, strict=True))
        return body, stats


class TaskEncoder(Encoder):
    """Support and queries in, features of both out, under the statistics of the support.

    For models of the batch-norm policy "support", whose features depend on the task.
    """

    def forward(self, support: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return (features of the support, features of the queries)."""
        first, then = test_modes(self.model)
        h, seen = self._features(support, {}, first)
        return h, self._features(query, seen, then)[0]


def encoder_module(model: Model, body: Tree, stats: Tree) -> Encoder:
    """Return the module that fits the model's batch-norm policy."""
    has_norm = len(model.backbone.norm_policies) > 1
    kind = TaskEncoder if model.by_support and has_norm else Encoder
    return kind(model, body, stats).eval()


def traceable(model: Model) -> Model:
    """Return the same model without what tracing cannot follow."""
    backbone = model.backbone
    if hasattr(backbone, "kernel"):
        backbone = replace(backbone, kernel="cell")  # type: ignore[type-var]
    policy = model.norm_policy if len(backbone.norm_policies) > 1 else "running"
    return replace(model, backbone=backbone, norm_policy=policy, bf16=False)


def _put(module: nn.Module, name: str, of: Tree) -> dict[str, str]:
    """Hold the leaves of a tree as buffers; return the buffer of each path."""
    names = {}
    for path, leaf in tree.items(of):
        names[path] = f"{name}__{path}".replace("/", "__").replace(".", "_")
        module.register_buffer(names[path], leaf.detach().clone())
    return names


def example(model: Model, n: int, seed: int = 0) -> Tensor:
    """Return n made-up examples of the kind that a model takes."""
    random = torch.Generator().manual_seed(seed)
    if model.table is None:
        return torch.randint(0, 256, (n, *model.shape), generator=random, dtype=torch.uint8)
    words = torch.randint(1, len(model.table), (n, model.shape[0]), generator=random)
    lengths = torch.randint(1, model.shape[0] + 1, (n, 1), generator=random)
    return torch.where(torch.arange(model.shape[0]) < lengths, words, 0).to(torch.int32)
