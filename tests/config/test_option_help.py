"""The list of all options: whole, described, and the page made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedshot.cli.main import main
from fedshot.config import option_help
from fedshot.config.registry import KINDS, NONE, all_options

DOCS = Path(__file__).parents[2] / "docs" / "options"
EVERY = [part for place in option_help.PATHS for part in option_help.parts(place)]


def test_everything_says_what_it_is() -> None:
    silent = [f"{part.path} {part.kind}" for part in EVERY if not part.summary]
    silent += [option.path for part in EVERY for option in part.options() if not option.description]
    assert not silent, "\n".join(silent)


def test_every_option_of_a_configuration_is_listed() -> None:
    assert NONE in {part.kind for part in option_help.parts("model.head")}
    listed = {option.path for part in EVERY for option in part.options()}
    for place, (kinds, default) in KINDS.items():
        for kind in kinds:
            assert kind in {part.kind for part in option_help.parts(place)}
            names = {at: first for at, (_, first) in KINDS.items()} | {place: kind}
            assert {one.path for one in all_options(names)} <= listed, (place, kind, default)


def test_the_pages_are_what_the_command_writes(tmp_path: Path) -> None:
    assert main(["options", "--markdown", str(tmp_path)]) == 0
    written, kept = (
        {page.name: page.read_text(encoding="utf-8") for page in folder.iterdir()}
        for folder in (tmp_path, DOCS)
    )
    assert written == kept, (
        "docs/options is not what `fedshot options --markdown docs/options` writes"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "model.backbone  mlp, adapter, conv4, resnet12, gru, bilstm, module"),
        (["run"], "--run.rounds (a whole number of at least 1; default 100)"),
        (["model.head"], "cosine     The logit of a class is `scale` times"),
        (["model.head", "none"], "No head, for methods that classify from the features."),
        (["model.head", "cosine"], "--model.head.scale (a number above 0; default 10.0)"),
        (["partition", "iid"], "--partition.clients (a whole number of at least 1; default 10)"),
        (["data", "folder"], "--data.path (a text; must be given)"),
        (["method", "f2l"], "--method.inner.lr (a number above 0 or null; default null)"),
        (["method", "fl_proto"], "of the clients: step size."),
    ],
)
def test_a_place_is_listed(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options", *words]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["runs"], "there are no options at 'runs'. Did you mean 'run'"),
        (
            ["run.unreliable"],
            "not a section of its own. `fedshot options run` lists the options below",
        ),
        (
            ["run", "fast"],
            "`run` is a section without components, so it takes no name 'fast'. Leave it out.",
        ),
        (["model.head", "cosin"], "there is no model.head 'cosin'. Did you mean 'cosine'"),
        (
            ["run", "--markdown", "pages"],
            "--markdown writes the pages of all sections. Leave out ",
        ),
    ],
)
def test_a_slip_is_told(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options", *words]) == 2
    assert said in capsys.readouterr().err
