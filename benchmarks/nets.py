"""The networks of the comparison as ordinary `nn.Module`s, with fedshot's names of parameters.

No import of fedshot: peers in other environments use this file too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody reads)
from torch import Tensor, nn


class Conv4(nn.Module):
    """Four blocks of convolution, batch norm, ReLU, max-pool; then flat, or a linear head.

    Args:
        channels: of the images.
        size: their side in pixels.
        width: channels inside.
        way: outputs of the head; 0 for no head.
        running: whether batch norm keeps running statistics.
    """

    def __init__(
        self, channels: int, size: int, width: int, way: int = 0, running: bool = True
    ) -> None:
        super().__init__()
        for i in range(1, 5):
            c_in = channels if i == 1 else width
            setattr(self, f"conv{i}", nn.Conv2d(c_in, width, 3, padding=1))
            setattr(self, f"norm{i}", nn.BatchNorm2d(width, track_running_stats=running))
        if way:
            self.head = nn.Linear(width * (size // 16) ** 2, way)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        """Return features, or logits where there is a head."""
        for i in range(1, 5):
            h = getattr(self, f"norm{i}")(getattr(self, f"conv{i}")(x))
            x = F.max_pool2d(F.relu(h), 2)
        h = x.flatten(1)
        return self.head(h) if self.way else h


class Block(nn.Module):
    """A residual block of three 3x3 convolutions."""

    def __init__(self, c_in: int, width: int) -> None:
        super().__init__()
        for i, c, kernel in (("1", c_in, 3), ("2", width, 3), ("3", width, 3), ("", c_in, 1)):
            layer = nn.Conv2d(c, width, kernel, padding=kernel // 2, bias=False)
            setattr(self, f"conv{i}", layer)
            setattr(self, f"norm{i}", nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return half the map."""
        z = F.leaky_relu(self.norm1(self.conv1(x)), 0.1)
        z = F.leaky_relu(self.norm2(self.conv2(z)), 0.1)
        z = self.norm3(self.conv3(z)) + self.norm(self.conv(x))
        return F.max_pool2d(F.leaky_relu(z, 0.1), 2)


class ResNet12(nn.Module):
    """Four residual blocks, then the mean over the map."""

    def __init__(self, channels: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        for i, width in enumerate(widths, start=1):
            setattr(self, f"block{i}", Block(channels, width))
            channels = width

    def forward(self, x: Tensor) -> Tensor:
        """Return features."""
        for i in range(1, 5):
            x = getattr(self, f"block{i}")(x)
        return x.mean((-2, -1))


class Gru(nn.Module):
    """A GRU over frozen word vectors; the features are its last state."""

    def __init__(self, table: Tensor, hidden: int) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)
        self.gru = nn.GRU(table.shape[1], hidden, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of word numbers [n, words], all texts equally long."""
        _, end = self.gru(F.embedding(x, self.table))
        return end[0]


class Mlp(nn.Module):
    """Two linear layers, each with a ReLU."""

    def __init__(self, n_in: int, hidden: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(n_in, hidden)
        self.linear2 = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return features."""
        return F.relu(self.linear2(F.relu(self.linear1(x.flatten(1)))))


def build(spec: dict[str, object], table: Tensor | None = None) -> nn.Module:
    """Return the network that a spec names: {"net": ..., and the arguments}."""
    own = {name: value for name, value in spec.items() if name != "net"}
    if spec["net"] == "gru":
        assert table is not None
        return Gru(table, **own)  # type: ignore[arg-type]
    kinds: dict[object, type[nn.Module]] = {"conv4": Conv4, "resnet12": ResNet12, "mlp": Mlp}
    return kinds[spec["net"]](**own)


def in_layout(x: Tensor, layout: str) -> Tensor:
    """Return maps that really lie in memory as `layout` says, "nchw" or "channels_last".

    With one channel the strides of both layouts describe the same memory, and torch goes by the
    strides: images born as [n, h, w, 1] take the channels-last path even when `contiguous()` says
    they are plain. Hence a fresh tensor, and a look at its strides.
    """
    if x.ndim != 4:
        return x
    form = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    fresh = torch.empty(x.shape, dtype=x.dtype, memory_format=form)
    n, c, h, w = x.shape
    if layout == "channels_last":
        fresh = fresh.as_strided((n, c, h, w), (c * h * w, 1, c * w, c))
    else:
        fresh = fresh.as_strided((n, c, h, w), (c * h * w, h * w, w, 1))
    return fresh.copy_(x)


def place(module: nn.Module, layout: str) -> nn.Module:
    """Lay the weights of a network out in memory as `layout` says."""
    if layout == "channels_last":
        return module.to(memory_format=torch.channels_last)
    return module
