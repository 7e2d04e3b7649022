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
ENCODER = ["data", "show", "--model.encoder.path", "x", "--model.encoder.name"]
RUN = [
    "run", "--data.name", "digits", "--partition.name", "classes", "--partition.clients", "2",
    "--method.name", "fl_proto", "--method.local_steps", "1", "--run.rounds", "1",
    "--model.backbone.name", "mlp", "--model.backbone.hidden", "[8]", "--episode.way", "2",
    "--test.way", "2", "--test.episodes", "5", "--test.validation_episodes", "5", "--quiet",
]  # fmt: skip


def names(requirements: list[str]) -> set[str]:
    found = {re.split(r"[>=<\[]", line)[0].lower().replace("-", "_") for line in requirements}
    return {IMPORTED_AS.get(name, name) for name in found}


WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

optional, commands = eval(sys.argv[1])

class Missing(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in optional:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from fedshot.cli.main import main
for words in commands:
    assert main(words) == 0, words

import fedshot as fs
run = fs.open_run("a")
print(run, run.result, fs.compare("a", "b"), fs.methods(), fs.datasets())
for extra, needs in {"pandas": lambda: run.history, "reports": run.plot}.items():
    try:
        needs()
    except fs.ConfigError as error:
        assert f"pip install 'fedshot[{extra}]'" in str(error), error
    else:
        raise AssertionError(extra)
"""


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
            ["predict", "x", "--support", "y", "--query", "z", "--page", "p.html"],
        ),
        ("reports", ["data", "show", "digits"]),
        ("hf", ["data", "show", "hf", "--data.path", "a/b", "--data.text", "text"]),
        ("encoders", [*ENCODER, "transformers"]),
        ("timm", [*ENCODER, "timm"]),
        ("secure", [*RUN, "--run.secure_sums", "true"]),
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


def test_a_package_that_fails_when_it_is_imported_is_named_without_a_traceback(
    tmp_path: Path,
) -> None:
    broken = tmp_path / "torch" / "__init__.py"
    broken.parent.mkdir()
    broken.write_text("raise ImportError('libgomp.so.1: no such file')", encoding="utf-8")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
        f"from fedshot.cli.main import main; sys.exit(main({RUN!r}))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == (
        "fedshot: error: torch is installed, but fails: libgomp.so.1: no such file. "
        "Reinstall it, or install what it lacks."
    )
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_without_any_extra_a_run_is_trained_evaluated_compared_and_shown(tmp_path: Path) -> None:
    optional = set().union(*(names(lines) for lines in EXTRAS.values()))
    needed = {"fedshot", "jinja2", "markupsafe"}  # torch needs the latter two
    commands = [
        *([*RUN, "--out", ".", "--name", name, "--seed", str(i)] for i, name in enumerate("ab")),
        ["evaluate", "a", "--quiet"], ["compare", "a", "b"], ["status", "."], ["data", "list"],
        ["methods", "fl_proto"], ["export", "a", "--to", "safetensors"],
    ]  # fmt: skip
    given = repr((optional - names(PROJECT["dependencies"]) - needed, commands))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, given],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("±") > 3
