"""Encoders of the library transformers, for images or texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedshot.core.errors import ConfigError
from fedshot.core.extras import require
from fedshot.data.dataset import Kind, Pixels
from fedshot.data.encoders.frozen import LoadedEncoder, Network, colour
from fedshot.data.encoders.pretrained import PretrainedEncoder, loading, quiet

_LONGEST = 512  # tokens, for a tokenizer and a network without a limit


@dataclass(frozen=True)
class TransformersEncoder(PretrainedEncoder):
    """A model of the library transformers, for images or texts; needs the extra `encoders`.

    Its image processor or tokenizer comes from the model's folder. For a model of images and texts,
    such as CLIP, the features are its projected embeddings; for others, the last layer is pooled.
    Code from the hub never runs.

    Args:
        pooling: how the last layer is pooled: "mean" averages its tokens (or positions), and "cls"
            takes its first token.
    """

    pooling: Literal["mean", "cls"] = "mean"

    def _load(self, kind: Kind, device: torch.device, data_dir: Path | None) -> LoadedEncoder:
        require("encoders", "model.encoder.name 'transformers'", "transformers")
        folder, options = self.found(data_dir, pooling=self.pooling)
        return LoadedEncoder(options, partial(self._read, folder, kind == "images"), device)

    def _read(self, folder: Path, images: bool) -> Network:
        from transformers import AutoModel

        with loading(folder), quiet():
            model, report = AutoModel.from_pretrained(
                folder,
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
            lacking = [name for name in sorted(report["missing_keys"]) if "pooler" not in name]
            if lacking:
                raise ConfigError(
                    f"{folder} lacks weights of its model, such as {lacking[0]!r}, which would be "
                    "random. Choose a folder with all weights."
                )
            prepare = _images(folder) if images else _texts(folder, model.config)
        return Network(_PooledFeatures(model, self.pooling, images), prepare)


def _images(folder: Any) -> Callable[[Pixels], dict[str, Tensor]]:
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(
        folder, backend="pil", trust_remote_code=False, local_files_only=True
    )

    def prepare(images: Pixels) -> dict[str, Tensor]:
        found = processor(
            list(colour(images)), input_data_format="channels_last", return_tensors="pt"
        )
        return {"pixel_values": found["pixel_values"]}

    return prepare


def _texts(folder: Any, config: Any) -> Callable[[tuple[str, ...]], dict[str, Tensor]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True
    )
    config = config.get_text_config()
    longest = min(
        int(tokenizer.model_max_length), int(getattr(config, "max_position_embeddings", _LONGEST))
    )

    def prepare(texts: tuple[str, ...]) -> dict[str, Tensor]:
        found = tokenizer(
            list(texts), padding=True, truncation=True, max_length=longest, return_tensors="pt"
        )
        return dict(found)

    return prepare


class _PooledFeatures(nn.Module):
    """A model whose output is one row of features for each example."""

    def __init__(self, model: nn.Module, pooling: str, images: bool) -> None:
        super().__init__()
        self.model, self.pooling = model, pooling
        name = "get_image_features" if images else "get_text_features"
        self._project = getattr(model, name, None)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return features [n, d]."""
        if self._project is not None:
            found = self._project(**inputs)
            projected: Tensor = found if isinstance(found, Tensor) else found.pooler_output
            return projected
        h: Tensor = self.model(**inputs).last_hidden_state
        if h.ndim == 4:  # maps [n, d, H, W] of a convolutional network
            h = h.flatten(2).transpose(1, 2)
        if self.pooling == "cls":
            return h[:, 0]
        mask = inputs.get("attention_mask")
        if mask is None:
            return h.mean(1)
        mask = mask[..., None].to(h.dtype)
        return (h * mask).sum(1) / mask.sum(1).clamp_min(1)
