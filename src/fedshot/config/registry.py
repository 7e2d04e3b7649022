"""What a configuration consists of: sections, kinds to choose by name, and all their options."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from fedshot.config import settings as trees
from fedshot.config.options import Option, nearest_options, options_of, takes_text, validated
from fedshot.config.schema import ModelOptions, RunOptions, SplitOptions
from fedshot.config.settings import Settings
from fedshot.core.errors import ConfigError
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.registry import PARTITIONS
from fedshot.data.sources.registry import SOURCES
from fedshot.evaluation.episodic_test import TestOptions
from fedshot.methods.registry import METHODS
from fedshot.methods.removed_options import REMOVED
from fedshot.nn.heads import HEADS
from fedshot.nn.models.backbones import BACKBONES

# Where a `name` chooses a dataclass: place in the tree, choices, default.
KINDS: dict[str, tuple[Mapping[str, type[Any]], str]] = {
    "data": (SOURCES, "digits"),
    "partition": (PARTITIONS, "iid"),
    "model.backbone": (BACKBONES, "conv4"),
    "model.head": (HEADS, "linear"),
    "method": (METHODS, "fl_proto"),
}
SECTIONS: dict[str, type[Any]] = {
    "split": SplitOptions,
    "episode": EpisodeSpec,
    "model": ModelOptions,
    "run": RunOptions,
    "test": TestOptions,
}
# What a method is given besides its options: the base classes of the data, the number of clients,
# whether their images are dealt anew in each round.
_TOLD = {"classes", "clients", "redealt"}
NOT_OPTIONS = {"method": {"model", "episode"} | _TOLD, "model": {"backbone", "head"}}
NO_HEAD = "none"
# The largest whole numbers that are no slip: width of a net, examples, threads.
_MOST = {
    "model.": 65_536,
    "run.threads": 1024,
    "run.workers": 1024,
    "test.episodes": 1_000_000,
    "test.validation_episodes": 1_000_000,
}


def long(place: str, value: Any) -> Any:
    """Write `method: fl_proto`, which is short for it, as `method: {name: fl_proto}`."""
    return {"name": value} if place in KINDS and isinstance(value, str) else value


def written_out(tree: Mapping[str, Any]) -> Settings:
    """Return settings with every kind in its long form, since trees alone are merged by keys."""
    full: Settings = deepcopy(dict(tree))
    for place in KINDS:
        if isinstance(trees.at(full, place), str):
            trees.put(full, place, long(place, trees.at(full, place)))
    return full


def layered(*layers: Mapping[str, Any]) -> Settings:
    """Return the layers one over the other, every kind in its long form.

    A null takes away what lies below it; a kind that is named alone, such as `head: none`, takes
    the place of another with its options.
    """
    tree: Settings = {}
    for layer in layers:
        tree = written_out(trees.layered(tree, layer))
    return tree


def settle(tree: Settings, names: Mapping[str, str]) -> None:
    """Check every value, put in what fits its option, and refuse keys that no option has."""
    options = {option.place: option for option in all_options(names)}
    groups = {place.rsplit(".", i)[0] for place in options for i in range(1, place.count(".") + 1)}
    for place, value in list(trees.flat(tree)):
        if value == {} and (place in groups or place in names):
            continue
        if place in options:
            *above, last = place.split(".")
            trees.at(tree, ".".join(above))[last] = validated(options[place], value)
            continue
        for i in range(1, place.count(".") + 1):
            if (above_it := place.rsplit(".", i)[0]) in options:
                validated(options[above_it], trees.at(tree, above_it))
        if place in groups:
            below = sorted(one for one in options if one.startswith(f"{place}."))
            raise ConfigError(
                f"{place} is {value!r}; expected keys and values below it: {', '.join(below)}."
            )
        raise ConfigError(_unknown(place, options, names))
    for option in options.values():
        if option.required and trees.at(tree, option.place) is None:
            raise ConfigError(
                f"{option.place} is not set, and there is no default. Set it in the file, or with "
                f"--{option.place} VALUE. `fedshot data list` tells the sources."
                if option.place.startswith("data.")
                else f"{option.place} is not set, and there is no default; add --{option.place} "
                "VALUE."
            )


def _unknown(place: str, options: Mapping[str, Option], names: Mapping[str, str]) -> str:
    for section, (kinds, _) in KINDS.items():
        owners = [
            kind
            for kind in kinds
            if any(f"{one.place}.".startswith(f"{place}.") for one in kind_options(section, kind))
        ]
        if owners:
            valid = sorted(one for one in options if one.startswith(f"{section}."))
            has = f"has {', '.join(valid)}" if valid else "has no options"
            return (
                f"{place!r} belongs to {section} {' or '.join(map(repr, owners))}, not to "
                f"{names[section]!r}, which {has}. Remove it, or set {section}.name to "
                f"{owners[0]!r}."
            )
    places = {*options, "name", "seed", *(f"{one}.name" for one in names)}
    return f"there is no option {place!r}. {nearest_options(place, places)}"


def all_options(names: Mapping[str, str]) -> Iterator[Option]:
    """Yield every option of a configuration with these kinds, but `name` and `seed`."""
    for section, cls in SECTIONS.items():
        yield from map(_bounded, options_of(cls, section, NOT_OPTIONS.get(section, ())))
    for place, kind in names.items():
        if kind != NO_HEAD:
            yield from map(_bounded, kind_options(place, kind))


def defaults(settings: Settings) -> dict[str, Any]:
    """Return the default of every option of these kinds, by place; none of a required one.

    Kinds that are not known have none.
    """
    return {one.place: one.default for one in _options_in(settings) if not one.required}


def is_diagnostic(settings: Settings) -> set[str]:
    """Return the places of options that tell more of a training and change nothing of it."""
    return {one.place for one in _options_in(settings) if one.is_diagnostic}


def difference(old: Settings, new: Settings, *, except_for: Collection[str] = ()) -> str | None:
    """Say which settings differ, as `a.b was 1, is 2`; None when none does but what only watches.

    Args:
        old: settings before, maybe of a time when options of today were not yet.
        new: settings now; they say of which kinds the options are.
        except_for: keys that may differ.
    """
    return every_difference(old, new, except_for={*except_for, *is_diagnostic(new)})


def every_difference(
    old: Settings, new: Settings, *, except_for: Collection[str] = ()
) -> str | None:
    """Say which settings differ as `difference` does, those that only watch included."""
    removed = REMOVED.get(str(trees.at(new, "method.name")), {})
    later = defaults(new) | {f"method.{option}": value for option, value in removed.items()}
    return trees.difference(old, new, except_for=except_for, later=later)


def _options_in(settings: Settings) -> tuple[Option, ...]:
    """Return the options of the kinds that settings name, or leave to be the usual ones."""
    found = []
    for place, (kinds, default) in KINDS.items():
        section = long(place, trees.at(settings, place)) or {}
        kind = section.get("name", default) if isinstance(section, Mapping) else None
        if isinstance(kind, str) and kind in kinds:
            found.append((place, kind, kinds[kind]))
    return _options_for(tuple(found))


@lru_cache(256)
def _options_for(chosen: tuple[tuple[str, str, type[Any]], ...]) -> tuple[Option, ...]:
    return tuple(all_options({place: kind for place, kind, _ in chosen}))


def kind_options(place: str, kind: str) -> Iterator[Option]:
    """Yield the options of one kind at its place."""
    return options_of(KINDS[place][0][kind], place, NOT_OPTIONS.get(place, ()))


def _bounded(option: Option) -> Option:
    most = [n for place, n in _MOST.items() if option.place.startswith(place)]
    return replace(option, most=most[0]) if most else option


def is_text(place: str) -> bool:
    """Whether the option at a place takes text, whichever kind is chosen."""
    return place in _texts()


@cache
def _texts() -> frozenset[str]:
    every = [kind_options(place, kind) for place, (kinds, _) in KINDS.items() for kind in kinds]
    every += [options_of(cls, s, NOT_OPTIONS.get(s, ())) for s, cls in SECTIONS.items()]
    hints = [one for options in every for one in options]
    # Kinds may have options of one name and different types: what is no text for one is read as is.
    found = {one.place for one in hints} - {one.place for one in hints if not takes_text(one.hint)}
    return frozenset(found | {"name", *(f"{place}.name" for place in KINDS)})
