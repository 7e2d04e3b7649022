"""Hosts whose data never lay in one place: what each packs fits together, and nothing else does."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedshot.cli.main import main
from fedshot.config.load import Config
from fedshot.core import storage, tree
from fedshot.core.errors import ConfigError, DataError
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.episode import ClientData
from fedshot.data.tokens import Tokens
from fedshot.deploy.flower.data_files import ServerTestRun, path_of, read_shards, write_shards
from fedshot.deploy.flower.packing import Classes, pack_client, pack_tests
from fedshot.deploy.flower.setup import Setup
from fedshot.runs.prepare import PreparedRun
from system.runs import SMALL, merged

from .test_shards import assert_same_tests

SPLIT = {
    "base": ["robin", "wren", "finch"],
    "validation": ["jay", "crow"],
    "novel": ["owl", "rook"],
}
ALL = ("crow", "finch", "jay", "owl", "robin", "rook", "wren")
BASE: dict[str, Any] = {
    "split": SPLIT,
    "partition": {"name": "iid", "clients": 3},
    "episode": {"way": 2, "shot": 1, "query": 2},
    "test": {"way": 2, "shot": 1, "query": 3},
}


def config(*changes: dict[str, Any]) -> Config:
    return Config.of(merged(SMALL, BASE, {"run": {"cohort": None}}, *changes))


def pictures(*names: str, each: int = 8, seed: int = 0, of: int = 5) -> Dataset:
    """Pictures of these classes, in which each picture differs from all others."""
    y = np.repeat(np.arange(len(names)), each).astype(np.int64)
    x = Key(seed).at("pictures", *names).numpy().integers(0, 256, (len(y), of, of, 1), np.uint8)
    return Dataset("birds", x, y, names)


def texts(*names: str, seed: int) -> Dataset:
    """Texts with words, and a table of vectors, of their own; the last of these is no one's."""
    rng = Key(seed).at("texts").numpy()
    y = np.repeat(np.arange(len(names)), 8).astype(np.int64)
    sizes, table = rng.integers(1, 5, len(y)), rng.standard_normal((9 + seed, 4))
    table[0] = 0
    ids = rng.integers(1, len(table) - 1, sizes.sum()).astype(np.int32)
    ids[: len(table) - 2] = np.arange(1, len(table) - 1)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Dataset("words", Tokens(ids, offsets, table.astype(np.float32), 5), y, names)


def saved(path: Path, dataset: Dataset) -> dict[str, Any]:
    """Write a dataset to a file, and return the settings that read it."""
    np.savez(path, x=dataset.x, y=dataset.y, class_names=np.array(dataset.class_names))
    return {"data": {"name": "npz", "path": str(path)}}


def test_hosts_with_other_classes_number_them_alike(tmp_path: Path) -> None:
    hosts = {0: pictures("robin", "wren"), 2: pictures("wren", "finch", "robin", seed=1)}
    for client, held in hosts.items():
        pack_client(tmp_path, config(), held, client)
    together = read_shards(tmp_path)
    assert together.clients == (0, 2)
    assert together.dataset.class_names == ALL
    for client, held in hosts.items():
        rows = together.partition[client]
        assert np.array_equal(together.dataset.pixels[rows], held.pixels)
        mine = [ALL[c] for c in together.dataset.y[rows]]
        assert mine == [held.class_names[c] for c in held.y]
    assert Classes.of(config()).parts["base"] == (1, 4, 6)


def test_a_packed_client_draws_what_it_would_draw_where_all_data_are_in_one_place(
    tmp_path: Path,
) -> None:
    held = pictures("finch", "robin", "wren")
    pack_client(tmp_path, config(), held, 1)
    read = read_shards(tmp_path)
    numbers = np.array([ALL.index(name) for name in held.class_names])
    mine = ClientData(read.dataset, read.partition[1])
    whole = ClientData(Dataset("birds", held.x, numbers[held.y], ALL), np.arange(len(held)))
    for step in range(3):
        key = Key(7).at("client", 1, step)
        episodes = [one.episode(config().episode, key.numpy()) for one in (mine, whole)]
        assert tree.digest(episodes[0]) == tree.digest(episodes[1])


def test_the_server_tests_as_if_it_had_all_data_in_one_place(tmp_path: Path) -> None:
    whole = pictures(*ALL)
    numbers = [ALL.index(name) for name in ("crow", "jay", "owl", "rook", "robin")]
    rows = whole.images_of(numbers)
    own = Dataset("birds", whole.pixels[rows], whole.y[rows], ALL)  # of base classes robin alone
    told = pack_tests(tmp_path, config(), own)
    assert told == [
        "Skipped: 8 examples of the split's other classes.",
        "tests for 3 clients: 16 examples of validation classes and 16 examples of novel classes",
    ]
    data = saved(tmp_path / "whole.npz", whole)
    there, here = ServerTestRun(config(data), str(tmp_path)), PreparedRun(config(data))
    assert there.base_classes == here.base_classes
    assert there.method == here.method
    assert there.clients == here.clients
    assert_same_tests(there, here)
    assert not any("training episode" in text for text in there.notices())
    five = config({"partition": {"name": "iid", "clients": 5}})
    with pytest.raises(ConfigError, match=r"another configuration: partition.clients was 3, is 5"):
        ServerTestRun(five, str(tmp_path))
    kept = ServerTestRun(config(), str(tmp_path)).dataset
    assert set(kept.y.tolist()) == {0, 2, 3, 5}, "no picture to train on"


def test_a_node_takes_packed_data_of_these_classes_and_no_others(tmp_path: Path) -> None:
    pack_tests(tmp_path / "server", config(), pictures("crow", "jay", "owl", "rook"))
    setup = Setup.of("0" * 32, ServerTestRun(config(), str(tmp_path / "server")))
    pack_client(tmp_path / "a", config(), pictures("robin", "wren"), 0)
    setup.check(read_shards(tmp_path / "a"))
    pack_client(tmp_path / "b", config(), pictures("robin", "wren", of=6), 0)
    with pytest.raises(ConfigError, match=r"another shape than the server's: \[6, 6, 1\]"):
        setup.check(read_shards(tmp_path / "b"))
    renamed = {"split": SPLIT | {"novel": ["owl", "raven"]}}
    pack_client(tmp_path / "c", config(renamed), pictures("robin", "wren"), 0)
    with pytest.raises(ConfigError, match="another list of classes than the server's"):
        setup.check(read_shards(tmp_path / "c"))
    held = PreparedRun(
        config({"split": {"base": ["0-4"], "validation": ["5-6"], "novel": ["7-9"]}})
    )
    write_shards(tmp_path / "d", held.dataset, held.client_split.train, [0])
    with pytest.raises(ConfigError, match="another list of classes"):
        setup.check(read_shards(tmp_path / "d"))


def test_what_was_dealt_is_no_part_of_a_run_on_packed_data(tmp_path: Path) -> None:
    held = pictures(*ALL)
    pack_tests(tmp_path / "server", config(), held)
    setup = Setup.of("0" * 32, ServerTestRun(config(), str(tmp_path / "server")))
    whole = PreparedRun(config(saved(tmp_path / "whole.npz", held)))
    write_shards(tmp_path / "node", whole.dataset, whole.client_split.train, [0])
    with pytest.raises(ConfigError, match=r"another (dataset|client split) than the server's"):
        setup.check(read_shards(tmp_path / "node"))


def test_texts_of_two_clients_keep_their_own_vectors(tmp_path: Path) -> None:
    hosts = {client: texts("robin", "wren", seed=client) for client in (0, 1, 2)}
    for client, held in hosts.items():
        pack_client(tmp_path, config(), held, client)
    pack_client(tmp_path, config(), hosts[0], 2)  # vectors that are there already are held once
    hosts[2] = hosts[0]
    together = read_shards(tmp_path)
    held, rows = together.dataset.x, together.partition
    assert isinstance(held, Tokens)
    assert len(held.table) == 8 + 9 - 1
    for client, whole in hosts.items():
        assert isinstance(whole.x, Tokens)
        for mine, theirs in zip(rows[client], range(len(whole)), strict=True):
            a = held.table[held.rows(np.array([mine]))]
            b = whole.x.table[whole.x.rows(np.array([theirs]))]
            assert np.array_equal(a, b)


@pytest.mark.parametrize("word", [-1, 99])
def test_a_word_without_a_vector_in_its_own_file_is_refused(tmp_path: Path, word: int) -> None:
    pack_client(tmp_path, config(), texts("robin", "wren", seed=0), 0)
    pack_client(tmp_path, config(), texts("robin", "wren", seed=1), 1)
    flat, notes, _ = storage.read(path_of(tmp_path, 1))
    flat["ids"][0] = word
    storage.write(path_of(tmp_path, 1), flat, notes, sync=False)
    with pytest.raises(DataError, match="word numbers run from"):
        read_shards(tmp_path)


def test_vectors_of_words_that_are_passed_over_are_not_written(tmp_path: Path) -> None:
    held = texts("robin", "wren", "jay", "crow", "owl", "rook", "secret", seed=30)
    reader = config({"model": {"backbone": {"name": "gru", "hidden": 4}}})
    pack_client(tmp_path, reader, held, 0)
    pack_tests(tmp_path, reader, held)
    assert isinstance(held.x, Tokens)
    for name, classes in (("client-000000", range(2)), ("tests", range(2, 6))):
        flat, _, _ = storage.read(tmp_path / f"{name}.safetensors")
        spoken = held.x.only(np.flatnonzero(np.isin(held.y, classes))).ids
        expected = held.x.table[sorted({0, 1, *spoken.tolist()})]
        assert np.array_equal(flat["table"].numpy(), expected)
        assert len(expected) < len(held.x.table) - 1


def test_a_node_does_not_train_on_what_the_server_tests_by(tmp_path: Path) -> None:
    pack_tests(tmp_path / "server", config(), pictures("crow", "jay", "owl", "rook"))
    setup = Setup.of("0" * 32, ServerTestRun(config(), str(tmp_path / "server")))
    earlier = {"split": SPLIT | {"base": ["robin", "wren", "owl"], "novel": ["finch", "rook"]}}
    pack_client(tmp_path / "a", config(earlier), pictures("robin", "wren", "owl"), 0)
    with pytest.raises(ConfigError, match="hold examples of 'owl', which is not a base class"):
        setup.check(read_shards(tmp_path / "a"))


def test_an_accent_may_be_written_in_two_ways(tmp_path: Path) -> None:
    one, two = "\u00e4rger", "a\u0308rger"
    split = {"split": SPLIT | {"base": ["robin", one]}}
    told = pack_client(tmp_path, config(split), pictures("robin", two), 0)
    assert told == ["client 0: 16 examples of 2 base classes"]


def test_many_strange_classes_take_few_lines(tmp_path: Path) -> None:
    strange = [f"strange {i}" for i in range(9)]
    told = pack_client(tmp_path, config(), pictures("robin", "wren", *strange), 0)
    assert len(told) == 7
    assert told[5] == "Skipped: 32 examples of 4 other classes that the split does not name."


def test_names_that_are_numbers_are_told(tmp_path: Path) -> None:
    split = {"split": {"base": [1, 2, 10], "validation": [], "novel": [3, 4]}}
    bare = {key: part for key, part in BASE.items() if key != "split"}
    made = Config.of(merged(SMALL, bare, {"run": {"cohort": None}}, split))
    told = pack_client(tmp_path, made, pictures("1", "10"), 0)
    assert "Classes are identified by name, and those of birds are numbers" in told[0]
    assert read_shards(tmp_path).dataset.class_names == ("1", "10", "2", "3", "4")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"split": {"random": [3, 1, 2]}}, r"split\.random is set, which needs the data in one"),
        ({"split": {"users": [0.6, 0.2, 0.2]}}, r"split\.users is set"),
        ({"split": {**SPLIT, "base": ["0-4"]}}, "has '0-4', a range.*Write out the names"),
        ({"split": {**SPLIT, "novel": []}}, r"split\.novel names no class"),
        ({"split": {}}, r"split\.base names no class"),
        ({"split": {**SPLIT, "novel": ["robin", "owl"]}}, "names class 'robin' twice"),
        ({"partition": {"name": "users"}}, r"partition\.name is 'users'; .*to 'iid'"),
        ({"partition": {"name": "resampled", "clients": 3}}, r"partition\.name is 'resampled'"),
    ],
)
def test_a_configuration_that_hosts_cannot_share_is_refused(
    change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    bare = {key: part for key, part in BASE.items() if key not in change}
    made = Config.of(merged(SMALL, bare, {"run": {"cohort": None}}, change))
    for pack in (
        lambda: pack_client(tmp_path, made, pictures("robin", "wren"), 0),
        lambda: pack_tests(tmp_path, made, pictures(*ALL)),
    ):
        with pytest.raises(ConfigError, match=told):
            pack()
    assert not list(tmp_path.iterdir())


def test_data_that_do_not_do_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    def client(*names: str, number: int = 0, **parts: Any) -> None:
        pack_client(tmp_path, config(), pictures(*names, **parts), number)

    with pytest.raises(ConfigError, match=r"--client is 3; partition\.clients is 3.*are 0\.\.2"):
        client("robin", "wren", number=3)
    with pytest.raises(ConfigError, match="--client is -1"):
        client("robin", "wren", number=-1)
    with pytest.raises(DataError, match=r"client 0 cannot form a .* episode: it has 1 class"):
        client("robin")
    with pytest.raises(
        DataError, match=r"client 0 cannot.*Skipped: 8 examples of 'robn'.*'robin'\? Lower"
    ):
        client("robn", "wren")
    with pytest.raises(DataError, match="cannot form"):
        client("robin", "wren", each=2)
    told = r"no example of a class of split\.base\. Skipped: 8 .*'magpie'"
    with pytest.raises(DataError, match=told):
        client("magpie")
    with pytest.raises(DataError, match=r"no example .*16 examples of the split's other classes"):
        client("owl", "jay")
    with pytest.raises(DataError, match=r"no example of 'rook', which split\.novel names"):
        pack_tests(tmp_path, config(), pictures("crow", "jay", "owl"))
    assert not list(tmp_path.iterdir())


@pytest.mark.flower
def test_the_command_writes_either_and_says_what_it_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "a.npz", pictures("robin", "wren", "owl", "stork"))
    saved(tmp_path / "b.npz", pictures("crow", "jay", "owl", "rook", each=6))
    config().write(tmp_path / "x.yaml")
    words = ["flower", "pack", "--config", str(tmp_path / "x.yaml"), "--to", str(tmp_path / "out")]

    def said(*more: str) -> tuple[int, str, str]:
        code = main([*words, *more])
        return code, *capsys.readouterr()

    data = "--data.name", "npz", "--data.path"
    code, out, err = said("--client", "1", *data, str(tmp_path / "a.npz"))
    assert code == 0
    assert out == f"{tmp_path / 'out'}: client 1: 16 examples of 2 base classes\n"
    assert "Skipped: 8 examples of 'stork', which the split does not name.\n" in err
    assert "Skipped: 8 examples of the split's other classes." in err
    assert path_of(tmp_path / "out", 1).is_file()
    code, out, err = said("--tests", *data, str(tmp_path / "b.npz"))
    assert (code, err) == (0, "")
    assert "tests for 3 clients: 12 examples of validation classes and 12 examples of" in out
    before = (tmp_path / "out" / "tests.safetensors").read_bytes()
    few = ("--test.query", "9")
    code, _, err = said("--tests", *few, *data, str(tmp_path / "b.npz"))
    assert code == 2
    assert "cannot fill the test" in err
    assert (tmp_path / "out" / "tests.safetensors").read_bytes() == before
    for wrong in ((), ("--tests", "--client", "1")):
        code, _, err = said(*wrong, *data, str(tmp_path / "a.npz"))
        assert code == 2
        assert "give --client with a number, or --tests" in err


@pytest.mark.flower
def test_hosts_that_read_words_in_other_ways_do_not_train_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"w{i}" for i in range(12)]
    vectors = "".join(f"{word} {i} 1.5 {-i}\n" for i, word in enumerate(words)).encode()
    (tmp_path / "same.txt").write_bytes(vectors)
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(vectors))
    (tmp_path / "other.txt").write_bytes(vectors.replace(b"w3 3 ", b"w3 4 "))
    chosen = config({"model": {"backbone": {"name": "gru", "hidden": 4}}})
    chosen.write(tmp_path / "x.yaml")

    def packed(to: str, vectors: str, classes: tuple[str, ...], *more: str) -> Path:
        with (tmp_path / "texts.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            writer.writerows([f"{words[i]} w3", name] for name in classes for i in range(6))
        told = ["--data.name", "texts", "--data.path", str(tmp_path / "texts.csv"),
                "--data.vectors", str(tmp_path / vectors), "--to", str(tmp_path / to)]  # fmt: skip
        code = main(["flower", "pack", "--config", str(tmp_path / "x.yaml"), *told, *more])
        assert code == 0, capsys.readouterr().err
        return tmp_path / to

    server = packed("server", "same.txt", ("crow", "jay", "owl", "rook"), "--tests")
    setup = Setup.of("0" * 32, ServerTestRun(chosen, str(server)))
    birds, first = ("robin", "wren"), ("--client", "0")
    setup.check(read_shards(packed("a", "packed.txt.gz", birds, *first)))
    other = (("b", "other.txt", ()), ("c", "same.txt", ("--data.keep", "known")))
    for to, read, more in other:
        held = read_shards(packed(to, read, birds, *first, *more))
        with pytest.raises(ConfigError, match=r"another way to read texts .* than the server's"):
            setup.check(held)
    packed("a", "other.txt", birds, "--client", "1")
    with pytest.raises(DataError, match="client 0: words differ"):
        read_shards(tmp_path / "a")
