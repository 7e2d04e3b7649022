"""Building and loading the C kernels of this package, with the compiler of this machine.

Without a compiler, on systems other than Linux and macOS, or with FEDSHOT_KERNELS=off, `library()`
is None and callers use torch operations. The library is stored in the cache, in a folder of the
current user. Its name holds a hash of source, compiler and processor, and a hash of its content: a
library that is stale, truncated, or writable by other users is not loaded but rebuilt.

On a busy machine a build may take up to half an hour. If it then fails for lack of time, memory or
disk, the run ends with a BuildError: a run must not mix rounds with and without kernels.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from fedshot.core import storage
from fedshot.core.errors import BuildError
from fedshot.core.locks import locked

# No fast-math: NaN must stay NaN, and sums keep the order of the source.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared")
_SOURCES = (
    "lanes.h", "fused.c", "elementwise.c", "recurrent.c", "rows.c", "lstm.c",
    "stem.c", "winograd.c", "products.c", "tiles.c", "prototypes.c",
)  # fmt: skip
_TYPES = {
    "size": ctypes.c_ssize_t, "float": ctypes.c_float, "double": ctypes.c_double,
    "int32_t": ctypes.c_int32,
}  # fmt: skip
# Lines of /proc/cpuinfo that identify a processor, on x86, ARM and RISC-V.
_TRAITS = ("model name", "flags", "Features", "CPU implementer", "CPU part", "isa")
_SLOW = 30.0  # seconds after which a notice is printed
_LIMIT = 1800.0  # seconds after which the compiler counts as hung; usually it takes about twenty
# Errors that may be gone on another try: error numbers, and words of the compiler's messages.
_TEMPORARY = (errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
_TEMPORARY_WORDS = (
    "killed", "terminated program", "no space left", "cannot allocate", "out of memory",
    "memory exhausted",
)  # fmt: skip
_OPEN_TO_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@cache
def library() -> ctypes.CDLL | None:
    """Return the library of C kernels, built at the first call; None if it cannot be built here.

    If there is a compiler but it fails, the reason is printed to stderr. Raises BuildError if the
    compiler was killed or lacked memory, disk or time: another try may succeed.
    """
    if os.environ.get("FEDSHOT_KERNELS", "").lower() in ("off", "0", "no", "false"):
        return None
    if sys.platform not in ("linux", "darwin"):
        return None
    why = []
    for compiler in _compilers():
        try:
            with _notice(compiler[0]):
                return _built(compiler)
        except (OSError, AttributeError, subprocess.SubprocessError) as error:
            why.append(f"{shlex.join(compiler)}: {_reason(error)}")
            if _is_temporary(error):
                raise BuildError(
                    f"the C kernels cannot be built for now ({why[-1]}). Try again with more "
                    "memory or disk free, or set FEDSHOT_KERNELS=off to run without them; results "
                    "then differ in the last digits."
                ) from error
    if why:
        print(
            f"fedshot: the C kernels cannot be built ({'; '.join(why)}). Torch operations are used "
            "instead, which are slower and differ in the last digits. Set FEDSHOT_KERNELS=off to "
            "use them without this notice.",
            file=sys.stderr,
        )
    return None


def kind() -> str:
    """Return "compiled" if the C kernels are used here, "plain" if torch operations are.

    Their results differ in the last digits.
    """
    return "plain" if library() is None else "compiled"


def _compilers() -> Iterator[list[str]]:
    """Yield the commands to try: $CC with its options and wrappers, then the usual names."""
    try:
        own = shlex.split(os.environ.get("CC", ""))
    except ValueError:  # an unclosed quotation mark
        own = []
    for command in filter(None, (own, ["cc"], ["gcc"], ["clang"])):
        path = shutil.which(command[0])
        if path:
            yield [path, *command[1:]]


def _built(compiler: list[str]) -> ctypes.CDLL:
    """Return the library from the cache, building it first if it is missing.

    If several processes need the missing library, one compiles it and the others wait. If the cache
    cannot be used, this process compiles a library for itself only.
    """
    source = _source()
    version = _run([*compiler, "--version"], b"")
    parts = (source, version, shlex.join([*compiler, *_FLAGS]).encode(), _processor().encode())
    name = "fused-" + hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]
    folder = storage.cache_folder() / f"kernels-{os.geteuid()}"
    if (found := _found(folder, name)) is not None:
        return found
    with ExitStack() as stack:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            stack.enter_context(locked(folder / f"{name}.lock"))
            if (found := _found(folder, name)) is not None:
                return found
        library = _compiled(compiler, source)
        try:
            return _loaded(_kept(library, folder, name))
        except OSError:
            with tempfile.TemporaryDirectory(prefix="fedshot-") as private:
                return _loaded(_kept(library, Path(private), name))


def _source() -> bytes:
    folder = resources.files("fedshot.nn.kernels") / "c"
    return b"".join(folder.joinpath(name).read_bytes() for name in _SOURCES)


def _signatures() -> dict[str, list[Any]]:
    """Return the argument types of the C functions, as their source declares them."""
    functions = re.findall(r"^void (fedshot_\w+)\(([^)]*)\)", _source().decode(), re.MULTILINE)
    return {
        name: [
            ctypes.c_void_p if "*" in parameter else _TYPES[parameter.split()[-2]]
            for parameter in parameters.split(",")
        ]
        for name, parameters in functions
    }


def _found(folder: Path, name: str) -> ctypes.CDLL | None:
    """Return the library from the cache; None if it is missing, damaged, or not trusted."""
    for path in sorted(folder.glob(f"{name}-*.so")):
        with suppress(OSError, AttributeError):
            return _loaded(path)
    return None


def _compiled(compiler: list[str], source: bytes) -> bytes:
    with tempfile.TemporaryDirectory(prefix="fedshot-") as folder:
        made = Path(folder, "fused.so")
        _run([*compiler, *_FLAGS, "-x", "c", "-", "-o", str(made), "-lm"], source)
        return made.read_bytes()


def _kept(library: bytes, folder: Path, name: str) -> Path:
    """Write the library atomically, with its hash in the file's name; return the path."""
    path = folder / f"{name}-{hashlib.sha256(library).hexdigest()}.so"
    storage.write_bytes(path, library, sync=True, mode=0o700)
    return path


def _loaded(path: Path) -> ctypes.CDLL:
    """Load a library after checking its hash, and that only this user or root can write it.

    Loading a truncated file would kill the process with a signal.
    """
    _check(path.parent.lstat(), path.parent)
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        _check(os.fstat(handle), path)
        with os.fdopen(handle, "rb", closefd=False) as file:
            if hashlib.sha256(file.read()).hexdigest() != path.stem.rpartition("-")[2]:
                raise OSError(f"{path} is damaged")
        # Load by the checked descriptor, because the folder may have been replaced meanwhile. The
        # descriptor stays open: its number is the library's name, and the loader would take another
        # library with that name for this one.
        same = Path(f"/proc/self/fd/{handle}")
        found = ctypes.CDLL(str(same if os.access(same, os.R_OK) else path))
        for name, arguments in _signatures().items():
            function = getattr(found, name)
            function.argtypes, function.restype = arguments, None
    except BaseException:
        os.close(handle)
        raise
    return found


def _check(about: os.stat_result, path: Path) -> None:
    if about.st_uid not in (0, os.geteuid()):
        raise OSError(f"{path} belongs to another user")
    if about.st_mode & _OPEN_TO_OTHERS or stat.S_ISLNK(about.st_mode):
        raise OSError(f"other users can write to {path}")


@contextmanager
def _notice(compiler: str) -> Iterator[None]:
    """Print a notice if compiling, or waiting for another process to compile, takes long."""
    notice = threading.Timer(
        _SLOW, print, [f"fedshot: waiting for the C kernels: {compiler} is running"],
        {"file": sys.stderr},
    )  # fmt: skip
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


def _run(command: list[str], given: bytes) -> bytes:
    return subprocess.run(
        command, input=given, capture_output=True, check=True, timeout=_LIMIT
    ).stdout


def _is_temporary(error: Exception) -> bool:
    """Whether a failed build may succeed when it is tried again."""
    if isinstance(error, subprocess.CalledProcessError):
        said = error.stderr.decode(errors="replace").lower()
        return error.returncode < 0 or any(words in said for words in _TEMPORARY_WORDS)
    if isinstance(error, subprocess.TimeoutExpired):
        return True
    return isinstance(error, OSError) and error.errno in _TEMPORARY


def _reason(error: Exception) -> str:
    """Return one line: the first error message of the compiler, or the exception's text."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it did not finish within {error.timeout:,g} seconds"
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    said = [line for line in error.stderr.decode(errors="replace").splitlines() if line.strip()]
    wrong = [line for line in said if "error" in line.lower()]
    return next(iter(wrong + said), f"exit status {error.returncode}")


def _processor() -> str:
    """Return a description of the processor, which determines what `-march=native` means."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = [platform.processor()]
    else:
        lines = sorted({line for line in lines if line.startswith(_TRAITS)})
    return "\n".join([platform.machine(), *lines])
