"""A backbone that is a torch module of the user, fine-tuned in whole or in part."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.extras import require
from fedshot.core.ranges import AtLeast1, check_options
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.nn.models.functional import FunctionalModule
from fedshot.nn.models.layers import Shape, channels_last, contiguous, init_uniform
from fedshot.nn.models.mode import Mode
from fedshot.nn.user_modules import OF_OTHERS, UserModule, alike, check_features

Tune = Literal["none", "head", "norm", "bias", "lora", "all"]
_ADAPTER = ".lora_"  # in the name of each parameter of an adapter
_PROBES = 3  # random examples that the module is tried on


@dataclass(frozen=True)
class ModuleBackbone(UserModule):
    """A `torch.nn.Module` of your own, which a method trains, or fine-tunes in part.

    It takes prepared images, float [n, C, H, W], texts as word vectors, float [n, L, d + 1] with a
    last column that is 1 for a word and 0 for padding, or features, float [n, d]. It returns
    features, float [n, k]. Training starts from the module's own weights, whatever the seed.

    The module runs in evaluation mode. Its `nn.Dropout` is nevertheless active in training, and
    other random layers are not.

    Args:
        tune: which parameters are trained and exchanged; the others stay as they are and are never
            sent. "all" or "none"; those of the "head", the last layer that has any; those of
            each normalisation layer ("norm"); each "bias"; or low-rank adapters of linear layers
            ("lora"), which the library peft of the extra `encoders` adds. A parameter that requires
            no gradient is not trained. Batch norm follows model.norm_policy with "all" and "norm";
            else it uses the module's own running statistics.
        rank: rank of each adapter of "lora".
        alpha: scale of the adapters: their output is multiplied by alpha / rank.
        targets: names of the layers that "lora" adapts, or the ends of their names; null: each
            `nn.Linear`.
        digest: SHA-256 of the module's layers as printed, of the names, shapes and types of the
            trained weights, and of all other tensors; code is not part of it. null: recorded when a
            run starts. A module with another hash is then refused.
    """

    option: ClassVar[str] = "model.backbone"
    argument: ClassVar[str] = "backbone"
    takes: ClassVar[tuple[Literal["images", "text", "features"], ...]] = (
        "images", "text", "features",
    )  # fmt: skip

    tune: Tune = "all"
    rank: AtLeast1 = 8
    alpha: AtLeast1 = 16
    targets: tuple[str, ...] | None = None
    digest: str | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.targets is not None and self.tune != "lora":
            raise ConfigError(
                f"targets is {list(self.targets)}, and tune is {self.tune!r}; only 'lora' adapts "
                "layers. Leave targets out, or set tune to 'lora'."
            )

    def recorded(self) -> Self:
        """Return these options with the module's hash, as a run records them."""
        made = self._with_held(self.held, digest=self._loaded[1])
        made.__dict__["_loaded"] = self._loaded
        return made

    @property
    def net(self) -> FunctionalModule:
        """The module as a function.

        Raises ConfigError as `module` does, or if the module's hash differs from `digest`.
        """
        return self._loaded[0]

    @cached_property
    def _loaded(self) -> tuple[FunctionalModule, str]:
        module = self.module(self.digest)
        _check_weights(module)
        sha = hashlib.sha256(repr(module).encode())
        if not any(module.children()):
            module = nn.Sequential(module)  # only a layer inside a module can be replaced
        if self.tune == "lora":
            _add_adapters(module, self.rank, self.alpha, self.targets)
        net = FunctionalModule(module, self._chosen, own_norm=self.tune in ("all", "norm"))
        forms = [f"{name} {tree.form(leaf)}" for name, leaf in net.trained.items()]
        sha.update("".join([*forms, tree.digest_of(net.constants.items())]).encode())
        digest = sha.hexdigest()
        if self.digest not in (None, digest):
            raise ConfigError(
                f"model.backbone is another module than this run's: its SHA-256 is {digest}, that "
                f"of the run {self.digest}. Restore the module, or start a new run."
            )
        return net, digest

    def _chosen(self, module: nn.Module) -> set[str]:
        """Return the names of the parameters that are trained."""
        if self.tune == "none":
            return set()
        layers = [one for one in module.named_modules() if [*one[1].parameters(recurse=False)]]
        if self.tune == "head":
            layers = layers[-1:]
        if self.tune == "norm":
            layers = [one for one in layers if "norm" in type(one[1]).__name__.lower()]
        inside = {id(leaf) for _, layer in layers for leaf in layer.parameters(recurse=False)}
        names = {
            name
            for name, leaf in module.named_parameters()
            if leaf.requires_grad
            and id(leaf) in inside
            and (self.tune != "bias" or name.endswith("bias"))
            and (self.tune != "lora" or _ADAPTER in name)
        }
        if not names and self.tune == "all":
            raise ConfigError(
                "model.backbone has no parameter that requires a gradient. Pass a network that is "
                "not trained as `encoder`, or set model.backbone.tune to 'none'."
            )
        if not names:
            raise ConfigError(
                f"model.backbone.tune is {self.tune!r}, and the module has no such parameter that "
                "requires a gradient. Set it to 'all' or 'lora', or let the parameters require one."
            )
        return names

    @property
    def trains(self) -> bool:
        """Whether there are parameters to train."""
        return self.tune != "none"

    @property
    def vmappable(self) -> bool:
        """Whether the module runs under `torch.func.vmap`, for all example shapes tried so far."""
        for shape in self._widths:
            if shape not in self._stackable:
                self._stackable[shape] = self._runs_stacked(shape)
        return all(self._stackable.values())

    @cached_property
    def _stackable(self) -> dict[Shape, bool]:
        return {}

    def _runs_stacked(self, shape: Shape) -> bool:
        mode = Mode(True, "batch", torch.tensor(0))
        x = torch.stack([_probe(shape), _probe(shape)])
        params, stats = self.init(Key(0), shape, x.dtype)

        def features(params: Tree, x: Tensor) -> Tensor:
            return self.apply(params, stats, x, mode)[0].sum()

        grad = torch.func.grad(features) if self.trains else features
        try:
            torch.func.vmap(grad)(tree.map(lambda w: torch.stack([w, w]), params), x)
        except Exception:  # the code of a module may raise anything
            return False
        return True

    @property
    def norm_policies(self) -> tuple[str, ...]:
        """All batch-norm policies if batch norm is trained, else ("running",)."""
        return ("running", "support", "transductive") if self.net.stats else ("running",)

    def init(self, key: Key, shape: Shape, dtype: torch.dtype) -> tuple[Tree, Tree]:
        """Return the module's own weights and running statistics; only adapters are random."""
        self.out_features(shape)  # refuse a module that does not fit the data
        params = {name: leaf.to(dtype, copy=True) for name, leaf in self.net.trained.items()}
        for name, leaf in params.items():
            if f"{_ADAPTER}A." in name:  # the other factor of an adapter starts at 0
                inputs = leaf[0].numel()
                drawn = init_uniform(key.at(name), inputs, len(leaf), inputs**-0.5, dtype)
                params[name] = drawn["weight"].view(leaf.shape)
        stats = tree.map(lambda leaf: leaf.to(dtype, copy=True), self.net.stats)
        return _nested(params), _nested(stats)

    def out_features(self, shape: Shape) -> int:
        """Return the number of features. Raises ConfigError if the module returns none."""
        if shape not in self._widths:
            self._widths[shape] = self._tried(shape)
        return self._widths[shape]

    @cached_property
    def _widths(self) -> dict[Shape, int]:
        return {}

    def _tried(self, shape: Shape) -> int:
        """Return the module's number of features for random examples of a shape."""
        x, net = _probe(shape), self.net
        constants = net.constants_on(x.device, x.dtype)
        before = [leaf._version for leaf in constants.values()]
        params = {n: w.to(x.dtype) for n, w in net.trained.items()}
        stats = tree.map(lambda s: s.to(x.dtype), net.stats)

        def features(x: Tensor, params: Mapping[str, Tensor] = params) -> Any:
            return net(params, stats, x, Mode())[0]

        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                once, again = features(x), features(x)
                alone = [features(one[None]) for one in x]
                with torch.enable_grad():
                    learning = features(
                        x, {n: w.detach().requires_grad_() for n, w in params.items()}
                    )
            except ConfigError:
                raise
            except Exception as error:  # the code of a module may raise anything
                reason = f"{type(error).__name__}: {error}".rstrip(".")
                raise ConfigError(
                    f"model.backbone raises an error for examples of shape {list(x.shape)}: "
                    f"{reason}. The data are {_kind(shape)}; change the module's forward, or "
                    "choose other data."
                ) from error
        found = check_features(once, len(x), "model.backbone")
        if not found.isfinite().all():
            raise ConfigError(
                "model.backbone gives features that are not finite, before any training. Check the "
                "weights of the module, and its forward."
            )
        if not torch.allclose(found, again):
            raise ConfigError(
                "model.backbone gives other features for the same examples each time, and a result "
                "must not depend on chance outside the seed. Use nn.Dropout, or remove the noise "
                "in the module's forward."
            )
        singles = [check_features(one, 1, "model.backbone") for one in alone]
        if not all(alike(row[None], one) for row, one in zip(found, singles, strict=True)):
            raise ConfigError(f"model.backbone {OF_OTHERS}")
        if self.trains and not learning.requires_grad:
            raise ConfigError(
                "model.backbone gives features without a gradient: its forward detaches them, runs "
                "under torch.no_grad, or does not use the parameters that model.backbone.tune "
                "selects. Correct it, or pass a network that is not trained as `encoder`."
            )
        changed = [name for (name, leaf), version in zip(constants.items(), before, strict=True)
                   if leaf._version != version]  # fmt: skip
        if changed:
            raise ConfigError(
                f"model.backbone changes its tensor {changed[0]!r} in a forward pass in evaluation "
                "mode; only batch norm may keep statistics. Compute a new tensor instead."
            )
        return found.shape[1]

    def apply(self, params: Tree, stats: Tree, x: Tensor, mode: Mode) -> tuple[Tensor, Tree]:
        """Return (features [n, out_features], statistics after this pass) of prepared examples."""
        x = channels_last(x) if x.ndim == 4 else x  # for equal bits, whatever the strides
        flat = {
            path.replace("/", "."): contiguous(leaf) if leaf.ndim > 2 else leaf
            for path, leaf in tree.items(params)
        }
        found, after = self.net(flat, dict(_by_layer(stats, "")), x, mode)
        if not torch.compiler.is_exporting():
            found = check_features(found, len(x), "model.backbone")
            if self._widths and found.shape[1] not in self._widths.values():
                raise ConfigError(
                    f"model.backbone gives {found.shape[1]} features here, and "
                    f"{next(iter(self._widths.values()))} before. Make the number of features of "
                    "the module the same for all examples."
                )
        return found.to(x.dtype), _nested(after)


def _check_weights(module: nn.Module) -> None:
    """Raise ConfigError for weights without values, and for TorchScript with its fixed weights."""
    if any(isinstance(one, torch.jit.ScriptModule) for one in module.modules()):
        raise ConfigError("model.backbone is TorchScript. Pass the module that it was made from.")
    for name, leaf in module.named_parameters():
        if is_lazy(leaf) or leaf.is_meta:
            raise ConfigError(
                f"model.backbone has no values for {name!r}. Load its weights, or call it once."
            )


def _add_adapters(
    module: nn.Module, rank: int, alpha: int, targets: tuple[str, ...] | None
) -> None:
    """Add low-rank adapters, W + alpha / rank * B A, to layers of a module."""
    require("encoders", "model.backbone.tune 'lora'", "peft")
    from peft import LoraConfig, inject_adapter_in_model

    linear = [name for name, layer in module.named_modules() if type(layer) is nn.Linear]
    if targets is None and not linear:
        raise ConfigError(
            "model.backbone.tune is 'lora', and the module has no nn.Linear. Name the layers to "
            "adapt, such as convolutions, in model.backbone.targets."
        )
    # peft takes a list as ends of names, and a text as a pattern of whole names.
    wanted = "|".join(map(re.escape, linear)) if targets is None else list(targets)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=wanted)
    try:
        with torch.random.fork_rng(devices=[]):  # `init` draws the adapters again
            torch.default_generator.manual_seed(0)
            inject_adapter_in_model(config, module)
        if any(f"{_ADAPTER}embedding_" in name for name, _ in module.named_parameters()):
            raise ValueError("one of them is an nn.Embedding.")
    except ValueError as error:
        raise ConfigError(
            f"model.backbone.targets is {linear if targets is None else list(targets)}, which the "
            f"module cannot adapt: {error} Name linear layers or convolutions of the module."
        ) from error


def _probe(shape: Shape) -> Tensor:
    """Return three random inputs of the module, float32 [3, ...], for data of a shape."""
    dims = shape
    if len(shape) == 3:
        dims = (shape[2], *shape[:2])
    elif len(shape) == 2:
        dims = (shape[0], shape[1] + 1)
    x = torch.rand(_PROBES, *dims, generator=torch.Generator().manual_seed(0))
    if len(shape) == 2:
        x[..., -1] = 1.0  # words, without padding
    return x


def _kind(shape: Shape) -> str:
    return {3: "images [n, C, H, W]", 2: "word vectors [n, L, d + 1]"}.get(
        len(shape), "features [n, d]"
    )


def _nested(flat: Mapping[str, Tree]) -> Tree:
    """Return nested dicts from leaves whose names have dots."""
    made: dict[str, Tree] = {}
    for name, leaf in flat.items():
        *above, last = name.split(".")
        node = made
        for part in above:
            node = node.setdefault(part, {})
        node[last] = leaf
    return made


def _by_layer(stats: Tree, name: str) -> Iterator[tuple[str, Tree]]:
    """Yield (layer name, its {"mean", "var"}) from nested statistics of the submodule `name`."""
    for part, node in stats.items():
        at = f"{name}.{part}" if name else part
        if node.keys() == {"mean", "var"} and isinstance(node["mean"], Tensor):
            yield at, node
        else:
            yield from _by_layer(node, at)
