"""An encoder that is a torch module of the user."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from fedshot.core import plugins
from fedshot.core.errors import ConfigError
from fedshot.data.dataset import Kind, Pixels
from fedshot.data.encoders.frozen import EncoderOptions, LoadedEncoder, Network, hash_weights


@dataclass(frozen=True)
class ModuleEncoder(EncoderOptions):
    """A `torch.nn.Module` of your own.

    It takes images as float [n, C, H, W] in [0, 1], or a list of n texts, and returns features
    [n, d]. It normalises its input itself.

    Args:
        factory: "package.module:function", which returns the module. It runs only if the
            environment variable FEDSHOT_PLUGINS names the Python module, since a configuration
            alone must not run code. null: the module was passed in Python.
        args: keyword arguments of the factory.
    """

    factory: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    held: nn.Module | None = field(
        default=None, init=False, repr=False, compare=False, kw_only=True
    )

    def hold(self, encoder: Any) -> Self:
        """Return these options with a module, or the module that a function returns."""
        if not callable(encoder):
            raise ConfigError(
                f"encoder is of type {type(encoder).__name__}; expected a torch.nn.Module, or a "
                "function that returns one."
            )
        module = encoder if isinstance(encoder, nn.Module) else _called(encoder, {}, "encoder")
        made = replace(self)
        object.__setattr__(made, "held", module)
        return made

    def _load(self, kind: Kind, device: torch.device, data_dir: Path | None) -> LoadedEncoder:
        del data_dir
        module = deepcopy(self._module())  # it is frozen, and the user's stays as it is
        options = self.recorded({"weights": hash_weights(module)})
        object.__setattr__(options, "held", self.held)
        if kind == "images":
            return LoadedEncoder(options, lambda: Network(module, _tensor), device)
        return LoadedEncoder(options, lambda: Network(module, list), device, parallel=False)

    def _module(self) -> nn.Module:
        if self.held is not None:
            return self.held
        if self.factory is None:
            known = f", SHA-256 {self.digest}" if self.digest else ""
            raise ConfigError(
                f"model.encoder was a module in a program's memory{known}, and no file holds it. "
                "Pass it again in Python, as encoder=module, or set model.encoder.factory."
            )
        where, colon, name = self.factory.partition(":")
        if not colon or not all(word.isidentifier() for word in [*where.split("."), name]):
            raise ConfigError(
                f"model.encoder.factory is {self.factory!r}; expected 'package.module:function'."
            )
        if where not in plugins.modules():
            raise ConfigError(
                f"model.encoder.factory names code of the module {where!r}, which only you can "
                f"allow to run. If you trust it, set {plugins.VARIABLE}={where}."
            )
        try:
            factory = getattr(importlib.import_module(where), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"model.encoder.factory is {self.factory!r}, which cannot be imported: {error}. "
                "Correct it, or add its folder to PYTHONPATH."
            ) from error
        return _called(factory, self.args, self.factory)


def held(options: EncoderOptions | None, encoder: Any) -> EncoderOptions:
    """Return the options for an encoder that a Python program passes.

    It is a `torch.nn.Module`, or a function that returns one.
    """
    return (ModuleEncoder() if options is None else options).hold(encoder)


def _called(factory: Callable[..., Any], args: dict[str, Any], name: str) -> nn.Module:
    try:
        made = factory(**args)
    except Exception as error:  # a user's code may raise anything
        raise ConfigError(
            f"{name} raises an error if it is called with {args}: {type(error).__name__}: {error}."
        ) from error
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"{name} returns an object of type {type(made).__name__}; expected a torch.nn.Module, "
            "whose weights can be hashed. Wrap it in one."
        )
    return made


def _tensor(images: Pixels) -> Tensor:
    return unit_range(torch.from_numpy(np.array(images)))


def unit_range(images: Tensor) -> Tensor:
    """Return images, uint8 [n, H, W, C], as float [n, C, H, W] in [0, 1]."""
    return images.permute(0, 3, 1, 2).float() / 255
