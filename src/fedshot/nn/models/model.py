"""A model: a backbone, an optional head, and the preparation of its input."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812  (the usual name)
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.ranges import Above0, check_options
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.nn.heads import Head
from fedshot.nn.models.backbones import Backbone
from fedshot.nn.models.mode import Mode

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


NormPolicy = Literal["running", "support", "transductive", "group"]
_SHAPES = {
    "images": ("height", "width", "channels"),
    "text": ("longest length", "d"),
    "features": ("number of features",),
}


@dataclass(frozen=True)
class Model:
    """A backbone, an optional head, and the preparation of images or texts.

    Parameters are `{"body": ..., "head": ...}`, without "head" if there is none. Statistics are
    `{}` unless `norm_policy` is "running".

    `shape` is (height, width, channels) for images, and (d,) for features. For texts it is (maximal
    length, d), and `table` [V, d] holds the frozen word vectors, with row 0 for padding.

    `norm_policy` selects the batch-norm statistics at test. Values:

    - "running": those of training.
    - "support": those of the support set. If the support set is split among a group of clients,
      each client uses the statistics of its own part for its queries.
    - "group": one set of statistics for all clients of the group; else as "support".
    - "transductive": those of the query batch.

    With `bf16`, convolutions and matrix products of the backbone run in bfloat16 (except the first
    block of a Conv4 if `stem.py` computes it). Everything else, parameters and features included,
    has the type `dtype`.
    """

    backbone: Backbone
    head: Head | None
    shape: tuple[int, ...]
    norm_policy: NormPolicy = "running"
    dtype: Literal["float32", "float64"] = "float32"
    pixel_mean: float = 0.5
    pixel_std: Above0 = 0.5
    bf16: bool = False
    table: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._check_kind()
        check_options(self)
        if self.bf16 and (self.dtype != "float32" or self.kind != "images"):
            raise ConfigError(
                "bf16 needs images and float32: bfloat16 rounds to 8 bits, which defeats float64, "
                "and recurrent nets are not faster with it. Leave it off."
            )
        if not math.isfinite(self.pixel_mean):
            raise ConfigError(f"pixel_mean is {self.pixel_mean}; expected a finite number.")

    def _check_kind(self) -> None:
        """Raise ConfigError if shape, table or backbone do not fit the kind of examples."""
        given = self.kind
        names = _SHAPES[given]
        if len(self.shape) != len(names) or min(self.shape) < 1:
            raise ConfigError(f"shape is {self.shape}; expected ({', '.join(names)}).")
        if self.table is not None and (self.table.ndim != 2 or len(self.table.T) != self.shape[1]):
            raise ConfigError(
                f"table is {list(self.table.shape)}; expected word vectors [V, {self.shape[1]}]."
            )
        takes = getattr(self.backbone, "takes", ("images",))
        if given not in takes:
            raise ConfigError(
                f"{type(self.backbone).__name__} takes {' or '.join(takes)}, but the data are "
                f"{given}. Choose a model.backbone for {given}"
                f"{', such as mlp,' if given == 'features' else ','} or other data."
            )

    @property
    def kind(self) -> Literal["images", "text", "features"]:
        """The kind of the examples: text if there is a `table`, features if `shape` is (d,)."""
        if self.table is not None:
            return "text"
        return "features" if len(self.shape) == 1 else "images"

    @property
    def trains_backbone(self) -> bool:
        """Whether the backbone has parameters to train."""
        trains: bool = getattr(self.backbone, "trains", True)
        return trains

    @property
    def by_support(self) -> bool:
        """Whether tests use the batch-norm statistics of the support set."""
        return self.norm_policy in ("support", "group")

    @property
    def out_features(self) -> int:
        """The number of features of an example."""
        return self.backbone.out_features(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of parameters and features."""
        return _DTYPES[self.dtype]

    def init(self, key: Key) -> tuple[Tree, Tree]:
        """Return random parameters, and initial running statistics.

        The body drawn from a key is the same with any head.
        """
        body, stats = self.backbone.init(key.at("body"), self.shape, self.torch_dtype)
        params: dict[str, Tree] = {"body": body}
        if self.head is not None:
            params["head"] = self.head.init(key.at("head"), self.out_features, self.torch_dtype)
        return params, stats if self.norm_policy == "running" else {}

    def prepare(self, x: Tensor) -> Tensor:
        """Convert examples to the input of the backbone.

        Images, uint8 [n, H, W, C], become (x / 255 - pixel_mean) / pixel_std, float [n, C, H, W].
        The memory stays channels-last, the faster layout for convolutions.

        Texts, int32 [n, L], become float [n, L, d + 1]: word vectors, and a last column that is 1
        for a word, known or not, and 0 for padding.

        Features, float [n, d], are cast to `dtype`.

        Raises ConfigError if x has another dtype or shape.
        """
        if self.kind == "features":
            if not x.is_floating_point() or tuple(x.shape[1:]) != self.shape:
                raise ConfigError(
                    f"features are {x.dtype} of shape {list(x.shape)}; this model takes floats of "
                    f"shape [n, {self.shape[0]}]."
                )
            return x.to(self.torch_dtype)
        if self.table is not None:
            if x.dtype != torch.int32 or x.ndim != 2:
                raise ConfigError(
                    f"texts are {x.dtype} of shape {list(x.shape)}; this model takes int32 of "
                    "shape [n, L]."
                )
            return F.embedding(x, self._words(x.device))
        if x.dtype != torch.uint8 or tuple(x.shape[1:]) != self.shape:
            raise ConfigError(
                f"images are {x.dtype} of shape {list(x.shape)}; this model takes uint8 of shape "
                f"[n, {', '.join(map(str, self.shape))}]. Set `shape` to that of the data."
            )
        x = x.permute(0, 3, 1, 2).to(self.torch_dtype)
        return x.mul_(1.0 / (255.0 * self.pixel_std)).sub_(self.pixel_mean / self.pixel_std)

    def _words(self, device: torch.device) -> Tensor:
        """Return the word vectors with the mask column, so that one lookup gives both."""
        if device not in self._tables:
            self._tables[device] = self._with_mask().to(device)
        return self._tables[device]

    @cached_property
    def _tables(self) -> dict[torch.device, Tensor]:
        return {}

    def _with_mask(self) -> Tensor:
        assert self.table is not None
        real = torch.ones(len(self.table), 1)
        real[0] = 0
        return torch.cat([self.table, real], dim=1).to(self.torch_dtype)

    def features(self, params: Tree, stats: Tree, x: Tensor, mode: Mode) -> tuple[Tensor, Tree]:
        """Return the features [n, out_features], and the running statistics after the forward pass.

        `x` is uint8 [n, H, W, C], int32 [n, L] or float [n, d], or the result of `prepare`.
        Raises ConfigError if it has another dtype or shape.
        """
        if not x.is_floating_point() or self.kind == "features":
            x = self.prepare(x)
        elif self.table is not None:
            if x.ndim != 3 or x.shape[2] != self.shape[1] + 1:
                raise ConfigError(
                    f"prepared texts have shape {list(x.shape)}; this model takes float of shape "
                    f"[n, L, {self.shape[1] + 1}]."
                )
        else:
            height, width, channels = self.shape
            if tuple(x.shape[1:]) != (channels, height, width):
                raise ConfigError(
                    f"prepared images have shape {list(x.shape)}; this model takes float of shape "
                    f"[n, {channels}, {height}, {width}]. Set `shape` to that of the data."
                )
        if not self.bf16:
            return self.backbone.apply(params["body"], stats, x, mode)
        with torch.autocast(x.device.type, torch.bfloat16):
            h, stats = self.backbone.apply(params["body"], stats, x, mode)
        return h.to(self.torch_dtype), tree.map(lambda leaf: leaf.to(self.torch_dtype), stats)

    def logits(self, params: Tree, h: Tensor) -> Tensor:
        """Return the head's logits [n, way] of features h; raise ConfigError without a head."""
        if self.head is None:
            raise ConfigError(
                "this model has no head, so it computes no logits. Set `head` (linear, two_layer "
                "or cosine), or classify with fedshot.nn.prototypes.prototype_logits."
            )
        return self.head.logits(params["head"], h)
