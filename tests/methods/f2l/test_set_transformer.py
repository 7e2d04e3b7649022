"""The set Transformer: who sees whom, chance, stacking, size, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from differences import noise
from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.methods.f2l.set_transformer import SetTransformer
from fedshot.nn.models.mode import Mode

EXACT = {"rtol": 1e-12, "atol": 1e-12}
D, S, Q = 8, 5, 4
QUERIES = ("support_context", "query_set", "alone")
NET = SetTransformer(heads=2, hidden=16, dropout=0.2)
PARAMS = NET.init(Key(0), D, torch.float64)


SUPPORT, QUERY = noise(S, D), noise(Q, D, seed=1)


def run(s: Tensor, q: Tensor, queries: Any) -> tuple[Tensor, Tensor]:
    return NET.apply(PARAMS, s, q, Mode(), queries)


@pytest.mark.parametrize(
    ("queries", "others", "support"),
    [("support_context", False, True), ("query_set", True, False), ("alone", False, False)],
)
def test_a_query_sees_what_was_asked_for(queries: Any, others: bool, support: bool) -> None:
    _, before = run(SUPPORT, QUERY, queries)
    moved = torch.cat([QUERY[:1], noise(Q + 2, D, seed=7)])  # other queries, and more of them
    assert torch.allclose(run(SUPPORT, moved, queries)[1][0], before[0], **EXACT) is not others
    _, after = run(SUPPORT + 1.5 * SUPPORT.flip(1), QUERY, queries)
    assert torch.allclose(after, before, **EXACT) is not support
    _, after = run(SUPPORT, QUERY + noise(Q, D, seed=8), queries)
    assert not torch.allclose(after, before)


@pytest.mark.parametrize("queries", QUERIES)
def test_the_support_sees_itself_and_no_query(queries: Any) -> None:
    s, _ = run(SUPPORT, QUERY, queries)
    torch.testing.assert_close(run(SUPPORT, 3 * QUERY[:2], queries)[0], s, rtol=0, atol=0)
    moved = torch.cat([SUPPORT[:-1], 2 * SUPPORT[-1:]])
    assert not torch.allclose(run(moved, QUERY, queries)[0][0], s[0])
    _, none = run(SUPPORT, QUERY[:0], queries)
    assert none.shape == (0, D)


@pytest.mark.parametrize("queries", QUERIES)
def test_dropout_repeats_under_a_seed_and_arguments_are_left_alone(queries: Any) -> None:
    before = tree.digest((PARAMS, SUPPORT, QUERY))

    def outputs(seed: int, net: SetTransformer = NET) -> Tensor:
        mode = Mode(train=True, seed=torch.tensor(seed))
        return torch.cat(net.apply(PARAMS, SUPPORT, QUERY, mode, queries))

    assert torch.equal(outputs(0), outputs(0))
    assert not torch.allclose(outputs(0), outputs(1))
    still = outputs(0, SetTransformer(2, 16, dropout=0.0))
    assert torch.equal(still, torch.cat(run(SUPPORT, QUERY, queries)))
    assert tree.digest((PARAMS, SUPPORT, QUERY)) == before


@pytest.mark.parametrize("queries", QUERIES)
def test_stacked_clients_and_their_gradients_equal_the_loop(queries: Any) -> None:
    many = [NET.init(Key(i), D, torch.float64) for i in range(3)]
    s, q, seeds = noise(3, S, D), noise(3, Q, D, seed=1), torch.arange(3)

    def loss(w: tree.Tree, s: Tensor, q: Tensor, seed: Tensor) -> Tensor:
        a, b = NET.apply(w, s, q, Mode(train=True, seed=seed), queries)
        return a.sin().sum() + b.cos().sum()

    got = torch.func.vmap(torch.func.grad(loss))(tree.stack(many), s, q, seeds)
    for i, w in enumerate(many):
        at = tree.map(lambda leaf: leaf.clone().requires_grad_(), w)
        want = torch.autograd.grad(loss(at, s[i], q[i], seeds[i]), tree.leaves(at))
        for a, b in zip(tree.leaves(tree.index(got, i)), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_f2ls_layer_on_640_features_has_4_27_million_parameters() -> None:
    # The published size is 4.27 M: 4 d (d + 1) attention, d 2048 twice and biases, 4 d of norms.
    params = SetTransformer().init(Key(0), 640, torch.float32)
    count = sum(map(Tensor.numel, tree.leaves(params)))
    assert count == 4 * 640 * 641 + 2 * 640 * 2048 + 2048 + 640 + 4 * 640
    assert round(count / 1e6, 2) == 4.27


def test_a_layer_is_drawn_as_torch_draws_it() -> None:
    params = SetTransformer().init(Key(0), 100, torch.float32)
    double = SetTransformer().init(Key(0), 100, torch.float64)
    assert tree.digest(params) == tree.digest(tree.map(Tensor.float, double))
    torch.manual_seed(0)
    theirs = torch.nn.TransformerEncoderLayer(100, 4, 2048)
    pairs = [
        (params["qkv"], theirs.self_attn.in_proj_weight, theirs.self_attn.in_proj_bias),
        (params["out"], theirs.self_attn.out_proj.weight, theirs.self_attn.out_proj.bias),
        *[
            (params[name], getattr(theirs, name).weight, getattr(theirs, name).bias)
            for name in ("linear1", "linear2", "norm1", "norm2")
        ],
    ]
    for ours, weight, bias in pairs:
        for a, b in ((ours["weight"], weight), (ours["bias"], bias)):
            assert a.shape == b.shape
            assert a.abs().max().item() == pytest.approx(b.abs().max().item(), rel=0.05)


def test_values_that_make_no_sense_are_refused() -> None:
    for make, text in [
        (lambda: SetTransformer(heads=0), "heads is 0"),
        (lambda: SetTransformer(hidden=0), "hidden is 0"),
        (lambda: SetTransformer(dropout=1.0), "dropout is 1.0"),
        (lambda: SetTransformer().init(Key(0), 50, torch.float32), "50 features are not divisible"),
        (lambda: run(SUPPORT, QUERY, "all"), "queries is 'all'"),
    ]:
        with pytest.raises(ConfigError, match=text):
            make()
