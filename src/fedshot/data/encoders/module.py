"""An encoder that is the user's own torch module."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from fedshot.core.errors import ConfigError
from fedshot.data.dataset import Kind, Pixels
from fedshot.data.encoders.frozen import EncoderOptions, LoadedEncoder, hash_weights

MODULES = "FEDSHOT_ENCODERS"


@dataclass(frozen=True)
class ModuleEncoder(EncoderOptions):
    """A `torch.nn.Module` of your own.

    It takes images as float [n, C, H, W] in [0, 1], or a list of n texts, and returns features
    [n, d]. It normalises its input itself.

    Args:
        factory: "package.module:function", which returns the module. It runs only if the
            environment variable FEDSHOT_ENCODERS names the Python module, since a configuration
            alone must not run code. null: the module was passed in Python.
        args: keyword arguments of the factory.
    """

    factory: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    held: nn.Module | None = field(
        default=None, init=False, repr=False, compare=False, kw_only=True
    )

    def hold(self, encoder: Any) -> Self:
        """Return a copy of these options that uses `encoder`, a module or a function that makes it.

        Raises ConfigError for anything else.
        """
        if not callable(encoder):
            raise ConfigError(
                f"encoder is of type {type(encoder).__name__}; expected a torch.nn.Module, or a "
                "function that returns one."
            )
        module = encoder if isinstance(encoder, nn.Module) else _called(encoder, {}, "encoder")
        made = replace(self)
        object.__setattr__(made, "held", module)
        return made

    def _load(self, kind: Kind, device: torch.device) -> LoadedEncoder:
        module = deepcopy(self._module())  # it is frozen, and the user's stays as it is
        options = self.recorded({"weights": hash_weights(module)})
        object.__setattr__(options, "held", self.held)
        if kind == "images":
            return LoadedEncoder(options, module, _tensor, device)
        return LoadedEncoder(options, module, list, device, parallel=False)

    def _module(self) -> nn.Module:
        if self.held is not None:
            return self.held
        if self.factory is None:
            known = f", SHA-256 {self.digest}" if self.digest else ""
            raise ConfigError(
                f"model.encoder was a module passed in Python{known}, which no file contains. "
                "Pass it again in Python, as encoder=module, or set model.encoder.factory."
            )
        where, colon, name = self.factory.partition(":")
        if not colon or not all(word.isidentifier() for word in [*where.split("."), name]):
            raise ConfigError(
                f"model.encoder.factory is {self.factory!r}; expected 'package.module:function'."
            )
        if where not in os.environ.get(MODULES, "").split(","):
            raise ConfigError(
                f"model.encoder.factory names code of the module {where!r}, which only you can "
                f"allow to run. If you trust it, set {MODULES}={where}."
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
    """Return the configured encoder options, or new ones, with an encoder passed in Python.

    The encoder is a `torch.nn.Module`, or a function that returns one.
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
