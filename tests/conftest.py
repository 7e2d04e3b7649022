"""What all tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Promises are of bits, so a failing example must fail again: the examples are the same each time.
settings.register_profile("fedshot", deadline=None, derandomize=True, database=None)
settings.load_profile("fedshot")


# A job in the background is born deaf to Ctrl-C, and so would be the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Sums inside an operator are split by the thread count, so it is part of every expectation."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """What a test draws without a seed does not depend on the tests that ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests leave nothing in a person's cache, and find nothing there.

    The workers of a session share one, in which one of them builds the C kernels for all.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSHOT_CACHE", str(folder))
        yield
