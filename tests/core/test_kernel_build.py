"""The library of C kernels: built, kept, and loaded only where it is whole and ours."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fedshot.core import kernel_build
from fedshot.core.errors import BuildError

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile little, without optimising: these tests are of the file, not of what it computes."""
    flags = tuple("-O0" if flag == "-O3" else flag for flag in kernel_build._FLAGS)
    monkeypatch.setattr(kernel_build, "_FLAGS", flags)
    monkeypatch.setattr(kernel_build, "_SOURCES", ("lanes.h", "prototypes.c"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of this user."""
    monkeypatch.setenv("FEDSHOT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The compilers that have compiled, rather than been asked for their version."""
    made: list[str] = []
    real = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        if "-o" in command:
            made.append(command[0])
        return real(command, **options)

    monkeypatch.setattr(subprocess, "run", run)
    return made


def fresh() -> ctypes.CDLL | None:
    """Return the library as a new process would."""
    return kernel_build.library.__wrapped__()


def kept(cache: Path) -> list[Path]:
    return sorted(cache.glob("kernels*/*"))


def program(path: Path, text: str) -> str:
    """Write a script that can stand for a compiler."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_the_library_is_built_once_and_kept_under_its_hash(cache: Path, built: list[str]) -> None:
    assert fresh() is not None
    assert fresh() is not None
    assert len(built) == 1
    (path,) = kept(cache)
    assert path.stem.endswith(hashlib.sha256(path.read_bytes()).hexdigest())
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.name == f"kernels-{os.geteuid()}"  # of each user of the cache its own


SLOW = pytest.mark.slow  # each compiles


@SLOW
@pytest.mark.parametrize("size", [0, 100, 9000])
def test_a_library_that_was_cut_short_is_built_anew(cache: Path, size: int) -> None:
    """In a process of its own, since loading such a file ends it by SIGBUS."""
    code = (
        f"build._FLAGS, build._SOURCES = {kernel_build._FLAGS}, {kernel_build._SOURCES}; "
        "print(build.kind())"
    )
    command = [sys.executable, "-c", f"from fedshot.core import kernel_build as build; {code}"]
    fresh()
    (path,) = [path for path in kept(cache) if path.suffix == ".so"]
    whole = path.read_bytes()
    os.truncate(path, size)
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "compiled\n"), run.stderr
    assert [path.read_bytes() for path in kept(cache)] == [whole]


def test_the_file_is_on_the_disk_before_it_has_its_name(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power may otherwise leave the name with nothing behind it."""
    steps = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: steps.append("sync") or sync(handle))

    def renamed(path: Path, to: Path) -> Path:
        steps.append("rename")
        return replace(path, to)

    monkeypatch.setattr(Path, "replace", renamed)
    fresh()
    assert steps == ["sync", "rename", "sync"]


@pytest.mark.parametrize("what", ["file", "folder"])
@pytest.mark.parametrize("mode", [0o020, pytest.param(0o002, marks=SLOW)])
def test_a_library_that_others_could_have_written_is_not_loaded(
    cache: Path, what: str, mode: int, built: list[str]
) -> None:
    fresh()
    (path,) = kept(cache)
    open_ = path if what == "file" else path.parent
    open_.chmod(open_.stat().st_mode | mode)
    assert fresh() is not None
    assert len(built) == 2


def test_a_library_of_another_user_is_not_loaded(
    cache: Path, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cache that is shared, say, where it was put under this user's name."""
    fresh()
    (path,) = kept(cache)
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        os.chown(path.parent, 12345, -1)
    else:  # then we are the other user
        me = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: me)
        path.parent.rename(cache / f"kernels-{me}")
    fresh()
    assert len(built) > 1


def test_what_is_loaded_is_what_was_checked(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever may write to the cache folder can put another folder in the place of ours."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("no names for descriptors here")
    fresh()
    (path,) = kept(cache)
    real = ctypes.CDLL

    def late(name: str) -> ctypes.CDLL:
        path.parent.rename(tmp_path / "away")
        path.parent.mkdir()
        path.write_bytes(b"something else")
        return real(name)

    monkeypatch.setattr(ctypes, "CDLL", late)
    assert kernel_build._loaded(path) is not None


def test_a_cache_that_cannot_be_written_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("FEDSHOT_CACHE", str(tmp_path / "file" / "cache"))
    assert fresh() is not None
    assert capsys.readouterr().err == ""


def test_cc_may_hold_a_wrapper_and_options(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: list[str]
) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    wrapper = program(tmp_path / "my cache", f'echo "$@" >> "{tmp_path}/log"\nexec "$@"')
    monkeypatch.setenv("CC", f"'{wrapper}' {compiler} -DWRAPPED")
    assert fresh() is not None
    assert built == [wrapper]
    assert f"{compiler} -DWRAPPED -O0" in (tmp_path / "log").read_text()


def test_a_compiler_that_fails_leaves_the_work_to_the_next(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", program(tmp_path / "broken", "exit 1"))
    assert fresh() is not None
    assert capsys.readouterr().err == ""


def test_a_person_is_told_when_all_compilers_fail(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(
        tmp_path / "cc", 'case "$1" in --version) exit 0;; esac\necho "error: full" >&2; exit 1'
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    kernel_build.library.cache_clear()
    try:
        assert kernel_build.kind() == kernel_build.kind() == "plain"
    finally:
        kernel_build.library.cache_clear()
    said = capsys.readouterr().err
    assert said.count("the C kernels cannot be built") == 1
    assert f"{tmp_path}/cc: error: full" in said


@pytest.mark.parametrize("how", ["off", "no compiler"])
def test_nothing_is_said_of_what_was_chosen_or_is_not_there(
    how: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if how == "off":
        monkeypatch.setenv("FEDSHOT_KERNELS", "off")
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CC", raising=False)
    assert fresh() is None
    assert capsys.readouterr().err == ""


def test_a_build_on_a_busy_machine_is_waited_for(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that fell back to plain operations would come to other bits."""
    real = subprocess.run

    def busy(command: list[str], **options: Any) -> Any:
        """Take a quarter of an hour."""
        if options.get("timeout", 900) < 900:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return real(command, **options)

    monkeypatch.setattr(subprocess, "run", busy)
    assert fresh() is not None
    assert capsys.readouterr().err == ""


def test_processes_that_find_a_cold_cache_at_once_build_once(cache: Path, built: list[str]) -> None:
    """Locks of files hold between threads, too, which have a library each here."""
    with ThreadPoolExecutor(3) as pool:
        found = [task.result() for task in [pool.submit(fresh) for _ in range(3)]]
    assert None not in found
    assert len(built) == len(kept(cache)) == 1


@pytest.mark.parametrize(
    "end",
    [
        "kill -9 $$",
        "echo 'cc: fatal error: Killed signal terminated program cc1' >&2; exit 1",
        "echo 'fatal error: error writing to /tmp/cc.s: No space left on device' >&2; exit 1",
    ],
)
def test_a_compiler_that_was_killed_or_finds_no_disk_ends_the_run_for_now(
    end: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "cc", f'case "$1" in --version) exit 0;; esac\n{end}')
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BuildError, match=r"cannot be built for now .*FEDSHOT_KERNELS=off") as error:
        fresh()
    assert error.value.retryable, "the exit code must be 75, as for a full disk of the run"


def test_a_compiler_that_hangs_refuses_the_run(cache: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("CC", program(tmp_path / "hangs", "exec sleep 600"))
    monkeypatch.setattr(kernel_build, "_LIMIT", 0.2)
    with pytest.raises(BuildError, match=r"hangs: it did not finish within 0.2 seconds\)"):
        fresh()


def test_a_person_is_told_of_a_wait_for_another_process_that_compiles(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, real = [], kernel_build.locked

    class Timer(threading.Timer):
        def start(self) -> None:
            steps.append(self.args[0])

    def locked(path: Path) -> Any:
        steps.append("lock")
        return real(path)

    monkeypatch.setattr(threading, "Timer", Timer)
    monkeypatch.setattr(kernel_build, "locked", locked)
    fresh()
    assert steps[1:] == ["lock"]
    assert steps[0].endswith("is running")


ARM = """processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd {features}
CPU implementer\t: {maker}
CPU part\t: {part}
"""


def test_processors_of_arm_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(**traits: str) -> str:
        text = ARM.format(**{"features": "sve", "maker": "0x41", "part": "0xd40"} | traits)
        monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
        return kernel_build._processor()

    found = {of(), of(features="sve sve2"), of(maker="0xc0"), of(part="0xd0c")}
    assert len(found) == 4
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "aarch64" in of()
