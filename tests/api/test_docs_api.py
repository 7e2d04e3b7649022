"""The blocks of docs/api.md pass users' type checkers, and the pages have every public name."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from mypy import api as mypy

import fedshot

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_every_public_name_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    lacking = [name for name in fedshot.__all__ if name not in text and not name.startswith("__")]
    assert lacking == []


def test_the_reference_has_every_public_name() -> None:
    """Classes and functions of the public names, each with a docstring of more than a line."""
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    named = re.findall(r"^::: fedshot\.(?:api\.listing\.)?(\w+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(set(fedshot.__all__) - {"__version__"})
    assert all(getattr(fedshot, name).__doc__ for name in named)


@pytest.mark.slow
def test_the_blocks_pass_a_strict_type_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "page.py"
    unknown = "fs.tarin()  # type: ignore[attr-defined]\n"
    program.write_text("\n".join([*BLOCKS, unknown]), encoding="utf-8")
    monkeypatch.setenv("MYPYPATH", os.fspath(Path(fedshot.__file__).parents[1]))
    monkeypatch.chdir(ROOT)  # `make check` leaves a cache there, without which this takes a minute
    found, _, code = mypy.run(["--strict", str(program)])
    assert (found.splitlines()[:-1], code) == ([], 0)
