"""The tutorial's method runs, does what its equations say, and its page quotes it."""

from __future__ import annotations

import hashlib
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from conformance.cases import BODY, EPISODE, REFERENCE, VECTORISED
from conformance.tutorial_method import FILE, FLProtoMomentum
from fedshot.cli.main import main
from fedshot.conformance.checks import CHECKS
from fedshot.conformance.federation import Federation
from fedshot.core import tree
from fedshot.core.errors import ConfigError, MethodError
from fedshot.core.seeds import Key
from fedshot.data.episodes.episode import ClientData
from fedshot.fleets.client_checks import WorkChecks
from fedshot.methods import user_methods
from fedshot.methods.base.fl_proto import FLProto
from fedshot.methods.registry import METHODS, check_traits, register
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import ClientWork, Reply, client_work
from fedshot.protocol.method import Method, Traits
from fedshot.recipes.index import load
from fedshot.recipes.reading import joined
from fedshot.recipes.results import CellResult, identity, outdated
from fedshot.recipes.runner import RecipeRunner, Request

PAGE = Path(__file__).parents[2] / "docs" / "adding.md"
DOUBLE = replace(BODY, dtype="float64")
RUN = "run --name mine --data digits --split.base 0-4 --split.novel 5-9 --model.backbone mlp"
SHORT = ["--method", "fl_proto_momentum", "--run.rounds", "2", "--test.episodes", "20"]


@pytest.mark.slow
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
    assert "One of your own is known to the program that registers it" in capsys.readouterr().err
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
        [sys.executable, "-m", "fedshot.cli.main", *reproduce, "--plan"],
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
    assert before["method_file"] == user_methods.fingerprint("fl_proto_momentum")
    place = RecipeRunner(request)._run_of(cell, 0, None)[1]
    assert place == RecipeRunner(request)._run_of(cell, 0, None)[1]
    result = CellResult(recipe.name, "small", "mine", "iid-1", before, {0: {}})
    assert outdated(result, cell, None) is None
    monkeypatch.setattr(user_methods, "fingerprint", lambda _: "mine.py 00")
    assert "method_file was 'fl_proto_momentum.py " in str(outdated(result, cell, None))
    assert place != RecipeRunner(request)._run_of(cell, 0, None)[1]
    theirs = recipe.cells("small", ["local/iid-1"])[0]
    monkeypatch.undo()
    assert "method_file" not in identity(theirs, None)


@pytest.mark.slow
@pytest.mark.flower
def test_its_file_trains_it_on_nodes(tmp_path: Path) -> None:
    """Which load it themselves: the bits of a run without nodes."""
    short = [*RUN.split()[3:], *SHORT, "--partition.clients", "4", "--quiet"]
    for words in (["run", "--name", "here"], ["flower", "up", "--nodes", "1", "--name", "there"]):
        subprocess.run([sys.executable, FILE, *words, *short], cwd=tmp_path, check=True)
    here, there = (tmp_path / "runs" / name / "result.json" for name in ("here", "there"))
    assert here.read_bytes() == there.read_bytes()


def test_the_page_quotes_the_file() -> None:
    page, code = PAGE.read_text(encoding="utf-8"), letters(FILE.read_text(encoding="utf-8"))
    page = re.sub("## Backbones, data.*?(?=## Into)", "", page, flags=re.DOTALL)  # other classes
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        assert letters(block) in code, block


def letters(text: str) -> str:
    """Without spaces: a page shows the parts of a class one by one, where lines break elsewhere."""
    return "".join(text.split())


@pytest.mark.slow
def test_without_momentum_it_is_fl_proto(tmp_path: Path) -> None:
    ours = FLProtoMomentum(DOUBLE, EPISODE, momentum=0.0, local_steps=2)
    theirs = FLProto(DOUBLE, EPISODE, local_steps=2)
    a, b = (Federation(m, REFERENCE, tmp_path / m.name).train(2).server for m in (ours, theirs))
    assert_close(a.theta, b.theta)
    assert_close(a.stats, b.stats)


def test_a_step_repeats_its_share_of_the_last(tmp_path: Path) -> None:
    ours = FLProtoMomentum(DOUBLE, EPISODE, momentum=0.5, local_steps=2)
    run = Federation(ours, REFERENCE, tmp_path / "ours")
    theta = [run.server.theta, run.train(1).server.theta]
    plain = Federation(FLProto(DOUBLE, EPISODE, local_steps=2), REFERENCE, tmp_path / "plain")
    plain.server = plain.server._replace(theta=theta[1], stats=run.server.stats)
    plain.round = 1
    repeated = tree.map(lambda x: 0.5 * x, tree.sub(theta[1], theta[0]))
    assert_close(run.train(1).server.theta, tree.add(plain.train(1).server.theta, repeated))


def assert_close(a: tree.Tree, b: tree.Tree) -> None:
    for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True):
        torch.testing.assert_close(x, y)


class Breaking(FLProto):
    """FL-Proto with one fault, which a newcomer may make."""

    fault: ClassVar[str] = ""

    def draw(self, data: ClientData, key: Key) -> Any:
        if self.fault == "draw":
            np.random.shuffle([0, 1])
        return super().draw(data, key)

    @client_work(draw="draw")
    def train(self, down: Any, private: Any, drawn: Any) -> Any:
        reply = super().train(down, private, drawn)
        layer = down["theta"]["body"]["conv1"]
        if self.fault == "adds":
            layer["weight"] += 1
        elif self.fault == "replaces":
            down["theta"] = {**down["theta"], "more": layer["weight"]}
        elif self.fault == "asks for gradients":
            layer["weight"].requires_grad_()
        elif self.fault == "torch":
            torch.randn(1)
        elif self.fault == "random":
            random.random()
        found = {
            "a tree": dict(reply.up),
            "no parts": reply._replace(up=layer["weight"]),
            "no tensors": reply._replace(up={**reply.up, "theta": 0.5}),
            "a number": reply._replace(metrics={"loss": 0.5}),
            "no private state": reply._replace(private=None),
        }
        return found.get(self.fault, reply)

    def round(self, server: Any, clients: Clients, key: Key) -> Any:
        found = super().round(server, clients, key)
        if self.fault == "metric":
            return found[0], {"loss": torch.tensor(0.5)}
        stats = found[0].stats
        states = {
            "a part more": {**stats, "v": torch.zeros(2)},
            "a part less": {},
            "another shape": tree.map(lambda leaf: leaf[None], stats),
            "another type": tree.map(lambda leaf: leaf.double(), stats),
            "a number in the state": {**stats, next(iter(stats)): 3},
        }
        if self.fault in states:
            return found[0]._replace(stats=states[self.fault]), found[1]
        return found[0] if self.fault == "state alone" else found


def test_client_work_may_be_given_tensors_made_in_inference_mode() -> None:
    """Such as features that its draw computes: torch keeps no version of them."""
    with torch.inference_mode():
        features = torch.ones(2)

    class Sums:
        def draw(self, data: Any, key: Key) -> Any: ...

        @client_work(draw="draw")
        def train(self, down: Any, private: Any, drawn: Any) -> Reply:
            return Reply({"sum": drawn["features"].sum()}, {}, 1.0)

    reply = WorkChecks().run(ClientWork(Sums(), "train"), {}, {}, {"features": features})
    assert reply.up["sum"] == 2


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            "adds",
            r"train changes its inputs in place: down/theta/body/conv1/weight\..*clone the input",
        ),
        ("replaces", "train changes its inputs in place"),
        ("asks for gradients", "train changes its inputs in place"),
        ("draw", r"Faulty\.draw draws from the global generator of numpy.*key\.numpy"),
        ("torch", r"Faulty\.train draws from the global generator of torch,"),
        ("random", r"Faulty\.train draws from the global generator of random"),
        ("a tree", r"train returned a dict; expected a Reply\. Return Reply\(up"),
        ("no parts", "train returned a Reply whose up is a Tensor"),
        ("no tensors", "whose up is not a tree: theta is a float"),
        ("a number", r"the metric 'loss' as a float.*torch\.tensor"),
        (
            "no private state",
            r"a private state that differs in structure.*torch\.tensor\(\.\.\.\)\.$",
        ),
        (
            "a part more",
            r"Faulty\.round returned a state in another form: stats/v is not expected\.",
        ),
        ("a part less", r"another form: stats/\S+ is missing\. A state keeps the parts, shapes"),
        ("another shape", r"another form: stats/\S+ is float32\[1, 16\], expected float32\[16\]"),
        ("another type", r"another form: stats/\S+ is float64\[16\], expected float32\[16\]"),
        ("a number in the state", r"form: stats/\S+ is a int; .* with torch\.tensor\(\.\.\.\)\. A"),
        ("state alone", r"Faulty\.round returned a ModelState; expected the server's new state"),
        ("metric", r"Faulty\.round returned the metric 'loss' as a Tensor; expected a number"),
    ],
)
def test_a_method_that_breaks_the_protocol_is_stopped_with_its_name_and_the_fix(
    fault: str, words: str, tmp_path: Path
) -> None:
    method = type("Faulty", (Breaking,), {"fault": fault})(BODY, EPISODE, local_steps=1)
    with pytest.raises(MethodError, match=words):
        Federation(method, REFERENCE, tmp_path).train(1)


def start(method: Method[Any], folder: Path) -> None:
    check_traits(method)
    Federation(method, REFERENCE, folder).train(1)


@pytest.mark.parametrize(
    ("function", "found", "words"),
    [
        ("init", None, r"Faulty\.init returned a state that is not a tree: the root is a NoneType"),
        ("init", {"v": 0.5}, r"Faulty\.init returned a state that is not a tree: v is a float"),
        (
            "init_client",
            None,
            r"Faulty\.init_client returned .* not a tree: the root is a NoneType",
        ),
        (
            "init_client",
            {"n": 0},
            r"Faulty\.init_client .*: n is a int;.* torch\.tensor\(\.\.\.\)\.$",
        ),
        ("init_client", {"n": np.zeros(2)}, r"Faulty\.init_client .*: n is a ndarray"),
        ("server_model", None, r"Faulty\.server_model returned a NoneType; expected ServerModel\("),
        ("traits", None, r"Faulty\.traits returned a NoneType; expected Traits\. Write `return"),
    ],
)
def test_a_function_that_returns_something_else_is_named(
    function: str, found: Any, words: str, tmp_path: Path
) -> None:
    made: Any = property(lambda _: found) if function == "traits" else lambda *_: found
    method = type("Faulty", (FLProto,), {function: made})(BODY, EPISODE, local_steps=1)
    with pytest.raises(MethodError, match=words):
        start(method, tmp_path)


def test_a_server_model_that_fails_for_the_first_state_is_named(tmp_path: Path) -> None:
    class Singular(FLProto):
        def server_model(self, server: Any) -> Any:
            torch.linalg.inv(torch.zeros(2, 2))

    with pytest.raises(MethodError, match=r"Singular\.server_model fails for the state that init"):
        start(Singular(BODY, EPISODE, local_steps=1), tmp_path)


@pytest.mark.parametrize("fault", ["adds", "a tree", "random"])
def test_the_vectorised_fleet_checks_the_same(fault: str, tmp_path: Path) -> None:
    method = type("Faulty", (Breaking,), {"fault": fault})(BODY, EPISODE, local_steps=1)
    with pytest.raises(MethodError, match=r"train (changes|returned|draws)"):
        Federation(method, VECTORISED, tmp_path).train(1)


def test_a_generator_that_another_thread_moves_once_is_no_fault(tmp_path: Path) -> None:
    calls = []

    class Disturbed(FLProto):
        @client_work(draw="draw")
        def train(self, down: Any, private: Any, drawn: Any) -> Any:
            calls.append(1)
            if len(calls) == 1:  # as a tracker's thread may, at any time
                random.random()
            return super().train(down, private, drawn)

    Federation(Disturbed(BODY, EPISODE, local_steps=1), REFERENCE, tmp_path).train(1)
    assert len(calls) > 1


class Bare(Method[Any]):
    name: ClassVar[str] = "bare"


@dataclass(frozen=True)
class Short(Method[Any]):
    name: ClassVar[str] = "short"


@dataclass(frozen=True)
class Namesake(FLProto):
    pass


def frozen(**members: Any) -> type[Any]:
    """Return FL-Proto with these members of the class; a pair is a type and a value."""
    types = {name: pair[0] for name, pair in members.items() if isinstance(pair, tuple)}
    values = {name: v[1] if isinstance(v, tuple) else v for name, v in members.items()}
    body = {"name": "mine", "__annotations__": types, "__module__": __name__, **values}
    return dataclass(frozen=True)(type("Mine", (FLProto,), body))


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (
            frozen(server_lr=1.0),
            r"Mine\.server_lr has no type, so it is no option. Write `server_lr: float = \.\.\.`",
        ),
        (frozen(local_steps=3), r"Mine\.local_steps has no type"),
        (frozen(traits=(int, 0)), r"Mine\.traits is an option, and also a function or property"),
        (frozen(learner=(int, 0)), r"Mine\.learner is an option, and also a function or property"),
        (
            frozen(step=(int, property(lambda _: 0))),
            r"Mine\.step is an option, and also a function or property",
        ),
        (frozen(traits=lambda _: Traits()), r"Mine\.traits is not a property\. Put @property"),
        (Bare, "Bare is not a dataclass"),
        (Short, "Short does not define init, round, server_model or evaluate"),
        (
            Namesake,
            r"the name 'fl_proto': FLProto \(.*base/fl_proto\.py, line \d+\) and Namesake \(.*"
            r"test_user_method\.py, line \d+\)",
        ),
        (type("Nameless", (Method,), {}), "Nameless.name is ''"),
        (type("Stray", (), {}), "Stray does not inherit from fedshot.protocol.Method"),
    ],
)
def test_what_is_no_method_is_refused(method: type[Any], words: str) -> None:
    before = dict(METHODS)
    with pytest.raises(ConfigError, match=words):
        register(method)
    assert before == METHODS


CHECKED = """
from dataclasses import dataclass
from typing import ClassVar
import numpy as np
from fedshot.methods import FLProto, register
from fedshot.protocol import client_work

@register
@dataclass(frozen=True)
class Mine(FLProto):
    \"\"\"FL-Proto with faults.\"\"\"
    name: ClassVar[str] = "mine"

    @client_work(draw="draw")
    def train(self, down, private, drawn):
        reply = super().train(down, private, drawn)
        {work}
        return reply

    def round(self, server, clients, key):
        {round}
        return super().round(server, clients, key)
"""
TINY = ["--method.local_steps", "1", "--model.backbone", "mlp", "--model.backbone.hidden", "[8]"]


@pytest.fixture
def _unregistered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no method that a file registers stay."""
    before = dict(METHODS)
    monkeypatch.setattr(user_methods, "_loaded", set())
    monkeypatch.delitem(sys.modules, FILE.stem)  # an import registers its method anew
    yield
    METHODS.clear()
    METHODS.update(before)


def checked(file: Path, work: str = "pass", round: str = "pass") -> int:
    file.write_text(CHECKED.format(work=work, round=round), encoding="utf-8")
    return main(["check", str(file), *TINY])


@pytest.mark.usefixtures("_unregistered")
def test_check_prints_a_line_for_each_promise_and_says_which_is_not_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also what the checks of a run cannot see: a write past torch, and chance at the server."""
    work = 'next(iter(down["theta"]["body"].values()))["weight"].data.add_(1)'
    assert checked(tmp_path / "mine.py", work, "np.random.rand()") == 1
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert len(lines) == len(CHECKS)
    failed = {line.split(": ")[2]: line for line in lines if line.startswith("mine: fail: ")}
    assert len(lines) == len(failed) + sum(line.startswith("mine: pass: ") for line in lines)
    assert re.search(
        r"train changes down/theta/body/\S+/weight in place$",
        failed["client work does not change its inputs"],
    )
    assert failed["no global random generator is used"].endswith(
        "a round uses the global generator of numpy"
    )
    assert told.err.splitlines()[-1] == f"{len(failed)} checks failed"


@pytest.mark.usefixtures("_unregistered")
@pytest.mark.parametrize(
    ("work", "told"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("assert False", "AssertionError"),
        ("assert False, 'no state yet'", "AssertionError: no state yet"),
    ],
)
def test_check_stops_where_a_method_does_not_run_and_names_the_line(
    work: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(tmp_path / "mine.py", work) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"mine: fail: two rounds and a test run without errors: {told} (mine.py, line 17)"
    ]


@pytest.mark.usefixtures("_unregistered")
def test_check_stops_at_a_state_that_changes_its_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = "found[0]._replace(stats={'v': server.theta})"
    changes = f"found = super().round(server, clients, key); return {stats}, found[1]"
    assert checked(tmp_path / "mine.py", round=changes) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "test run without errors: Mine.round returned a state in another form: stats/v/" in line


@pytest.mark.usefixtures("_unregistered")
def test_check_refuses_what_is_no_file_of_a_method(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.py"
    empty.write_text("", encoding="utf-8")
    for file, words in (
        (empty, "registers no method"),
        (tmp_path / "no.py", "which is not a file"),
    ):
        assert main(["check", str(file)]) == 2
        assert f"fedshot check names {str(file)!r}" in (err := capsys.readouterr().err)
        assert words in err


@pytest.mark.usefixtures("_unregistered")
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--method", "fl_proto"], "method.name is 'fl_proto', and the file registers 'mine'"),
        (["--data", "glyphs"], "data cannot be set: the check has small data and rounds"),
        (["--run.rounds", "50"], "run cannot be set"),
    ],
)
def test_check_refuses_settings_that_it_would_not_use(
    words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(CHECKED.format(work="pass", round="pass"), encoding="utf-8")
    assert main(["check", str(tmp_path / "mine.py"), *words]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("_unregistered")
def test_the_example_passes_all_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(FILE), "--method.local_steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"fl_proto_momentum: pass: {name}" for name, _ in CHECKS]
