"""The LSTM in C, in both directions, against cells in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from covering import pairwise
from fedshot.core import tree
from fedshot.core.errors import DataError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.nn.kernels import lstm as ours
from fedshot.nn.models.recurrence import bilstm, init_recurrence

pytestmark = pytest.mark.usefixtures("kernels")

D = 5
LENGTHS = [
    (3,), (1, 1), (0, 4, 2), (7, 7, 7, 7, 7, 7), (5, 0, 9, 1, 3, 3, 8, 2, 6, 4, 1, 9, 7), (0, 0),
]  # fmt: skip


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=Key(0).at(*shape).torch(), dtype=torch.float64)


def texts(lengths: tuple[int, ...], words: int) -> tuple[Tensor, Tensor]:
    """Texts of so many different words, as prepared ones lie: beside their mask."""
    longest = max(1, *lengths) + 1
    table = noise(words, D)
    which = torch.randint(words, (len(lengths), longest), generator=Key(1).torch())
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).double()
    return torch.cat([table[which] * mask[..., None], mask[..., None]], -1), mask


def layer(hidden: int, dtype: torch.dtype) -> Tree:
    p = {
        name: init_recurrence(Key(2).at(name), D, hidden, 4, torch.float64)
        for name in ("forward", "backward")
    }
    return tree.map(lambda leaf: leaf.to(dtype).requires_grad_(), p)


def results(x: Tensor, p: Tree, kernel: Any) -> list[Tensor]:
    """States where there are words, last states, and the gradients of a sum of both."""
    states, last = bilstm(p, x[..., :-1], x[..., -1], kernel)
    mask = x[:, : states.shape[1], -1:]
    loss = (states * mask).square().sum() + (last * last.detach().cos()).sum()
    return [states * mask, last, *torch.autograd.grad(loss, tree.leaves(p))]


@pytest.mark.parametrize(
    ("lengths", "hidden", "words"), pairwise(LENGTHS, [1, 4, 16, 50], [3, 1000])
)
def test_states_and_gradients_are_those_of_the_cells(
    lengths: tuple[int, ...], hidden: int, words: int
) -> None:
    x, _ = texts(lengths, words)
    want = results(x, layer(hidden, torch.float64), "cell")
    got = results(x.float(), layer(hidden, torch.float32), "fused")
    for g, w in zip(got, want, strict=True):
        same = w[:, : g.shape[1]] if w.dim() == 3 else w
        torch.testing.assert_close(g.double(), same, rtol=1e-4, atol=2e-5)


def test_the_kernel_is_the_one_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("fedshot.nn.models.recurrence.BiLstm.apply", none)
    x, _ = texts((3, 2), 5)
    with pytest.raises(AssertionError):
        results(x.float(), layer(4, torch.float32), "fused")
    results(x, layer(4, torch.float64), "fused")  # torch's, in float64


def test_its_gradient_can_be_differentiated_again() -> None:
    x, _ = texts((3, 0, 5, 1), 4)

    def twice(kernel: Any, dtype: torch.dtype) -> list[Tensor]:
        p = layer(4, dtype)
        states, last = bilstm(p, x.to(dtype)[..., :-1], x.to(dtype)[..., -1], kernel)
        loss = (states * x.to(dtype)[:, : states.shape[1], -1:]).square().sum() + last.sum()
        first = torch.autograd.grad(loss, tree.leaves(p), create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), tree.leaves(p)))

    for g, w in zip(twice("fused", torch.float32), twice("cell", torch.float64), strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-3, atol=1e-4)


def test_a_gradient_by_the_words_is_there_where_it_is_asked_for() -> None:
    x, _ = texts((3, 5), 40)
    p = layer(4, torch.float32)
    own = x.float().requires_grad_()
    states, last = bilstm(p, own[..., :-1], own[..., -1].detach(), "fused")
    (by_x,) = torch.autograd.grad(states.square().sum() + last.sum(), own)
    assert by_x[..., :-1].any()


def test_threads_company_and_a_graph_change_no_bit() -> None:
    x, _ = texts(LENGTHS[4], 1000)  # hardly a word twice: the products are of the words themselves
    x = x.float()
    p = layer(16, torch.float32)
    one = results(x, p, "fused")
    torch.set_num_threads(2)
    for a, b in zip(one, results(x, p, "fused"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # torch's own sums may differ
    torch.set_num_threads(1)
    order = torch.randperm(len(x), generator=Key(3).torch())
    shuffled = results(x[order], p, "fused")
    for a, b in zip(shuffled[:2], one[:2], strict=True):
        torch.testing.assert_close(a, b[order], rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        states, last = bilstm(p, x[..., :-1], x[..., -1], "fused")
    torch.testing.assert_close(states * x[:, : states.shape[1], -1:], one[0], rtol=0, atol=0)
    torch.testing.assert_close(last, one[1], rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [2.0, -1.0, 0.5, math.nan])
def test_a_mask_is_of_ones_and_zeros(wrong: float) -> None:
    x, _ = texts((3, 2), 4)
    x[:, :3, -1] = wrong
    with pytest.raises(DataError, match="1 for a word and 0 for padding"):
        results(x.float(), layer(4, torch.float32), "fused")


def test_padding_may_hold_anything() -> None:
    x, mask = texts((3, 0, 2), 2)
    p = layer(4, torch.float32)
    want = results(x.float(), p, "fused")
    rubbish = torch.where(mask[..., None] > 0, x, torch.tensor([math.nan] * D + [0.0]).double())
    for a, b in zip(results(rubbish.float(), p, "fused")[1:], want[1:], strict=True):
        assert torch.equal(a, b)


def test_weights_that_rest_and_weights_that_lie_otherwise() -> None:
    x, _ = texts((3, 0, 2), 2)
    p = layer(4, torch.float32)
    want = results(x.float(), p, "fused")
    p["forward"]["input"]["weight"].requires_grad_(False)
    p["backward"]["state"]["weight"] = p["backward"]["state"]["weight"].T.contiguous().T
    asked = [leaf for leaf in tree.leaves(p) if leaf.requires_grad]
    states, last = bilstm(p, x.float()[..., :-1], x.float()[..., -1], "fused")
    found = torch.autograd.grad((last * last.detach().cos()).sum(), asked, retain_graph=True)
    again = torch.autograd.grad((last * last.detach().cos()).sum(), asked)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    torch.testing.assert_close(last, want[1])
    assert states.shape == (3, 3, 8)


def test_it_refuses_what_c_would_read_past_the_end_of() -> None:
    with pytest.raises(ValueError, match="expected 0 to 2"):
        ours.Places.made(torch.tensor([3, -1]), 2)
    for u, c in ((torch.zeros(7, 2), torch.zeros(8)), (torch.zeros(8, 2), torch.zeros(7))):
        with pytest.raises(ValueError, match=r"expected \[8, 2\] and \[8\]"):
            ours._check_weights(u, c)
    places = ours.Places.made(torch.tensor([2, 1]), 2)
    gates, kept = torch.zeros(3, 8), torch.zeros(3, 1)
    ours._check(places, gates, 1, kept)
    for wrong in (torch.zeros(3, 7), torch.zeros(2, 8), gates.double(), torch.zeros(8, 3).T):
        with pytest.raises(ValueError, match=r"expected contiguous float32 \[3, 8\]|\(3, 8\)"):
            ours._check(places, wrong, 1, kept)
    with pytest.raises(ValueError, match="the kernels were given"):
        ours._check(places, gates, 1, torch.zeros(3, 2))
