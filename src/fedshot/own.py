"""Methods of one's own in processes that fedshot starts: each is known by the file it stands in.

A program that registers a method knows it; the processes that train the cells of a recipe, or a
federation's nodes, are others. They are told the files by the environment, `FEDSHOT_METHODS`, and
load them before they read a configuration. No file is ever named by a configuration or on a wire.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import shlex
import sys
from pathlib import Path

from fedshot.errors import ConfigError
from fedshot.methods import METHODS

FILES = "FEDSHOT_METHODS"


def source(method: str) -> Path | None:
    """Return the file of a method that is not the package's; None for one that is.

    Raises ConfigError for one that no file holds, as in a notebook.
    """
    made = METHODS.get(method)
    if made is None or made.__module__.startswith("fedshot."):
        return None
    try:
        file = Path(inspect.getfile(made)).resolve()
    except (OSError, TypeError):
        file = Path()
    if not file.is_file():
        raise ConfigError(
            f"method {method!r} stands in no file, and the processes that would train it could not "
            "load it. Put it into a file of its own, as examples/fl_proto_momentum.py has it."
        )
    return file


def fingerprint(method: str) -> str:
    """Return the name and the SHA-256 of a method's file; "" for one of the package."""
    file = source(method)
    return f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" if file else ""


def for_children(method: str) -> dict[str, str]:
    """Return what the environment of a process adds that has to know a method."""
    file = source(method)
    return {FILES: str(file)} if file else {}


def program(*methods: str) -> list[str]:
    """Return the words that begin a command about these methods, for people to type."""
    files = dict.fromkeys(file.name for name in methods if (file := source(name)))
    return [*([f"{FILES}={shlex.quote(os.pathsep.join(files))}"] if files else []), "fedshot"]


def load() -> None:
    """Load the files of `FEDSHOT_METHODS`, which may be several, joined as paths of a system are.

    Raises ConfigError for one that is not there, or that registers no method.
    """
    for word in filter(None, os.environ.get(FILES, "").split(os.pathsep)):
        file = Path(word).resolve()
        if not file.is_file():
            raise ConfigError(
                f"{FILES} names {word!r}, where no file is. Name the file of a method of your own."
            )
        if file not in _known():
            _run(file)
        if file not in _known():
            raise ConfigError(
                f"{FILES} names {word!r}, which registers no method. Put @register above its class."
            )


def _known() -> set[Path]:
    return {file for method in METHODS if (file := source(method))}


def _run(file: Path) -> None:
    folder, name = file.parent, file.stem
    while (folder / "__init__.py").exists():  # a module of a package, which may import its siblings
        folder, name = folder.parent, f"{folder.name}.{name}"
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # behind all others: what lies there hides nothing
    if "." in name:
        importlib.import_module(name)
        return
    name = f"fedshot_own_{name}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{FILES} names {str(file)!r}; expected a file that ends in .py.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
