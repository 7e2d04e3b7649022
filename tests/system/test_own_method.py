"""The tutorial's method runs, does what its equations say, and its page quotes it."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from conformance.cases import BODY, EPISODE, REFERENCE
from conformance.federation import Federation
from conformance.own import FILE, FLProtoMomentum
from fedshot import own, tree
from fedshot.cli import main
from fedshot.data import EpisodeSpec
from fedshot.errors import ConfigError
from fedshot.methods import METHODS, FLProto, register
from fedshot.nn import Model
from fedshot.recipes import load
from fedshot.recipes.bench import Bench, Request
from fedshot.recipes.reading import joined
from fedshot.recipes.results import Result, identity, outdated

PAGE = Path(__file__).parents[2] / "docs" / "adding.md"
DOUBLE = replace(BODY, dtype="float64")
RUN = "run --name mine --data digits --split.base 0-4 --split.novel 5-9 --model.backbone mlp"
SHORT = ["--method", "fl_proto_momentum", "--run.rounds", "2", "--test.episodes", "20"]


def test_its_file_is_a_command_line_that_knows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = subprocess.run(
        [sys.executable, FILE, *RUN.split(), *SHORT],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "fl_proto_momentum: " in done.stdout
    assert main(["resume", str(tmp_path / "runs" / "mine")]) == 2
    assert "known to the program that registers it" in capsys.readouterr().err
    made = json.loads((tmp_path / "runs" / "mine" / "environment.json").read_text("utf-8"))
    digest = hashlib.sha256(FILE.read_bytes()).hexdigest()
    assert made["method_file"] == f"fl_proto_momentum.py {digest}"


@pytest.mark.slow
def test_its_file_trains_it_in_a_table(tmp_path: Path) -> None:
    """By processes of their own, which load it from there; the page tells which file it was."""
    rows = tmp_path / "results" / "digits" / "rows.yaml"
    rows.parent.mkdir(parents=True)
    rows.write_text("mine: {settings: {method: {name: fl_proto_momentum}}}\n", encoding="utf-8")
    reproduce = ("reproduce", "digits", "--seeds", "1", "--cells", "mine/iid-1")
    done = subprocess.run(
        [sys.executable, FILE, *reproduce], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert re.search(r"mine +IID, 1-shot +- +\d+\.\d+ ±", done.stdout)
    page = [sys.executable, FILE, "reproduce", "results"]
    text = subprocess.run(page, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "`FEDSHOT_METHODS=fl_proto_momentum.py fedshot reproduce digits" in text
    assert re.search(r"fl_proto_momentum\.py [0-9a-f]{12} on ", text)
    alone = subprocess.run(
        [sys.executable, "-m", "fedshot.cli", *reproduce, "--plan"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "no method" in alone.stdout


def test_another_file_is_another_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What older lines have trained counts for nothing, finished or not."""
    monkeypatch.setitem(METHODS, "fl_proto_momentum", FLProtoMomentum)
    rows = {"mine": {"settings": {"method": {"name": "fl_proto_momentum"}}}}
    recipe = joined(load("digits"), rows, "rows.yaml")
    cell = recipe.cells("small", ["mine/iid-1"])[0]
    request = Request(recipe, patterns=("mine/iid-1",), runs=tmp_path, results=tmp_path)
    before = identity(cell, None)
    assert before["method_file"] == own.fingerprint("fl_proto_momentum")
    place = Bench(request)._run_of(cell, 0, None)[1]
    assert place == Bench(request)._run_of(cell, 0, None)[1]
    result = Result(recipe.name, "small", "mine", "iid-1", before, {0: {}})
    assert outdated(result, cell, None) is None
    monkeypatch.setattr(own, "fingerprint", lambda _: "mine.py 00")
    assert "method_file was 'fl_proto_momentum.py " in str(outdated(result, cell, None))
    assert place != Bench(request)._run_of(cell, 0, None)[1]
    theirs = recipe.cells("small", ["local/iid-1"])[0]
    monkeypatch.undo()
    assert "method_file" not in identity(theirs, None)


@pytest.mark.slow
def test_its_file_trains_it_on_nodes(tmp_path: Path) -> None:
    """Which load it themselves: the bits of a run without nodes."""
    pytest.importorskip("flwr")
    short = [*RUN.split()[3:], *SHORT, "--partition.clients", "4", "--quiet"]
    for words in (["run", "--name", "here"], ["flower", "up", "--nodes", "2", "--name", "there"]):
        subprocess.run([sys.executable, FILE, *words, *short], cwd=tmp_path, check=True)
    here, there = (tmp_path / "runs" / name / "result.json" for name in ("here", "there"))
    assert here.read_bytes() == there.read_bytes()


def test_the_page_quotes_the_file() -> None:
    page, code = PAGE.read_text(encoding="utf-8"), letters(FILE.read_text(encoding="utf-8"))
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        assert letters(block) in code, block


def letters(text: str) -> str:
    """Without spaces: a page shows the parts of a class one by one, where lines break elsewhere."""
    return "".join(text.split())


def test_without_momentum_it_is_fl_proto(tmp_path: Path) -> None:
    ours = FLProtoMomentum(DOUBLE, EPISODE, momentum=0.0, local_steps=2)
    theirs = FLProto(DOUBLE, EPISODE, local_steps=2)
    a, b = (Federation(m, REFERENCE, tmp_path / m.name).play(2).server for m in (ours, theirs))
    assert_close(a.theta, b.theta)
    assert_close(a.stats, b.stats)


def test_a_step_repeats_its_share_of_the_last(tmp_path: Path) -> None:
    ours = FLProtoMomentum(DOUBLE, EPISODE, momentum=0.5, local_steps=2)
    run = Federation(ours, REFERENCE, tmp_path / "ours")
    theta = [run.server.theta, run.play(1).server.theta]
    plain = Federation(FLProto(DOUBLE, EPISODE, local_steps=2), REFERENCE, tmp_path / "plain")
    plain.server = plain.server._replace(theta=theta[1], stats=run.server.stats)
    plain.round = 1
    repeated = tree.map(lambda x: 0.5 * x, tree.sub(theta[1], theta[0]))
    assert_close(run.play(1).server.theta, tree.add(plain.play(1).server.theta, repeated))


def assert_close(a: tree.Tree, b: tree.Tree) -> None:
    for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True):
        torch.testing.assert_close(x, y)


class Bare:
    name: ClassVar[str] = "bare"


@dataclass(frozen=True)
class Short:
    name: ClassVar[str] = "short"
    model: Model
    episode: EpisodeSpec


@dataclass(frozen=True)
class Namesake(FLProto):
    pass


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (Bare, "a dataclass with the fields"),
        (Short, "Short has no init, init_client, round, evaluate, transductive, max_way"),
        (Namesake, "there is a method 'fl_proto' already"),
        (type("Nameless", (), {}), "Nameless.name is None"),
    ],
)
def test_what_is_no_method_is_refused(method: type[Any], words: str) -> None:
    before = dict(METHODS)
    with pytest.raises(ConfigError, match=words):
        register(method)
    assert before == METHODS
