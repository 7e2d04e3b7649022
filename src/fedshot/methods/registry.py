"""The methods, by the names they have in configurations and tables."""

from typing import Any, TypeVar

from fedshot.core.errors import ConfigError
from fedshot.core.plugins import place, same_place
from fedshot.protocol.method import Method

METHODS: dict[str, type[Any]] = {}

M = TypeVar("M", bound=type[Any])


def register(method: M) -> M:
    """Register a method in this process, so that configurations can name it.

    This is a class decorator. A class that is defined again, as by a second run of a notebook's
    cell, replaces the earlier one. Raises ConfigError if the class is not a complete
    `fedshot.protocol.method.Method`, or if another method has its name.
    """
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise ConfigError(
            f"{method.__name__} does not inherit from fedshot.protocol.Method. Write "
            f"`class {method.__name__}(Method[State])`, with the type of the server's state."
        )
    name = method.name
    if not name.isidentifier():
        raise ConfigError(
            f"{method.__name__}.name is {name!r}; expected a ClassVar of letters, digits and '_', "
            "such as 'my_method'. Configurations choose the method by this name."
        )
    if "__dataclass_params__" not in vars(method):
        raise ConfigError(
            f"{method.__name__} is not a dataclass. Put @dataclass(frozen=True) below @register."
        )
    missing = sorted(method.__abstractmethods__)
    if method.server_model is Method.server_model and method.evaluate is Method.evaluate:
        missing.append("server_model or evaluate")
    if missing:
        raise ConfigError(
            f"{method.__name__} does not define {', '.join(missing)}, which every method needs."
        )
    if not same_place(METHODS.setdefault(name, method), method):
        raise ConfigError(
            f"two methods have the name {name!r}: {place(METHODS[name])} and {place(method)}. "
            "Choose another `name` for one of them."
        )
    METHODS[name] = method
    return method
