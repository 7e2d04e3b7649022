"""Loading of user methods (those defined outside the package) in other processes.

Only the program that registers a method has its class. The processes that train one cell of a
recipe's table, or run the nodes of a federation, do not. Before they read a configuration, they
load the files that the environment variable `FEDSHOT_METHODS` names. Neither a configuration nor a
message can make a process load a file: a server only sends its nodes the name and hash of a
method's file, which the nodes compare with their own.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import shlex
import sys
import traceback
from collections.abc import Hashable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

from fedshot.core.errors import ConfigError, FedshotError
from fedshot.core.regular_files import real_path
from fedshot.methods.registry import METHODS

FILES = "FEDSHOT_METHODS"
_loaded: set[Path] = set()
_loading: list[Path] = []


def source(method: str) -> Path | None:
    """Return the file that defines a user method; None for a method of the package.

    Raises ConfigError for a method that was not defined in a file, but in a notebook, say.
    """
    made = METHODS.get(method)
    if made is None or is_packaged(made):
        return None
    file = _file(made)
    if file is None:
        raise ConfigError(
            f"method {method!r} is not defined in a file, so other processes cannot load it. Put "
            "it into a file of its own; examples/fl_proto_momentum.py is an example."
        )
    return file


def fingerprint(method: str) -> str:
    """Return "NAME HASH", the name and SHA-256 of a user method's file; "" if it has no file.

    The file is read once, so a process that still runs old code also reports the old hash.
    """
    made = METHODS.get(method)
    return "" if made is None or is_packaged(made) else _fingerprint(cast("Hashable", made))


def noted(method: str) -> dict[str, str]:
    """Return the entry that identifies a user method in a record: `{"method_file": fingerprint}`.

    Returns `{}` for a method of the package, which has no fingerprint.
    """
    file = fingerprint(method)
    return {"method_file": file} if file else {}


def for_children(*methods: str) -> dict[str, str]:
    """Return the environment variables that make a new process load these methods.

    Raises ConfigError for a method that is not defined in a file.
    """
    files = dict.fromkeys(str(file) for name in methods if (file := source(name)))
    for path in files:
        if os.pathsep in path:
            raise ConfigError(
                f"{path} has a {os.pathsep!r} in its path, which separates paths in {FILES}. Move "
                "the file."
            )
    return {FILES: os.pathsep.join(files)} if files else {}


def check(wanted: Mapping[str, str]) -> None:
    """Raise ConfigError unless each method in `wanted` has the fingerprint given there."""
    for method, file in wanted.items():
        if fingerprint(method) != file:
            raise ConfigError(
                f"the file of method {method!r} has changed since the command started. Start the "
                "command again: a changed file counts as another method."
            )


def program(*methods: str) -> list[str]:
    """Return the first words of a command line that loads these methods, for use in messages."""
    known = filter(None, map(fingerprint, methods))
    files = dict.fromkeys(file.rpartition(" ")[0] for file in known)
    return [*([f"{FILES}={shlex.quote(os.pathsep.join(files))}"] if files else []), "fedshot"]


def load() -> None:
    """Load the files of `FEDSHOT_METHODS`, separated by `os.pathsep`.

    Raises ConfigError for a file that is missing, raises an error, or registers no method.
    """
    for word in filter(None, os.environ.get(FILES, "").split(os.pathsep)):
        _load(word, FILES)
    for method in _files():
        fingerprint(method)


def load_file(word: str, named_by: str) -> list[str]:
    """Load the file `word`, unless it is loaded already, and return the names of its methods.

    Error messages begin with `named_by`, such as the option that names the file. Raises
    ConfigError as `load` does.
    """
    _load(word, named_by)
    file = real_path(Path(word))
    return sorted(name for name, place in _files().items() if place == file)


def _load(word: str, named_by: str) -> None:
    file, before = real_path(Path(word)), dict(METHODS)
    if not file.is_file() or file.suffix != ".py":
        what = "which does not end in .py" if file.is_file() else "which is not a file"
        raise ConfigError(f"{named_by} names {word!r}, {what}. Name the file of your method.")
    if file in _files().values() or file in _loaded:
        return
    _run(file, named_by)
    _loaded.add(file)
    if before == METHODS:
        raise ConfigError(
            f"{named_by} names {word!r}, which registers no method. Put @register above its class."
        )


def refuse_while_loading(call: str) -> None:
    """Raise ConfigError if a user's file makes the call `call` while this process loads the file.

    Each process that trains a user's method loads its file, and would repeat the whole script.
    """
    if _loading:
        raise ConfigError(
            f"{_loading[-1]} calls {call} while it is loaded, and every process that trains a "
            "method of this file loads the file. Put such calls below "
            '`if __name__ == "__main__":`.'
        )


def where(error: BaseException, file: Path) -> str:
    """Return ", line N" for the last line of `file` in an error's traceback, or ""."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    return f", line {frames[-1].lineno}" if frames else ""


def _file(made: type[Any]) -> Path | None:
    try:
        file = Path(inspect.getfile(made)).resolve()
    except (OSError, TypeError):
        return None
    return file if file.is_file() else None


@cache
def _fingerprint(made: Any) -> str:
    file = _file(made)
    return f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" if file else ""


def _files() -> dict[str, Path]:
    """Return the file of each user method that has one, by the method's name."""
    own = {name: made for name, made in METHODS.items() if not is_packaged(made)}
    return {name: file for name, made in own.items() if (file := _file(made))}


def is_packaged(made: type[Any]) -> bool:
    """Whether a method is one of the package."""
    return made.__module__.startswith("fedshot.")


def _run(file: Path, named_by: str) -> None:
    """Import a user's file.

    As under `python FILE`, the file can import modules from its own folder. It can also import the
    package that it belongs to. Raises ConfigError for any error that the file raises.
    """
    folder, name = file.parent, file.stem
    while (folder / "__init__.py").exists():
        folder, name = folder.parent, f"{folder.name}.{name}"
    name = name.removesuffix(".__init__")
    sys.path[:0] = [str(f) for f in dict.fromkeys((file.parent, folder)) if str(f) not in sys.path]
    _loading.append(file)
    try:
        if _found(name) == file:
            importlib.import_module(name)
            return
        name = f"fedshot_own_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None, "it ends in .py"
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except FedshotError:
        raise
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise ConfigError(
            f"{named_by} names {str(file)!r}, which raises an error{where(error, file)}: "
            f"{type(error).__name__}: {error}."
        ) from error
    finally:
        _loading.pop()


def _found(name: str) -> Path | None:
    """Return the file that `import name` would load; None if there is none."""
    try:  # errors in a user's package are not caught
        spec = importlib.util.find_spec(name) if name.replace(".", "_").isidentifier() else None
    except (ModuleNotFoundError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name != name.partition(".")[0]:
            raise
        return None
    return Path(spec.origin).resolve() if spec and spec.origin and spec.has_location else None
