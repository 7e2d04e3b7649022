"""A torch module as a pure function of its trained parameters and of batch-norm statistics.

It runs in evaluation mode, with two kinds of layers replaced by fedshot's own: batch norm, which
then follows the `Mode` and returns its statistics, and dropout, which then depends on the seed
alone. All other tensors are constants.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the usual name)
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from fedshot.core.errors import ConfigError
from fedshot.core.tree import Tree
from fedshot.nn.models.layers import batch_norm, dropout
from fedshot.nn.models.mode import Mode
from fedshot.nn.stacks import plain

_TORCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class FunctionalModule:
    """A module that is called as `f(params, stats, x, mode)`, by several threads at once.

    Args:
        module: the module, whose layers are replaced in place.
        choose: returns the names of the trained parameters of the changed module.
        own_norm: whether batch norm follows the mode; else it uses its own running statistics.
    """

    def __init__(
        self, module: nn.Module, choose: Callable[[nn.Module], Collection[str]], *, own_norm: bool
    ) -> None:
        module.cpu().eval()
        run = _Pass()
        self.stats = _replace_layers(module, run, own_norm)
        chosen = choose(module)
        every: dict[str, Tensor] = {
            **dict(module.named_parameters()),
            **dict(module.named_buffers()),
        }
        self.trained = {name: every[name].detach().contiguous() for name in sorted(chosen)}
        self.constants = {name: leaf.detach() for name, leaf in every.items() if name not in chosen}
        first = {id(leaf): name for name, leaf in every.items()}
        shared = [*module.named_parameters(remove_duplicate=False),
                  *module.named_buffers(remove_duplicate=False)]  # fmt: skip
        self._names = {name: first[id(leaf)] for name, leaf in shared}
        self._blank = module.to("meta"), run  # without weights: each thread takes a copy
        self._free: list[tuple[nn.Module, _Pass]] = []
        self._placed: dict[torch.device, tuple[torch.dtype, dict[str, Tensor]]] = {}

    def __call__(
        self, params: Mapping[str, Tensor], stats: Mapping[str, Tree], x: Tensor, mode: Mode
    ) -> tuple[Any, dict[str, Tree]]:
        """Return (the module's output, statistics after this pass).

        `params` are keyed by their names in the module, `stats` by those of its layers.
        """
        given = {**self.constants_on(x.device, x.dtype), **params}
        try:
            module, run = self._free.pop()
        except IndexError:
            module, run = deepcopy(self._blank)
        run.mode, run.stats, run.calls = mode, dict(stats), {}
        try:
            with _PlainAttention():
                found = torch.func.functional_call(
                    module, {at: given[name] for at, name in self._names.items()}, (x,),
                    tie_weights=False,
                )  # fmt: skip
            return found, run.stats
        finally:
            run.mode, run.stats = Mode(), {}
            self._free.append((module, run))

    def constants_on(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors that are not trained, by name, on a device; floats are `dtype`."""
        if device not in self._placed or self._placed[device][0] != dtype:
            placed = {
                name: plain(leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype))
                for name, leaf in self.constants.items()
            }
            self._placed[device] = dtype, placed
        return self._placed[device][1]


@dataclass
class _Pass:
    """What the replaced layers share during one forward pass."""

    mode: Mode = field(default_factory=Mode)
    stats: dict[str, Tree] = field(default_factory=dict)  # by name of the layer
    calls: dict[int, int] = field(default_factory=dict)  # of each dropout layer, by its site


class _Norm(nn.Module):
    """Batch norm with the statistics that the mode of the current forward pass asks for."""

    def __init__(self, layer: _BatchNorm, name: str, run: _Pass) -> None:
        super().__init__()
        ones = torch.ones(layer.num_features)
        self.weight = nn.Parameter(ones, False) if layer.weight is None else layer.weight
        self.bias = nn.Parameter(0 * ones, False) if layer.bias is None else layer.bias
        self.name, self.run, self.eps, self.momentum = name, run, layer.eps, layer.momentum

    def forward(self, x: Tensor) -> Tensor:
        """Return batch norm of x [n, c, ...]; store the updated statistics in the `_Pass`."""
        p, s = {"weight": self.weight, "bias": self.bias}, self.run.stats.get(self.name, {})
        assert self.momentum is not None
        y, after = batch_norm(p, s, x, self.run.mode, self.eps, self.momentum)
        if after:
            self.run.stats[self.name] = after
        return y


class _Dropout(nn.Module):
    """Dropout in training passes, drawn by the seed of the current forward pass."""

    def __init__(self, rate: float, site: int, run: _Pass) -> None:
        super().__init__()
        self.rate, self.site, self.run = rate, site, run

    def forward(self, x: Tensor) -> Tensor:
        """Return x, in training with random elements set to 0.

        Each call in a pass draws a mask of its own.
        """
        mode = self.run.mode
        if mode.train:
            before = self.run.calls.get(self.site, 0)
            self.run.calls[self.site] = before + 1
            mode = mode.layer(before) if before else mode
        return dropout(x, self.rate, mode, self.site)


def _replace_layers(module: nn.Module, run: _Pass, own_norm: bool) -> dict[str, Tree]:
    """Replace dropout layers, and batch-norm layers if `own_norm`.

    Returns the running statistics of the replaced batch-norm layers, by name of the layer.
    """
    stats: dict[str, Tree] = {}
    made: dict[int, nn.Module] = {}
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if id(layer) not in made:
            if type(layer) is nn.Dropout and 0 < layer.p < 1:
                made[id(layer)] = _Dropout(layer.p, len(made) + 1, run)
            elif own_norm and isinstance(layer, _BatchNorm):
                made[id(layer)] = _own_norm(layer, name, run)
                stats[name] = _running(layer)
        if id(layer) in made:
            above, _, last = name.rpartition(".")
            setattr(module.get_submodule(above), last, made[id(layer)])
    return stats


def _own_norm(layer: _BatchNorm, name: str, run: _Pass) -> _Norm:
    if type(layer) not in _TORCH_NORMS or layer.momentum is None:
        raise ConfigError(
            f"the layer {name!r} of the module is a {type(layer).__name__}"
            f"{' with momentum None' if layer.momentum is None else ''}, which cannot follow "
            "model.norm_policy. Put torch's own batch norm in its place, or set "
            "model.backbone.tune to 'lora', 'bias' or 'head', which leave its statistics fixed."
        )
    return _Norm(layer, name, run)


def _running(layer: _BatchNorm) -> Tree:
    if layer.running_mean is None or layer.running_var is None:
        return {"mean": torch.zeros(layer.num_features), "var": torch.ones(layer.num_features)}
    return {"mean": layer.running_mean.detach(), "var": layer.running_var.detach()}


class _PlainAttention(TorchFunctionMode):
    """Computes attention by matrix products, which can be stacked and differentiated twice.

    The fused kernels of torch cannot. While such a mode is active, torch's Transformer layers also
    avoid their fast path for inference, which would skip adapters.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **given)
        if func is F.multi_head_attention_forward:
            wanted = given.get("need_weights", True)
            found, weights = func(*args, **{**given, "need_weights": True})
            return found, weights if wanted else None
        return func(*args, **given)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_attention_math.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return found[0]
