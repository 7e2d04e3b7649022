"""What is refused of an option is told by its place in the settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from fedshot.config.load import Config
from fedshot.config.validation import with_option_path
from fedshot.core.errors import ConfigError, DataError, FedshotError
from fedshot.nn.optim import Optimizer
from fedshot.runs.prepare import PreparedRun
from system.runs import SMALL, merged


@dataclass(frozen=True)
class Part:
    """Options, and a field that is none."""

    steps: int = 1
    way: int = 5
    optimizer: Optimizer = Optimizer()
    model: int = 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("steps is 0; expected 1", "method.steps is 0; expected 1"),
        ("clients is 0; expected 1", "clients is 0; expected 1"),
        ("optimizer.lr is -1.0; expected", "method.optimizer.lr is -1.0; expected"),
        ("way is (0, 3); expected", "method.way is (0, 3); expected"),
        ("alpha is -1.0", "alpha is -1.0"),  # no option of this part
        ("model.head.way is 3", "model.head.way is 3"),
        ("test.way is 5; expected", "test.way is 5; expected"),
        ("the way is 5; expected", "the way is 5; expected"),
        ("", ""),
    ],
)
def test_the_key_path_is_put_before_an_option_of_the_part(text: str, told: str) -> None:
    with pytest.raises(FedshotError) as error, with_option_path("method", Part):
        raise DataError(text)
    assert str(error.value) == told
    assert isinstance(error.value, DataError)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"partition": {"name": "iid", "clients": 0}}, "partition.clients is 0"),
        ({"partition": {"name": "classes", "clients": 30}}, "partition.clients is 30, but there"),
        ({"episode": {"way": 0}}, "episode.way is 0"),
        ({"model": {"backbone": {"hidden": [0]}}}, "model.backbone.hidden is [0]"),
        ({"method": {"optimizer": {"name": "sgd", "lr": -1}}}, "method.optimizer.lr is -1"),
        (
            {"method": {"name": "f2l", "client_optimizer": {"lr": -1}}},
            "method.client_optimizer.lr is -1",
        ),
        ({"method": {"name": "fedfomo", "epsilon": 3}}, "method.epsilon is 3"),
        ({"test": {"group": {"spare": 1}}}, "test.group.spare is 1 and clients is 0"),
        ({"test": {"shot": 0}}, "test.shot is 0; expected a whole number of at least 1"),
    ],
)
def test_a_run_that_is_refused_says_where_the_option_stands(
    change: dict[str, Any], told: str
) -> None:
    with pytest.raises((ConfigError, DataError)) as error:
        PreparedRun(Config.of(merged(SMALL, change)))
    assert str(error.value).startswith(told)
