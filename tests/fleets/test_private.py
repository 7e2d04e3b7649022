"""Private states on disk: versions, sealing, going back, and what is kept."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from fedshot.core.errors import CheckpointError
from fedshot.core.tree import Tree
from fedshot.fleets.private import PrivateStore

LATE = (10**6, 0)


@pytest.fixture
def store(tmp_path: Path) -> PrivateStore:
    return PrivateStore(tmp_path / "clients")


def state(value: float) -> Tree:
    return {"w": {"x": torch.full((2,), float(value))}}


def value(store: PrivateStore, client: int, upto: tuple[int, int] = LATE) -> float | None:
    held = store.load(client, upto)
    return None if held is None else float(held["w/x"][0])


def files(store: PrivateStore) -> list[str]:
    return sorted(str(p.relative_to(store.folder)) for p in store.folder.rglob("*") if p.is_file())


def test_a_client_that_kept_nothing_has_no_state(store: PrivateStore) -> None:
    assert store.load(3, LATE) is None
    assert not store.folder.exists()
    assert store.seal(1, []) == ""


def test_the_newest_version_not_after_the_asked_one_is_loaded(store: PrivateStore) -> None:
    for version in ((1, 0), (1, 1), (3, 0), (10, 0), (10, 100)):
        store.save(17, version, state(version[0] + version[1] / 1000))
    assert files(store)[0] == "000017/r000001-00.safetensors"
    asked = [(0, 99), (1, 0), (1, 5), (2, 0), (3, 0), (9, 9), (10, 99), (10, 100), LATE]
    assert [value(store, 17, upto) for upto in asked] == pytest.approx(
        [None, 1.0, 1.001, 1.001, 3.0, 3.0, 10.0, 10.1, 10.1]
    )
    assert value(store, 1) is None


def test_a_dropped_version_gives_way_to_the_one_before(store: PrivateStore) -> None:
    store.save(1, (1, 0), state(1))
    store.save(1, (2, 0), state(2))
    store.drop(1, (2, 0))
    store.drop(1, (2, 0))  # twice is no harm
    store.drop(9, (2, 0))  # nor is one that never was
    assert value(store, 1) == 1.0


def test_a_sealed_version_is_not_dropped(store: PrivateStore) -> None:
    store.save(1, (1, 0), state(1))
    store.seal(1, [])
    store.drop(1, (1, 0))
    store.void(1)
    assert value(store, 1) == 1.0


def test_a_void_round_leaves_the_others_alone(store: PrivateStore) -> None:
    for client in (1, 2):
        store.save(client, (1, 0), state(1))
        store.save(client, (2, 0), state(2))
        store.save(client, (2, 1), state(3))
    store.void(2)
    assert [value(store, c) for c in (1, 2)] == [1.0, 1.0]
    assert len(files(store)) == 2


def test_sealing_keeps_what_somebody_may_return_to(store: PrivateStore) -> None:
    """The newest, and for each round that is kept the newest version not after it."""
    for round in range(1, 8):
        store.save(1, (round, 0), state(round))
        if round % 2:
            store.save(2, (round, 0), state(round))
        store.seal(round, keep=[2, 4, round - 1])
    assert files(store) == [
        "000001/r000002-00.safetensors",
        "000001/r000004-00.safetensors",
        "000001/r000006-00.safetensors",
        "000001/r000007-00.safetensors",
        "000002/r000001-00.safetensors",
        "000002/r000003-00.safetensors",
        "000002/r000005-00.safetensors",
        "000002/r000007-00.safetensors",
        "index-000002.safetensors",
        "index-000004.safetensors",
        "index-000006.safetensors",
        "index-000007.safetensors",
    ]


def test_rewinding_deletes_later_versions_and_half_written_ones(store: PrivateStore) -> None:
    shas = {}
    for round in (1, 2, 3):
        store.save(1, (round, 0), state(round))
        shas[round] = store.seal(round, keep=[1, 2])
    partial = store.folder / "000001" / "r000002-00.safetensors.partial"
    partial.write_bytes(b"half")
    store.rewind(2, shas[2])
    assert files(store) == [
        "000001/r000001-00.safetensors",
        "000001/r000002-00.safetensors",
        "index-000001.safetensors",
        "index-000002.safetensors",
    ]
    assert value(store, 1) == 2.0


def test_a_half_written_version_is_never_read(store: PrivateStore) -> None:
    store.save(1, (1, 0), state(1))
    (store.folder / "000001" / "r000002-00.safetensors.partial").write_bytes(b"half")
    assert value(store, 1) == 1.0


def test_rewinding_an_empty_store_is_no_error(store: PrivateStore) -> None:
    store.rewind(3, "")


def test_a_damaged_version_is_refused_by_name(store: PrivateStore) -> None:
    store.save(1, (1, 0), state(1))
    path = store.folder / "000001" / "r000001-00.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"000001/r000001-00\.safetensors is damaged"):
        store.load(1, LATE)


def test_a_byte_changed_anywhere_in_a_sealed_state_is_detected(store: PrivateStore) -> None:
    store.save(1, (1, 0), state(1) | {"n": torch.tensor(7)})
    sha = store.seal(1, [])
    path = store.folder / "000001" / "r000001-00.safetensors"
    whole = path.read_bytes()
    again = PrivateStore(store.folder)
    again.rewind(1, sha)
    name = whole.index(b"notes")  # without its name, an empty text has no effect
    for n in set(range(len(whole))) - set(range(name, name + 5)):
        path.write_bytes(whole[:n] + bytes([whole[n] ^ 16]) + whole[n + 1 :])
        with pytest.raises(CheckpointError, match=r"client 1 "):
            again.load(1, LATE)
    path.write_bytes(whole)
    assert value(again, 1) == 1.0


def test_any_order_of_operations_keeps_what_may_be_read(tmp_path: Path) -> None:
    for seed in range(20):
        any_order(PrivateStore(tmp_path / str(seed)), seed)


def any_order(store: PrivateStore, seed: int) -> None:
    """The model is a dict for each committed round, and one of what was written after the last."""
    rng = random.Random(seed)
    sealed: dict[int, tuple[str, dict[int, float]]] = {0: (store.seal(0, []), {})}
    pending: dict[tuple[int, tuple[int, int]], float] = {}
    for round in range(1, 20):
        for step in range(rng.randrange(3)):
            for client in rng.sample(range(5), 3):
                pending[client, (round, step)] = rng.random()
                store.save(client, (round, step), state(pending[client, (round, step)]))
                if rng.random() < 0.2:
                    store.drop(client, (round, step))
                    del pending[client, (round, step)]
        last = max(sealed)
        match rng.choice(["seal", "seal", "void", "rewind", "restart", "nothing"]):
            case "seal":
                keep = rng.sample(sorted(sealed), rng.randrange(len(sealed) + 1))
                done = sealed[last][1] | {c: held for (c, _), held in sorted(pending.items())}
                sealed = {r: sealed[r] for r in keep} | {round: (store.seal(round, keep), done)}
                pending.clear()
            case "void":
                store.void(round)
                pending = {key: held for key, held in pending.items() if key[1][0] != round}
            case "rewind":
                target = rng.choice(sorted(sealed))
                store = PrivateStore(store.folder)
                store.rewind(target, sealed[target][0])
                sealed = {r: held for r, held in sealed.items() if r <= target}
                pending.clear()
            case "restart":
                store = PrivateStore(store.folder)
                store.open(last, sealed[last][0])
                store.recover()
        now = sealed[max(sealed)][1] | {c: held for (c, _), held in sorted(pending.items())}
        assert {c: value(store, c) for c in range(5)} == pytest.approx(
            {c: now.get(c) for c in range(5)}
        )
        for r, (sha, then) in sealed.items():
            reader = PrivateStore(store.folder)
            reader.open(r, sha)
            assert {c: value(reader, c, (r, 99)) for c in range(5)} == pytest.approx(
                {c: then.get(c) for c in range(5)}
            )


def test_the_hash_covers_contents_and_not_the_order_of_writing(tmp_path: Path) -> None:
    def run(name: str, order: tuple[int, ...], second: float = 2.0) -> list[str]:
        store = PrivateStore(tmp_path / name)
        shas = []
        for round, number in ((1, 1.0), (2, second)):
            for client in order:
                store.save(client, (round, 0), state(number + client))
            shas.append(store.seal(round, []))
        return shas

    first = run("a", (1, 2, 3))
    assert run("b", (3, 1, 2)) == first
    assert run("c", (1, 2, 3), second=2.5)[0] == first[0]
    assert run("d", (1, 2, 3), second=2.5)[1] != first[1]
    assert run("e", (1, 2))[0] != first[0]


def test_a_round_that_wrote_nothing_leaves_the_hash_as_it_was(store: PrivateStore) -> None:
    store.save(1, (1, 0), state(1))
    sha = store.seal(1, [])
    assert store.seal(2, []) == sha


def test_another_store_on_the_same_folder_goes_on(store: PrivateStore) -> None:
    store.save(1, (1, 0), state(1))
    sha = store.seal(1, [])
    store.save(1, (2, 0), state(2))
    expected = store.seal(2, [1])
    again = PrivateStore(store.folder)
    again.rewind(1, sha)
    assert value(again, 1) == 1.0
    again.save(1, (2, 0), state(2))
    assert again.seal(2, [1]) == expected


def test_opening_an_earlier_round_shows_its_states_and_changes_nothing(
    store: PrivateStore,
) -> None:
    store.save(1, (1, 0), state(1))
    first = store.seal(1, [])
    store.save(1, (2, 0), state(2))
    store.save(2, (2, 0), state(2))
    second = store.seal(2, [1])
    before = files(store)
    for reader in (store, PrivateStore(store.folder)):
        reader.open(2, second)
        reader.open(1, first)
        assert [value(reader, c, (1, 99)) for c in (1, 2)] == [1.0, None]
        assert [value(reader, c, (2, 99)) for c in (1, 2)] == [2.0, 2.0]
    assert files(store) == before


@pytest.mark.parametrize("harm", ["missing", "older", "index missing", "index of another"])
def test_states_that_are_not_the_sealed_ones_are_refused(store: PrivateStore, harm: str) -> None:
    for round in (1, 2):
        for client in (1, 2):
            store.save(client, (round, 0), state(round))
        sha = store.seal(round, [1])
    newest = store.folder / "000002" / "r000002-00.safetensors"
    index = store.folder / "index-000002.safetensors"
    if harm == "missing":
        newest.unlink()
    elif harm == "older":
        newest.write_bytes((store.folder / "000002" / "r000001-00.safetensors").read_bytes())
    elif harm == "index missing":
        index.unlink()
    else:
        index.write_bytes((store.folder / "index-000001.safetensors").read_bytes())
    again = PrivateStore(store.folder)
    with pytest.raises(CheckpointError, match=r"client 2|round 2"):  # noqa: PT012
        again.rewind(2, sha)
        assert value(again, 1) == 2.0
        again.load(2, LATE)
