"""The compiled step of Adam and the compiled sums against torch's own operations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from covering import diagonal
from fedshot.core import kernel_build, tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.learners.learner import EpisodeLoss
from fedshot.learners.local_training import LocalEpisodes, local_sgd
from fedshot.nn.gradients import value_and_grad
from fedshot.nn.kernels import tensors
from fedshot.nn.models.layers import kept
from fedshot.nn.optim import Optimizer, OptState

pytestmark = pytest.mark.usefixtures("kernels")
RULE = {"decay": 0.01, "rise": 0.1, "grow": 0.001, "step": 3e-3, "eps": 1e-8}
BIG = 200_000  # numbers, enough for two threads


@pytest.fixture
def two_threads() -> None:
    torch.set_num_threads(2)


def four(*shape: int, seed: int = 0) -> list[Tensor]:
    """Return w, g, m and v."""
    draw = torch.Generator().manual_seed(seed)
    w, g, m, v = (torch.randn(shape, generator=draw) for _ in range(4))
    return [w, g, m, v.square()]


def wanted(w: Tensor, g: Tensor, m: Tensor, v: Tensor) -> list[Tensor]:
    """Return w', m' and v' in float64."""
    w, g, m, v = (t.double() for t in (w, g, m, v))
    g = g + RULE["decay"] * w
    m = m + RULE["rise"] * (g - m)
    v = v + RULE["grow"] * (g * g - v)
    return [w - RULE["step"] * m / (v.sqrt() + RULE["eps"]), m, v]


def adam(*leaf: Tensor) -> tuple[Tensor, ...]:
    """Return the step of one leaf alone."""
    (moved,) = tensors.adam([leaf], **RULE)
    return moved


@pytest.mark.parametrize("shape", [(), (0,), (7,), (64, 33), (16, 3, 3, 3)])
def test_a_step_is_the_formula_s(shape: tuple[int, ...]) -> None:
    for found, want in zip(adam(*four(*shape)), wanted(*four(*shape)), strict=True):
        torch.testing.assert_close(found.double(), want, rtol=2e-6, atol=1e-7)


def test_memory_may_lie_in_any_order() -> None:
    plain = adam(*four(6, 4, 3, 5))
    w, g, m, v = four(6, 4, 3, 5)
    turned = w.contiguous(memory_format=torch.channels_last)
    apart = torch.stack([g, g], -1)[..., 0]
    for found, want in zip(adam(turned, apart, m, v), plain, strict=True):
        assert found.stride() == turned.stride()
        assert torch.equal(found, want)


@pytest.mark.usefixtures("two_threads")
def test_threads_share_it_and_change_no_bit() -> None:
    inputs = four(BIG)
    shared = adam(*inputs)
    torch.set_num_threads(1)
    for found, want in zip(shared, adam(*inputs), strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize("shape", [(), (0,), (7,), (64, 33), (16, 3, 3, 3)])
def test_in_their_own_memory_numbers_come_to_the_same_bits(shape: tuple[int, ...]) -> None:
    w, g, m, v = four(*shape)
    want = adam(*four(*shape))
    (found,) = tensors.adam([(w, g, m, v)], reuse=True, **RULE)
    assert [part.data_ptr() for part in found] == [part.data_ptr() for part in (w, m, v)]
    assert all(map(torch.equal, found, want))
    assert torch.equal(g, four(*shape)[1])


def test_what_does_not_lie_like_its_parameter_is_copied_first() -> None:
    w, g, m, v = four(6, 4)
    turned = m.T.contiguous().T
    (found,) = tensors.adam([(w, g, turned, v)], reuse=True, **RULE)
    assert all(map(torch.equal, found, adam(*four(6, 4))))


@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_training_leaves_what_it_was_given_as_it_was(name: Any, stack: bool) -> None:
    """It writes over its own memory from the second step on, and comes to the same bits."""
    optimizer, start = Optimizer(name, lr=0.1), {"a": four(5, 4)[0], "b": four(3)[0]}
    state = optimizer.init(start)
    steps = tuple((torch.randn(6, 5, generator=Key(i).torch()),) for i in range(4))

    def episode_loss(w: Tree, stats: Tree, x: Tensor, seed: Tensor) -> EpisodeLoss:
        del seed
        loss = (x @ w["a"]).square().mean() + (w["b"] - 1).square().sum()
        return EpisodeLoss(loss, stats, loss.detach())

    def visit(steps: Any) -> tuple[Tree, Tree]:
        local_episodes = LocalEpisodes(steps, torch.tensor(1), torch.tensor(6))
        new = local_sgd(episode_loss, optimizer, start, {}, local_episodes, state)
        return new.params, new.state.first

    if stack:
        twice = tree.map(lambda x: torch.stack([x, 2 * x]), steps)
        found = tree.map(lambda leaf: leaf[0], torch.func.vmap(visit)(twice))
    else:
        found = visit(steps)
    w, now = {"a": four(5, 4)[0], "b": four(3)[0]}, state
    for (x,) in steps:
        _, _, grads = value_and_grad(lambda w, x=x: (episode_loss(w, {}, x, x).loss, {}), w)
        w, now = optimizer.update(grads, now, w)
    for part, want in zip(tree.leaves(found), tree.leaves((w, now.first)), strict=True):
        torch.testing.assert_close(part, want, **({} if stack else {"rtol": 0, "atol": 0}))
    assert torch.equal(start["a"], four(5, 4)[0])
    assert all(float(leaf.abs().sum()) == 0 for leaf in tree.leaves(state.first))


def test_what_a_lesson_reports_of_its_parameters_stays_as_it_saw_it() -> None:
    steps, seen = tuple((torch.full((2,), float(i)),) for i in range(4)), []

    def episode_loss(w: Tree, stats: Tree, x: Tensor, seed: Tensor) -> EpisodeLoss:
        del seed
        seen.append(w["s"].detach().clone())
        loss = (w["s"] - x).square().sum() + w["t"].square().sum()
        return EpisodeLoss(loss, {"last": w["t"][:1]}, loss.detach(), {"s": w["s"]})

    def visit(steps: Any) -> tuple[Tensor, Tensor, Tensor]:
        start = {"s": torch.tensor(1.0), "t": torch.ones(3)}
        local_episodes = LocalEpisodes(steps, torch.tensor(1), torch.tensor(2))
        new = local_sgd(episode_loss, Optimizer("adam", lr=0.5), start, {}, local_episodes)
        return new.metrics["s"], new.stats["last"], new.params["t"][:1]

    s, last, end = alone = visit(steps)
    assert float(s) == pytest.approx(sum(map(float, seen)) / 4)
    assert float(last) != float(end)
    stack = torch.func.vmap(visit)(tree.map(lambda x: torch.stack([x, x]), steps))
    for found, want in zip(stack, alone, strict=True):
        torch.testing.assert_close(found[0], want)


@pytest.mark.usefixtures("two_threads")
def test_many_leaves_in_one_call_move_as_each_alone() -> None:
    """Shares of the threads begin and end within leaves, empty ones among them."""
    shapes = [(3,), (0,), (BIG // 2,), (), (5, 7), (BIG,), (0, 4), (2,)]
    leaves = [four(*shape, seed=i) for i, shape in enumerate(shapes)]
    for found, leaf in zip(tensors.adam(leaves, **RULE), leaves, strict=True):
        for part, want in zip(found, adam(*leaf), strict=True):
            assert torch.equal(part, want)


def test_what_is_not_a_number_stays_so() -> None:
    w, g, m, v = four(3)
    g[1] = math.nan
    found = adam(w, g, m, v)
    assert [part.isnan().tolist() for part in found] == [[False, True, False]] * 3


def test_a_stack_of_clients_makes_the_steps_of_each() -> None:
    """The step of a stack, over a parameter that all share at first, is that of every client."""
    optimizer = Optimizer("adam", lr=0.01, weight_decay=0.1)
    w, many = {"a": four(5, 4)[0], "b": four(3)[0]}, 3
    grads = {"a": four(many, 5, 4, seed=1)[1], "b": four(many, 3, seed=2)[1]}

    def visit(g: Tree) -> tuple[Tree, OptState]:
        one, state = optimizer.update(g, optimizer.init(w), w)
        return optimizer.update(g, state, one)

    stacked, state = torch.func.vmap(visit)(grads)
    for k in range(many):
        alone, own = visit({name: leaf[k] for name, leaf in grads.items()})
        for name in w:
            assert torch.equal(stacked[name][k], alone[name])
            assert torch.equal(state.second[name][k], own.second[name])


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("n", [0, 5, BIG])
def test_taking_in_rounds_once_and_to_even(n: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    x[: min(n, 5)] = torch.tensor([0.5, 1.5, -0.5, -2.5, 2.0**-30])[: min(n, 5)]
    for scale in (1.0, 3 * 2.0**41):
        total = torch.arange(n)
        tensors.take([(total, x)], scale)
        assert torch.equal(total, torch.arange(n) + (x.double() * scale).round().long())


def test_taking_in_goes_by_place_and_not_by_memory() -> None:
    total, x = torch.zeros(3, 4, dtype=torch.int64), four(4, 3)[0].T
    tensors.take([(total, x)], 2.0**20)
    assert torch.equal(total, (x.double() * 2.0**20).round().long())


@pytest.mark.parametrize(
    "total", [torch.zeros(4, dtype=torch.int64), torch.zeros(3), torch.zeros(3, 2).long().T[0]]
)
def test_a_total_that_does_not_fit_is_refused(total: Tensor) -> None:
    with pytest.raises(ValueError, match="expected contiguous int64"):
        tensors.take([(total, torch.ones(3))], 1.0)


@pytest.mark.parametrize(
    ("values", "largest"),
    [
        ([], 0.0),
        ([-0.0], 0.0),
        ([1.0, -3.5, 2.0], 3.5),
        ([1e-45], 1e-45),
        ([math.inf, 1.0], math.inf),
        ([1.0, -math.inf], math.inf),
        ([math.inf, -math.nan, 1.0], math.nan),
    ],
)
def test_the_largest_number_says_what_is_not_finite(values: list[float], largest: float) -> None:
    found = tensors.largest([torch.tensor(values[:1]), torch.tensor(values[1:])])
    want = float(torch.tensor(largest))
    assert found == want or (math.isnan(found) and math.isnan(want))


@pytest.mark.parametrize(
    ("seed", "rate"), diagonal([0, 1, -7, 2**63 - 1, -(2**63)], [0.0, 0.1, 0.5, 0.999])
)
def test_a_mask_of_dropout_is_that_of_torch_s_operations(
    seed: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mask(*shape: int) -> Tensor:
        return kept(torch.Size(shape), rate, torch.tensor(seed), 1.25, torch.float32)

    shapes = [(), (0,), (7, 3), (3, 5, 6, 7), (BIG,)]
    found = [mask(*shape) for shape in shapes]
    monkeypatch.setattr(kernel_build, "library", lambda: None)
    for shape, values in zip(shapes, found, strict=True):
        assert torch.equal(values, mask(*shape))
        assert values.stride() == mask(*shape).stride()
