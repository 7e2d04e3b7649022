"""The parts of a configuration: sections, components, and the options of both.

A section, such as `run`, is one dataclass. At other key paths, such as `data`, a `name` chooses one
of several dataclasses, such as `digits`. These are the components; the code calls them kinds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from functools import cache, lru_cache
from typing import Any

from fedshot.config import settings as trees
from fedshot.config.options import Option, nearest_options, options_of, takes_text
from fedshot.config.schema import ModelOptions, RunOptions
from fedshot.config.settings import Settings
from fedshot.core import plugins
from fedshot.data.class_split import SplitOptions
from fedshot.data.encoders.registry import ENCODERS
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions import registry as partitions
from fedshot.data.sources import registry as sources
from fedshot.evaluation.episodic_test import TestOptions
from fedshot.fleets.attacks import ATTACKS
from fedshot.methods.registry import METHODS
from fedshot.nn.heads import HEADS
from fedshot.nn.models import backbones
from fedshot.privacy.differential import LEVELS
from fedshot.protocol.aggregators import AGGREGATORS
from fedshot.protocol.compressors import DOWNLOADS, UPLOADS, Compression

# The components at each key path: their dataclasses by name, and the default name.
KINDS: dict[str, tuple[Mapping[str, type[Any]], str]] = {
    "data": (sources.SOURCES, "digits"),
    "partition": (partitions.PARTITIONS, "iid"),
    "model.backbone": (backbones.BACKBONES, "conv4"),
    "model.head": (HEADS, "linear"),
    "model.encoder": (ENCODERS, "none"),
    "method": (METHODS, "fl_proto"),
    "privacy": (LEVELS, "none"),
    "attack": (ATTACKS, "none"),
    "aggregate": (AGGREGATORS, "mean"),
    "compress.up": (UPLOADS, "none"),
    "compress.down": (DOWNLOADS, "none"),
}
SECTIONS: dict[str, type[Any]] = {
    "split": SplitOptions,
    "episode": EpisodeSpec,
    "model": ModelOptions,
    "run": RunOptions,
    "test": TestOptions,
    "compress": Compression,
}
_PLUGINS = {  # group of entry points -> how its classes are registered
    "fedshot.backbones": backbones.register,
    "fedshot.sources": sources.register,
    "fedshot.partitions": partitions.register,
}
NONE = "none"  # no component at a key path of OPTIONAL
OPTIONAL = ("model.head", "model.encoder", "privacy", "attack", "compress.up", "compress.down")


@cache
def load_plugins() -> None:
    """Load the plugins of this process once. Raises ConfigError as `plugins.load` does."""
    plugins.load(_PLUGINS)


def plugins_in(settings: Settings) -> dict[str, str]:
    """Return the classes of plugins that the settings choose, as "module:class" by key path."""
    chosen = {path: kinds.get(str(trees.at(settings, f"{path}.name")))
              for path, (kinds, _) in KINDS.items() if path != "method"}  # fmt: skip
    return {
        path: f"{cls.__module__}:{cls.__qualname__}"
        for path, cls in chosen.items()
        if cls is not None and not cls.__module__.startswith("fedshot.")
    }


def expand_name(path: str, value: Any) -> Any:
    """Return the value `fl_proto` of a component such as `method` as `{name: fl_proto}`.

    Mappings, and values at other key paths, are returned as they are.
    """
    return {"name": value} if path in KINDS and isinstance(value, str) else value


def expand_names(tree: Mapping[str, Any]) -> Settings:
    """Return settings in which every component is a mapping, so that settings can be merged.

    A component that is given by its name, `method: fl_proto`, becomes `{name: fl_proto}`.
    """
    full: Settings = deepcopy(dict(tree))
    for path in KINDS:
        if isinstance(value := trees.at(full, path), str):
            trees.put(full, path, expand_name(path, value))
    return full


def layered(*layers: Mapping[str, Any]) -> Settings:
    """Merge settings, later layers over earlier ones; components become mappings with a `name`.

    A null removes the value of an earlier layer. A layer that gives only the name of a component,
    such as `head: none`, replaces the earlier component together with its options.
    """
    tree: Settings = {}
    for layer in layers:
        tree = expand_names(trees.without_nulls(trees.merged(tree, layer)))
    return tree


def unknown_option(path: str, names: Mapping[str, str]) -> str:
    """Return the error message for an option that does not exist, with a suggested fix.

    `names` has the name of the chosen component for each key path.
    """
    options = {option.path for option in all_options(names)}
    for section, (kinds, _) in KINDS.items():
        owners = [
            kind
            for kind in kinds
            if any(f"{one.path}.".startswith(f"{path}.") for one in kind_options(section, kind))
        ]
        if owners:
            valid = sorted(one for one in options if one.startswith(f"{section}."))
            has = f"has {', '.join(valid)}" if valid else "has no options"
            return (
                f"{path!r} belongs to {section} {' or '.join(map(repr, owners))}, not to "
                f"{names[section]!r}, which {has}. Remove it, or set {section}.name to "
                f"{owners[0]!r}."
            )
    every = {*options, "name", "seed", *(f"{one}.name" for one in names)}
    return f"there is no option {path!r}. {nearest_options(path, every)}"


def kind_options(path: str, kind: str) -> Iterator[Option]:
    """Yield the options of the component named `kind` at a key path, such as "method"."""
    return options_of(KINDS[path][0][kind], path)


def all_options(names: Mapping[str, str]) -> Iterator[Option]:
    """Yield every option of a configuration except `name` and `seed`.

    `names` has the name of the chosen component for each key path.
    """
    for section, cls in SECTIONS.items():
        yield from options_of(cls, section)
    for path, kind in names.items():
        if kind != NONE:
            yield from kind_options(path, kind)


def defaults(settings: Settings) -> dict[str, Any]:
    """Return key path -> default of the options that apply to the settings and have a default."""
    return {one.path: one.default for one in _options_in(settings) if not one.required}


def is_diagnostic(settings: Settings) -> set[str]:
    """Return the key paths of diagnostic options, which do not affect training."""
    return {one.path for one in _options_in(settings) if one.is_diagnostic}


def difference(
    old: Settings, new: Settings, *, except_for: Collection[str] = (), diagnostics: bool = False
) -> str | None:
    """Describe which settings differ, as `a.b was 1, is 2`; None if none do.

    Args:
        old: settings before. An option that they lack, because it was added later, counts as set
            to its default.
        new: settings now; the components that they name determine the options to compare.
        except_for: key paths to ignore.
        diagnostics: whether to compare diagnostic options too, which do not affect training.
    """
    before, after = dict(trees.flat(expand_names(old))), dict(trees.flat(new))
    for one in _options_in(new):
        if not one.required and (one.path in before or one.path in after):
            before.setdefault(one.path, one.default)
            after.setdefault(one.path, one.default)
    ignored = {*except_for, *(() if diagnostics else is_diagnostic(new))}
    changed = [
        f"{path} was {before.get(path, 'not set')!r}, is {after.get(path, 'not set')!r}"
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path) and path not in ignored
    ]
    return "; ".join(changed) or None


def lacks(settings: Settings, path: str) -> str:
    """Return the error message for an option that the settings do not have; "" if they have it.

    A part of an option, or a section of options, counts as one. The options of a component that
    this process has not loaded are unknown, and count as present.
    """
    names = {
        section: str(trees.at(settings, f"{section}.name") or default)
        for section, (_, default) in KINDS.items()
    }
    own = {section: name for section, name in names.items() if f"{path}.".startswith(f"{section}.")}
    if any(name not in KINDS[section][0] for section, name in own.items()):
        return ""
    has = any(
        f"{path}.".startswith(f"{one.path}.") or f"{one.path}.".startswith(f"{path}.")
        for one in _options_in(settings)
    )
    return "" if has else unknown_option(path, names)


def _options_in(settings: Settings) -> tuple[Option, ...]:
    """Return the options of all sections, and of the components that the settings choose."""
    found = []
    for path, (kinds, default) in KINDS.items():
        section = expand_name(path, trees.at(settings, path)) or {}
        kind = section.get("name", default) if isinstance(section, Mapping) else None
        if isinstance(kind, str) and kind in kinds:
            found.append((path, kind, kinds[kind]))
    return _options_for(tuple(found))


@lru_cache(256)
def _options_for(chosen: tuple[tuple[str, str, type[Any]], ...]) -> tuple[Option, ...]:
    return tuple(all_options({path: kind for path, kind, _ in chosen}))


def every_option() -> Iterator[Option]:
    """Yield the options of all sections and components; a key path may occur several times."""
    load_plugins()
    yield from all_options({})
    for path, (kinds, _) in KINDS.items():
        for kind in kinds:
            yield from kind_options(path, kind)


def is_text(path: str) -> bool:
    """Whether the option at a key path takes text, whichever component is chosen."""
    return path in _texts()


@cache
def _texts() -> frozenset[str]:
    # Several components may have an option at one key path. Unless all of these options take
    # text, YAML decides the type.
    every = list(every_option())
    texts = {one.path for one in every} - {one.path for one in every if not takes_text(one.hint)}
    return frozenset(texts | {"name", *(f"{path}.name" for path in KINDS)})
