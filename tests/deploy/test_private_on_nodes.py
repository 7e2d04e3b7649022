"""Differential privacy on nodes: what would reveal more than epsilon counts is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fedshot.core.errors import ConfigError
from fedshot.privacy.differential import ClientLevel, ExampleLevel

flower_runs = pytest.importorskip(
    "fedshot.deploy.flower.flower_runs", reason="the extra `flower` is not installed"
)
pytestmark = pytest.mark.flower


def check(privacy: Any, norms: str, rounds: int) -> None:
    config = SimpleNamespace(privacy=privacy, run=SimpleNamespace(rounds=rounds))
    flower_runs._check_privacy(SimpleNamespace(config=config), SimpleNamespace(norms=norms))


@pytest.mark.parametrize("norms", ["clip", "refuse"])
def test_norms_of_others_may_not_bound_a_private_upload(norms: str) -> None:
    with pytest.raises(ConfigError, match=rf"--norms is {norms}.* Set it to warn"):
        check(ClientLevel(noise=1.0), norms, 9)
    check(ClientLevel(noise=1.0), "warn", 9)
    check(None, norms, 9)


def test_examples_are_uploaded_in_one_round() -> None:
    with pytest.raises(ConfigError, match=r"run.rounds is 2.*Set run.rounds to 1"):
        check(ExampleLevel(noise=1.0), "warn", 2)
    check(ExampleLevel(noise=1.0), "warn", 1)
