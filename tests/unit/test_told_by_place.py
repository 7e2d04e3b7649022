"""What is refused of an option is told by its place in the settings."""

from __future__ import annotations

from typing import Any

import pytest

from fedshot.config.load import Config
from fedshot.config.options import with_option_path
from fedshot.core.errors import ConfigError, DataError, FedshotError
from fedshot.runs.prepare import PreparedRun
from system.runs import SMALL, merged

TREE: dict[str, Any] = {
    "partition": {"clients": 0, "alpha": -1.0},
    "test": {"group": {"clients": 0}, "way": 5, "seed": 3},
    "episode": {"way": [0, 3]},
    "method": {"way": 5, "optimizer": {"lr": -1.0}},
    "data": {"path": "a b", "seed": 3},
    "model": {"backbone": {"hidden": [0]}},
}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("clients is 0; expected 1", "partition.clients is 0; expected 1"),
        ("alpha is -1.0; expected", "partition.alpha is -1.0; expected"),
        ("optimizer.lr is -1.0; expected", "method.optimizer.lr is -1.0; expected"),
        ("way is (0, 3); expected", "episode.way is (0, 3); expected"),
        ("hidden is (0,); expected", "model.backbone.hidden is (0,); expected"),
        ("path is 'a b', and", "data.path is 'a b', and"),
        ("way is 5, and there", "way is 5, and there"),  # two of them
        ("clients is 7; expected", "clients is 7; expected"),  # not of these settings
        ("seed is 3", "seed is 3"),
        ("alpha is -1.0", "partition.alpha is -1.0"),
        ("lr is -1.05; expected", "lr is -1.05; expected"),
        ("test.way is 5; expected", "test.way is 5; expected"),
        ("the way is 5; expected", "the way is 5; expected"),
        ("", ""),
    ],
)
def test_the_place_is_that_of_the_option_with_this_name_and_value(text: str, told: str) -> None:
    with pytest.raises(FedshotError) as error, with_option_path(TREE):
        raise DataError(text)
    assert str(error.value) == told
    assert isinstance(error.value, DataError)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"partition": {"name": "iid", "clients": 0}}, "partition.clients is 0"),
        ({"partition": {"name": "classes", "clients": 30}}, "partition.clients is 30, but there"),
        ({"episode": {"way": 0}}, "episode.way is 0"),
        ({"model": {"backbone": {"hidden": [0]}}}, "model.backbone.hidden is (0,)"),
        ({"method": {"optimizer": {"name": "sgd", "lr": -1}}}, "method.optimizer.lr is -1"),
        ({"method": {"name": "fedfomo", "epsilon": 3}}, "method.epsilon is 3"),
    ],
)
def test_a_run_that_is_refused_says_where_the_option_stands(
    change: dict[str, Any], told: str
) -> None:
    with pytest.raises((ConfigError, DataError)) as error:
        PreparedRun(Config.of(merged(SMALL, change)))
    assert str(error.value).startswith(told)
