"""The notebooks run, are committed without outputs, and are in plain words."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

from project.test_prose import faults

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture
def render() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render", FOLDER / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first_run", "own_pictures", "write_a_method"]


@each_notebook
def test_a_notebook_is_committed_without_outputs_and_in_plain_words(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            assert list(faults(cell.source)) == []
        else:
            assert (cell.outputs, cell.execution_count) == ([], None)


def shortened(path: Path, folder: Path) -> Path:
    """Copy a notebook with fewer rounds, steps and episodes."""
    notebook = nbformat.read(path, as_version=4)
    cuts = ((r'("rounds": )\d+', "2"), (r'("local_steps": )\d+', "1"), (r'(episodes": )\d+', "20"))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            for pattern, value in cuts:
                cell.source = re.sub(pattern, rf"\g<1>{value}", cell.source)
    copy = folder / path.name
    nbformat.write(notebook, copy)
    return copy


@pytest.mark.slow
def test_a_notebook_runs_and_becomes_a_page(
    render: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One of them: `make docs` runs all as they stand."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = shortened(FOLDER / "own_pictures.ipynb", tmp_path)
    text, pictures = render.markdown(render.executed(path, timeout=900), path.stem)
    assert text.startswith("# ")
    assert text.count("\n```python\n") == sum(
        cell.cell_type == "code" for cell in nbformat.read(path, as_version=4).cells
    )
    assert "pictures are right" in text
    assert all(
        f"]({name})" in text and data.startswith(b"\x89PNG") for name, data in pictures.items()
    )
