"""What an encoder is: its options, and the loaded network with its preprocessing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from fedshot.core.errors import ConfigError, DataError
from fedshot.data.dataset import Features, Kind, Pixels

Block: TypeAlias = Pixels | tuple[str, ...]
"""Images, uint8 [n, H, W, C], or raw texts."""


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """Options of all encoders.

    Args:
        cache: whether to keep the features in the cache folder, for other runs. The numbers are the
            same bits either way.
        digest: SHA-256 of the encoder's weights and preprocessing; null: recorded when a run
            starts. Another encoder is then refused.
    """

    cache: bool = True
    digest: str | None = None

    def load(self, kind: Kind, device: str, data_dir: Path | None = None) -> LoadedEncoder:
        """Return the encoder of images or raw texts, with the options as a run records them.

        Models on a hub are looked for in the folder `encoders` of `data_dir` first.

        Raises ConfigError if it cannot be found, or if its hash is not `digest`.
        """
        if kind not in ("images", "raw text"):
            noun = "features already" if kind == "features" else "word numbers"
            raise ConfigError(
                f"model.encoder takes images or raw texts, and the data are {noun}. Leave "
                "model.encoder out, or choose other data."
            )
        loaded = self._load(kind, torch.device(device), data_dir)
        found = loaded.options.digest
        if self.digest not in (None, found):
            raise ConfigError(
                f"model.encoder is another one than this run's: its SHA-256 is {found}, that of "
                f"the run {self.digest}. Restore the encoder, or start a new run."
            )
        return loaded

    def hold(self, encoder: Any) -> Self:
        """Return these options for an encoder that a Python program passes."""
        del encoder
        raise ConfigError(
            f"an encoder was passed, and model.encoder is a {type(self).__name__}, which reads its "
            "own files. Leave `encoder` out."
        )

    def _load(self, kind: Kind, device: torch.device, data_dir: Path | None) -> LoadedEncoder:
        raise NotImplementedError

    def recorded(self, facts: Mapping[str, Any], **known: Any) -> Self:
        """Return these options with the SHA-256 of `facts`, and with the values in `known`."""
        text = json.dumps({"class": type(self).__name__, **facts}, sort_keys=True)
        return replace(self, digest=hashlib.sha256(text.encode()).hexdigest(), **known)


class Network(NamedTuple):
    """A network and its preprocessing."""

    module: nn.Module  # maps prepared examples to features, float [n, d]
    prepare: Callable[[Any], Any]  # returns a block of examples as the module takes it


@dataclass(frozen=True)
class LoadedEncoder:
    """A frozen network, which is read when it is first used: features may be in the cache.

    Args:
        options: the options, with the hash of the encoder.
        read: returns the network. Raises ConfigError if it cannot be read.
        device: where the module computes.
        parallel: whether several threads may call the module at once.
    """

    options: EncoderOptions
    read: Callable[[], Network]
    device: torch.device
    parallel: bool = True

    @cached_property
    def network(self) -> Network:
        """The network, on the device and in evaluation mode. One thread calls this first."""
        found = self.read()
        found.module.to(self.device).eval().requires_grad_(False)
        return found

    def forward(self, inputs: Any, n: int) -> Features:
        """Return the features, float32 [n, d], of n prepared examples.

        Raises ConfigError if the module gives anything else than n rows of numbers.
        """
        with torch.inference_mode():
            found = self.network.module(_to(inputs, self.device))
        if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != n:
            raise ConfigError(
                f"model.encoder gives {_described(found)} for {n} examples; expected features, a "
                f"tensor [{n}, d]. Flatten or pool the output in the module's forward."
            )
        if not found.is_floating_point():
            raise ConfigError(f"model.encoder gives {found.dtype}; expected floating point.")
        return np.ascontiguousarray(found.float().numpy(force=True))


def _to(inputs: Any, device: torch.device) -> Any:
    if isinstance(inputs, Mapping):
        return {name: _to(value, device) for name, value in inputs.items()}
    return inputs.to(device) if isinstance(inputs, Tensor) else inputs


def _described(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"a tensor {list(found.shape)}"
    return f"an object of type {type(found).__name__}"


def colour(images: Pixels) -> Pixels:
    """Return images [n, H, W, 3]; grey ones are repeated."""
    if images.shape[3] not in (1, 3):
        raise DataError(
            f"images have {images.shape[3]} channels; this model.encoder takes grey or colour. "
            "Choose other data, or a module of your own."
        )
    return np.repeat(images, 3, axis=3) if images.shape[3] == 1 else images


def hash_weights(module: nn.Module) -> str:
    """Return a SHA-256 of the layers of a module and of its parameters and buffers."""
    sha = hashlib.sha256(repr(module).encode())
    for name, leaf in module.state_dict().items():
        if not isinstance(leaf, Tensor):
            raise ConfigError(
                f"model.encoder keeps an object of type {type(leaf).__name__} in its state_dict, "
                f"as {name!r}; expected tensors alone. Remove its get_extra_state."
            )
        sha.update(f"{name}:{leaf.dtype}{tuple(leaf.shape)};".encode())
        sha.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()
