"""The clients' files: the same draws as from the whole dataset, and nobody else's samples."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedshot.cli.main import main
from fedshot.config.load import Config
from fedshot.conformance.small import CLIENTS, DATASET, PARTITION
from fedshot.core import tree
from fedshot.core.errors import ConfigError, DataError
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.episode import ClientData
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import Partition
from fedshot.data.partitions.resampled import Resampled
from fedshot.data.tokens import Tokens
from fedshot.deploy.flower.data_files import (
    ServerTestRun,
    notes_of,
    path_of,
    read_shards,
    write_server_tests,
    write_shards,
)
from fedshot.deploy.flower.node_registry import parse_clients
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import FederatedDataset, PreparedRun
from system.runs import CHOOSING, SMALL, merged

SPEC = EpisodeSpec(way=3, shot=1, query=2)


def texts() -> Dataset:
    rng = Key(0).at("texts").numpy()
    sizes = rng.integers(0, 7, len(DATASET))
    table = rng.standard_normal((50, 4)).astype(np.float32)
    table[0] = 0
    ids = rng.integers(1, 50, sizes.sum()).astype(np.int32)
    tokens = Tokens(ids, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), table, 7)
    return Dataset("texts", tokens, DATASET.y, DATASET.class_names)


def features() -> Dataset:
    x = DATASET.pixels.reshape(len(DATASET), -1) / np.float32(255)
    return Dataset("features", x.astype(np.float32), DATASET.y, DATASET.class_names)


def spoken(drawn: Any, dataset: Dataset) -> str:
    """Return the hash of what was drawn, words by their vectors: files number words anew."""
    if not isinstance(dataset.x, Tokens):
        return tree.digest(drawn)
    table = torch.tensor(dataset.x.table)
    return tree.digest(tuple(table[leaf] if leaf.dtype == torch.int32 else leaf for leaf in drawn))


def assert_same_tests(mine: PreparedRun, theirs: PreparedRun) -> None:
    """Also in the number of episodes of the test and of the validation."""
    for one, other in ((mine.test, theirs.test), (mine.validation, theirs.validation)):
        assert one is not None
        assert other is not None
        assert len(one) == len(other)
        for u in range(len(other)):
            assert tree.digest(one.eval_episodes[u]) == tree.digest(other.eval_episodes[u])
            assert one.labels(u).equal(other.labels(u))


@pytest.mark.parametrize("dataset", [DATASET, texts(), features()], ids=lambda d: d.kind)
def test_a_client_draws_from_its_file_what_it_draws_from_the_whole(
    tmp_path: Path, dataset: Dataset
) -> None:
    write_shards(tmp_path, dataset, PARTITION, range(CLIENTS))
    held = read_shards(tmp_path, [1, 4, 5])
    assert held.clients == (1, 4, 5)
    assert len(held.dataset) == sum(len(PARTITION[client]) for client in held.clients)
    assert held.dataset.shape == dataset.shape
    for client in held.clients:
        mine = ClientData(held.dataset, held.partition[client])
        whole = ClientData(dataset, PARTITION[client])
        for step in range(3):
            key = Key(7).at("client", client, step)
            assert spoken(mine.episode(SPEC, key.numpy()), held.dataset) == spoken(
                whole.episode(SPEC, key.numpy()), dataset
            )
            assert spoken(mine.batch(5, key.numpy()), held.dataset) == spoken(
                whole.batch(5, key.numpy()), dataset
            )
    assert not len(held.partition[0])
    with pytest.raises(IndexError):
        held.partition[6]


def test_a_file_that_is_missing_or_of_another_deal_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no client: expected files such as client-000000"):
        read_shards(tmp_path)
    write_shards(tmp_path, DATASET, PARTITION, [0, 1])
    with pytest.raises(DataError, match=r"client-000003\.safetensors does not exist"):
        read_shards(tmp_path, [0, 3])
    other = Partition.of([rows[::-1] for rows in PARTITION])
    write_shards(tmp_path, DATASET, other, [1])
    with pytest.raises(DataError, match="client 0: deal differ"):
        read_shards(tmp_path)
    write_shards(tmp_path, replace(DATASET, class_names=tuple("uvwxyz")), PARTITION, [1])
    with pytest.raises(DataError, match="class_names differ"):
        read_shards(tmp_path)
    path_of(tmp_path, 1).write_bytes(path_of(tmp_path, 0).read_bytes()[:-7])
    with pytest.raises(Exception, match="damaged"):
        read_shards(tmp_path)


def test_clients_are_numbers_and_ranges() -> None:
    assert parse_clients("0-2,7, 5") == [0, 1, 2, 5, 7]
    for text in ("", "a", "1-", "-1", "1-2-3", "99999999999"):
        with pytest.raises(ConfigError, match="expected numbers and ranges"):
            parse_clients(text)
    for text in ("9-7", "0-2, 9-7"):
        with pytest.raises(ConfigError, match=r"--clients has 9-7; .* smaller number first: 7-9\."):
            parse_clients(text)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"split": {"random": [6, 2, 2]}, "test": {"way": 2}},
        {"partition": {"name": "iid", "clients": 4}},
        {"method": {"name": "frl"}, "model": {"head": {"name": "linear", "way": 5}}},
        {
            "method": {"name": "frl"},
            "partition": {"name": "dirichlet", "clients": 12, "alpha": 0.3},
            "episode": {"way": 2, "query": 20, "queries": "up_to", "classes": "up_to"},
            "run": {"infeasible_clients": "leave_out", "cohort": None},
        },
    ],
    ids=["named classes", "drawn classes", "iid", "few-round", "few-round, some left out"],
)
def test_a_server_without_the_training_data_sets_the_same_tests(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    config = Config.of(merged(SMALL, CHOOSING if not change.get("split") else {}, change))
    whole = PreparedRun(config)
    write_server_tests(tmp_path, whole)
    part = ServerTestRun(config, str(tmp_path))
    assert part.base_classes == whole.base_classes
    assert part.clients == whole.clients
    assert bool(whole.left_out) == ("infeasible_clients" in change.get("run", {}))
    assert part.method == whole.method
    assert asdict(part.dataset_info()) == asdict(whole.dataset_info())
    assert part.config.settings == whole.config.settings
    assert part.notes == notes_of(whole.dataset, whole.client_split.train)
    assert part.notices() == whole.notices()
    assert Experiment(part, tmp_path / "run")._protocol() == Experiment(whole, tmp_path)._protocol()
    assert_same_tests(part, whole)
    assert part.test.digest == whole.test.digest
    assert part.validation.digest == whole.validation.digest
    trained = whole.dataset.pixels[whole.rows.base]
    assert trained.any()
    assert not part.dataset.pixels[whole.rows.base].any()
    other = Config.of(merged(config.settings, {"partition": {"clients": 1}}))
    with pytest.raises(ConfigError, match=r"configuration: partition\.clients was \d+, is 1\. Use"):
        ServerTestRun(other, str(tmp_path))
    another = Config.of(merged(config.settings, {"seed": 5}))
    with pytest.raises(ConfigError, match=r"configuration: seed was 0, is 5\. Use"):
        ServerTestRun(another, str(tmp_path))
    with pytest.raises(DataError, match=r"tests\.safetensors does not exist"):
        ServerTestRun(config, str(tmp_path / "nowhere"))


@pytest.mark.flower
def test_clients_with_tests_of_their_own_are_dealt_for_a_server_with_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["flower", "partition", "--nodes", "2", "--to", str(tmp_path / "dealt")]
    own = ["--data", "digits", "--split.base", "0-9", "--split.validation", "[]"]
    own += ["--split.novel", "[]", "--partition", "pathological", "--partition.clients", "3"]
    own += ["--episode.way", "3", "--episode.shot", "1", "--episode.query", "1"]
    assert main([*words, *own, "--partition.way", "3"]) == 0
    assert sorted(path.name for path in (tmp_path / "dealt").iterdir()) == ["node-0", "node-1"]
    assert "the server needs the whole dataset" in capsys.readouterr().err
    assert main([*words, *own, "--partition.way", "3"]) == 0, "the same deal may be written again"
    capsys.readouterr()
    words[words.index("2")] = "3"
    assert main([*words, *own, "--partition.way", "3"]) == 2
    err = capsys.readouterr().err
    assert "client-000002.safetensors belongs to another client split, and two nodes would" in err


def test_what_nodes_and_their_server_cannot_have_is_not_dealt(tmp_path: Path) -> None:
    pool = Resampled(clients=CLIENTS).assign(
        DATASET, np.arange(len(DATASET)), Key(0), EpisodeSpec(3, 6, 6)
    )
    with pytest.raises(DataError, match="'resampled', which redistributes the data in every round"):
        write_shards(tmp_path, DATASET, pool.train, [0])
    own = {
        "split": {"base": ["0-9"], "validation": [], "novel": []},
        "partition": {"name": "pathological", "clients": 3, "way": 3},
    }
    with pytest.raises(DataError, match="tested on their own examples"):
        write_server_tests(tmp_path, FederatedDataset(Config.of(merged(SMALL, own))))
    assert not list(tmp_path.glob("*.safetensors"))
