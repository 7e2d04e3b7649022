"""The C kernels of this package, built once with the compiler that is there.

Without a compiler, on another system than Linux or macOS, or with FEDSHOT_KERNELS=off, `library()`
is None and callers use plain torch operations. The library lies in the cache folder under a hash of
its source, the compiler and the processor, so that nothing stale or foreign is loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import secrets
import shutil
import subprocess
import sys
from functools import cache
from importlib import resources
from pathlib import Path

from fedshot.data.cache import default_folder

# No fast-math: NaN must stay NaN, and sums keep the order that the source gives them.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared")
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_ssize_t
_SIGNATURES = {
    "fedshot_moments": [_POINTER, *[_SIZE] * 4, *[_POINTER] * 2],
    "fedshot_merge": [_POINTER, _POINTER, *[_SIZE] * 3, *[_POINTER] * 2],
    "fedshot_pool": [*[_POINTER] * 3, *[_SIZE] * 5, _POINTER],
    "fedshot_sums": [*[_POINTER] * 5, *[_SIZE] * 5, *[_POINTER] * 2],
    "fedshot_grad": [*[_POINTER] * 7, *[_SIZE] * 5, _POINTER],
    "fedshot_twice_sums": [*[_POINTER] * 6, *[_SIZE] * 5, *[_POINTER] * 3],
    "fedshot_twice_grad": [*[_POINTER] * 11, *[_SIZE] * 5, *[_POINTER] * 2],
}


@cache
def library() -> ctypes.CDLL | None:
    """Return the kernels, building them the first time; None where they cannot be had."""
    if os.environ.get("FEDSHOT_KERNELS", "").lower() in ("off", "0", "no"):
        return None
    compiler = _compiler()
    if compiler is None:
        return None
    try:
        return _loaded(_built(compiler, default_folder() / "kernels"))
    except (OSError, AttributeError, subprocess.SubprocessError):
        return None


def kind() -> str:
    """Return "compiled" or "plain": results of the two differ in their last digits."""
    return "plain" if library() is None else "compiled"


def _compiler() -> str | None:
    if sys.platform not in ("linux", "darwin"):
        return None
    words = [*os.environ.get("CC", "").split()[:1], "cc", "gcc", "clang"]
    return next((path for word in words if (path := shutil.which(word))), None)


def _built(compiler: str, folder: Path) -> Path:
    """Compile into the folder, unless that has been done; the file appears whole or not at all."""
    source = resources.files("fedshot.nn").joinpath("fused.c").read_bytes()
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, timeout=20, check=True
    ).stdout
    parts = (source, version, " ".join(_FLAGS).encode(), _processor().encode())
    name = hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]
    path = folder / f"fused-{name}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = folder / f".{secrets.token_hex(8)}.so"
    try:
        subprocess.run(
            [compiler, *_FLAGS, "-x", "c", "-", "-o", str(partial), "-lm"],
            input=source, capture_output=True, timeout=120, check=True,
        )  # fmt: skip
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _loaded(path: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, None
    return found


def _processor() -> str:
    """Return what `-march=native` stands for here."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
