"""Prints the page of all commands: `python -m fedshot.cli.help_page > docs/cli.md`."""

from __future__ import annotations

import os

from fedshot.cli.describe import commands_of
from fedshot.cli.main import make_parser

_HEAD = """\
# Commands

What each command prints with `--help`. `fedshot COMMAND --help` prints the same in a terminal.
[Options](options/index.md) lists the settings of a configuration, which some commands take as
`--section.key VALUE`.
"""


def markdown() -> str:
    """Return the page as Markdown, with help texts 88 columns wide whatever the terminal."""
    os.environ["COLUMNS"] = "90"  # argparse leaves two of them free
    parts = [_HEAD, f"```text\n{make_parser().format_help().strip()}\n```\n"]
    for command in commands_of(make_parser()):
        text = command.format_help().strip()
        parts.append(f"## `{command.prog}`\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(markdown(), end="")
