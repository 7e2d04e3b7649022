"""Run the notebooks of this folder and write them as Markdown pages, with their outputs.

    python examples/notebooks/render.py FOLDER [NAME]...

A notebook runs in an empty temporary folder. An error in a cell ends the program.
"""

from __future__ import annotations

import base64
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")  # colours of a terminal


def executed(path: Path, timeout: int = 300) -> nbformat.NotebookNode:
    """Return a notebook with the outputs of its cells; raise CellExecutionError for an error."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook, timeout=timeout, resources={"metadata": {"path": folder}}
        ).execute()
    return notebook


def markdown(notebook: nbformat.NotebookNode, name: str) -> tuple[str, dict[str, bytes]]:
    """Return a page, and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source.replace("](../../docs/", "](../"))
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data: dict[str, Any] = output.get("data", {})
            text = output.get("text", "") or data.get("text/plain", "")
            if "image/png" in data:
                file = f"{name}-{len(pictures) + 1}.png"
                pictures[file] = base64.b64decode(data["image/png"])
                parts.append(f"![Output of the cell above]({file})")
            elif "text/html" in data:
                parts.append(f'<div class="output">{one_line(data["text/html"])}</div>')
            elif output.get("name") != "stderr" and text.strip():
                parts.append(f"```text\n{ESCAPE.sub('', text).strip()}\n```")
    return "\n\n".join(parts) + "\n", pictures


def one_line(html: str) -> str:
    """Return HTML without its styles, and on one line, so that Markdown leaves it as it is."""
    html = html.replace(' border="1" class="dataframe"', "").replace(
        ' style="text-align: right;"', ""
    )
    return re.sub(r"\s*\n\s*", " ", re.sub(r"<style.*?</style>", "", html, flags=re.DOTALL))


def main(folder: Path, names: list[str]) -> None:
    """Write the pages of all notebooks, or of those named, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(HERE.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        text, pictures = markdown(executed(path), path.stem)
        (folder / f"{path.stem}.md").write_text(text, encoding="utf-8")
        for file, data in pictures.items():
            (folder / file).write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
