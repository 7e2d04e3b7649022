"""Configurations: one tree of plain values, checked against the dataclasses that it configures.

    data: {name: digits}
    partition: {name: dirichlet, clients: 10, alpha: 10}
    method: {name: fl_proto, local_steps: 10}

`name` chooses the kind, the other keys are its options. What is not said has the dataclass's
default; an unknown key is refused with the nearest valid one. A file and the command line
(`--method.local_steps 5`) make the same tree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace

from fedshot.config import settings as trees
from fedshot.config.options import Option, validated, with_option_path
from fedshot.config.registry import (
    KINDS,
    NO_HEAD,
    NOT_OPTIONS,
    SECTIONS,
    difference,
    is_text,
    kind_options,
    long,
    settle,
    written_out,
)
from fedshot.config.schema import Chances, ModelOptions, RunOptions, SplitOptions
from fedshot.config.settings import Settings
from fedshot.core import storage
from fedshot.core.errors import ConfigError, as_path, nearest
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import Partitioner
from fedshot.data.partitions.redealt import Redealt
from fedshot.data.sources.in_memory import InMemory
from fedshot.data.sources.registry import SOURCES
from fedshot.data.sources.source import Source
from fedshot.evaluation.episodic_test import TestOptions
from fedshot.methods.registry import METHODS
from fedshot.methods.removed_options import without_removed
from fedshot.methods.user_methods import FILES
from fedshot.nn.models.model import Model
from fedshot.protocol.method import Method

__all__ = [
    "Chances",
    "Config",
    "ModelOptions",
    "RunOptions",
    "Settings",
    "SplitOptions",
    "difference",
    "load",
    "override",
]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


# Of the model, the base classes, and the number of clients.
MethodMaker = Callable[[Model, tuple[int, ...], int], Method[Any]]


@dataclass(frozen=True)
class Config:
    """A checked configuration. `settings` is the whole tree, defaults included.

    Where a part is replaced, as by `dataclasses.replace`, `settings` and what was made of the old
    part follow. A part that settings cannot name is refused with ConfigError; only data may be of a
    program's own: see `with_data`. So are other settings beside the old parts.
    """

    settings: Settings
    name: str
    seed: int
    data: Source
    split: SplitOptions
    partition: Partitioner
    episode: EpisodeSpec
    model: ModelOptions
    method: MethodMaker
    run: RunOptions
    test: TestOptions
    _made_of: Settings | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if type(self.data) not in SOURCES.values():
            object.__setattr__(self, "data", InMemory.of(self.data))
        told = _told(self)
        if told != self.settings:
            if self._made_of not in (None, self.settings):
                raise ConfigError(
                    "settings are replaced, and the parts that they describe are not: expected "
                    "both to agree. Make the configuration with Config.of(settings)."
                )
            for name, part in (_parts(told) | {"data": self.data}).items():
                object.__setattr__(self, name, part)
        object.__setattr__(self, "_made_of", self.settings)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Config:
        """Check a tree of settings.

        Raises:
            ConfigError: an unknown key or name, a missing one, or a value of the wrong type.
        """
        if not isinstance(settings, Mapping):
            raise ConfigError(
                f"settings are {repr(settings)[:60]}; expected keys and values, such as {{'data': "
                "{'name': 'digits'}}. fedshot.config.load.load reads them from a file."
            )
        return cls(**_parts(settings))

    @property
    def divides(self) -> bool:
        """Whether clients divide all that they hold in support and queries, by themselves."""
        asks = {field.name for field in fields(METHODS[self.settings["method"]["name"]])}
        return "redealt" in asks and not isinstance(self.partition, Redealt)

    @property
    def changed_meaning(self) -> str:
        """Return what these settings meant otherwise in older runs, "" for nothing."""
        meant: str = METHODS[self.settings["method"]["name"]].changed_meaning(self.settings)
        return meant

    def with_threads(self, threads: int) -> Config:
        """Return the configuration with the number of intra-op threads said."""
        if self.run.threads == threads:
            return self
        settings = trees.merged(self.settings, {"run": {"threads": threads}})
        return replace(self, run=replace(self.run, threads=threads), settings=settings)

    def with_data(self, data: Dataset | Source) -> Config:
        """Return the configuration with a dataset of the program's own, or a source of any class.

        Settings record the name and the hash of what is in memory. Without a split of its own it
        needs the section `split`.
        """
        return replace(self, data=data)  # type: ignore[arg-type]  # a dataset becomes a source

    def write(self, path: Path) -> None:
        """Write the settings as YAML."""
        text = yaml.safe_dump(self.settings, sort_keys=False)
        storage.write_bytes(path, text.encode(), sync=True)


def load(path: Path | str) -> Settings:
    """Read settings from a YAML file. Raises ConfigError when it is not a tree of settings."""
    return trees.load(as_path("path", path), is_text)


def override(
    settings: Mapping[str, Any], arguments: list[str]
) -> tuple[Settings, list[str]]:  # fmt: skip
    """Put `--a.b value` (or `--a.b=value`) arguments over the settings of a file.

    Returns the settings and what a person should know: where the arguments choose another kind than
    the file, the file's options that the new kind does not have are left out.
    """
    given: Settings = {}
    for option, text in _pairs(arguments):
        place = option.removeprefix("--")
        value = trees.parse(text, is_text, origin=f"the value of {option}", place=place)
        trees.put(given, place, long(place, value))
    below = written_out(settings)
    notices = [text for place in KINDS if (text := _drop_other_kind(below, given, place))]
    return trees.merged(below, given), notices


def _pairs(arguments: list[str]) -> Iterator[tuple[str, str]]:
    queue = list(arguments)
    while queue:
        option, equals, value = queue.pop(0).partition("=")
        if not option.startswith("--") or len(option) < 3:
            raise ConfigError(
                f"{option!r} is not an option; expected --section.key VALUE, such as "
                "--run.rounds 50. A value of several words needs quotes."
            )
        if not equals:
            if not queue or queue[0].startswith("--"):
                raise ConfigError(f"{option} has no value; write {option} VALUE.")
            value = queue.pop(0)
        yield option, value


def _drop_other_kind(below: Settings, given: Settings, place: str) -> str:
    """Take from `below` the options of a kind that `given` replaces; say which."""
    kinds, default = KINDS[place]
    old, new = long(place, trees.at(below, place)), trees.at(given, place)
    if not isinstance(old, dict) or not isinstance(new, dict) or "name" not in new:
        return ""
    was, now = old.get("name", default), new["name"]
    if was == now or was not in kinds or (now not in kinds and now != NO_HEAD):
        return ""
    had, has = _top(place, was), _top(place, now) if now in kinds else set()
    lost = [key for key in old if key in had - has or _another(place, was, now, key, old[key])]
    kept = {key: value for key, value in old.items() if key not in {*lost, "name"}}
    trees.put(below, place, None)  # or the two would be merged
    trees.put(below, place, kept)
    if not lost:
        return ""
    names = ", ".join(f"{place}.{key}" for key in lost)
    stay = f"; {', '.join(f'{place}.{key}' for key in kept)} stays" if kept else ""
    return f"the file's {names} left out: of {was!r}, and {place} is now {now!r}{stay}"


def _another(place: str, was: str, now: str, key: str, value: Any) -> bool:
    """Whether two kinds mean different things by a key, and the value is none for the new one."""
    if now == NO_HEAD:
        return False
    old, new = (
        next((one for one in kind_options(place, kind) if one.place == f"{place}.{key}"), None)
        for kind in (was, now)
    )
    if old is None or new is None or old.hint == new.hint:
        return False
    try:
        validated(new, value)
    except ConfigError:
        return True
    return False


def _top(place: str, kind: str) -> set[str]:
    depth = place.count(".") + 1
    return {one.place.split(".")[depth] for one in kind_options(place, kind)}


def _told(config: Config) -> Settings:
    """Return the settings that the parts of a configuration come to.

    Raises ConfigError for a part that no settings can name.
    """
    tree: Settings = {"name": config.name, "seed": config.seed}
    for section in ("split", "episode", "run", "test"):
        tree[section] = _fields(getattr(config, section))
    for place in ("data", "partition"):
        tree[place] = _kind_of(place, getattr(config, place))
    model = _fields(config.model, NOT_OPTIONS["model"])
    model["backbone"] = _kind_of("model.backbone", config.model.backbone)
    head = config.model.head
    model["head"] = {"name": NO_HEAD} if head is None else _kind_of("model.head", head)
    if not isinstance(config.method, _Maker):
        raise ConfigError(
            f"method is of type {type(config.method).__name__}, which no settings can name. "
            "Register the method's class, and choose it by method.name."
        )
    method = {"name": config.method.name, **_plain_values(dict(config.method.chosen))}
    return tree | {"model": model, "method": method}


def _kind_of(place: str, part: Any) -> Settings:
    names = [name for name, kind in KINDS[place][0].items() if kind is type(part)]
    if not names:
        raise ConfigError(
            f"{place} is of type {type(part).__name__}, which no settings can name. "
            f"{nearest(type(part).__name__, [kind.__name__ for kind in KINDS[place][0].values()])}"
        )
    return {"name": names[0], **_fields(part)}


def _fields(part: Any, skip: Collection[str] = ()) -> Settings:
    """Return what a dataclass was made of, as plain values."""
    found = {one.name: getattr(part, one.name) for one in fields(part) if one.init}
    return {name: _plain_values(value) for name, value in found.items() if name not in skip}


def _parts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Check a tree of settings; return the fields of the configuration that it is."""
    tree = deepcopy(dict(settings))
    name = validated(Option("name", str), tree.pop("name", "run"))
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"name is {name[:120]!r}; expected up to 100 letters, digits, '.', '_' and '-', "
            "because it names a folder."
        )
    seed = validated(Option("seed", int), tree.pop("seed", 0))
    for section in SECTIONS:
        if tree.get(section, {}) is None:  # `run:` with nothing below it
            del tree[section]
    names = {place: _take_kind(tree, place) for place in KINDS}
    if reason := METHODS[names["method"]].retired(trees.at(tree, "method")):
        raise ConfigError(reason)
    tree["method"] = without_removed(names["method"], trees.at(tree, "method"))
    settle(tree, names)
    chosen = [(place, KINDS[place][0][name]) for place, name in names.items() if name != NO_HEAD]
    parser = _parser(tuple(chosen))
    try:
        found = parser.parse_object(tree)
        if found.model.norm_policy == "method":
            found.model.norm_policy = METHODS[names["method"]].norm_policy(vars(found.method))
        with with_option_path(_plain_values(found)):
            made = parser.instantiate(found)
    except ArgumentError as error:
        raise ConfigError(" ".join(str(error).split())) from None
    kept: Settings = {"name": name, "seed": seed, **_plain_values(found)}
    for place, kind in names.items():
        trees.put(kept, place, {"name": kind})
    return {
        "settings": _names_first(kept),
        "name": name,
        "seed": seed,
        "data": made.data,
        "split": made.split,
        "partition": made.partition,
        "episode": made.episode,
        "model": ModelOptions(**(vars(made.model) | {"head": vars(made.model).get("head")})),
        "method": _Maker(names["method"], vars(made.method), made.episode, made.partition),
        "run": made.run,
        "test": made.test,
    }


@dataclass(frozen=True)
class _Maker:
    """What makes the method once the data is known.

    Fields `classes` and `clients` get the base classes and the number of clients, `redealt` whether
    images are dealt anew in each round.
    """

    name: str
    chosen: Mapping[str, Any]
    episode: EpisodeSpec
    partition: Partitioner

    def __call__(self, model: Model, classes: tuple[int, ...], clients: int) -> Method[Any]:
        cls = METHODS[self.name]
        redealt = isinstance(self.partition, Redealt)
        told = {"classes": classes, "clients": clients, "redealt": redealt}
        asks = {field.name for field in fields(cls)} & told.keys()
        known: dict[str, Any] = {name: told[name] for name in asks}
        settings = {"method": {key: _plain_values(value) for key, value in self.chosen.items()}}
        with with_option_path(settings):
            made: Method[Any] = cls(model=model, episode=self.episode, **known, **self.chosen)
        return made


def _take_kind(tree: Settings, place: str) -> str:
    """Remove and return the `name` at a place; the choice must exist."""
    kinds, default = KINDS[place]
    *above, last = place.split(".")
    section = tree
    for part in above:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ConfigError(
                f"{part} is {section!r}; expected keys and values, such as {place}.name."
            )
    value = long(place, section.get(last, {}))
    if not isinstance(value, dict):
        raise ConfigError(f"{place} is {value!r}; expected a name, or keys and values.")
    section[last] = value = dict(value)
    kind = value.pop("name", default)
    if place == "model.head" and kind == NO_HEAD:
        if value:
            raise ConfigError(f"{place}.name is 'none', which has no options; got {value}.")
        del section[last]
        return NO_HEAD
    if not isinstance(kind, str) or kind not in kinds:
        valid = [*kinds, NO_HEAD] if place == "model.head" else kinds
        own = (
            " (One of your own is known to the program that registers it, and elsewhere by its "
            f"file: {FILES}=my_method.py.)"
        )
        hint = nearest(str(kind), valid) + (own if place == "method" else "")
        raise ConfigError(f"{place}.name is {kind!r}. {hint}")
    return kind


def _new_parser() -> Any:
    return ArgumentParser(exit_on_error=False, add_help=False, prog="fedshot")


@lru_cache(maxsize=32)
def _parser(chosen: tuple[tuple[str, Any], ...]) -> Any:
    """Return the parser for the places and the classes chosen there.

    Kept, because a recipe of a hundred cells asks for the same few again and again, and making one
    takes as long as reading with it.
    """
    parser = _new_parser()
    for section, cls in SECTIONS.items():
        if section != "model":
            parser.add_class_arguments(cls, section)
    for place, cls in chosen:
        # The method is built later, when the data is known.
        skip = NOT_OPTIONS.get(place, set())
        parser.add_class_arguments(cls, place, skip=skip, instantiate=place != "method")
    skip = NOT_OPTIONS["model"]
    parser.add_class_arguments(ModelOptions, "model", skip=skip, instantiate=False)
    return parser


def _plain_values(found: Any) -> Any:
    """Turn namespaces and tuples into dicts and lists, so that YAML and JSON give them back."""
    if isinstance(found, Namespace):
        return {key: _plain_values(value) for key, value in vars(found).items()}
    if isinstance(found, Mapping):
        return {key: _plain_values(value) for key, value in found.items()}
    if is_dataclass(found) and not isinstance(found, type):
        return _fields(found)
    if isinstance(found, tuple | list):
        return [_plain_values(value) for value in found]
    return found


def _names_first(tree: Settings) -> Settings:
    ordered = {"name": tree["name"], **tree} if "name" in tree else tree
    return {k: _names_first(v) if isinstance(v, dict) else v for k, v in ordered.items()}
