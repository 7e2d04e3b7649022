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
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace

from fedshot import storage
from fedshot.data import PARTITIONS, SOURCES, ClassSplit, Dataset, Dealer, EpisodeSpec, Source
from fedshot.data.tokens import Tokens
from fedshot.errors import ConfigError, nearest
from fedshot.evaluation import ExamOptions
from fedshot.keys import Key
from fedshot.methods import METHODS
from fedshot.nn import BACKBONES, HEADS, Backbone, Head, Model
from fedshot.protocol import Method

Settings = dict[str, Any]


@dataclass(frozen=True)
class SplitOptions:
    """Which classes train, choose and test; without any of it, the data's own split.

    Args:
        base: classes to train on: names, numbers, or ranges such as "0-4".
        validation: classes that choose the round; may be empty.
        novel: classes to test on.
        random: draw this many base, validation and novel classes instead.
    """

    base: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    novel: tuple[str, ...] = ()
    random: tuple[int, int, int] | None = None

    def of(self, dataset: Dataset, standard: ClassSplit | None, key: Key) -> ClassSplit:
        """Return the split of a dataset. Raises ConfigError when nothing says what it is."""
        if self.random is not None:
            if self.base or self.validation or self.novel:
                raise ConfigError("split.random and named classes exclude each other; use one.")
            return ClassSplit.at_random(dataset, *self.random, key.at("split"))
        if self.base or self.validation or self.novel:
            return ClassSplit.from_names(dataset, self.base, self.validation, self.novel)
        if standard is None:
            raise ConfigError(
                f"{dataset.name} has no split of its own; set split.base and split.novel to class "
                "names, or split.random to three numbers of classes."
            )
        return standard


@dataclass(frozen=True)
class ModelOptions:
    """A model before it knows the data."""

    backbone: Backbone
    head: Head | None
    norm_policy: Literal["running", "support", "transductive"] = "running"
    dtype: Literal["float32", "float64"] = "float32"
    pixel_mean: float = 0.5
    pixel_std: float = 0.5

    def build(self, dataset: Dataset) -> Model:
        """Return the model for the images of a dataset, or for its texts and their vectors."""
        x = dataset.x
        return Model(
            self.backbone,
            self.head,
            dataset.shape,
            self.norm_policy,
            self.dtype,
            self.pixel_mean,
            self.pixel_std,
            torch.tensor(x.table) if isinstance(x, Tokens) else None,
        )


@dataclass(frozen=True)
class Chances:
    """A rehearsal of failing clients: the probability, per reply in training, of each trouble.

    Args:
        drop: the reply is lost.
        delay: it comes after all the others.
        corrupt: it comes with NaN, wrong shapes, a part missing, or a weight that cannot be.
    """

    drop: float = 0.0
    delay: float = 0.0
    corrupt: float = 0.0

    def __post_init__(self) -> None:
        shares = (self.drop, self.delay, self.corrupt)
        if not (all(share >= 0 for share in shares) and sum(shares) <= 1):
            raise ConfigError(
                f"run.unreliable is drop {self.drop}, delay {self.delay}, corrupt {self.corrupt}; "
                "expected probabilities that add up to 1 at most."
            )


@dataclass(frozen=True)
class RunOptions:
    """How long, how many, and what to do when clients fail.

    Args:
        rounds: communication rounds.
        cohort: clients sampled per round; null for all.
        quorum: share of a cohort whose replies must be usable.
        below_quorum: "stop" the run, or "skip" the round and go on from the state before it.
        unable: clients that cannot form an episode: "refuse" the run, or "leave_out" the clients.
        validate_every: rounds between two looks at the validation classes; the last round always.
        checkpoint_every: rounds between two checkpoints; the best and the last round always.
        threads: intra-op threads of torch. Bits may differ between two values, never within one.
        unreliable: rehearse failing clients.
    """

    rounds: int = 100
    cohort: int | None = None
    quorum: float = 0.5
    below_quorum: Literal["stop", "skip"] = "stop"
    unable: Literal["refuse", "leave_out"] = "refuse"
    validate_every: int = 10
    checkpoint_every: int = 1
    threads: int = 1
    unreliable: Chances = Chances()

    def __post_init__(self) -> None:
        for name in ("rounds", "validate_every", "checkpoint_every", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"run.{name} is {getattr(self, name)}; expected at least 1.")
        if self.cohort is not None and self.cohort < 1:
            raise ConfigError(f"run.cohort is {self.cohort}; expected at least 1, or null for all.")
        if not 0 <= self.quorum <= 1:
            raise ConfigError(f"run.quorum is {self.quorum}; expected a share in [0, 1].")


@dataclass(frozen=True)
class Config:
    """A checked configuration. `settings` is the whole tree, defaults included."""

    settings: Settings
    name: str
    seed: int
    data: Source
    split: SplitOptions
    partition: Dealer
    episode: EpisodeSpec
    model: ModelOptions
    method: Callable[[Model], Method[Any]]
    run: RunOptions
    test: ExamOptions

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Config:
        """Check a tree of settings.

        Raises:
            ConfigError: an unknown key or name, a missing one, or a value of the wrong type.
        """
        return _read(settings)

    def write(self, path: Path) -> None:
        """Write the settings as YAML."""
        text = yaml.safe_dump(self.settings, sort_keys=False)
        storage.write_bytes(path, text.encode(), sync=True)


# Where a `name` chooses a dataclass: place in the tree, choices, default.
_KINDS: dict[str, tuple[Mapping[str, type[Any]], str]] = {
    "data": (SOURCES, "digits"),
    "partition": (PARTITIONS, "iid"),
    "model.backbone": (BACKBONES, "conv4"),
    "model.head": (HEADS, "linear"),
    "method": (METHODS, "fl_proto"),
}
_NO_HEAD = "none"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def load(path: Path) -> Settings:
    """Read settings from a YAML file. Raises ConfigError when it is not a tree of settings."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds {type(settings).__name__}; expected keys and values.")
    return settings


def override(settings: Mapping[str, Any], arguments: list[str]) -> Settings:
    """Return the settings with `--a.b value` (or `--a.b=value`) arguments put in."""
    merged = deepcopy(dict(settings))
    queue = list(arguments)
    while queue:
        option, equals, value = queue.pop(0).partition("=")
        if not option.startswith("--") or len(option) < 3:
            raise ConfigError(f"{option!r} is not an option; expected --section.key value.")
        if not equals:
            if not queue:
                raise ConfigError(f"{option} has no value; write {option} VALUE.")
            value = queue.pop(0)
        try:
            _put(merged, option[2:].split("."), yaml.safe_load(value))
        except yaml.YAMLError:
            raise ConfigError(f"{option} has the value {value!r}, which is not YAML.") from None
    return merged


def difference(old: Settings, new: Settings) -> str | None:
    """Say which settings differ, as `a.b was 1, is 2`; None when none does."""
    before, after = dict(_flat(old)), dict(_flat(new))
    changed = [
        f"{key} was {before.get(key, 'not set')!r}, is {after.get(key, 'not set')!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
    return "; ".join(changed) or None


def options(method: str) -> str:
    """Return the help text of a method's options."""
    if method not in METHODS:
        raise ConfigError(f"there is no method {method!r}. {nearest(method, METHODS)}")
    parser = _new_parser()
    parser.add_class_arguments(METHODS[method], "method", skip={"model", "episode"})
    text: str = parser.format_help()
    return text[text.index("\n\n") :].strip()


def _read(settings: Mapping[str, Any]) -> Config:
    tree = deepcopy(dict(settings))
    name, seed = tree.pop("name", "run"), tree.pop("seed", 0)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"name is {name!r}; expected letters, digits, '.', '_' and '-', because it names a "
            "folder."
        )
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ConfigError(f"seed is {seed!r}; expected a whole number.")
    names = {place: _take_kind(tree, place) for place in _KINDS}
    parser = _parser(names)
    _check_keys(parser, tree)
    try:
        found = parser.parse_object(tree)
        made = parser.instantiate(found)
    except ArgumentError as error:
        raise ConfigError(_plain(str(error))) from None
    kept: Settings = {"name": name, "seed": seed, **_plain_values(found)}
    for place, kind in names.items():
        _put(kept, [*place.split("."), "name"], kind)
    return Config(
        settings=_names_first(kept),
        name=name,
        seed=seed,
        data=made.data,
        split=made.split,
        partition=made.partition,
        episode=made.episode,
        model=ModelOptions(
            **(vars(made.model) | {"head": vars(made.model).get("head")}),
        ),
        method=_method(names["method"], vars(made.method), made.episode),
        run=made.run,
        test=made.test,
    )


def _method(
    name: str, chosen: Mapping[str, Any], episode: EpisodeSpec
) -> Callable[[Model], Method[Any]]:
    return lambda model: METHODS[name](model=model, episode=episode, **chosen)


def _take_kind(tree: Settings, place: str) -> str:
    """Remove and return the `name` at a place; the choice must exist."""
    kinds, default = _KINDS[place]
    *above, last = place.split(".")
    section = tree
    for part in above:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{part} is {section!r}; expected keys and values.")
    value = section.get(last, {})
    if isinstance(value, str):  # `method: fl_proto` is short for `method: {name: fl_proto}`
        value = {"name": value}
    if not isinstance(value, dict):
        raise ConfigError(f"{place} is {value!r}; expected a name, or keys and values.")
    section[last] = value = dict(value)
    kind = value.pop("name", default)
    if place == "model.head" and kind == _NO_HEAD:
        if value:
            raise ConfigError(f"{place}.name is 'none', which has no options; got {value}.")
        del section[last]
        return _NO_HEAD
    if kind not in kinds:
        valid = [*kinds, _NO_HEAD] if place == "model.head" else kinds
        raise ConfigError(f"{place}.name is {kind!r}. {nearest(str(kind), valid)}")
    return str(kind)


def _new_parser() -> Any:
    return ArgumentParser(exit_on_error=False, add_help=False, prog="fedshot")


def _parser(names: Mapping[str, str]) -> Any:
    parser = _new_parser()
    for place, cls in (("split", SplitOptions), ("run", RunOptions), ("test", ExamOptions)):
        parser.add_class_arguments(cls, place)
    parser.add_class_arguments(EpisodeSpec, "episode")
    for place, (kinds, _) in _KINDS.items():
        if names[place] != _NO_HEAD:
            skip = {"model", "episode"} if place == "method" else set()
            # The method is built later, when the data is known.
            parser.add_class_arguments(
                kinds[names[place]], place, skip=skip, instantiate=place != "method"
            )
    parser.add_class_arguments(ModelOptions, "model", skip={"backbone", "head"}, instantiate=False)
    return parser


def _check_keys(parser: Any, tree: Settings) -> None:
    """Refuse keys that no option has, naming the nearest one."""
    valid = {key for key in parser.get_defaults(skip_validation=True).keys()}  # noqa: C416, SIM118
    groups = {key.rsplit(".", i)[0] for key in valid for i in range(1, key.count(".") + 1)}
    for key, _ in _flat(tree):
        parts = key.split(".")
        if any(".".join(parts[: i + 1]) in valid for i in range(len(parts))):
            continue
        if key in groups:
            raise ConfigError(f"{key} needs keys and values below it.")
        near = [v for v in valid if v.rpartition(".")[0] == key.rpartition(".")[0]] or valid
        raise ConfigError(f"there is no option {key!r}. {nearest(key, {*near, 'name', 'seed'})}")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif not isinstance(value, Mapping):
            yield f"{prefix}{key}", value


def _put(tree: Settings, path: list[str], value: Any) -> None:
    for part in path[:-1]:
        below = tree.setdefault(part, {})
        if isinstance(below, str):
            below = tree[part] = {"name": below}
        if not isinstance(below, dict):
            raise ConfigError(f"{'.'.join(path)}: {part} is {below!r}, which has no keys.")
        tree = below
    tree[path[-1]] = value


def _plain_values(found: Any) -> Any:
    """Turn namespaces and tuples into dicts and lists, so that YAML and JSON give them back."""
    if isinstance(found, Namespace):
        return {key: _plain_values(value) for key, value in vars(found).items()}
    if isinstance(found, tuple | list):
        return [_plain_values(value) for value in found]
    return found


def _names_first(tree: Settings) -> Settings:
    ordered = {"name": tree["name"], **tree} if "name" in tree else tree
    return {k: _names_first(v) if isinstance(v, dict) else v for k, v in ordered.items()}


def _plain(message: str) -> str:
    """Shorten the parser's message to what its reader needs."""
    return " ".join(message.split())
