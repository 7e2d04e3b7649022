"""What travels: trees of arrays, bounded and named, and nothing else."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from covering import CHARACTERS
from fedshot.core import tree
from fedshot.core.serialised import _TYPES, LIMITS, CodecError, Limits, form_of, pack, short, unpack
from fedshot.core.tree import Tree
from fedshot.deploy.flower.messages import read_head
from fedshot.learners.learner import EvalEpisode
from fedshot.protocol.reducers import Gather

TYPES = [
    torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16,
]  # fmt: skip

leaves = st.builds(
    lambda dtype, shape, seed: torch.from_numpy(
        np.random.default_rng(seed).integers(0, 2, shape)
    ).to(dtype),
    st.sampled_from(TYPES),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(0, 9),
)
names = st.text(
    [c for c in CHARACTERS if c != "/" and c.isprintable()],
    min_size=1,
    max_size=20,
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.dictionaries(names, inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=6,
)


def there_and_back(content: Tree) -> Tree:
    form, data = pack(content)
    return unpack(json.loads(json.dumps(form)), data, LIMITS)


@given(trees)
def test_a_tree_comes_back_with_its_containers_types_and_bits(content: Tree) -> None:
    found = there_and_back(content)
    assert tree.difference(content, found) is None
    assert tree.digest(found) == tree.digest(content)


def test_the_order_of_names_and_the_bits_of_what_is_no_number_come_back() -> None:
    odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    found = there_and_back({"b": odd, "a": odd.flip(0)})
    assert list(found) == ["b", "a"]
    assert found["b"].numpy().tobytes() == odd.numpy().tobytes()


def test_pieces_of_one_memory_and_other_layouts_travel() -> None:
    whole = torch.arange(48.0).reshape(2, 3, 4, 2)
    content = {"a": whole[0], "b": whole[:, 1], "c": whole.permute(0, 3, 1, 2)}
    assert tree.digest(there_and_back(content)) == tree.digest(content)


def test_named_tuples_of_fedshot_come_back_as_such() -> None:
    eval_episode = EvalEpisode(*(torch.zeros(2) for _ in EvalEpisode._fields))
    assert type(there_and_back({"q": eval_episode})["q"]) is EvalEpisode


class Stranger(NamedTuple):
    a: torch.Tensor


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "fedshot.nn:Conv4",
        "fedshot.nn:nothing",
        "builtins:tuple",
        f"{__name__}:Stranger",
        "fedshot.not_loaded:Thing",
        ":",
        "fedshot.core.tree:torch.Size",
        "fedshot.nn:EvalEpisode.__class__",
        "fedshot.nn:EvalEpisode",
    ],
)
def test_no_other_class_is_made_for_a_name(name: str) -> None:
    _, data = pack(Stranger(torch.zeros(1)))
    with pytest.raises(CodecError, match="is not a named tuple of fedshot"):
        unpack([name, 0], data, LIMITS)


def test_no_module_is_asked_to_make_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module may answer for a name that it does not have, by importing what does."""

    def importing(name: str) -> Any:
        pytest.fail(f"asked for {name}")

    monkeypatch.setattr(tree, "__getattr__", importing, raising=False)
    with pytest.raises(CodecError, match="is not a named tuple of fedshot"):
        unpack(["fedshot.core.tree:Later", 0], b"\2\0\0\0\0\0\0\0{}", LIMITS)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e5m2, torch.complex64])
def test_numbers_that_the_guard_cannot_look_at_are_not_taken(dtype: torch.dtype) -> None:
    form, data = pack({"a": torch.zeros(2).to(dtype)})
    with pytest.raises(CodecError, match="a dtype that is not accepted"):
        unpack(form, data, LIMITS)


def test_the_guard_can_judge_whatever_is_taken() -> None:
    for dtype in _TYPES:
        part = there_and_back({"a": torch.ones(3).to(dtype)})
        assert Gather().fault(0, part, 1.0) is None


def test_more_leaves_than_are_taken_are_refused_within_the_bound_on_names() -> None:
    few = torch.zeros(0)
    data = save({f"{i}": few for i in range(LIMITS.leaves + 1)})
    with pytest.raises(CodecError, match="more than 20000 arrays"):
        unpack({}, data, LIMITS)


def test_what_is_repeated_of_another_side_is_short_and_printable() -> None:
    assert short("\x1b[31mred\n" * 100, 20) == " [31mred  [31mred  [..."
    assert short("well") == "well"


@pytest.mark.parametrize(
    ("form", "content", "limits", "words"),
    [
        ({"a": 0}, {"b": 1}, LIMITS, "a is missing"),
        ({}, {"b": 1}, LIMITS, "not in the form"),
        ({"a/b": 0}, {"a/b": 1}, LIMITS, "a name with '/'"),
        ({"a": 1}, {"a": 1}, LIMITS, "has no valid form"),
        ({"a": None}, {"a": 1}, LIMITS, "has no valid form"),
        ({"a": False}, {"a": 1}, LIMITS, "has no valid form"),
        ([], {}, LIMITS, "has no valid form"),
        ({"a": {"a": {"a": 0}}}, {"a/a/a": 1}, Limits(depth=2), "too deeply"),
        ({"a": 0, "b": 0}, {"a": 1, "b": 1}, Limits(leaves=1), "more than 1 arrays"),
        ({"a": 0}, {"a": 4096}, Limits(message=4096), "at most 4096"),
        ({"a": 0}, {"a": 1}, Limits(head=16), "at most 16"),
        ({"a\n": 0}, {"a\n": 1}, LIMITS, "not printable"),
        ({"a" * 501: 0}, {"a" * 501: 1}, LIMITS, "too long"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(
    form: Any, content: dict[str, int], limits: Limits, words: str
) -> None:
    data = save({name: torch.zeros(n) for name, n in content.items()})
    with pytest.raises(CodecError, match=words):
        unpack(form, data, limits)


@given(st.binary(max_size=200), trees)
def test_bytes_that_are_none_of_ours_are_refused_and_never_crash(
    noise: bytes, content: Tree
) -> None:
    form, data = pack(content)
    for bad in (noise, data[: len(data) // 2], noise + data):
        try:
            found = unpack(form, bad, LIMITS)
        except CodecError:
            continue
        assert tree.difference(content, found) is None


def test_a_shape_that_promises_more_than_came_is_refused_before_it_is_made() -> None:
    header = json.dumps(
        {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
    ).encode()
    with pytest.raises(CodecError, match="cannot be read"):
        unpack({"a": 0}, len(header).to_bytes(8, "little") + header, LIMITS)


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 100_000, "null", '"a"'])
def test_a_head_is_names_and_numbers(text: str) -> None:
    with pytest.raises(CodecError):
        read_head(text, LIMITS)


def test_what_is_no_tree_is_not_sent() -> None:
    with pytest.raises(TypeError):
        form_of([torch.zeros(1)])
