"""How the package is laid out: what import-linter cannot say."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from functools import cache
from pathlib import Path

import fedshot

PACKAGE = Path(fedshot.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
# A room's table of what can be chosen by name has the same name everywhere.
SHARED_NAMES = {"__init__", "registry"}
RETIRED = {
    "lesson", "lessons", "question", "exam", "exams", "taught", "nearness", "outlook", "gallery",
    "heaviest", "shelf", "dealer", "gathering", "arrangement", "complaints", "sights", "roster",
    "cargo",
}  # fmt: skip
STAYING = {"common_questions", "question"}  # an option that users type; a key of step-times.json


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}


def named(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_only_what_python_asks_for_lies_at_the_root() -> None:
    files = {path.name for path in PACKAGE.iterdir() if path.is_file()}
    assert files == {"__init__.py", "__main__.py", "py.typed"}


def test_an_init_is_a_page_at_most() -> None:
    long = [named(path) for path in MODULES
            if path.name == "__init__.py" and len(path.read_text().splitlines()) > 60]  # fmt: skip
    assert long == []


def test_no_module_name_occurs_twice() -> None:
    places = defaultdict(list)
    for path in MODULES:
        if path.stem not in SHARED_NAMES:
            places[path.stem].append(named(path))
    assert {stem: found for stem, found in places.items() if len(found) > 1} == {}


def test_no_class_is_defined_twice() -> None:
    places = defaultdict(list)
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(named(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_method_imports_another() -> None:
    """What several of a family need stands in a module beside them that is no method."""
    methods = {
        path
        for path, tree in trees().items()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and path.is_relative_to(PACKAGE / "methods")
        for part in node.body
        if isinstance(part, ast.AnnAssign) and ast.unparse(part.target) == "name"
        and "ClassVar" in ast.unparse(part.annotation)
    }  # fmt: skip
    assert len(methods) > 20
    modules = {"fedshot." + named(path)[:-3].replace("/", ".") for path in methods}
    for path in methods:
        imported = {node.module for node in ast.walk(trees()[path])
                    if isinstance(node, ast.ImportFrom)}  # fmt: skip
        assert not imported & modules, named(path)


def test_no_family_of_methods_imports_another() -> None:
    families = {
        path.name for path in (PACKAGE / "methods").iterdir() if (path / "__init__.py").exists()
    }
    assert len(families) > 4
    for path, tree in trees().items():
        room, _, rest = named(path).partition("/")
        if room != "methods" or rest.split("/")[0] not in families:
            continue
        imported = {node.module.split(".")[2] for node in ast.walk(tree)
                    if isinstance(node, ast.ImportFrom) and node.module
                    and node.module.startswith("fedshot.methods.")}  # fmt: skip
        assert not imported & families - {rest.split("/")[0]}, named(path)


def test_retired_words_do_not_come_back() -> None:
    found = set()
    ends = re.compile(f"(?i:{'|'.join(RETIRED)})(?![a-z])")  # few files go through the tokenizer
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        if not ends.search(text):
            continue
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME and token.string not in STAYING:
                words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", token.string)
                if any(word.lower() in RETIRED for word in words):
                    found.add(f"{named(path)}: {token.string}")
    assert found == set()


def test_what_a_method_can_do_is_read_as_its_traits() -> None:
    """Only an exchange looks anything up in a method by name: the client work it asks for."""
    allowed = {"protocol/exchange.py": 1}
    found: dict[str, int] = {}
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) in ("getattr", "hasattr")
                and re.search(r"\bmethod\b|_method\b|METHODS", ast.unparse(node.args[0]))
            ):
                found[named(path)] = found.get(named(path), 0) + 1
    assert found == allowed


def test_errors_of_what_python_can_call_do_not_name_options_of_the_command_line_alone() -> None:
    found = [
        f"{named(path)}: {text}"
        for path, tree in trees().items()
        if not {"cli", "deploy", "recipes"} & {*path.parts}
        and named(path) != "config/load.py"  # it reads the words of the command line
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and node.exc is not None
        for text in [ast.unparse(node.exc)]
        if re.search(r"(?<!\S)--[a-z]", re.sub(r"`fedshot [^`]*`", "", text))
        and "in Python" not in text
    ]
    assert not found
