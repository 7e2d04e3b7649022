"""Hosts that pack the features of a frozen encoder: all must have the same one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedshot.config.load import Config
from fedshot.core.errors import ConfigError
from fedshot.data.encoders.module import ModuleEncoder
from fedshot.deploy.flower.data_files import ServerTestRun, read_shards, write_shards
from fedshot.deploy.flower.packing import pack_client, pack_tests
from fedshot.deploy.flower.setup import Setup
from fedshot.runs.prepare import PreparedRun, read_data

from .test_packing import ALL, config, pictures

pytestmark = pytest.mark.usefixtures("empty_cache")

FEATURES = {"model": {"backbone": {"name": "mlp", "hidden": []}}, "method": {"name": "fedncm"}}
TESTED = ("crow", "jay", "owl", "rook")


def encoder(seed: int = 0) -> ModuleEncoder:
    torch.manual_seed(seed)
    return ModuleEncoder().hold(nn.Sequential(nn.Flatten(), nn.Linear(25, 6)))


def of(*names: str, seed: int = 0) -> Config:
    made = Config.of(config().settings | FEATURES | {"run": {"rounds": 1}})
    return made.with_data(pictures(*names)).with_encoder(encoder(seed))


def pack(folder: Path, *names: str, seed: int = 0) -> None:
    made, dataset = read_data(of(*names, seed=seed))
    if names == TESTED:
        pack_tests(folder, made, dataset)
    else:
        pack_client(folder, made, dataset, 0)


def test_each_host_packs_the_features_of_its_own_examples(tmp_path: Path) -> None:
    pack(tmp_path / "server", *TESTED)
    server = ServerTestRun(of(*TESTED), str(tmp_path / "server"))
    digest = encoder().load("images", "cpu").options.digest
    assert server.config.settings["model"]["encoder"]["digest"] == digest
    assert server.dataset_info().original == (5, 5, 1)
    setup = Setup.of("0" * 32, server)
    assert setup.config().settings["model"]["encoder"]["digest"] == digest
    pack(tmp_path / "a", "robin", "wren")
    held = read_shards(tmp_path / "a")
    assert held.dataset.shape == (6,)
    setup.check(held)
    alone = read_data(of("robin", "wren"))[1]
    np.testing.assert_array_equal(held.dataset.x, alone.x)


def test_a_node_with_another_encoder_is_refused_with_both_hashes(tmp_path: Path) -> None:
    pack(tmp_path / "server", *TESTED)
    setup = Setup.of("0" * 32, ServerTestRun(of(*TESTED), str(tmp_path / "server")))
    pack(tmp_path / "b", "robin", "wren", seed=1)
    mine, theirs = (encoder(seed).load("images", "cpu").options.digest for seed in (0, 1))
    with pytest.raises(ConfigError, match=f"another frozen encoder .* {theirs}, expected {mine}"):
        setup.check(read_shards(tmp_path / "b"))
    plain = config({"model": {"backbone": {"name": "mlp"}}})
    pack_client(tmp_path / "c", plain, pictures("robin", "wren"), 0)
    with pytest.raises(ConfigError, match=f"another frozen encoder .* none, expected {mine}"):
        setup.check(read_shards(tmp_path / "c"))


def test_the_server_has_the_encoder_of_its_test_data(tmp_path: Path) -> None:
    pack(tmp_path, *TESTED)
    other = of(*TESTED, seed=1)
    for made in (other.with_encoder(None), read_data(other)[0]):
        with pytest.raises(ConfigError, match="Write it again with the server's configuration"):
            ServerTestRun(made, str(tmp_path))


def test_dealt_features_are_those_of_the_server(tmp_path: Path) -> None:
    whole = PreparedRun(of(*ALL))
    write_shards(tmp_path, whole.dataset, whole.client_split.train, [0])
    Setup.of("0" * 32, whole).check(read_shards(tmp_path))
