"""Episodes by the kernel: the numbers that numpy's own calls give, whatever is asked."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshot.core import kernel_build
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset
from fedshot.data.episodes import sampling as drawing_module
from fedshot.data.episodes.episode import ClientData, Tasks
from fedshot.data.episodes.sampling import MOST, ClassIndex, SampledRows, kernel
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.local_training import sample_episodes

pytestmark = pytest.mark.skipif(
    kernel_build.library() is None, reason="there are no compiled kernels: numpy draws"
)


def same(one: list[SampledRows], other: list[SampledRows]) -> bool:
    assert len(one) == len(other)
    return all(map(np.array_equal, sum(one, ()), sum(other, ())))


def both(
    shelf: ClassIndex, spec: EpisodeSpec, seed: int, n: int
) -> tuple[list[SampledRows], list[SampledRows]]:
    """Draw by the kernel and by numpy, and look at what comes next of either generator."""
    found, one, other = kernel(), Key(seed).numpy(), Key(seed).numpy()
    assert found is not None
    drawn = shelf.draw_by(found, spec, one, n)
    wanted = [shelf.draw_by_numpy(spec, other) for _ in range(n)]
    assert one.integers(2**62) == other.integers(2**62)
    return drawn, wanted


@given(
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=30),
    shot=st.integers(1, 8),
    query=st.integers(1, 40),
    queries=st.sampled_from(["exact", "up_to"]),
    labels=st.sampled_from(["shuffled", "fixed"]),
    classes=st.sampled_from(["exact", "up_to"]),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_it_draws_what_numpy_draws(
    counts: list[int], shot: int, query: int, queries: str, labels: str, classes: str, seed: int,
    data: st.DataObject,
) -> None:  # fmt: skip
    spec = EpisodeSpec(1, shot, query, queries, labels)  # type: ignore[arg-type]
    able = sum(count >= spec.min_images for count in counts)
    if able < (2 if classes == "up_to" else 1):
        return
    most = able + 3 if classes == "up_to" else able
    way = data.draw(st.integers(1, most), label="way")
    spec = EpisodeSpec(way, shot, query, queries, labels, classes)  # type: ignore[arg-type]
    y = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    held = np.random.default_rng(seed + 1).permutation(len(y))
    assert same(*both(ClassIndex(y, held), spec, seed, 3))


@pytest.mark.parametrize("n", [2, 3, 4, 5, 127, 128, 129, 4097, MOST - 1])
def test_it_draws_from_many_as_numpy_does(n: int) -> None:
    """Up to all of them, of which a rejected number is one in a few."""
    shelf = ClassIndex(np.zeros(n, dtype=np.int64), np.arange(n))
    for query in {1, n // 2, n - 1}:
        assert same(*both(shelf, EpisodeSpec(1, 1, max(query, 1)), n, 2))


def test_it_draws_from_many_classes_as_numpy_does() -> None:
    y = np.repeat(np.arange(3000), 2)
    shelf = ClassIndex(y, np.arange(len(y)))
    for way in (1, 5, 2999, 3000):
        assert same(*both(shelf, EpisodeSpec(way, 1, 1), way, 2))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    real = ClassIndex.draw_by_numpy

    def draw_by_numpy(self: ClassIndex, *args: object) -> SampledRows:
        calls.append(1)
        return real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ClassIndex, "draw_by_numpy", draw_by_numpy)
    return calls


@pytest.mark.parametrize(
    ("spec", "counts", "by_numpy"),
    [
        (EpisodeSpec(2, 1, 5), [9, 9, 9], 0),
        (EpisodeSpec((2, 3), 1, 5), [9, 9, 9], 4),
        (EpisodeSpec(2, 1, 5), [MOST, 9, 9], 4),
    ],
)
def test_numpy_draws_where_the_kernel_cannot(
    spec: EpisodeSpec, counts: list[int], by_numpy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    y = np.repeat(np.arange(len(counts)), counts)
    drawing_module._checked_kernel()
    calls = counted(monkeypatch)
    assert len(ClassIndex(y, np.arange(len(y))).draw(spec, Key(0).numpy(), 4)) == 4
    assert len(calls) == by_numpy


def test_a_numpy_that_draws_otherwise_draws_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ClassIndex.draw_by_numpy

    def draw_by_numpy(self: ClassIndex, spec: EpisodeSpec, rng: np.random.Generator) -> SampledRows:
        rng.random()
        return real(self, spec, rng)

    drawing_module._checked_kernel.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(ClassIndex, "draw_by_numpy", draw_by_numpy)
            assert drawing_module._checked_kernel() is None
        drawing_module._checked_kernel.cache_clear()
        assert drawing_module._checked_kernel() is not None
    finally:
        drawing_module._checked_kernel.cache_clear()


def test_all_that_is_left_may_be_asked_for() -> None:
    y = np.repeat(np.arange(3), 9)
    shelf = ClassIndex(y, np.arange(27))
    assert same(*both(shelf, EpisodeSpec(2, 1, 10**12, "up_to"), 0, 3))


def test_a_copy_draws_from_memory_of_its_own() -> None:
    y = np.repeat(np.arange(4), 9)
    shelf, spec = ClassIndex(y, np.arange(36)), EpisodeSpec(3, 1, 5)
    wanted = shelf.draw(spec, Key(0).numpy())
    copied = copy.deepcopy(shelf)
    for held in (shelf._rows, shelf._starts, *shelf._by_count[spec.min_images]):
        held[:] = 0  # what the copy must not read
    assert same(copied.draw(spec, Key(0).numpy()), wanted)


def test_none_is_none() -> None:
    y = np.repeat(np.arange(4), 9)
    dataset = Dataset("t", np.zeros((36, 2, 2, 1), np.uint8), y, tuple("abcd"))
    data = ClientData(dataset, np.arange(36))
    assert data.episodes(EpisodeSpec(3, 1, 5), Key(0).numpy(), 0) == []
    assert sample_episodes(data, EpisodeSpec(3, 1, 5), 0, 1, Key(0)).steps == ()


def test_the_tasks_of_a_test_are_nobody_s_to_change() -> None:
    y = np.repeat(np.arange(4), 9)
    dataset = Dataset("t", np.zeros((36, 2, 2, 1), np.uint8), y, tuple("abcd"))
    tasks = Tasks.draw(dataset, range(4), EpisodeSpec(3, 1, 5), 2, Key(0))
    before = tasks.digest(dataset)
    for part in tasks.episode(dataset, 0):
        part.add_(1)
    assert tasks.digest(dataset) == before


@pytest.mark.parametrize("queries", ["exact", "up_to"])
def test_several_at_once_are_those_one_by_one(queries: str) -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 6, 90)
    x = rng.integers(0, 255, (90, 2, 2, 1), dtype=np.uint8)
    held = ClientData(Dataset("t", x, y, tuple("abcdef")), rng.permutation(90))
    spec = EpisodeSpec(4, 2, 7, queries)  # type: ignore[arg-type]
    one, other = Key(1).numpy(), Key(1).numpy()
    for made, wanted in zip(
        held.episodes(spec, one, 5), [held.episode(spec, other) for _ in range(5)], strict=True
    ):
        assert all((a == b).all() for a, b in zip(made, wanted, strict=True))
        assert (y[held.indices].max() >= made.classes).all()
