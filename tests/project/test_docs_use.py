"""The snippets of docs/use.md are Python, and name what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import fedshot.use

TEXT = (Path(__file__).parents[2] / "docs" / "use.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_every_snippet_compiles_and_imports_what_exists() -> None:
    assert len(SNIPPETS) == 3
    for snippet in SNIPPETS:
        compile(snippet, "docs/use.md", "exec")
        for node in ast.walk(ast.parse(snippet)):
            if isinstance(node, ast.ImportFrom) and node.module == "fedshot.use":
                assert all(hasattr(fedshot.use, name.name) for name in node.names)


def test_the_web_server_takes_a_dozen_lines() -> None:
    server = next(snippet for snippet in SNIPPETS if "FastAPI" in snippet)
    imports = ("from", "import")
    lines = [t for t in server.splitlines() if t and not t.startswith(imports)]
    assert len(lines) <= 12
