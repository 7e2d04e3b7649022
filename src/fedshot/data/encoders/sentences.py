"""Encoders of the library sentence-transformers, for texts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedshot.core.errors import ConfigError
from fedshot.core.extras import require
from fedshot.core.regular_files import read_regular
from fedshot.data.dataset import Kind
from fedshot.data.encoders.frozen import LoadedEncoder, Network
from fedshot.data.encoders.pretrained import PretrainedEncoder, loading, quiet

_LIMIT = 1 << 20  # bytes of modules.json


@dataclass(frozen=True)
class SentenceTransformersEncoder(PretrainedEncoder):
    """A model of the library sentence-transformers, for texts; needs the extra `encoders`.

    Its tokenizer, pooling, normalisation and default prompt come from the model's folder. Code from
    the hub never runs.
    """

    def _load(self, kind: Kind, device: torch.device, data_dir: Path | None) -> LoadedEncoder:
        if kind == "images":
            raise ConfigError(
                "model.encoder.name is 'sentence_transformers', which takes texts, and the data "
                "are images. Set it to 'transformers' or 'timm'."
            )
        require("encoders", "model.encoder.name 'sentence_transformers'", "sentence_transformers")
        folder, options = self.found(data_dir)
        _check_modules(folder)
        return LoadedEncoder(options, lambda: _read(folder, device), device)


def _read(folder: Path, device: torch.device) -> Network:
    from sentence_transformers import SentenceTransformer

    with loading(folder), quiet():
        model = SentenceTransformer(
            str(folder),
            device=str(device),
            trust_remote_code=False,
            local_files_only=True,
            model_kwargs={"use_safetensors": True, "dtype": torch.float32},
        )
    prompt = model.prompts.get(model.default_prompt_name or "")

    def prepare(texts: tuple[str, ...]) -> Any:
        return model.preprocess(list(texts), prompt=prompt)

    return Network(_Sentences(model), prepare)


def _check_modules(folder: Path) -> None:
    """Raise ConfigError if the model names classes outside the library."""
    path = folder / "modules.json"
    if not path.is_file():
        return
    try:
        kinds = [str(one["type"]) for one in json.loads(read_regular(path, _LIMIT))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}). Fetch the model again.") from None
    for kind in kinds:
        if not kind.startswith("sentence_transformers."):
            raise ConfigError(
                f"{path} names {kind!r}, which is not part of sentence-transformers; a model must "
                "not choose the code that runs. Choose another model."
            )


class _Sentences(nn.Module):
    """A sentence-transformers model whose output is its sentence embedding."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Tensor:
        """Return features [n, d]."""
        found: Tensor = self.model(inputs)["sentence_embedding"]
        return found[:, : self.model.truncate_dim]
