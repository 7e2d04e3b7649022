"""Keys: the path alone decides, on every machine and in every process."""

from __future__ import annotations

import json
from hashlib import blake2b

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covering import CHARACTERS
from fedshot.core.seeds import Key, draws

DRAWS = "b476906ce5d5e9890cb343e5e6bbd9ed"
PATHS = st.lists(st.one_of(st.text(CHARACTERS), st.integers()), max_size=4)
CLIENT = Key(0).at("round", 3, "client", 17)


# Regenerate: print(key.seed). A change here changes every result of every recorded run.
@pytest.mark.parametrize(
    ("key", "seed"),
    [
        (Key(0), 6197007067532723406),
        (CLIENT, 7321531649921297080),
        (Key(-5).at("ä", 1), 5757157587915886671),
        (Key(2**70).at("1"), 7222633302079968623),
    ],
)
def test_seeds_are_pinned(key: Key, seed: int) -> None:
    assert key.seed == seed


def test_the_generators_are_pinned() -> None:
    """Regenerate: print the two lists; they may change with a major version of torch or numpy."""
    drawn = torch.randint(0, 2**31, (3,), generator=CLIENT.torch())
    assert drawn.tolist() == [1608967418, 1205548712, 1178423344]
    assert CLIENT.numpy().integers(0, 2**31, 3).tolist() == [363455175, 2122955695, 1846813096]


def test_a_seed_is_half_of_the_hash_of_its_path() -> None:
    """Which no process changes, as it does Python's own hash of text."""
    name = json.dumps([0, "round", 3, "client", 17]).encode()
    assert CLIENT.seed == int.from_bytes(blake2b(name, digest_size=8).digest(), "big") >> 1


@given(PATHS, PATHS)
def test_going_down_in_one_step_or_many_is_the_same(a: list[str | int], b: list[str | int]) -> None:
    assert Key(1).at(*a).at(*b) == Key(1).at(*a, *b)
    assert Key(1).at(*a).at(*b).seed == Key(1).at(*a, *b).seed


@given(st.integers(), PATHS, st.integers(), PATHS)
def test_different_paths_have_different_seeds(
    r: int, a: list[str | int], s: int, b: list[str | int]
) -> None:
    assert ((r, a) == (s, b)) == (Key(r).at(*a).seed == Key(s).at(*b).seed)


def test_parts_do_not_run_together() -> None:
    paths = [("a", "b"), ("a/b",), ("a,b",), ('a", "b',), ("ab",), ("b", "a"), ("a", "b", "")]
    assert len({Key(0).at(*path).seed for path in paths}) == len(paths)
    assert Key(0).at(1).seed != Key(0).at("1").seed


@given(st.integers(), PATHS)
def test_a_seed_fits_an_int64_tensor(root: int, path: list[str | int]) -> None:
    key = Key(root).at(*path)
    assert 0 <= key.seed < 2**63
    assert int(key.tensor()) == key.seed
    assert key.tensor().dtype == torch.int64


def test_each_generator_starts_afresh() -> None:
    assert CLIENT.numpy().random() == CLIENT.numpy().random()
    assert torch.rand(1, generator=CLIENT.torch()) == torch.rand(1, generator=CLIENT.torch())


# Regenerate: print(draws()). A change here says that this numpy or torch draws other numbers than
# those of the recorded runs.
def test_libraries_draw_the_numbers_of_the_recorded_runs() -> None:
    assert draws() == DRAWS
