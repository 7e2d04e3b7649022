"""Find the encoder in a run's state, and wrap it in a `torch.nn.Module` that can be traced.

The module calls the same functions as training, but without compiled kernels, which cannot be
traced. Recurrent networks run their cell word by word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.encoders.module import ModuleEncoder, unit_range
from fedshot.learners.learner import test_modes
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.optim import OptState
from fedshot.use.trained import TrainedRun

# Names of trees that look like a model but hold step sizes, sums, optimiser states or models of
# other clients.
_NOT_MODELS = frozenset({"alpha", "pool", "outer", "optimizer", "bank", "moments"})


def encoder_of(run: TrainedRun, client: int | None = None) -> tuple[Tree, Tree]:
    """Return (parameters of the backbone, running statistics) of the chosen round.

    If each client has its own encoder, `client` selects one. Raises ConfigError if there is no
    encoder, or more than one.
    """
    states: list[Tree] = [] if run.banked else [run.server]
    if client is not None:
        # A client that uploads a model predicts with it; its private state may hold an older model.
        states = [run.remembered(client), run.private(client), *states]
    for state in states:
        found = _find(run.model, state)
        if found is not None:
            return found
    hint = (
        " Choose a client with --client, or client=."
        if run.keeps_private and client is None
        else ""
    )
    raise ConfigError(
        f"the state of {run.method.name} holds no single encoder that could be exported.{hint}"
    )


def _find(model: Model, state: Tree) -> tuple[Tree, Tree] | None:
    like, stats_like = model.init(Key(0))
    bodies = _alike(state, like["body"], "body")
    if len(bodies) != 1:
        return None
    if not tree.leaves(stats_like):
        return bodies[0], {}
    stats = _alike(state, stats_like, "stats")
    return (bodies[0], stats[0]) if len(stats) == 1 else None


def _alike(state: Tree, like: Tree, name: str) -> list[Tree]:
    """Return the subtrees of `state` structured as `like`; of several, those named `name`."""
    found = [(path, node) for path, node in _nodes(state, ()) if not tree.difference(like, node)]
    if len(found) > 1:
        found = [(path, node) for path, node in found if path and path[-1] == name]
    return [node for _, node in found]


def _nodes(node: Tree, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tree]]:
    if isinstance(node, OptState) or (path and path[-1] in _NOT_MODELS):
        return
    if isinstance(node, Mapping | tuple):
        yield path, node
        names = node if isinstance(node, Mapping) else getattr(node, "_fields", range(len(node)))
        children = node.values() if isinstance(node, Mapping) else node
        for name, child in zip(names, children, strict=True):
            yield from _nodes(child, (*path, str(name)))


class Encoder(nn.Module):
    """An encoder for the batch-norm policies "running" and "transductive".

    It maps images uint8 [n, H, W, C], texts int32 [n, L] or features float [n, D] to features float
    [n, d]. With "transductive", the features of an example depend on the other examples.
    """

    def __init__(self, model: Model, body: Tree, stats: Tree) -> None:
        super().__init__()
        self.model = traceable(model)
        if model.table is not None:
            # The model caches its table of word vectors, which must not contain traced values.
            self.model.prepare(torch.zeros(1, 1, dtype=torch.int32))
        self._like, self._stats_like = body, stats
        self._names = [_put(self, "body", body), _put(self, "stats", stats)]

    def forward(self, examples: Tensor) -> Tensor:
        """Return the features of examples, float [n, d]."""
        _, query = test_modes(self.model)
        return self._features(examples, self._read()[1], query)[0]

    def _features(self, x: Tensor, stats: Tree, mode: Mode) -> tuple[Tensor, Tree]:
        body, _ = self._read()
        return self.model.features({"body": body}, stats, x, mode)

    def _read(self) -> tuple[Tree, Tree]:
        """Return the backbone's parameters and running statistics, rebuilt from the buffers."""
        body, stats = (
            tree.rebuild(like, {path: self.get_buffer(name) for path, name in names.items()})
            for like, names in zip((self._like, self._stats_like), self._names, strict=True)
        )
        return body, stats


class ImageEncoder(Encoder):
    """A frozen image encoder followed by the run's trained layers."""

    def __init__(self, model: Model, body: Tree, stats: Tree, frozen: nn.Module) -> None:
        super().__init__(model, body, stats)
        self.frozen = frozen

    def forward(self, examples: Tensor) -> Tensor:
        """Return the features, float [n, d], of images, uint8 [n, H, W, C]."""
        return super().forward(self.frozen(unit_range(examples)))


class TaskEncoder(Encoder):
    """An encoder for the batch-norm policy "support".

    It maps support and queries to features of both, normalised by the statistics of the support.
    """

    def forward(self, support: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return (features of the support, features of the queries), float [n, d] each."""
        first, then = test_modes(self.model)
        h, seen = self._features(support, {}, first)
        return h, self._features(query, seen, then)[0]


def frozen_module(run: TrainedRun) -> nn.Module | None:
    """Return a copy of the run's frozen encoder if it is a `torch.nn.Module` for images, else None.

    Only such an encoder can be traced.
    """
    is_module = isinstance(run.config.model.encoder, ModuleEncoder)
    if not is_module or run.dataset_info.example_kind != "images":
        return None
    return deepcopy(run.encoder.network.module).cpu()


def encoder_module(
    model: Model, body: Tree, stats: Tree, frozen: nn.Module | None = None
) -> Encoder:  # fmt: skip
    """Return the encoder, in evaluation mode, for the model's batch-norm policy.

    If `frozen` is not None, it is a frozen image encoder, whose features are the model's input.
    """
    if frozen is not None:
        return ImageEncoder(model, body, stats, frozen).eval()
    has_norm = len(model.backbone.norm_policies) > 1
    kind = TaskEncoder if model.by_support and has_norm else Encoder
    return kind(model, body, stats).eval()


def traceable(model: Model) -> Model:
    """Return the model without options that cannot be traced (compiled kernels, bfloat16)."""
    backbone = model.backbone
    if hasattr(backbone, "kernel"):
        backbone = replace(backbone, kernel="cell")  # type: ignore[type-var]
    policy = model.norm_policy if len(backbone.norm_policies) > 1 else "running"
    return replace(model, backbone=backbone, norm_policy=policy, bf16=False)


def _put(module: nn.Module, name: str, of: Tree) -> dict[str, str]:
    """Register each leaf of the tree `of` as a buffer of `module`; return path -> buffer name."""
    names = {}
    for path, leaf in tree.items(of):
        names[path] = f"{name}__{path}".replace("/", "__").replace(".", "_")
        module.register_buffer(names[path], leaf.detach().clone())
    return names


def example(model: Model, n: int, seed: int = 0, images: tuple[int, ...] | None = None) -> Tensor:
    """Return n random inputs of a model; if `images` is not None, n random images of that shape."""
    random = torch.Generator().manual_seed(seed)
    if images is None and model.kind == "features":
        return torch.randn(n, *model.shape, generator=random)
    if model.table is None:
        shape = images or model.shape
        return torch.randint(0, 256, (n, *shape), generator=random, dtype=torch.uint8)
    words = torch.randint(1, len(model.table), (n, model.shape[0]), generator=random)
    lengths = torch.randint(1, model.shape[0] + 1, (n, 1), generator=random)
    return torch.where(torch.arange(model.shape[0]) < lengths, words, 0).to(torch.int32)
