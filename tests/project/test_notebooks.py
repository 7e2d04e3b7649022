"""The notebooks run, are committed without outputs, and are in plain words."""

from __future__ import annotations

import importlib.util
from base64 import b64encode
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

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


def test_what_cells_put_out_becomes_a_page(render: ModuleType) -> None:
    """`make docs` runs all notebooks as they stand."""
    picture, frame = b"\x89PNG", '<style>x\n</style><table border="1" class="dataframe">\n</table>'
    outputs = [
        new_output("stream", name="stderr", text="progress"),
        new_output("stream", text="\x1b[31m3 of 4\x1b[0m pictures are right\n"),
        new_output("display_data", {"image/png": b64encode(picture).decode(), "text/plain": "x"}),
        new_output("execute_result", {"text/html": frame, "text/plain": "x"}),
    ]
    cells = [
        new_markdown_cell("# Title\n[page](../../docs/page.md)"),
        *(new_code_cell(f"show({i})", outputs=[output]) for i, output in enumerate(outputs)),
    ]
    assert render.markdown(new_notebook(cells=cells), "name") == (
        "# Title\n[page](../page.md)\n\n"
        "```python\nshow(0)\n```\n\n"
        "```python\nshow(1)\n```\n\n```text\n3 of 4 pictures are right\n```\n\n"
        "```python\nshow(2)\n```\n\n![Output of the cell above](name-1.png)\n\n"
        '```python\nshow(3)\n```\n\n<div class="output"><table> </table></div>\n',
        {"name-1.png": picture},
    )
