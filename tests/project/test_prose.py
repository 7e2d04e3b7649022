"""The prose of code and docs: retired words do not come back, and sentences stay short."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from project.test_layout import MODULES, named, trees

ROOT = Path(__file__).parents[2]
MADE = {ROOT / "docs/results.md", *(ROOT / "docs/results").glob("*.md")}  # of results' files
PAGES = sorted(
    {ROOT / "README.md", ROOT / "CHANGELOG.md"}.union(
        *((ROOT / folder).rglob("*.md") for folder in ("docs", "results"))
    )
    - MADE
)
LONGEST = 40  # words of a sentence
# Words for which the field has others: an exam that somebody sits, letters in the post.
RETIRED = re.compile(
    r"\b(exams?|sat|sits?|letters? (?:in|to|from) the post|shel(?:f|ves)|cargo|verdicts?|afresh|"
    r"whoever|lessons?|census of|outlooks?|nearness|galler(?:y|ies)|dealers?|roster|"
    r"doorm[ae]n|the way to itself|in words, by name|makes? the round last)\b",
    re.IGNORECASE,
)


def prose_of(path: Path) -> Iterator[str]:
    """Yield a module's docstrings and comments, and the texts in it that are sentences."""
    text = path.read_text(encoding="utf-8")
    comment: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comment.append(token.string.lstrip("#: "))
        elif token.type not in {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}:
            if comment:
                yield " ".join(comment)
            comment = []
    for node in ast.walk(trees()[path]):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text: tables, blocks of code and headings have none."""
    text = re.sub(r"```.*?```|\]\([^)]*\)|`[^`]*`", "X", text, flags=re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*#|>]|\d+\.|\w+:)\s)", text):
        if not block.lstrip().startswith(("|", "#")):
            yield from re.split(r"(?<=[.!?:;])[\"*)]*\s+", " ".join(block.split()))


def faults(text: str) -> Iterator[str]:
    for sentence in sentences(text):
        if found := RETIRED.search(sentence):
            yield f"{found.group()!r}: {sentence}"
        words = re.findall(r"[^\W\d_]+(?:['-][^\W\d_]+)*", sentence)  # figures are no words
        if len(words) > LONGEST:
            yield f"{len(words)} words: {sentence}"


def test_code_is_in_plain_words() -> None:
    found = [f"{named(path)}: {fault}" for path in MODULES
             for text in prose_of(path) for fault in faults(text)]  # fmt: skip
    assert not found, "\n".join(found)


def test_pages_are_in_plain_words() -> None:
    found = [f"{page.relative_to(ROOT)}: {fault}" for page in PAGES
             for fault in faults(page.read_text(encoding="utf-8"))]  # fmt: skip
    assert not found, "\n".join(found)
