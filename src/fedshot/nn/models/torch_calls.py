"""Intercept the torch functions that a block of code calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode


class TorchCalls(TorchFunctionMode):
    """A context manager in which `call` replaces each call of a torch function."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        return self.call(func, args, kwargs or {})

    def call(self, func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]) -> Any:
        """Return the result of `func(*args, **given)`, or a replacement for it."""
        return func(*args, **given)
