"""Trees: paths, structure, refusals, digests."""

from __future__ import annotations

import hashlib
import re
import struct
from typing import Any, NamedTuple

import pytest
import torch

from fedshot.core import tree


class Pair(NamedTuple):
    w: Any
    b: Any


NESTED = {
    "z": torch.arange(3.0),
    "a": Pair(torch.ones(2, 2), {"inner": torch.tensor(1)}),
    "m": (torch.zeros(1), torch.tensor([True, False])),
}


def test_leaves_are_named_by_path_in_sorted_order() -> None:
    assert [path for path, _ in tree.items(NESTED)] == ["a/w", "a/b/inner", "m/0", "m/1", "z"]


def test_a_single_tensor_is_a_tree_called_dot() -> None:
    assert [path for path, _ in tree.items(torch.ones(1))] == ["."]


def test_map_keeps_dicts_tuples_and_named_tuples() -> None:
    twice = tree.map(lambda leaf: leaf + leaf, NESTED)
    assert type(twice["a"]) is Pair
    assert type(twice["m"]) is tuple
    assert torch.equal(twice["z"], 2 * NESTED["z"])


def test_map_ignores_the_order_of_names() -> None:
    a = {"x": torch.tensor(1.0), "y": torch.tensor(2.0)}
    b = {"y": torch.tensor(20.0), "x": torch.tensor(10.0)}
    assert {k: float(v) for k, v in tree.add(a, b).items()} == {"x": 11.0, "y": 22.0}


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"a": {}}, "trees differ at a: ['b'] against []"),
        ({"b": {"b": torch.ones(1)}}, "trees differ at the root: ['a'] against ['b']"),
        ({"a": {"b": (torch.ones(1),)}}, "trees differ at a/b: a tensor in one, not in the other"),
        ({"a": (torch.ones(1),)}, "trees differ at a: ['b'] against ['0']"),
    ],
)
def test_map_says_where_two_trees_differ(other: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        tree.add({"a": {"b": torch.ones(1)}}, other)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"a": 1.0}, "a is a float; a tree holds tensors, dicts and tuples"),
        ([torch.ones(1)], "the root is a list"),
        ({"a/b": torch.ones(1)}, "'a/b' cannot name a part of a tree"),
        ({"": torch.ones(1)}, "'' cannot name a part of a tree"),
    ],
)
def test_what_is_no_tree_is_refused_by_place(bad: Any, text: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(text)}"):
        tree.leaves(bad)


@pytest.mark.parametrize("name", ["a/b", "", 0])
def test_a_name_that_is_none_is_a_difference_even_from_itself(name: Any) -> None:
    """So that nobody takes such a tree in for being like what was expected."""
    bad = {"w": {name: torch.ones(1)}}
    assert "cannot name a part of a tree" in str(tree.difference(bad, bad))


def test_map_says_where_trees_differ_below_a_number() -> None:
    with pytest.raises(ValueError, match=r"^trees differ at 1: \['a'\] against \['b'\]$"):
        tree.add({1: {"a": torch.ones(1)}}, {1: {"b": torch.ones(1)}})


def test_a_number_is_no_name() -> None:
    with pytest.raises(TypeError, match="0 cannot name a part of a tree: expected text"):
        tree.leaves({0: torch.ones(1)})


def test_rebuild_inverts_items() -> None:
    again = tree.rebuild(NESTED, dict(tree.items(NESTED)))
    assert type(again["a"]) is Pair
    assert tree.digest(again) == tree.digest(NESTED)


def test_unflatten_inverts_leaves() -> None:
    again = tree.unflatten(NESTED, tree.leaves(NESTED))
    assert type(again["a"]) is Pair
    assert tree.digest(again) == tree.digest(NESTED)


@pytest.mark.parametrize(("n", "words"), [(1, "fewer"), (3, "more")])
def test_unflatten_takes_as_many_leaves_as_there_are(n: int, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words} leaves than the tree's 2$"):
        tree.unflatten({"b": torch.ones(1), "a": {"c": torch.ones(2)}}, [torch.ones(1)] * n)


@pytest.mark.parametrize("empty", [{}, (), {"a": {}, "b": ()}])
def test_an_empty_tree_is_rebuilt_from_nothing(empty: Any) -> None:
    assert tree.rebuild(empty, {}) == empty
    assert tree.leaves(empty) == []
    assert tree.nbytes(empty) == 0


@pytest.mark.parametrize(
    ("flat", "text"),
    [
        ({}, "missing parts ['w'], unknown parts []"),
        ({"w": torch.ones(2), "v": torch.ones(2)}, "missing parts [], unknown parts ['v']"),
        ({"w": torch.ones(3)}, "w is float32[3], expected float32[2]"),
        ({"w": torch.ones(2).double()}, "w is float64[2], expected float32[2]"),
    ],
)
def test_rebuild_refuses_by_name(flat: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        tree.rebuild({"w": torch.ones(2)}, flat)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"w": torch.zeros(2)}, None),
        ({}, "w is missing"),
        ({"w": torch.ones(2), "v": torch.ones(2)}, "v is not expected"),
        ({"w": torch.ones(2, 1)}, "w is float32[2, 1], expected float32[2]"),
        ({"w": torch.ones(2).int()}, "w is int32[2], expected float32[2]"),
        ({"w": [1, 2]}, "w is a list; a tree holds tensors, dicts and tuples."),
    ],
)
def test_difference_names_the_first_departure(other: Any, text: str | None) -> None:
    found = tree.difference({"w": torch.ones(2)}, other)
    assert found == text if text is None else found is not None and found.startswith(text)


def test_trees_with_tuples_differ_by_type_length_and_leaves() -> None:
    def alike(**change: Any) -> bool:
        return tree.difference(NESTED, NESTED | change) is None

    pair = NESTED["a"]
    assert alike()
    assert alike(a=Pair(-pair.w, pair.b), m=tuple(NESTED["m"]))
    assert not alike(a=tuple(pair))
    assert not alike(a=Pair(pair.w[0], pair.b))
    assert not alike(a=Pair(pair.w, {"other": torch.tensor(1)}))
    assert not alike(m=NESTED["m"][:1])
    assert not alike(m=(*NESTED["m"], torch.ones(1)))
    assert not alike(m=Pair(*NESTED["m"]))


def test_arithmetic_leaves_its_arguments_alone() -> None:
    before = tree.digest(NESTED["a"].w)
    a, b = {"w": NESTED["a"].w}, {"w": torch.full((2, 2), 3.0)}
    assert float(tree.sub(a, b)["w"].sum()) == -8.0
    assert float(tree.add(a, b)["w"].sum()) == 16.0
    assert float(tree.zeros_like(a)["w"].sum()) == 0.0
    assert tree.digest(a["w"]) == before


def test_index_undoes_stack() -> None:
    trees = [{"w": torch.full((2,), float(i)), "n": torch.tensor(i)} for i in range(3)]
    stacked = tree.stack(trees)
    assert stacked["w"].shape == (3, 2)
    for i, one in enumerate(trees):
        assert tree.digest(tree.index(stacked, i)) == tree.digest(one)


def test_nbytes_counts_every_type() -> None:
    assert tree.nbytes(NESTED) == 3 * 4 + 4 * 4 + 8 + 4 + 2


def test_the_digest_sees_name_type_shape_and_every_bit() -> None:
    base = {"w": torch.tensor([1.0, 0.0])}
    others = [
        {"v": torch.tensor([1.0, 0.0])},
        {"w": torch.tensor([[1.0, 0.0]])},
        {"w": torch.tensor([1.0, 0.0]).view(torch.int32)},
        {"w": torch.tensor([1.0, -0.0])},
        {"w": torch.tensor([1.0, torch.finfo(torch.float32).tiny])},
        {"w": base["w"], "x": torch.zeros(0)},
    ]
    assert len({tree.digest(t) for t in [base, *others]}) == 7


def test_the_digest_ignores_memory_layout_and_container() -> None:
    x = torch.arange(24.0).reshape(1, 2, 3, 4)
    last = x.to(memory_format=torch.channels_last)
    assert tree.digest(x) == tree.digest(last)
    assert tree.digest(Pair(x, x[0])) == tree.digest({"b": x[0], "w": x})


def test_the_digest_is_the_sha256_of_names_forms_and_bytes() -> None:
    by_hand = b"n:int64[];" + struct.pack("<q", 3) + b"w:float32[2];" + struct.pack("<2f", 1, 2)
    found = tree.digest({"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)})
    assert found == hashlib.sha256(by_hand).hexdigest()
