"""Components from outside the package: backbones, data sources and partitions of a plugin.

A plugin is an installed package with entry points in the groups `fedshot.backbones`,
`fedshot.sources` and `fedshot.partitions`, whose names configurations use, or a module
that the environment variable FEDSHOT_PLUGINS names and that registers its classes. Neither a
configuration nor a message can make a process import a module.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

from fedshot.core.errors import ConfigError, FedshotError

VARIABLE = "FEDSHOT_PLUGINS"

T = TypeVar("T", bound=type[Any])


def modules() -> list[str]:
    """Return the names of the modules in FEDSHOT_PLUGINS, which are separated by commas."""
    words = os.environ.get(VARIABLE, "").split(",")
    return [word.strip() for word in words if word.strip()]


def load(groups: Mapping[str, Callable[[str], Callable[[type[Any]], Any]]]) -> None:
    """Import the plugins and register their classes.

    Args:
        groups: for each group of entry points, a function that takes a name and returns the
            decorator that registers a class by it.

    Raises ConfigError for a plugin that cannot be imported, or a name that is taken.
    """
    for group, register in groups.items():
        for point in entry_points(group=group):
            package = point.dist.name if point.dist else point.value
            origin = f"the entry point {point.name!r} of {package}, in {group},"
            register(point.name)(_imported(origin, point.load))
    for name in modules():
        _imported(f"{VARIABLE} names {name!r}, which", lambda: importlib.import_module(name))  # noqa: B023


def registering(
    table: dict[str, type[Any]], interface: type[Any], name: str
) -> Callable[[T], T]:  # fmt: skip
    """Return the class decorator that adds a class to a table of components.

    The class must be a dataclass with the public attributes of `interface`. Raises ConfigError if
    it is not, or if another class has the name.
    """
    if not name.isidentifier():
        raise ConfigError(f"the name {name!r} cannot be chosen; expected letters, digits and '_'.")

    def register(made: T) -> T:
        wanted = [part for part in vars(interface) if not part.startswith("_")]
        lacking = [part for part in wanted if not hasattr(made, part)]
        if not isinstance(made, type) or "__dataclass_params__" not in vars(made) or lacking:
            needs = f" with {', '.join(lacking)}" if lacking else ""
            raise ConfigError(
                f"{place(made)}, {name!r}, does not fit {interface.__name__}; expected a dataclass"
                f"{needs}. Put @dataclass(frozen=True) above its class, and inherit from "
                f"{interface.__module__}.{interface.__name__}."
            )
        if not same_place(table.setdefault(name, made), made):
            raise ConfigError(
                f"two classes are registered as {name!r}: {place(table[name])} and {place(made)}. "
                "Choose another name for one of them."
            )
        table[name] = made
        return made

    return register


def same_place(old: type[Any], new: type[Any]) -> bool:
    """Whether `new` is `old`, defined again: in a notebook's cell or by `importlib.reload`."""
    return (old.__module__, old.__qualname__) == (new.__module__, new.__qualname__)


def place(made: Any) -> str:
    """Return where a class is defined, for messages."""
    try:
        file, line = inspect.getsourcefile(made), inspect.getsourcelines(made)[1]
    except (OSError, TypeError):  # in a notebook, say
        return f"{made.__module__}.{made.__qualname__}" if isinstance(made, type) else repr(made)
    return f"{made.__qualname__} ({file}, line {line})"


def _imported(origin: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except FedshotError:
        raise
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise ConfigError(
            f"{origin} cannot be imported: {type(error).__name__}: {error}. Correct it, or add its "
            "folder to PYTHONPATH."
        ) from error
