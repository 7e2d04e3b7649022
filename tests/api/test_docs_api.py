"""The blocks of docs/api.md run in their order, and users' type checkers accept them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from mypy import api as mypy

import fedshot

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) > 10
    names: dict[str, Any] = {}
    for block in BLOCKS:
        exec(compile(block, "docs/api.md", "exec"), names)
    assert (tmp_path / "curve.pdf").exists()


def test_every_public_name_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    lacking = [name for name in fedshot.__all__ if name not in text and not name.startswith("__")]
    assert lacking == []


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
