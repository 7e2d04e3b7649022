"""The methods, by the names they have in configurations and tables."""

from dataclasses import fields
from functools import cached_property
from inspect import get_annotations, getattr_static
from types import FunctionType
from typing import Any, TypeVar

from fedshot.core.errors import ConfigError, MethodError
from fedshot.core.plugins import place, same_place
from fedshot.protocol.method import Method, Traits

METHODS: dict[str, type[Any]] = {}

M = TypeVar("M", bound=type[Any])


def register(method: M) -> M:
    """Register a method in this process, so that configurations can name it.

    This is a class decorator. A class that is defined again, as by a second run of a notebook's
    cell, replaces the earlier one. Raises ConfigError if the class is not a complete
    `fedshot.protocol.method.Method`, if its options are not fields with names of their own, or if
    another method has its name.
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
    _check_members(method)
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


_SIMPLE = ("bool", "int", "float", "str", "tuple")  # types of options that can be shown as they are


def check_traits(method: Method[Any]) -> None:
    """Raise MethodError unless a method's `traits` are `Traits`."""
    found: Any = method.traits
    if not isinstance(found, Traits):
        raise MethodError(
            f"{type(method).__name__}.traits returned a {type(found).__name__}; expected Traits. "
            "Write `return replace(super().traits, ...)`, with the traits that differ."
        )


def _check_members(method: type[Any]) -> None:
    """Raise ConfigError for options that would not be options, or hide a member of the class."""
    name, options = method.__name__, {one.name for one in fields(method)}
    inherited = set().union(*(get_annotations(base) for base in method.__mro__))
    typed = get_annotations(method).keys() | (inherited - options)  # own types, and constants
    for one, value in vars(method).items():
        is_data = not (callable(value) or hasattr(value, "__get__"))
        if is_data and not one.startswith("_") and one not in typed:
            kind = type(value).__name__
            option = f"`{one}: {kind} = ...`, or " if kind in _SIMPLE else ""
            raise ConfigError(
                f"{name}.{one} has no type, so it is no option. Write {option}"
                f"`{one}: ClassVar = ...` for a constant."
            )
    functions = (FunctionType, property, cached_property, classmethod, staticmethod)
    for one in sorted(options):
        found = [vars(base)[one] for base in method.__mro__ if one in vars(base)]
        if any(isinstance(value, functions) for value in found):
            raise ConfigError(
                f"{name}.{one} is an option, and also a function or property of the class. Give "
                "the option another name."
            )
    if isinstance(getattr_static(method, "traits"), FunctionType):
        raise ConfigError(f"{name}.traits is not a property. Put @property above it.")
