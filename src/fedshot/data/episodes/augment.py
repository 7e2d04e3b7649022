"""Data augmentation: random crops, flips and colour changes of images; off by default.

Each image gets its own crop, flip and colours; one key seeds all draws. Crops and flips are exact;
colours are computed in float32, so pixel values may differ by one between processor types.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedshot.core.errors import DataError
from fedshot.core.ranges import AtLeast0, Below1
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset

_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


@dataclass(frozen=True)
class Augment:
    """Random augmentation of training images.

    Args:
        crop_padding: black pixels added on each side, before a random crop of the original size.
        flip: whether to mirror each image horizontally with probability 1/2.
        jitter: strength of colour changes, in [0, 1). Brightness, contrast and saturation are
            scaled in this order, each by a factor uniform in [1 - jitter, 1 + jitter].
    """

    crop_padding: AtLeast0 = 0
    flip: bool = False
    jitter: Below1 = 0.0

    @property
    def active(self) -> bool:
        """Whether any change is configured."""
        return self.crop_padding > 0 or self.flip or self.jitter > 0

    def check(self, dataset: Dataset) -> None:
        """Raise DataError if the augmentation is active and does not suit the dataset."""
        if not self.active:
            return
        if dataset.kind != "images":
            noun = "texts" if dataset.is_text else "features"
            raise DataError(
                f"episode.augment applies to images; this dataset has {noun}. Remove it."
            )
        side = min(dataset.shape[:2])
        if self.crop_padding >= side:
            raise DataError(
                f"episode.augment.crop_padding is {self.crop_padding}, and images are {side} "
                f"pixels: a crop may contain only padding. Expected less than {side}, such "
                f"as {max(1, side // 8)}."
            )

    def apply(self, x: Tensor, key: Key) -> Tensor:
        """Return augmented copies of uint8 images [n, H, W, C]; `key` seeds the draws."""
        if x.dtype != torch.uint8 or x.ndim != 4:
            raise DataError(f"images are {x.dtype}{list(x.shape)}; expected uint8 [n, H, W, C]")
        if not self.active or len(x) == 0:
            return x
        if self.crop_padding or self.flip:
            x = self._moved(x, key)
        if self.jitter > 0:
            x = self._coloured(x, key.at("jitter").numpy())
        return x

    def _moved(self, x: Tensor, key: Key) -> Tensor:
        """Crop and flip by indexing: compute the row and column that each pixel comes from."""
        n, h, w, _ = x.shape
        pad = self.crop_padding
        rows = torch.arange(h).expand(n, h)
        columns = torch.arange(w).expand(n, w)
        if self.flip:
            mirrored = torch.from_numpy(key.at("flip").numpy().random((n, 1)) < 0.5)
            columns = torch.where(mirrored, columns.flip(1), columns)
        if pad:
            shift = torch.from_numpy(key.at("crop").numpy().integers(-pad, pad + 1, (2, n, 1)))
            rows, columns = rows + shift[0], columns + shift[1]
        inside = ((rows >= 0) & (rows < h))[:, :, None] & ((columns >= 0) & (columns < w))[:, None]
        images = torch.arange(n)[:, None, None]
        places = images, rows.clamp(0, h - 1)[:, :, None], columns.clamp(0, w - 1)[:, None]
        picked = x[tuple(part.to(x.device) for part in places)]
        return picked * inside[..., None].to(x.device)

    def _coloured(self, x: Tensor, rng: np.random.Generator) -> Tensor:
        n, _, _, c = x.shape
        draws = torch.from_numpy(rng.random((3, n, 1, 1, 1), dtype=np.float32))
        factors = (1 + self.jitter * (2 * draws - 1)).to(x.device)
        pixels = x.float() * factors[0]
        grey = self._grey(pixels).mean(dim=(1, 2), keepdim=True)
        pixels = grey + factors[1] * (pixels - grey)
        if c == 3:  # grey images have no saturation
            grey = self._grey(pixels)
            pixels = grey + factors[2] * (pixels - grey)
        return pixels.round().clamp(0, 255).to(torch.uint8)

    @staticmethod
    def _grey(pixels: Tensor) -> Tensor:
        if pixels.shape[-1] != 3:
            return pixels.mean(dim=-1, keepdim=True)
        return (pixels * torch.tensor(_LUMA, device=pixels.device)).sum(dim=-1, keepdim=True)
