"""One federation for all runs of a session: a server, three nodes, two clients on each."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from .local_federation import LocalFederation

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.flower)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300))
            if importlib.util.find_spec("flwr") is None:
                reason = "Flower is not installed: pip install 'fedshot[flower]'"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    """A federation that stays up; tests that kill a part of it put that back."""
    with LocalFederation(tmp_path_factory.mktemp("federation")) as made:
        yield made
