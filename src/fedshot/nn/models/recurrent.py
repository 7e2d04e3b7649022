"""Text backbones: a GRU and a bidirectional LSTM over word vectors.

Sources: FedFSL uses the last state of a GRU of 128 units; F2L (Wang et al. 2023, C.1.1) uses "a
biLSTM with 50 units". Departures: F2L does not say whether 50 is per direction, or how the states
are pooled. Here it is per direction, so that the number of features, 100, is divisible by the 4
heads of its Transformer; the pooling is an option.

Word vectors are frozen and come with the data; see `Backbone` for the input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedshot.core.ranges import Width, check_options
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.nn.models.cells import GRU_GATES, LSTM_GATES
from fedshot.nn.models.layers import Shape, init_uniform, linear
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.recurrence import Kernel, bilstm, gru, init_recurrence, words_and_mask


@dataclass(frozen=True)
class GRU:
    """One GRU layer; the features are its state after the last word. No batch norm or dropout.

    Args:
        hidden: number of features.
        kernel: "fused" is faster; "cell" is for `vmap` and for second derivatives on a GPU.
    """

    takes: ClassVar[tuple[Literal["text"], ...]] = ("text",)
    norm_policies: ClassVar[tuple[str, ...]] = ("running",)

    hidden: Width = 128
    kernel: Kernel = "fused"

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def vmappable(self) -> bool:
        """Whether `apply` works under `torch.func.vmap`: only with kernel "cell"."""
        return self.kernel == "cell"

    def init(self, key: Key, shape: Shape, dtype: torch.dtype) -> tuple[Tree, Tree]:
        """Return the parameters of a random layer "forward"; there are no running statistics."""
        at = key.at("forward")
        return {"forward": init_recurrence(at, shape[-1], self.hidden, GRU_GATES, dtype)}, {}

    def out_features(self, shape: Shape) -> int:
        """Return the number of hidden units."""
        del shape
        return self.hidden

    def apply(self, params: Tree, stats: Tree, x: Tensor, mode: Mode) -> tuple[Tensor, Tree]:
        """Return (features, the unchanged `stats`) of texts x [n, L, d + 1]."""
        del mode
        p = params["forward"]
        words, mask = words_and_mask(x, p["input"]["weight"].shape[1])
        return gru(p, words, mask, self.kernel), stats


@dataclass(frozen=True)
class BiLSTM:
    """One LSTM layer in each direction, pooled over the words. No batch norm or dropout.

    Args:
        hidden: units per direction; there are twice as many features.
        pooling: "last" takes the state of each direction after its last step, "mean" averages the
            states of the words, "attention" averages them with weights
            softmax_t(v . tanh(W h_t + b)).
        attention: number of rows of W in the pooling "attention".
        kernel: "fused" is faster; "cell" is for `vmap` and for second derivatives on a GPU.
    """

    takes: ClassVar[tuple[Literal["text"], ...]] = ("text",)
    norm_policies: ClassVar[tuple[str, ...]] = ("running",)

    hidden: Width = 50
    pooling: Literal["last", "mean", "attention"] = "last"
    attention: Width = 64
    kernel: Kernel = "fused"

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def vmappable(self) -> bool:
        """Whether `apply` works under `torch.func.vmap`: only with kernel "cell"."""
        return self.kernel == "cell"

    def init(self, key: Key, shape: Shape, dtype: torch.dtype) -> tuple[Tree, Tree]:
        """Return random layers `forward` and `backward`, and `attention` if the pooling needs it.

        There are no running statistics.
        """
        params: dict[str, Tree] = {
            name: init_recurrence(key.at(name), shape[-1], self.hidden, LSTM_GATES, dtype)
            for name in ("forward", "backward")
        }
        if self.pooling == "attention":
            params["attention"] = _init_attention(
                key.at("attention"), 2 * self.hidden, self.attention, dtype
            )
        return params, {}

    def out_features(self, shape: Shape) -> int:
        """Return the number of hidden units of both directions."""
        del shape
        return 2 * self.hidden

    def apply(self, params: Tree, stats: Tree, x: Tensor, mode: Mode) -> tuple[Tensor, Tree]:
        """Return (features, the unchanged `stats`) of texts x [n, L, d + 1]."""
        del mode
        words, mask = words_and_mask(x, params["forward"]["input"]["weight"].shape[1])
        states, last = bilstm(params, words, mask, self.kernel)
        if self.pooling == "last":
            return last, stats
        mask = mask[:, : states.shape[1]]
        if self.pooling == "mean":
            weights = mask / mask.sum(1, keepdim=True).clamp_min(1.0)
        else:
            weights = _attend(params["attention"], states, mask)
        return (states * weights[..., None]).sum(1), stats


def _init_attention(key: Key, n_in: int, width: int, dtype: torch.dtype) -> Tree:
    """Return random layers "project" and "score".

    The score has no bias, which would cancel in the softmax.
    """
    project = init_uniform(key.at("project"), n_in, width, 1.0 / math.sqrt(n_in), dtype)
    score = init_uniform(key.at("score"), width, 1, 1.0 / math.sqrt(width), dtype)
    return {"project": project, "score": {"weight": score["weight"]}}


def _attend(p: Tree, states: Tensor, mask: Tensor) -> Tensor:
    """Return the weights [n, L] of the states in the pooling "attention".

    They are 0 on padding, and sum to 1 for each text, or to 0 for an empty text.
    """
    scores = torch.tanh(linear(p["project"], states)) @ p["score"]["weight"][0]
    # The lowest number instead of minus infinity, whose softmax would be NaN for an empty text.
    scores = torch.where(mask > 0, scores, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, -1) * mask
