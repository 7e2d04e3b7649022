"""Optional dependencies: what needs one names the extra, and all else works without it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedshot.cli.main import main
from fedshot.core.extras import PACKAGES

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
IMPORTED_AS = {"mlflow_skinny": "mlflow"}
RUN = [
    "run", "--data.name", "digits", "--partition.name", "classes", "--partition.clients", "2",
    "--method.name", "fl_proto", "--method.local_steps", "1", "--run.rounds", "1",
    "--model.backbone.name", "mlp", "--model.backbone.hidden", "[8]", "--episode.way", "2",
    "--test.way", "2", "--test.episodes", "5", "--test.validation_episodes", "5", "--quiet",
]  # fmt: skip


def names(requirements: list[str]) -> set[str]:
    found = {re.split(r"[>=<\[]", line)[0].lower().replace("-", "_") for line in requirements}
    return {IMPORTED_AS.get(name, name) for name in found}


def without(packages: list[str], *commands: list[str]) -> subprocess.CompletedProcess[str]:
    """Run commands in a Python that lacks some packages, until one fails."""
    code = f"""
import sys
from importlib.abc import MetaPathFinder
class Missing(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from fedshot.cli.main import main
sys.exit(next((code for words in {list(commands)!r} if (code := main(words))), 0))
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_an_extra_installs_the_packages_that_are_asked_for() -> None:
    assert {extra: set(found) for extra, found in PACKAGES.items()} == {
        extra: names(lines) for extra, lines in EXTRAS.items() if extra not in ("dev", "docs")
    }


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("completion", ["completion", "bash"]),
        ("flower", ["flower", "up"]),
        ("reports", ["report", "runs/x"]),
        ("reports", ["reproduce", "list"]),
        (
            "reports",
            ["predict", "--run", "x", "--support", "y", "--query", "z", "--page", "p.html"],
        ),
        ("reports", ["data", "show", "digits"]),
        ("hf", ["data", "show", "hf", "--data.path", "a/b", "--data.text", "text"]),
        ("tracking", [*RUN, "--tracker", "mlflow"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_what_needs_an_extra_names_it(
    extra: str,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in PACKAGES[extra]:
        monkeypatch.setitem(sys.modules, name, None)
    out = ["--out", str(tmp_path)] if words[:2] == ["data", "show"] or words[0] == "run" else []
    assert main([*words, *out]) == 2
    said = capsys.readouterr().err
    assert re.search(rf" needs .*{PACKAGES[extra][-1]}, which (is|are) not installed\.", said)
    assert f"pip install 'fedshot[{extra}]'" in said
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_without_any_extra_a_run_is_trained_evaluated_compared_and_shown(tmp_path: Path) -> None:
    optional = set().union(*(names(lines) for lines in EXTRAS.values()))
    optional -= names(PROJECT["dependencies"]) | {"jinja2", "markupsafe"}  # torch needs these two
    out, first = str(tmp_path), str(tmp_path / "a")
    runs = [[*RUN, "--out", out, "--name", name, "--seed", str(i)] for i, name in enumerate("ab")]
    done = without(
        sorted(optional), *runs, ["evaluate", first, "--quiet"],
        ["compare", first, str(tmp_path / "b")], ["status", out], ["methods", "fl_proto"],
        ["export", "--run", first, "--to", "safetensors"], ["data", "list"],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("±") > 3
