"""A method of one's own is known by its file, and other processes load it from there."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedshot.api.sweeping  # noqa: F401  (before `_as_before`, which drops later imports)
from fedshot.cli.main import main
from fedshot.core.errors import ConfigError
from fedshot.methods import user_methods
from fedshot.methods.base.fl_proto import FLProto
from fedshot.methods.registry import METHODS

METHOD = """
from dataclasses import dataclass
from typing import ClassVar
from fedshot.methods import FLProto, register
{more}

@register
@dataclass(frozen=True)
class Mine(FLProto):
    name: ClassVar[str] = "{name}"
"""


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before, modules, path = dict(METHODS), set(sys.modules), list(sys.path)
    monkeypatch.delenv(user_methods.FILES, raising=False)
    monkeypatch.setattr(user_methods, "_loaded", set())
    yield
    METHODS.clear()
    METHODS.update(before)
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    sys.path[:] = path


def written(path: Path, name: str = "mine", more: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(METHOD.format(name=name, more=more), encoding="utf-8")
    return path


def loaded(monkeypatch: pytest.MonkeyPatch, *files: Any) -> None:
    monkeypatch.setenv(user_methods.FILES, os.pathsep.join(map(str, files)))
    user_methods.load()


def test_a_method_of_the_package_needs_no_file() -> None:
    assert user_methods.source("fl_proto") is None
    assert user_methods.source("nobody") is None
    assert user_methods.fingerprint("fl_proto") == ""
    assert user_methods.for_children("fl_proto") == {}
    assert user_methods.program("fl_proto") == ["fedshot"]


def test_what_a_process_is_told_lets_it_load_the_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "my method.py")
    loaded(monkeypatch, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert user_methods.source("mine") == file
    assert user_methods.fingerprint("mine") == f"my method.py {digest}"
    assert user_methods.program("fl_proto", "mine", "mine") == [
        "FEDSHOT_METHODS='my method.py'",
        "fedshot",
    ]
    told = user_methods.for_children("mine")
    del METHODS["mine"]
    user_methods._loaded.clear()  # as in another process
    monkeypatch.setenv(user_methods.FILES, told[user_methods.FILES])
    user_methods.load()
    assert issubclass(METHODS["mine"], FLProto)


def test_what_is_known_already_is_not_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "mine.py")
    loaded(monkeypatch, file)
    method = METHODS["mine"]
    user_methods.load()
    assert METHODS["mine"] is method


def test_several_files_and_what_lies_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fedshot_test_helper.py").write_text("K = 1\n", encoding="utf-8")
    first = written(tmp_path / "first.py", "first", "import fedshot_test_helper")
    (tmp_path / "lab_of_test").mkdir()
    for name in ("__init__", "constants"):
        (tmp_path / "lab_of_test" / f"{name}.py").write_text("K = 1\n", encoding="utf-8")
    second = written(tmp_path / "lab_of_test" / "second.py", "second", "from .constants import K")
    loaded(monkeypatch, first, second)
    assert user_methods.source("first") == first
    assert user_methods.source("second") == second


def test_what_lies_beside_a_method_is_found_first_as_by_its_own_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, value in ((tmp_path / "other", 1), (tmp_path / "own", 2)):
        folder.mkdir()
        (folder / "fedshot_test_helper.py").write_text(f"K = {value}\n", encoding="utf-8")
    sys.path.insert(0, str(tmp_path / "other"))
    more = "import fedshot_test_helper\nassert fedshot_test_helper.K == 2"
    loaded(monkeypatch, written(tmp_path / "own" / "mine.py", more=more))


def test_names_of_files_stand_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dots, one name in two folders, the name of a module, a package's own file."""
    places = ("v1.2.py", "a/method.py", "b/method.py", "c/torch.py", "lab_of_test/__init__.py")
    files = [written(tmp_path / place, f"mine{i}") for i, place in enumerate(places)]
    loaded(monkeypatch, *files)
    user_methods.load()
    assert [user_methods.source(f"mine{i}") for i in range(len(files))] == files


@pytest.mark.parametrize("order", [("base", "variant"), ("variant", "base")])
def test_a_method_that_builds_on_another_is_loaded_once_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[str, str]
) -> None:
    files = {"base": written(tmp_path / "own_base_of_test.py", "base")}
    files["variant"] = written(tmp_path / "variant.py", "variant", "import own_base_of_test")
    loaded(monkeypatch, *(files[name] for name in order))
    assert {name: user_methods.source(name) for name in files} == files


def test_a_package_that_hands_on_a_method_is_loaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "lab_of_test" / "inner.py")
    front = tmp_path / "lab_of_test" / "__init__.py"
    front.write_text("from .inner import Mine\n", encoding="utf-8")
    loaded(monkeypatch, front)
    user_methods.load()
    assert user_methods.source("mine") == tmp_path / "lab_of_test" / "inner.py"


def test_an_error_in_a_package_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path / "lab_of_test" / "mine.py")
    (file.parent / "__init__.py").write_text("import nowhere_at_all\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="No module named 'nowhere_at_all'"):
        loaded(monkeypatch, file)


def test_a_file_that_changes_under_way_is_another_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "mine.py")
    loaded(monkeypatch, file)
    before = user_methods.fingerprint("mine")
    user_methods.check({"mine": before, "fl_proto": ""})
    del METHODS["mine"]
    user_methods._loaded.clear()
    written(file, more="# other lines")
    sys.modules.pop("mine", None)
    user_methods.load()
    with pytest.raises(ConfigError, match="'mine' has changed since the command started"):
        user_methods.check({"mine": before})


def test_the_hash_is_of_the_lines_that_were_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "mine.py")
    loaded(monkeypatch, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    file.write_text("raise AssertionError\n", encoding="utf-8")
    assert user_methods.fingerprint("mine") == f"mine.py {digest}"
    file.unlink()
    assert user_methods.fingerprint("mine") == f"mine.py {digest}"
    assert user_methods.program("mine") == ["FEDSHOT_METHODS=mine.py", "fedshot"], (
        "results can be written"
    )


def test_a_path_that_cannot_be_joined_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "mine.py")
    loaded(monkeypatch, file)
    monkeypatch.setattr(os, "pathsep", "m")
    with pytest.raises(ConfigError, match="has a 'm' in its path"):
        user_methods.for_children("mine")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gone.py", None, "names '.*gone.py', which is not a file"),
        ("idle.py", "x = 1\n", "registers no method. Put @register above its class"),
        (
            "mine.txt",
            METHOD.format(name="mine", more=""),
            "which does not end in .py",
        ),
        ("odd.py", "x = 1\nif x\n", "odd.py', which raises an error: SyntaxError: .*line 2"),
        ("end.py", "raise SystemExit(3)\n", "line 1: SystemExit: 3"),
        ("far.py", "x = 1\n\nimport nowhere\n", "line 3: ModuleNotFoundError: No module named"),
        (
            "same.py",
            METHOD.format(name="ditto", more=""),
            r"the name 'ditto': Ditto \(.*ditto\.py, line \d+\) and .* \(.*same\.py, line \d+\)",
        ),
    ],
)
def test_what_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        loaded(monkeypatch, tmp_path / name)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("fedshot.train(method='mine', out='out')", "fedshot.train"),
        ("fedshot.sweep(None, {'seed': [1]}, method='mine', out='out')", "fedshot.sweep"),
        ("import fedshot.cli.main as m; m.main(['methods'])", "fedshot.cli.main.main"),
    ],
)
def test_a_file_that_trains_while_it_is_loaded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path / "mine.py")
    text = file.read_text(encoding="utf-8")
    file.write_text(f"{text}\n\nimport fedshot\n{call}\n", encoding="utf-8")
    words = f'mine.py calls {name} while it is loaded, .* below `if __name__ == "__main__":`'
    with pytest.raises(ConfigError, match=words):
        loaded(monkeypatch, file)
    assert not (tmp_path / "out").exists()
    file = written(tmp_path / "later.py", "later", f"if __name__ == '__main__':\n    {call}")
    loaded(monkeypatch, file)
    user_methods.refuse_while_loading("no longer loading")


def test_a_method_without_a_file_cannot_go_to_other_processes() -> None:
    module = sys.modules["a_notebook"] = ModuleType("a_notebook")
    exec(METHOD.format(name="mine", more=""), module.__dict__)
    with pytest.raises(ConfigError, match="is not defined in a file"):
        user_methods.for_children("mine")
    assert user_methods.fingerprint("mine") == "", "a run in the notebook itself needs none"


def test_a_command_that_needs_no_method_runs_no_file_and_the_others_say_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.setenv(user_methods.FILES, str(file))
    assert main(["data", "list"]) == 0
    assert main(["status", str(tmp_path)]) == main(["compare", str(tmp_path)]) == 2, (
        "there are no runs"
    )
    assert user_methods.FILES not in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert main(["methods"]) == 2, "it registers none"
    assert (
        f"FEDSHOT_METHODS: loading {file}, whose code runs in this process"
        in capsys.readouterr().err
    )
    assert (tmp_path / "ran").exists()
