"""Two federations for all runs of a session: a server and three nodes each.

`pytest -n 2 --dist loadgroup` starts each once; FEDERATIONS of tests/conftest.py has their tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import FEDERATIONS

from .local_federation import NODES, TWELVE, LocalFederation, own_port

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.flower)
            for name in FEDERATIONS.keys() & item.fixturenames:
                assert any(part in item.nodeid for part in FEDERATIONS[name]), item.nodeid


@pytest.fixture(scope="session", autouse=True)
def own_ports() -> Iterator[None]:
    """Workers that run at the same time do not take one another's ports."""
    from fedshot.deploy.flower import local

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "free_port", own_port)
        yield


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    """Two clients on each node; tests that kill a part of it put that back."""
    with LocalFederation(tmp_path_factory.mktemp("federation")) as made:
        yield made


@pytest.fixture(scope="session")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    """Another one, with four clients on each node."""
    with LocalFederation(tmp_path_factory.mktemp("twelve"), NODES, TWELVE) as made:
        yield made
