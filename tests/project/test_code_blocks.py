"""A block of code on a page runs, or a comment above it says why not: <!-- not run: why -->."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

import fedshot as fs
from fedshot.cli.main import make_parser
from fedshot.config.registry import KINDS, every_option

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(<!-- not run: [^\n]+ -->\n)?^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
SMALL = {
    "data": "digits",
    "model": {"backbone": {"name": "mlp", "hidden": [8]}},
    "method": {"name": "fl_proto", "local_steps": 1},
    "partition": {"name": "iid", "clients": 2},
    "episode": {"way": 2, "shot": 1, "query": 2},
    "run": {"rounds": 1},
    "test": {"way": 2, "shot": 1, "query": 5, "episodes": 5, "validation_episodes": 5},
}
PATHS = {"name", "seed"} | {option.path for option in every_option()}
PATHS |= {f"{place}.name" for place in KINDS}
SECTIONS = {".".join(path.split(".")[:i]) for path in PATHS for i in (1, 2, 3)}


# What makes the trainings of a page short, and their tests.
TEST = 'test={"episodes": 20, "validation_episodes": 20}, '
FEW = TEST + 'run={"rounds": '
SHORTER = {
    "start": {'run={"rounds": 20': FEW + "1", '"lr": 0.01}': '"lr": 0.01}, "local_steps": 1'},
    "features": {'run={"rounds": 1': FEW + "1"},
    "api": {"rounds=5": "rounds=1", "rounds=8": "rounds=2", "rounds=9": "rounds=3"},
    "own-network": {"rounds=5": TEST + "rounds=1", "rounds=6": "rounds=2"},
    "encoder": {"rounds=1,": TEST + "rounds=1,"},
}


class Block(NamedTuple):
    """A block of a page: its language, its text, and whether it is marked as not run."""

    language: str
    text: str
    marked: bool


def blocks(page: Path) -> list[Block]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [Block(language, text, bool(mark)) for mark, language, text in found]


def three_runs(folder: Path) -> None:
    for seed in range(3):
        fs.train(SMALL, seed=seed, out=folder / f"runs/mine-{seed}", progress=False)


def run_and_pictures(folder: Path) -> None:
    fs.train(SMALL, out=folder / "runs/omniglot", progress=False)
    rng = np.random.default_rng(0)
    for name in ("a1", "a2", "b1", "b2", "what"):
        Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(folder / f"{name}.png")


# What a page takes for granted: pages without an entry need nothing.
BEFORE: dict[str, Callable[[Path], None]] = {
    "report": three_runs,
    "use": run_and_pictures,
}


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES[1:] if any(block.language == "python" for block in blocks(page))],
    ids=lambda page: page.stem,
)
def test_blocks_of_python_run_in_their_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    BEFORE.get(page.stem, lambda _: None)(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}  # test_readme.py runs those of the README
    for block in blocks(page):
        if block.language == "python" and not block.marked:
            text = block.text
            for long, short in SHORTER.get(page.stem, {}).items():
                text = text.replace(long, short)
            exec(compile(text, f"{page.name}: {block.text[:60]!r}", "exec"), names)


def test_a_block_that_does_not_run_compiles() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.language == "python" and block.marked:
                nested = block.text.startswith(" ")
                text = "class Part:\n" + block.text if nested else ended(block.text)
                compile(text, page.name, "exec")


def test_the_tutorial_shows_the_whole_file_of_the_example() -> None:
    file = (ROOT / "examples" / "fl_proto_momentum.py").read_text(encoding="utf-8")
    assert [block.text for block in blocks(ROOT / "docs" / "adding.md")].count(file) == 1


def ended(text: str) -> str:
    """Return a text that ends in the head of a class as that of an empty one."""
    return text + "    pass\n" if text.rstrip().endswith(":") else text


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command of fedshot in the page's blocks."""
    for block in blocks(page):
        if block.language not in ("", "sh", "bash", "console", "ini"):
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            found = re.match(
                r"(?:ExecStart=|\w+=\S+ )*(?:\S*venv/bin/)?fedshot (\S.*)", line.strip()
            )
            if found and not found[1].startswith(("-> ", ": ")):
                text = re.split(r" > | \| | && ", found[1])[0]
                words = shlex.split(text, comments=True)
                if "..." not in words:  # else it is no whole command
                    yield words


def wrong(words: list[str]) -> list[str]:
    """Return what the command line does not take of a command."""
    try:
        options, rest = make_parser().parse_known_args(words)
    except SystemExit:
        return words
    if not options.takes_settings:
        return rest
    paths = (word[2:].partition("=")[0] for word in rest if word.startswith("--"))
    return [path for path in paths if path not in PATHS | SECTIONS]


def test_commands_of_pages_are_those_of_the_command_line() -> None:
    found = [f"{page.name}: {part} in: fedshot {shlex.join(words)}"
             for page in PAGES for words in commands(page) for part in wrong(words)]  # fmt: skip
    assert not found, "\n".join(found)
