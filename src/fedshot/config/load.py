"""Configurations: trees of plain values, such as this one, validated and turned into dataclasses.

    data: {name: digits}
    partition: {name: dirichlet, clients: 10, alpha: 10}
    method: {name: fl_proto, local_steps: 10}

`name` chooses a dataclass, and the other keys are its options. An omitted option takes the
dataclass's default. An unknown key is an error, whose message suggests the nearest valid key.
Command-line options (`--method.local_steps 5`) are parsed into the same kind of tree as files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from fedshot.config import settings as trees
from fedshot.config.options import is_section, members
from fedshot.config.registry import (
    KINDS,
    NONE,
    OPTIONAL,
    SECTIONS,
    expand_name,
    expand_names,
    is_text,
    load_plugins,
    unknown_option,
)
from fedshot.config.schema import ModelOptions, RunOptions
from fedshot.config.settings import Settings
from fedshot.config.validation import built, checked, value_of, with_option_path
from fedshot.core import storage
from fedshot.core.errors import ConfigError, as_path, brief, nearest
from fedshot.core.plugins import VARIABLE
from fedshot.data.class_split import SplitOptions
from fedshot.data.dataset import Dataset
from fedshot.data.encoders.frozen import EncoderOptions
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import Partitioner
from fedshot.data.partitions.resampled import Resampled
from fedshot.data.sources.in_memory import InMemory
from fedshot.data.sources.registry import SOURCES
from fedshot.data.sources.source import Source
from fedshot.evaluation.episodic_test import TestOptions
from fedshot.fleets.attacks import Attack
from fedshot.methods.registry import METHODS, check_traits
from fedshot.methods.user_methods import FILES
from fedshot.nn.models.backbones import Backbone
from fedshot.nn.models.model import Model
from fedshot.privacy.differential import Privacy
from fedshot.protocol.aggregators import Aggregator, PlainMean
from fedshot.protocol.compressors import Compression
from fedshot.protocol.method import Method

# Key paths without components of plugins.
_CLOSED = ("model.head", "model.encoder", "compress.up", "compress.down")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


# Makes a method from the model, the base classes, and the number of clients.
MethodMaker = Callable[[Model, tuple[int, ...], int], Method[Any]]


@dataclass(frozen=True)
class Config:
    """A validated configuration: the whole tree `settings`, and the objects that it describes.

    `settings` includes defaults. If a copy replaces an object (`dataclasses.replace(config,
    run=...)`), `settings` and the objects that depend on it are updated.

    Raises ConfigError if only `settings` is replaced, or if the class of a new object has no name
    in configurations. Only `data` may be of any class: see `with_data`.
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
    attack: Attack | None = None
    aggregate: Aggregator = PlainMean()
    privacy: Privacy | None = None
    compress: Compression = Compression()
    _made_of: Settings | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if type(self.data) not in SOURCES.values():
            object.__setattr__(self, "data", InMemory.of(self.data))
        settings = _settings_of(self)
        if settings != self.settings:
            if self._made_of not in (None, self.settings):
                raise ConfigError(
                    "settings were replaced, but not the objects that they describe; expected "
                    "both to agree. Make the configuration with Config.of(settings)."
                )
            parts = _parts(settings) | {"data": self.data}
            # Modules that were passed in Python are not in the settings.
            model = self.model
            parts["model"] = replace(parts["model"], backbone=model.backbone, encoder=model.encoder)
            for name, part in parts.items():
                object.__setattr__(self, name, part)
        object.__setattr__(self, "_made_of", self.settings)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Config:
        """Return the configuration that a tree of settings describes.

        Raises:
            ConfigError: a key or name is unknown or missing, or a value has the wrong type.
        """
        if not isinstance(settings, Mapping):
            raise ConfigError(
                f"settings are {repr(settings)[:60]}; expected keys and values, such as {{'data': "
                "{'name': 'digits'}}. fedshot.config.load.load reads them from a file."
            )
        return cls(**_parts(settings))

    @property
    def divides(self) -> bool:
        """Whether each client divides all of its own examples into support and queries."""
        asks = {field.name for field in fields(METHODS[self.settings["method"]["name"]])}
        return "resampled" in asks and not isinstance(self.partition, Resampled)

    @property
    def training_episode(self) -> EpisodeSpec | None:
        """The shape of the episodes that each client must be able to form.

        It is None if the method trains on no episodes: a client then needs one example only.
        """
        method = METHODS[self.settings["method"]["name"]]
        return self.episode if method.trains_on_episodes else None

    def with_threads(self, threads: int) -> Config:
        """Return a copy with this number of intra-op threads."""
        return replace(self, run=replace(self.run, threads=threads))

    def with_data(self, data: Dataset | Source) -> Config:
        """Return a copy with another dataset, or another source, which may be of any class.

        For a dataset in memory, the settings record its name and hash. If it does not define a
        split of its classes, the section `split` must define one.
        """
        return replace(self, data=data)  # type: ignore[arg-type]  # a dataset becomes a source

    def with_encoder(self, encoder: EncoderOptions | None) -> Config:
        """Return a copy with another encoder, or without one."""
        return replace(self, model=replace(self.model, encoder=encoder))

    def with_backbone(self, backbone: Backbone) -> Config:
        """Return a copy with another backbone."""
        return replace(self, model=replace(self.model, backbone=backbone))

    def with_noise(self, noise: float) -> Config:
        """Return a copy of a private configuration with this noise multiplier."""
        assert self.privacy is not None
        return replace(self, privacy=replace(self.privacy, noise=noise))

    def write(self, path: Path) -> None:
        """Write the settings as YAML."""
        text = yaml.safe_dump(self.settings, sort_keys=False)
        storage.write_bytes(path, text.encode(), sync=True)


def load(path: Path | str) -> Settings:
    """Read settings from a YAML file. Raises ConfigError if it does not hold a tree of settings."""
    return trees.load(as_path("path", path), is_text)


def override(
    settings: Mapping[str, Any], arguments: list[str]
) -> tuple[Settings, list[str]]:  # fmt: skip
    """Merge command-line arguments, `--a.b value` or `--a.b=value`, over the settings of a file.

    Returns the merged settings, and notices for the user. If an argument chooses another component
    than the file, such as another method, the file's options that the new component lacks are
    dropped, and a notice names them. Raises ConfigError for an argument that is not an option, or
    has no value.
    """
    given: Settings = {}
    for option, text in _pairs(arguments):
        path = option.removeprefix("--")
        value = trees.parse(text, is_text, origin=f"the value of {option}", path=path)
        trees.put(given, path, expand_name(path, value))
    return merge_over(settings, given)


def merge_over(settings: Mapping[str, Any], given: Settings) -> tuple[Settings, list[str]]:
    """Merge the settings `given` over those of a file, as `override` does for arguments."""
    below = expand_names(settings)
    notices = [text for path in KINDS if (text := _drop_other_kind(below, given, path))]
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


def _drop_other_kind(below: Settings, given: Settings, path: str) -> str:
    """Remove the old component's options from `below` if `given` names another one at `path`.

    An option stays if the new component has the same option and accepts its value.

    Returns a notice that names the removed options, or "".
    """
    kinds, default = KINDS[path]
    old, new = trees.at(below, path), trees.at(given, path)
    if not isinstance(old, dict) or not isinstance(new, dict) or "name" not in new:
        return ""
    was, now = old.get("name", default), new["name"]
    if was == now or was not in [*kinds] or now not in [*kinds, NONE]:
        return ""
    had, has = ({} if kind == NONE else _types(kinds[kind], path) for kind in (was, now))
    lost = [key for key, value in old.items()
            if key in had and not _carries_over(had[key], has.get(key), value)]  # fmt: skip
    kept = {key: value for key, value in old.items() if key not in {*lost, "name"}}
    trees.put(below, path, None)  # clear first: the next `put` would merge
    trees.put(below, path, kept)
    if not lost:
        return ""
    names = ", ".join(f"{path}.{key}" for key in lost)
    stay = f"; {', '.join(f'{path}.{key}' for key in kept)} stays" if kept else ""
    return f"ignored from the file: {names}, set for {was!r}; {path} is now {now!r}{stay}"


def _types(cls: type[Any], path: str) -> dict[str, Any]:
    """Return the type of each option of a dataclass, by name; Any for nested options."""
    return {one.name: Any if is_section(hint) else hint for one, hint, _ in members(cls, path)}


def _carries_over(had: Any, has: Any, value: Any) -> bool:
    """Whether a new component accepts an option's value.

    `had` and `has` are the option's types in the old and the new component; `has` is None if the
    new component lacks the option.
    """
    if has is None or had == has:
        return has is not None
    try:
        value_of("", has, value)
    except ConfigError:
        return False
    return True


def _settings_of(config: Config | SimpleNamespace) -> Settings:
    """Return the tree of settings that describes the objects in a configuration.

    Raises ConfigError for an object of a class that has no name.
    """
    if not isinstance(config.method, _Maker):
        raise ConfigError(
            f"method is of type {type(config.method).__name__}, which no settings can name. "
            "Register the method's class, and choose it by method.name."
        )
    method, chosen = METHODS[config.method.name], SimpleNamespace(**config.method.chosen)
    head, encoder = config.model.head, config.model.encoder
    return {
        "name": config.name,
        "seed": config.seed,
        "split": _plain(SplitOptions, "split", config.split),
        "episode": _plain(EpisodeSpec, "episode", config.episode),
        "run": _plain(RunOptions, "run", config.run),
        "test": _plain(TestOptions, "test", config.test),
        "data": _kind_of("data", config.data),
        "partition": _kind_of("partition", config.partition),
        "model": {
            "backbone": _kind_of("model.backbone", config.model.backbone),
            "head": {"name": NONE} if head is None else _kind_of("model.head", head),
            # Left out if there is none.
            **({} if encoder is None else {"encoder": _kind_of("model.encoder", encoder)}),
            **_plain(ModelOptions, "model", config.model),
        },
        "method": {"name": config.method.name, **_plain(method, "method", chosen)},
        # Left out unless they are chosen.
        **({} if config.privacy is None else {"privacy": _kind_of("privacy", config.privacy)}),
        **({} if config.attack is None else {"attack": _kind_of("attack", config.attack)}),
        **({} if config.aggregate == PlainMean()
           else {"aggregate": _kind_of("aggregate", config.aggregate)}),
        **({} if config.compress == Compression() else {"compress": _compression(config.compress)}),
    }  # fmt: skip


def _compression(options: Compression) -> Settings:
    chosen = {way: {"name": NONE} if one is None else _kind_of(f"compress.{way}", one)
              for way, one in (("up", options.up), ("down", options.down))}  # fmt: skip
    return chosen | _plain(Compression, "compress", options)


def _kind_of(path: str, part: Any) -> Settings:
    kinds = KINDS[path][0]
    for name, kind in kinds.items():
        if kind is type(part):
            return {"name": name, **_plain(kind, path, part)}
    raise ConfigError(
        f"{path} is of type {type(part).__name__}, which no settings can name. "
        f"{nearest(type(part).__name__, [kind.__name__ for kind in kinds.values()])}"
    )


def _plain(cls: type[Any], path: str, part: Any) -> Settings:
    """Return an object's options in YAML's types: dicts for dataclasses, lists for tuples."""
    found: Settings = {}
    for one, hint, value in members(cls, path, part):
        plain = _plain(hint, f"{path}.{one.name}", value) if is_section(hint) else value
        found[one.name] = list(plain) if isinstance(plain, tuple) else plain
    return found


def _parts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Validate a tree of settings; return the fields of a `Config` for it."""
    load_plugins()
    tree = _nested(settings)
    name = value_of("name", str, tree.pop("name", "run"))
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"name is {name[:120]!r}; expected up to 100 letters from a to z, digits, '.', "
            "'_' and '-', because it names a folder."
        )
    seed = value_of("seed", int, tree.pop("seed", 0))
    kinds = {path: _take_kind(tree, path) for path in KINDS}
    names = {path: kind for path, (kind, _) in kinds.items()}
    given = {path: options for path, (_, options) in kinds.items()}
    given |= {path: tree.pop(path, None) for path in SECTIONS}
    for path, _ in trees.flat(tree):
        raise ConfigError(unknown_option(path, names))
    method = METHODS[names["method"]]
    classes = SECTIONS | {path: KINDS[path][0][kind] for path, kind in names.items()
                          if kind != NONE}  # fmt: skip
    values = {  # null is an empty section
        path: checked(cls, path, {} if given[path] is None else given[path], names)
        for path, cls in classes.items()
    }
    chosen = {one.name: values["method"].get(one.name, default)
              for one, _, default in members(method, "method")}  # fmt: skip
    model = values["model"]
    if model.get("norm_policy", "method") == "method":
        model["norm_policy"] = method.norm_policy(chosen)
    parts = {path: built(cls, path, values[path]) for path, cls in classes.items()
             if path not in ("model", "method", "compress")}  # fmt: skip
    parts["model"] = ModelOptions(
        parts.pop("model.backbone"),
        parts.pop("model.head", None),
        encoder=parts.pop("model.encoder", None),
        **model,
    )
    ways = {way: parts.pop(f"compress.{way}", None) for way in ("up", "down")}
    parts["compress"] = Compression(**ways, **values["compress"])
    parts["method"] = _Maker(names["method"], chosen, parts["episode"], parts["partition"])
    parts = {"privacy": None, "attack": None} | parts | {"name": name, "seed": seed}
    return {"settings": _settings_of(SimpleNamespace(**parts)), **parts}


@dataclass(frozen=True)
class _Maker:
    """Makes the configured method once the model and the data are known.

    A method class with these fields also gets `classes` (the base classes), `clients` (the number
    of clients), and `resampled` (whether the images are assigned to clients again in each episode).
    """

    name: str
    chosen: Mapping[str, Any]
    episode: EpisodeSpec
    partition: Partitioner

    def __call__(self, model: Model, classes: tuple[int, ...], clients: int) -> Method[Any]:
        cls = METHODS[self.name]
        resampled = isinstance(self.partition, Resampled)
        given = {"classes": classes, "clients": clients, "resampled": resampled}
        asks = {field.name for field in fields(cls)} & given.keys()
        known: dict[str, Any] = {name: given[name] for name in asks}
        with with_option_path("method", cls):
            made: Method[Any] = cls(model=model, episode=self.episode, **known, **self.chosen)
        check_traits(made)
        return made


def _nested(tree: Mapping[str, Any]) -> Settings:
    """Return a copy of settings in which dotted keys, such as `run.rounds`, are nested."""
    full: Settings = {}
    for key, value in tree.items():
        trees.put(full, str(key), _nested(value) if isinstance(value, Mapping) else deepcopy(value))
    return full


def _take_kind(tree: Settings, path: str) -> tuple[str, Settings]:
    """Remove the component at `path` from the tree; return its name and options.

    If no name is given, the default component is used. Raises ConfigError for an unknown name.
    """
    kinds, default = KINDS[path]
    above, _, last = path.rpartition(".")
    if above and tree.get(above) is None:
        tree[above] = {}
    section = tree[above] if above else tree
    if not isinstance(section, dict):
        raise ConfigError(
            f"{above} is {brief(section)}; expected keys and values, such as {path}.name."
        )
    value = expand_name(path, section.pop(last, {}))
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is {brief(value)}; expected a name, or keys and values.")
    kind = value.pop("name", default)
    valid = [*kinds, NONE] if path in OPTIONAL else [*kinds]
    if kind not in valid:
        known = (
            f"file: {FILES}=my_method.py" if path == "method" else f"module: {VARIABLE}=my_module"
        )
        own = " (One of your own is known to the program that registers it, and elsewhere by its "
        hint = nearest(str(kind), valid) + (f"{own}{known}.)" if path not in _CLOSED else "")
        raise ConfigError(f"{path}.name is {kind!r}. {hint}")
    if kind == NONE and path in OPTIONAL and value:
        raise ConfigError(
            f"{path}.name is 'none', which has no options; got {value}. Set {path}.name: "
            f"{', '.join(kinds)}."
        )
    return kind, value
