"""Torch modules of the user: passed in Python, or made by a function that a configuration names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from fedshot.core import plugins
from fedshot.core.errors import ConfigError


@dataclass(frozen=True)
class UserModule:
    """A `torch.nn.Module` of the user.

    Args:
        factory: "package.module:function", which returns the module. It runs only if the
            environment variable FEDSHOT_PLUGINS names the Python module, since a configuration
            alone must not run code. null: the module was passed in Python.
        args: keyword arguments of the factory, which runs with torch's generator seeded by 0.
    """

    option: ClassVar[str]  # key path of the section
    argument: ClassVar[str]  # the argument that takes the module in Python

    factory: str | None = None
    args: dict[str, Any] = field(default_factory=dict, hash=False)
    held: nn.Module | None = field(
        default=None, init=False, repr=False, compare=False, kw_only=True
    )

    @classmethod
    def holding(cls, options: Any, module: Any) -> Self:
        """Return `options` with `module`, or the module that it returns if it is a function.

        Raises ConfigError if the options are of another class, or if `module` is neither.
        """
        if not isinstance(options, cls):
            article = "an" if cls.argument[0] in "aeiou" else "a"
            raise ConfigError(
                f"{article} {cls.argument} was passed, and {cls.option} is a "
                f"{type(options).__name__}. Set {cls.option}.name to 'module', or leave "
                f"`{cls.argument}` out."
            )
        return options.hold(module)

    def hold(self, module: Any) -> Self:
        """Return these options with `module`, or the module that it returns if it is a function.

        Raises ConfigError if it is neither.
        """
        if not callable(module):
            raise ConfigError(
                f"{self.argument} is of type {type(module).__name__}; expected a torch.nn.Module, "
                "or a function that returns one."
            )
        found = module if isinstance(module, nn.Module) else called(module, {}, self.argument)
        return self._with_held(found)

    def _with_held(self, module: nn.Module | None, **known: Any) -> Self:
        made = replace(self, **known)
        object.__setattr__(made, "held", module)
        return made

    def module(self, digest: str | None) -> nn.Module:
        """Return a copy of the module that was passed, or the module that the factory returns.

        Raises ConfigError if there is no module, or if the factory may not run or fails. `digest`,
        the hash that a run recorded or None, is for the error message.
        """
        if self.held is not None:
            return deepcopy(self.held)
        if self.factory is None:
            known = f", SHA-256 {digest}" if digest else ""
            raise ConfigError(
                f"{self.option} was a module passed in Python{known}, which no file contains. "
                f"Pass it again in Python, as in fedshot.open_run(folder, {self.argument}=module), "
                f"or set {self.option}.factory."
            )
        where, colon, name = self.factory.partition(":")
        if not colon or not all(word.isidentifier() for word in [*where.split("."), name]):
            raise ConfigError(
                f"{self.option}.factory is {self.factory!r}; expected 'package.module:function'."
            )
        if where not in plugins.modules():
            raise ConfigError(
                f"{self.option}.factory names code of the module {where!r}, which only you can "
                f"allow to run. If you trust it, set {plugins.VARIABLE}={where}."
            )
        try:
            factory = getattr(importlib.import_module(where), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{self.option}.factory is {self.factory!r}, which cannot be imported: {error}. "
                "Correct it, or add its folder to PYTHONPATH."
            ) from error
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # equal random weights in every process
            return called(factory, self.args, self.factory)


def called(factory: Callable[..., Any], args: Mapping[str, Any], name: str) -> nn.Module:
    """Return the module that a user's function returns. Raises ConfigError if it fails."""
    try:
        made = factory(**args)
    except Exception as error:  # a user's code may raise anything
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise ConfigError(
            f"{name} raises an error if it is called with {args}: {reason}. Correct it, or its "
            "arguments."
        ) from error
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"{name} returns an object of type {type(made).__name__}; expected a torch.nn.Module, "
            "whose weights can be hashed. Wrap it in one."
        )
    return made


OF_OTHERS = (
    "gives an example different features alone and in a batch, and a prediction must not depend on "
    "other queries. In the module's forward, remove noise and what mixes the examples of a batch."
)
"""The error for what `alike` finds; it follows the name of the option."""


def alike(x: Tensor, y: Tensor, tolerance: float = 1e-3) -> bool:
    """Whether features are equal, but for rounding, which depends on the size of the batch."""
    if x.shape != y.shape or not x.isfinite().all():
        return x.shape == y.shape  # what is not finite is refused elsewhere
    return torch.allclose(x, y, rtol=tolerance, atol=tolerance * float(x.abs().max()))


def check_features(found: Any, n: int, option: str) -> Tensor:
    """Return `found`, the output of a module for n examples.

    Raises ConfigError unless it is a floating-point tensor [n, d].
    """
    if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != n:
        shape = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else None
        raise ConfigError(
            f"{option} returns {shape or f'an object of type {type(found).__name__}'} for {n} "
            f"examples; expected features, a tensor [{n}, d]. Flatten or pool the output in the "
            "module's forward."
        )
    if not found.is_floating_point():
        raise ConfigError(f"{option} returns {found.dtype}; expected floating point.")
    return found
