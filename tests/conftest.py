"""What all tests share."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A thread of OpenMP that waits for work leaves its core to the other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# torch is imported by what needs it: xdist reads this file once more, in a process without tests.

# Parts of the names of tests that use a federation which stays up, by its fixture.
FEDERATIONS = {
    "federation": (
        "test_admission", "test_operating", "processes/test_same_results", "test_wrong_server",
        "killed_in_the_middle", "server_killed_and_resumed", "run_that_is_killed",
    ),
    "twelve": ("test_cluster", "processes/test_secure_sums"),
}  # fmt: skip

# Promises are of bits, so a failing example must fail again: the examples are the same each time.
settings.register_profile(
    "fedshot", max_examples=30, deadline=None, derandomize=True, database=None
)
settings.load_profile("fedshot")


# A job in the background is born deaf to Ctrl-C, and so would be the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """No garbage collection visits modules and tests, which stay: each visit takes a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("flwr") is None:
        for item in items:
            if item.get_closest_marker("flower"):
                item.add_marker(pytest.mark.skip(reason="the extra `flower` is not installed"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the tests of one federation to one worker, with `--dist loadgroup`.

    The groups of xdist 3.8 have no effect with pytest 9, whose items keep their names elsewhere.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFederation(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            named = (name for name, parts in FEDERATIONS.items() for p in parts if p in nodeid)
            return next(named, nodeid)

    return ByFederation(config, log)


def pytest_sessionfinish() -> None:
    """Nor does the one before the process ends."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Sums inside an operator are split by the thread count, so it is part of every expectation."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_draws() -> Iterator[None]:
    """No test depends on one before: on its draws without a seed, or its number of threads."""
    import torch

    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack, for CUDA
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_disks() -> Iterator[None]:
    """No test pulls the plug, and there are twenty thousand files to wait for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def _kernels(folder: Path) -> Path:
    """Return the folder of C kernels in a cache folder."""
    return folder / f"kernels-{os.geteuid()}"


def _copy_kernels(source: Path, target: Path) -> None:
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for library in source.glob("*.so"):
        if not (target / library.name).exists():
            partial = target / f"{library.name}.{os.getpid()}"  # another worker may copy it, too
            shutil.copy2(library, partial)
            partial.replace(target / library.name)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tests leave nothing in a person's cache, and find nothing there.

    The workers of a session share one, in which one of them builds the C kernels for all. The main
    virtual environment keeps these for the next session, that of the lowest versions included.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    kept = Path(__file__).parents[1] / ".venv" / ".kernels"
    _copy_kernels(kept, _kernels(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSHOT_CACHE", str(folder))
        # A notice that compiling takes long would be output that some test does not expect.
        patch.setattr("fedshot.core.kernel_build._SLOW", 3600.0)
        yield folder
    if kept.parent.is_dir():
        _copy_kernels(_kernels(folder), kept)


@pytest.fixture
def empty_cache(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, empty but for the C kernels."""
    from fedshot.core import kernel_build

    kernel_build.library()
    folder = tmp_path / "cache"
    _copy_kernels(_kernels(own_cache), _kernels(folder))
    monkeypatch.setenv("FEDSHOT_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def kernels(own_cache: Path) -> None:
    """The C kernels, built; the test is skipped where there is no compiler."""
    from fedshot.core import kernel_build

    if kernel_build.library() is None:
        pytest.skip("without the C kernels")
