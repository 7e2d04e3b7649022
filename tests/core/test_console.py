"""The log of a command: its levels, and its lines as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import datetime

import pytest

from fedshot.core.console import at_level, log_shown, set_log, tell, warning


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    yield
    set_log()


def test_lines_below_the_level_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    set_log("warning")
    tell("connected")
    tell(at_level("debug", "a message"))
    tell(warning("a node is left out"))
    tell(at_level("error", "failed"))
    assert capsys.readouterr().err == "a node is left out\nfailed\n"


def test_each_line_of_json_has_its_time_level_and_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_log(format="json")
    tell("round 1/5  12.5 ± 1.0 %")
    tell(at_level("error", "it failed\n  in line 3\n\x1b[0m"))
    with log_shown():
        logging.getLogger("fedshot.data").warning("a folder is skipped")
    found = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["level"], line["message"]) for line in found] == [
        ("info", "round 1/5  12.5 ± 1.0 %"),
        ("error", "it failed\n  in line 3\n\x1b[0m"),
        ("warning", "a folder is skipped"),
    ]
    assert all(datetime.fromisoformat(line["time"]).utcoffset() is not None for line in found)
