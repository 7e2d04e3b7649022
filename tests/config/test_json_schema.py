"""The JSON Schema of configurations: it takes what fedshot takes, and finds slips as an editor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from fedshot.cli.main import main
from fedshot.config.load import Config, load
from fedshot.config.registry import every_option
from fedshot.config.settings import at
from fedshot.recipes.index import load as recipe
from fedshot.recipes.index import names

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    from fedshot.config.option_help import json_schema

    return json_schema()


@pytest.fixture(scope="module")
def validator(schema: dict[str, Any]) -> Draft202012Validator:
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def test_the_command_prints_it(schema: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.yaml")), ids=lambda path: path.name)
def test_the_examples_are_of_the_schema(path: Path, validator: Draft202012Validator) -> None:
    validator.validate(load(path))
    assert Config.of(load(path)).name


@pytest.mark.slow
def test_the_cells_of_the_recipes_are_of_the_schema(validator: Draft202012Validator) -> None:
    for name in names(ROOT / "results"):
        one = recipe(name, ROOT / "results")
        for budget in one.budgets if one.rows else ():
            cells = one.cells(budget)
            for cell in cells[:: max(1, len(cells) // 3)]:
                validator.validate(cell.settings())


def test_what_is_written_of_a_configuration_is_of_the_schema(
    validator: Draft202012Validator,
) -> None:
    validator.validate(Config.of({"split": {"base": [0, 1]}}).settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"run": None, "method": "fl_proto", "model": {"head": "none"}},
        {"split": {"base": [0, "1-3"], "novel": 5}, "name": 2024},
        {"data": {"name": "folder", "path": "x", "channels": 3}},
        {"episode": {"way": [3, 5]}, "method": {"optimizer": {"lr": 1}}},
        {"compress": {"up": {"name": "topk", "share": 0.1}, "down": "int8"}},
    ],
)
def test_what_fedshot_takes_is_of_the_schema(
    settings: dict[str, Any], validator: Draft202012Validator
) -> None:
    Config.of(settings)
    validator.validate(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"runs": {}},
        {"run": {"rounds": 0}},
        {"run": {"rounds": "x"}},
        {"run": {"chose": "last"}},
        {"method": {"name": "fl_prot"}},
        {"method": {"name": "fl_proto", "epsilon": 3}},
        {"data": {"name": "folder"}},
        {"model": {"backbone": {"width": 10**6}}},
        {"episode": {"way": [1, 2, 3]}},
    ],
)
def test_a_slip_is_not_of_the_schema(
    settings: dict[str, Any], validator: Draft202012Validator
) -> None:
    assert not validator.is_valid(settings)


def test_the_schema_has_every_option_with_its_default_and_what_it_means(
    schema: dict[str, Any],
) -> None:
    rounds = at(schema, "properties.run.properties.rounds")
    assert rounds["default"] == 100
    assert rounds["minimum"] == 1
    assert rounds["description"]
    text = json.dumps(schema)
    assert [
        one.path for one in every_option() if f'"{one.path.rpartition(".")[2]}"' not in text
    ] == []


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_options_of_a_configuration(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert "--method.inner.steps" in out
    assert "fedfsl_naive" in out
