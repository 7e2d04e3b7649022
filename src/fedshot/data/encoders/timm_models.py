"""Encoders of the library timm, for images."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from fedshot.core.errors import ConfigError
from fedshot.core.extras import require
from fedshot.data.dataset import Kind, Pixels
from fedshot.data.encoders.frozen import LoadedEncoder, Network, colour
from fedshot.data.encoders.pretrained import PretrainedEncoder, loading


@dataclass(frozen=True)
class TimmEncoder(PretrainedEncoder):
    """A model of the library timm, for images; needs the extra `timm`.

    Its features are those before the classifier. The preprocessing of images (size, mean, standard
    deviation and interpolation) comes from the model's folder.

    Args:
        path: a folder with config.json and model.safetensors, or a name on the Hugging Face hub,
            such as "timm/resnet18.a1_in1k".
    """

    def _load(self, kind: Kind, device: torch.device, data_dir: Path | None) -> LoadedEncoder:
        if kind != "images":
            raise ConfigError(
                "model.encoder.name is 'timm', which takes images, and the data are texts. Set it "
                "to 'sentence_transformers' or 'transformers'."
            )
        require("timm", "model.encoder.name 'timm'")
        folder, options = self.found(data_dir)
        return LoadedEncoder(options, partial(_read, folder), device)


def _read(folder: Path) -> Network:
    import timm

    with loading(folder):
        model = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=0)
        data = timm.data.resolve_model_data_config(model)
        transform = timm.data.create_transform(**data, is_training=False)

    def prepare(images: Pixels) -> Tensor:
        return torch.stack([transform(Image.fromarray(one)) for one in colour(images)])

    return Network(model, prepare)
