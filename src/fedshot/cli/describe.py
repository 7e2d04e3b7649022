"""The commands `methods`, `options`, `config schema` and `completion`. Each returns exit code 0."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from fedshot.config import option_help
from fedshot.config.registry import KINDS, NONE, OPTIONAL, every_option
from fedshot.core.console import say
from fedshot.core.errors import ConfigError


def methods(options: argparse.Namespace) -> int:
    """Print the list of methods, or the options of a method."""
    say(option_help.text("method", options.method))
    return 0


def options(chosen: argparse.Namespace) -> int:
    """Print an overview of the sections, or help on one, or write Markdown pages of all options."""
    if chosen.markdown and chosen.place:
        raise ConfigError(
            f"--markdown writes the pages of all sections. Leave out {chosen.place!r}."
        )
    if chosen.markdown:
        chosen.markdown.mkdir(parents=True, exist_ok=True)
        for name, text in option_help.pages().items():
            (chosen.markdown / name).write_text(text, encoding="utf-8")
    else:
        say(option_help.text(chosen.place, chosen.kind) if chosen.place else option_help.overview())
    return 0


def schema(options: argparse.Namespace) -> int:
    """Print the JSON Schema of a configuration."""
    del options
    say(json.dumps(option_help.json_schema(), indent=1))
    return 0


def completion(options: argparse.Namespace) -> int:
    """Print a shell's completion script, which completes commands and key paths of options."""
    import shtab

    from fedshot.cli.main import make_parser

    parser = make_parser()
    choices = {f"{path}.name": [*kinds] for path, (kinds, _) in KINDS.items()}
    for path in OPTIONAL:
        choices[f"{path}.name"].append(NONE)
    choices |= {"name": [], "seed": [], **{one.path: [] for one in every_option()}}
    for one in every_option():
        choices[one.path] += [word for word in get_args(one.hint) if isinstance(word, str)]
    for command in commands_of(parser):
        for action in command._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        if command.get_default("takes_settings"):
            for path, words in choices.items():
                command.add_argument(f"--{path}", choices=list(dict.fromkeys(words)) or None)
    say(shtab.complete(parser, options.shell))
    return 0


def commands_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of each command, and of each action of a command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below: dict[str, Any] = action.choices
            for command in below.values():
                yield command
                yield from commands_of(command)
