"""An encoder that is the user's own torch module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedshot.data.dataset import Kind, Pixels
from fedshot.data.encoders.frozen import EncoderOptions, LoadedEncoder, Network, hash_weights
from fedshot.nn.user_modules import UserModule


@dataclass(frozen=True)
class ModuleEncoder(UserModule, EncoderOptions):
    """A `torch.nn.Module` of your own.

    It takes images as float [n, C, H, W] in [0, 1], or a list of n texts, and returns features
    [n, d]. It normalises its input itself.
    """

    option: ClassVar[str] = "model.encoder"
    argument: ClassVar[str] = "encoder"

    def _load(self, kind: Kind, device: torch.device, data_dir: Path | None) -> LoadedEncoder:
        del data_dir
        module = self.module(self.digest)
        known = self.recorded({"weights": hash_weights(module)}).digest
        options = self._with_held(self.held, digest=known)
        if kind == "images":
            return LoadedEncoder(options, lambda: Network(module, _tensor), device)
        return LoadedEncoder(options, lambda: Network(module, list), device, parallel=False)


def _tensor(images: Pixels) -> Tensor:
    return unit_range(torch.from_numpy(np.array(images)))


def unit_range(images: Tensor) -> Tensor:
    """Return images, uint8 [n, H, W, C], as float [n, C, H, W] in [0, 1]."""
    return images.permute(0, 3, 1, 2).float() / 255
