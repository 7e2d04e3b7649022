"""The page of all commands is current."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedshot.cli.help_page import markdown

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_of_commands_is_what_help_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to line breaks, which differ between versions of Python."""
    monkeypatch.setenv("COLUMNS", "80")
    assert PAGE.read_text(encoding="utf-8").split() == markdown().split(), (
        "write it again: python -m fedshot.cli.help_page > docs/cli.md"
    )
