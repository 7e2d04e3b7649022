"""The set Transformer of F2L's client-model, which encodes a task's features in their context.

Source: Wang et al. 2023 (F2L), eq. (22) and C.1.2, which pass the features of the support through
a Transformer (Vaswani et al. 2017) as a set, and C.3, which gives the dropout rate. The rest
is our choice: one encoder layer, 4 heads, 2048 hidden units, ReLU and the norm after the sum, as in
torch.nn.TransformerEncoderLayer. There are no positions, so a permuted set gives permuted outputs.
Eq. (22) does not cover queries; what they attend to is an option here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody reads)
from torch import Tensor

from fedshot.core.errors import ConfigError, check_word
from fedshot.core.ranges import AtLeast1, Below1, check_options
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.nn.models.layers import EPS, dropout, init_linear_head, init_uniform, linear
from fedshot.nn.models.mode import Mode

Queries = Literal["support_context", "query_set", "alone"]


@dataclass(frozen=True)
class SetTransformer:
    """One encoder layer: x' = norm(x + attention(x)), then norm(x' + W2 relu(W1 x')).

    It works under `vmap`. Dropout is applied where torch's layer applies it: on the attention
    weights, in the feed-forward part, and before both sums.

    Args:
        heads: number of attention heads; must divide the number of features.
        hidden: width of the feed-forward part.
        dropout: dropout rate, the same at all four places.
    """

    vmappable: ClassVar[bool] = True

    heads: AtLeast1 = 4
    hidden: AtLeast1 = 2048
    dropout: Below1 = 0.1

    def __post_init__(self) -> None:
        check_options(self)

    def check(self, d: int) -> None:
        """Raise ConfigError unless the number of heads divides d, the number of features."""
        if d % self.heads:
            raise ConfigError(
                f"{d} features are not divisible by {self.heads} heads; set `heads` to a divisor, "
                "or change the backbone's width."
            )

    def init(self, key: Key, d: int, dtype: torch.dtype) -> Tree:
        """Return random parameters for d features, from the distributions that torch uses."""
        self.check(d)
        inward = init_uniform(key.at("qkv"), d, 3 * d, math.sqrt(6.0 / (4 * d)), dtype)
        outward = init_linear_head(key.at("out"), d, d, dtype)
        zero = torch.zeros_like
        return {
            "qkv": inward | {"bias": zero(inward["bias"])},  # query, key, value
            "out": outward | {"bias": zero(outward["bias"])},
            "norm1": _init_layer_norm(d, dtype),
            "linear1": init_linear_head(key.at("linear1"), d, self.hidden, dtype),
            "linear2": init_linear_head(key.at("linear2"), self.hidden, d, dtype),
            "norm2": _init_layer_norm(d, dtype),
        }

    def apply(
        self,
        params: Tree,
        h_support: Tensor,
        h_query: Tensor,
        mode: Mode,
        queries: Queries = "support_context",
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of support [s, d] and queries [q, d].

        Args:
            params: from `init`.
            h_support: features of the support set, which attends to itself alone.
            h_query: features of the queries.
            mode: switches dropout on, and seeds it.
            queries: with "support_context" a query attends to the support set and itself, never to
                another query; with "query_set" queries attend to one another and not to the
                support, as in F2L's code in training (transductive); with "alone" to itself only.
        """
        check_word("queries", queries, ("support_context", "query_set", "alone"))
        s, q = self._heads(params, h_support), self._heads(params, h_query)
        seen = self._attend(s, s, False, mode.layer(0))
        support = self._finish(params, h_support, seen, mode.layer(0))
        context = {"support_context": s, "query_set": q, "alone": q[:, :, :0]}[queries]
        seen = self._attend(q, context, queries != "query_set", mode.layer(1))
        return support, self._finish(params, h_query, seen, mode.layer(1))

    def _heads(self, p: Tree, h: Tensor) -> Tensor:
        """Return queries, keys and values [3, heads, n, d / heads] of h [n, d]."""
        n, d = h.shape
        return linear(p["qkv"], h).view(n, 3, self.heads, d // self.heads).permute(1, 2, 0, 3)

    def _attend(self, of: Tensor, to: Tensor, itself: bool, mode: Mode) -> Tensor:
        """Return softmax(Q K^T / sqrt(d / heads)) V, [n, d].

        `of` and `to` are results of `_heads`: Q comes from `of`, K and V from `to`. With `itself`
        each row of `of` also attends to its own key and value.
        """
        q, k_own, v_own = of.unbind()
        _, k, v = to.unbind()
        m = k.shape[1]
        scores = q @ k.transpose(1, 2)
        if itself:  # one more column instead of a mask over all pairs of queries
            scores = torch.cat([scores, (q * k_own).sum(-1, keepdim=True)], -1)
        weights = torch.softmax(scores / math.sqrt(q.shape[-1]), -1)
        weights = dropout(weights, self.dropout, mode, site=0)
        out = weights[..., :m] @ v
        if itself:
            out = out + weights[..., m:] * v_own
        return out.transpose(0, 1).flatten(1)

    def _finish(self, p: Tree, h: Tensor, seen: Tensor, mode: Mode) -> Tensor:
        """Return the layer's output [n, d] for h, given the attention's result `seen` [n, d].

        The steps after the attention are a projection, the feed-forward part, the sums and the
        norms.
        """
        seen = dropout(linear(p["out"], seen), self.dropout, mode, site=1)
        h = _layer_norm(p["norm1"], h + seen)
        z = dropout(F.relu(linear(p["linear1"], h)), self.dropout, mode, site=2)
        z = dropout(linear(p["linear2"], z), self.dropout, mode, site=3)
        return _layer_norm(p["norm2"], h + z)


def _init_layer_norm(d: int, dtype: torch.dtype) -> Tree:
    return {"weight": torch.ones(d, dtype=dtype), "bias": torch.zeros(d, dtype=dtype)}


def _layer_norm(p: Tree, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], p["weight"], p["bias"], EPS)
