"""What the README tells a newcomer to type works as it stands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from fedshot.cli.main import main
from fedshot.config.load import Config, load
from fedshot.evaluation.episodic_test import score
from fedshot.evaluation.raw_baselines import pixel_logits
from fedshot.protocol.method import predict_at_server
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    return [text for kind, text in found if kind == language]


def first_run() -> list[list[str]]:
    (text,) = [b for b in blocks("") if b.startswith("fedshot run --name first")]
    lines = text.replace("\\\n", " ").strip().splitlines()
    assert [line.split()[1] for line in lines] == ["run", "evaluate"]
    return [shlex.split(line)[1:] for line in lines]


def test_the_first_run_and_its_evaluation_work_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one round of one step, and few episodes; the next test has all of them."""
    monkeypatch.chdir(tmp_path)
    run, evaluate = first_run()
    assert run[-2:] == ["--run.rounds", "20"]
    few = "--method.local_steps 1 --test.episodes 20 --test.validation_episodes 20"
    assert main([*run[:-1], "1", *few.split()]) == 0
    assert main(evaluate) == 0
    assert capsys.readouterr().out.count("on novel classes") == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_training_pays_in_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By 20 points over raw pixels and over the encoder before round 1, word for word."""
    monkeypatch.chdir(tmp_path)
    assert main(first_run()[0]) == 0
    experiment = Experiment(
        PreparedRun(Config.of(load(Path("runs/first/config.yaml")))), Path("again")
    )
    episodic_test = experiment.prepared.test
    pixels = score(predict_at_server(pixel_logits, episodic_test.eval_episodes), episodic_test)
    trained = json.loads(Path("runs/first/result.json").read_text(encoding="utf-8"))["test"]
    for floor in (pixels, experiment.evaluate_untrained(episodic_test)):
        assert trained["accuracy"] > floor.accuracy + 0.2


def test_its_python_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one round of one step, and few episodes."""
    monkeypatch.chdir(tmp_path)
    (text,) = blocks("python")
    few = {
        '"rounds": 20': '"rounds": 1',
        '"lr": 0.01}': '"lr": 0.01}, "local_steps": 1',
        'out="runs/first"': 'out="runs/first", test={"episodes": 20, "validation_episodes": 20}',
    }
    for word, quick in few.items():
        assert text.count(word) == 1
        text = text.replace(word, quick)
    found: dict[str, Any] = {}
    exec(compile(text, "README.md", "exec"), found)
    assert 0 <= found["run"].result.accuracy <= 1


PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def test_links_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)} links to {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert not broken, "\n".join(broken)


def test_every_page_is_in_the_menu_of_the_site() -> None:
    menu = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    for page in PAGES[1:]:
        assert f'"{page.relative_to(ROOT / "docs").as_posix()}"' in menu


WALK = (ROOT / "docs" / "own-data.md").read_text(encoding="utf-8")


def test_the_settings_of_the_walk_are_valid() -> None:
    first, long = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", WALK, flags=re.DOTALL))
    assert Config.of(first).name == "mine"
    method = Config.of(first | long).settings["method"]
    assert (method["name"], method["decay_rounds"]) == ("fedavg_probe", long["run"]["rounds"])


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
    text = re.findall(r"```yaml\n(.*?)```", WALK, flags=re.DOTALL)[0]
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
