"""What a peer in another process is given: plain values and tensors, in one safetensors file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def write(path: Path, content: Any) -> None:
    """Write nested dicts, lists and tuples of tensors and plain values; tuples become lists."""
    tensors: dict[str, torch.Tensor] = {}

    def plain(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            tensors[str(len(tensors))] = part.detach().clone(memory_format=torch.contiguous_format)
            return {"tensor": str(len(tensors) - 1)}
        if isinstance(part, dict):
            return {"dict": {key: plain(value) for key, value in part.items()}}
        if isinstance(part, list | tuple):
            return [plain(value) for value in part]
        return part

    text = json.dumps(plain(content))
    save_file(tensors, path, metadata={"content": text})


def read(path: Path) -> Any:
    """Read what `write` wrote."""
    with safe_open(path, framework="pt") as file:

        def whole(part: Any) -> Any:
            if isinstance(part, list):
                return [whole(value) for value in part]
            if isinstance(part, dict):
                if "tensor" in part:
                    return file.get_tensor(part["tensor"])
                return {key: whole(value) for key, value in part["dict"].items()}
            return part

        return whole(json.loads(file.metadata()["content"]))
