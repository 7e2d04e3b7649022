"""Torch modules as a user writes them, without anything of fedshot; nodes import them, too."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Conv4Module(nn.Module):
    """The layers of fedshot's Conv4 under the same names."""

    def __init__(self, width: int = 4, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for i in range(1, 5):
            setattr(self, f"conv{i}", nn.Conv2d(1 if i == 1 else width, width, 3, padding=1))
            setattr(self, f"norm{i}", nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(1, 5):
            x = getattr(self, f"norm{i}")(getattr(self, f"conv{i}")(x))
            x = F.relu(F.max_pool2d(x, 2) if min(x.shape[-2:]) >= 2 else x)
        return x.flatten(1)


class SmallViT(nn.Module):
    """A vision Transformer of torch's own layers: attention, layer norm, dropout, a buffer."""

    def __init__(self, dropout: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.patch = nn.Conv2d(1, 8, 4, 4)
        self.register_buffer("position", torch.randn(4, 8))
        self.drop = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).transpose(1, 2) + self.position
        out: Tensor = self.out(self.layers(self.drop(h)).mean(1))
        return out


def conv4(width: int = 4, seed: int = 0) -> nn.Module:
    return Conv4Module(width, seed)


def vit(dropout: float = 0.0, seed: int = 0) -> nn.Module:
    return SmallViT(dropout, seed)
