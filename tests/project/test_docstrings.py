"""Examples in docstrings are run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import fedshot

HERE = Path(fedshot.__file__).parent
WITH_EXAMPLES = [
    ".".join(("fedshot", *path.relative_to(HERE).with_suffix("").parts))
    for path in sorted(HERE.rglob("*.py"))
    if ">>>" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_hold(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0
