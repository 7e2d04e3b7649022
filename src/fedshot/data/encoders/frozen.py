"""The interface of encoders: their options, and the loaded network with its preprocessing."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from fedshot.core.errors import ConfigError, DataError, FedshotError
from fedshot.data.dataset import Features, Kind, Pixels
from fedshot.data.files.fingerprints import hash_json
from fedshot.nn.user_modules import OF_OTHERS, alike, check_features

Block: TypeAlias = Pixels | tuple[str, ...]
"""Images, uint8 [n, H, W, C], or raw texts."""


@dataclass(frozen=True, kw_only=True)
class EncoderOptions(ABC):
    """Options of all encoders.

    Args:
        cache: whether to keep the features in the cache folder, for other runs. The features are
            bitwise the same either way.
        digest: SHA-256 of the encoder's weights and preprocessing; null: recorded when a run
            starts. An encoder with another hash is refused.
    """

    cache: bool = True
    digest: str | None = None

    def load(self, kind: Kind, device: str, data_dir: Path | None = None) -> LoadedEncoder:
        """Load the encoder for data of `kind`; the result's `options` are those to record in a run.

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
                f"model.encoder is not the encoder of this run: its SHA-256 is {found}, but the "
                f"run has {self.digest}. Restore the encoder, or start a new run."
            )
        return loaded

    @abstractmethod
    def _load(self, kind: Kind, device: torch.device, data_dir: Path | None) -> LoadedEncoder:
        """Load the encoder for images or raw texts, as `load` does, but do not check its hash."""

    def recorded(self, facts: Mapping[str, Any], **known: Any) -> Self:
        """Return a copy of these options in which `digest` is the SHA-256 of `facts`.

        `known` gives new values of other options.
        """
        digest = hash_json({"class": type(self).__name__, **facts})
        return replace(self, digest=digest, **known)


class Network(NamedTuple):
    """A network and its preprocessing."""

    module: nn.Module  # maps prepared examples to features, float [n, d]
    prepare: Callable[[Any], Any]  # returns a block of examples as the module takes it


@dataclass(frozen=True)
class LoadedEncoder:
    """A frozen network, read only when it is first used, because features may be in the cache.

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

        Raises ConfigError if the module returns anything other than n rows of finite floats.
        """
        with torch.inference_mode():
            found = np.ascontiguousarray(self._features(inputs, n).float().numpy(force=True))
        if not np.isfinite(found).all():
            raise ConfigError(
                "model.encoder returns NaN or infinity. Check its weights, and whether its output "
                "overflows in half precision."
            )
        return found

    def _features(self, inputs: Any, n: int) -> Tensor:
        module = self.network.module
        try:
            found = module(_to(inputs, self.device))
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            if isinstance(error, FedshotError | torch.OutOfMemoryError):
                raise
            form = list(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
            raise ConfigError(
                f"model.encoder raises an error for inputs {form}: {type(error).__name__}: "
                f"{error}. Change the module's forward, or choose other data."
            ) from error
        return check_features(found, n, "model.encoder")

    def check(self, block: Block) -> None:
        """Raise ConfigError unless the first of two examples has the same features alone."""
        with torch.inference_mode():
            both, alone = (
                self._features(self.network.prepare(some), len(some))
                for some in (block[:2], block[:1])
            )
        if not alike(both[:1], alone, 0.02):
            raise ConfigError(f"model.encoder {OF_OTHERS}")


def _to(inputs: Any, device: torch.device) -> Any:
    if isinstance(inputs, Mapping):
        return {name: _to(value, device) for name, value in inputs.items()}
    return inputs.to(device) if isinstance(inputs, Tensor) else inputs


def colour(images: Pixels) -> Pixels:
    """Return images as uint8 [n, H, W, 3]; the channel of grey images is repeated."""
    if images.shape[3] not in (1, 3):
        raise DataError(
            f"images have {images.shape[3]} channels; this model.encoder takes 1 (grey) or 3 "
            "(colour). Choose other data, or a module of your own."
        )
    return np.repeat(images, 3, axis=3) if images.shape[3] == 1 else images


def hash_weights(module: nn.Module) -> str:
    """Return a SHA-256 of a module's layers, parameters and buffers, non-persistent ones, too.

    Raises ConfigError if its `state_dict` holds anything but tensors.
    """
    sha = hashlib.sha256(repr(module).encode())
    saved = module.state_dict()
    others = {name: leaf for name, leaf in module.named_buffers() if name not in saved}
    for name, leaf in (*saved.items(), *others.items()):
        if not isinstance(leaf, Tensor):
            raise ConfigError(
                f"model.encoder keeps an object of type {type(leaf).__name__} in its state_dict, "
                f"as {name!r}; expected tensors alone. Remove its get_extra_state."
            )
        sha.update(f"{name}:{leaf.dtype}{tuple(leaf.shape)};".encode())
        sha.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()
