"""The examples run as they stand, the demo with a smaller encoder, fewer steps and episodes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fedshot.cli.main import make_parser

ROOT = Path(__file__).parents[2]

SMALLER = """
import sys
import glyphs

full = glyphs.settings

def settings(method, seed):
    tree = full(method, seed)
    tree["model"]["backbone"]["width"] = 4
    tree["method"]["local_steps"] = 1
    tree["test"] |= {"episodes": 40, "validation_episodes": 20}
    return tree

glyphs.settings = settings
sys.exit(glyphs.main())
"""


@pytest.mark.slow
def test_the_demo_prints_the_comparison_and_writes_the_page(tmp_path: Path) -> None:
    words = [sys.executable, "-c", SMALLER, "--out", tmp_path / "demo"]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=ROOT / "examples",
        env=os.environ | {"COLUMNS": "80", "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for label in ("FSL-local", "FL-Proto", "raw pixels", "untrained encoder"):
        assert re.search(rf"\n\W*{label}\W", done.stdout), done.stdout
    assert "FL-Proto, seed 1: round 5 of 10\n" in done.stderr, "in a pipe it says how far it is"
    page = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert "Five new characters from one example each" in page
    for name in ("curves-test", "spread", "holdings-plot", "map-plot"):
        assert f'class="plot" id="{name}"' in page


def test_the_script_for_a_cluster_has_valid_syntax_and_commands() -> None:
    script = ROOT / "examples" / "cluster.sh"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text(encoding="utf-8").replace("\\\n", " ").replace("$SLURM_NTASKS", "4")
    found = [shlex.split(words) for words in re.findall(r"fedshot (flower [^|>&'\n]*)", text)]
    assert len(found) == 7
    for words in found:
        make_parser().parse_known_args(words)
