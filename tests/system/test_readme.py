"""What the README tells a newcomer to type works as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from fedshot.cli import main
from fedshot.config import Config, load

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_first_run_and_its_evaluation_work_word_for_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = [b for b in blocks("") if b.startswith("fedshot run --name first")]
    lines = text.replace("\\\n", " ").strip().splitlines()
    assert [line.split()[1] for line in lines] == ["run", "evaluate"]
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out.count("on novel classes") == 2


def test_the_settings_it_shows_are_valid() -> None:
    (text,) = blocks("yaml")
    config = Config.of(yaml.safe_load(text))
    assert config.name == "mine"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_the_examples_are_valid(path: Path) -> None:
    assert Config.of(load(path)).name


PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert page.parent.joinpath(target).exists(), f"{page} links to {target}"


def test_every_page_is_in_the_menu_of_the_site() -> None:
    menu = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    for page in PAGES[1:]:
        assert f'"{page.relative_to(ROOT / "docs").as_posix()}"' in menu


WALK = (ROOT / "docs" / "own-data.md").read_text(encoding="utf-8")


def test_the_settings_of_the_walk_are_valid() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", WALK, flags=re.DOTALL)
    assert Config.of(yaml.safe_load(text)).name == "mine"


@pytest.mark.slow
def test_the_walk_with_one_s_own_pictures_works_word_for_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many classes and pictures as the page says, in two rounds and ten test episodes."""
    rng = np.random.default_rng(0)

    def draw(folder: Path, n: int) -> None:
        folder.mkdir(parents=True)
        for i in range(n):
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(folder / f"{i}.png")

    for name in range(70):
        draw(tmp_path / "pictures" / str(name), 40)
    for name in ("finch", "tit"):
        draw(tmp_path / "examples" / name, 3)
    draw(tmp_path / "unknown", 4)
    (text,) = re.findall(r"```yaml\n(.*?)```", WALK, flags=re.DOTALL)
    short = text.replace("rounds: 20", "rounds: 2").replace("episodes: 1000", "episodes: 10")
    assert short.count("rounds: 2,") == short.count("episodes: 10}") == 1
    (tmp_path / "mine.yaml").write_text(short, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    lines = re.findall(r"^fedshot .*$", WALK, flags=re.MULTILINE)
    assert [line.split()[1] for line in lines] == ["data", "run", "report", "predict"]
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0, line
    made = ("pictures-classes.png", "runs/mine/report.html", "answers.html")
    assert all((tmp_path / name).stat().st_size > 1000 for name in made)
