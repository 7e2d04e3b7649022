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

from fedshot import own
from fedshot.errors import ConfigError
from fedshot.methods import METHODS, FLProto

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
    monkeypatch.delenv(own.FILES, raising=False)
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
    monkeypatch.setenv(own.FILES, os.pathsep.join(map(str, files)))
    own.load()


def test_a_method_of_the_package_needs_no_file() -> None:
    assert own.source("fl_proto") is None
    assert own.source("nobody") is None
    assert own.fingerprint("fl_proto") == ""
    assert own.for_children("fl_proto") == {}
    assert own.program("fl_proto") == ["fedshot"]


def test_what_a_process_is_told_lets_it_load_the_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "my method.py")
    loaded(monkeypatch, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert own.source("mine") == file
    assert own.fingerprint("mine") == f"my method.py {digest}"
    assert own.program("fl_proto", "mine", "mine") == ["FEDSHOT_METHODS='my method.py'", "fedshot"]
    told = own.for_children("mine")
    del METHODS["mine"]
    monkeypatch.setenv(own.FILES, told[own.FILES])
    own.load()
    assert issubclass(METHODS["mine"], FLProto)


def test_what_is_known_already_is_not_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "mine.py")
    loaded(monkeypatch, file)
    method = METHODS["mine"]
    own.load()
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
    assert own.source("first") == first
    assert own.source("second") == second


def test_a_folder_beside_a_method_hides_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "colorsys.py").write_text("raise AssertionError\n", encoding="utf-8")
    sys.modules.pop("colorsys", None)
    loaded(monkeypatch, written(tmp_path / "mine.py", more="import colorsys; colorsys.ONE_SIXTH"))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gone.py", None, "names '.*gone.py', where no file is"),
        ("idle.py", "x = 1\n", "registers no method. Put @register above its class"),
        ("mine.txt", METHOD.format(name="mine", more=""), "expected a file that ends in .py"),
        ("same.py", METHOD.format(name="ditto", more=""), "there is a method 'ditto' already"),
    ],
)
def test_what_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        loaded(monkeypatch, tmp_path / name)


def test_a_method_without_a_file_cannot_go_to_other_processes() -> None:
    module = sys.modules["a_notebook"] = ModuleType("a_notebook")
    exec(METHOD.format(name="mine", more=""), module.__dict__)
    with pytest.raises(ConfigError, match="stands in no file"):
        own.for_children("mine")
