"""The options of `model.encoder`: none by default, and then as if there were no such section."""

from __future__ import annotations

from typing import Any

import pytest

from fedshot.config.load import Config, override
from fedshot.config.registry import difference
from fedshot.core.errors import ConfigError
from fedshot.data.encoders.module import ModuleEncoder

NET = {"name": "module", "factory": "nets:make", "args": {"width": 8, "norm": {"eps": 1e-3}}}


def chosen(encoder: Any) -> Config:
    return Config.of({"model": {"encoder": encoder}})


def test_settings_without_an_encoder_are_those_of_older_versions() -> None:
    assert "encoder" not in Config.of({}).settings["model"]
    assert chosen("none").settings == Config.of({}).settings
    assert difference(Config.of({}).settings, chosen(NET).settings) is not None


def test_arguments_of_a_factory_may_be_any_keys_and_values() -> None:
    config = chosen(NET)
    assert Config.of(config.settings).settings == config.settings
    assert config.model.encoder == ModuleEncoder(factory="nets:make", args=NET["args"])
    settings, _ = override({"model": {"encoder": NET}}, ["--model.encoder.args.width", "16"])
    assert Config.of(settings).settings["model"]["encoder"]["args"]["width"] == 16
    other = chosen(NET | {"args": {"width": 9}}).settings
    changed = difference(config.settings, other)
    assert changed is not None
    assert "model.encoder.args.width was 8, is 9" in changed


def test_a_module_that_was_passed_stays_with_changed_copies() -> None:
    import torch

    config = Config.of({}).with_encoder(ModuleEncoder().hold(torch.nn.Flatten()))
    copy = config.with_threads(2).model.encoder
    assert isinstance(copy, ModuleEncoder)
    assert isinstance(copy.held, torch.nn.Flatten)
    assert config.with_encoder(None).settings == Config.of({}).settings


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        ({"name": "transformer"}, "Did you mean 'transformers'"),
        ({"name": "transformers"}, "model.encoder.path is not set"),
        (
            {"name": "none", "path": "x"},
            "Set model.encoder.name: module",
        ),
        ({"name": "module", "args": [1]}, "expected keys and values"),
        ({"name": "module", "size": 3}, "there is no option 'model.encoder.size'"),
    ],
)
def test_wrong_options_are_refused(encoder: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(encoder)
