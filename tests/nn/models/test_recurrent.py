"""Text backbones: padding, empty texts, sizes, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from covering import diagonal
from fedshot.core import tree
from fedshot.core.errors import ConfigError, DataError
from fedshot.core.seeds import Key
from fedshot.nn.models.backbones import BACKBONES, Backbone
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.recurrent import GRU, BiLSTM

D = 5
LENGTHS = (3, 0, 6, 1, 4)
NETS = [
    net(kernel)
    for kernel in ("fused", "cell")
    for net in (
        lambda k: GRU(4, kernel=k),
        lambda k: BiLSTM(3, "last", kernel=k),
        lambda k: BiLSTM(3, "mean", kernel=k),
        lambda k: BiLSTM(3, "attention", 7, kernel=k),
    )
]


def texts(lengths: tuple[int, ...] = LENGTHS, columns: int = 6) -> Tensor:
    words = torch.randn((len(lengths), columns, D), generator=Key(0).torch(), dtype=torch.float64)
    mask = (torch.arange(columns) < torch.tensor(lengths)[:, None]).double()
    return torch.cat([words * mask[..., None], mask[..., None]], -1)


def run(net: Any, x: Tensor) -> Tensor:
    params, stats = net.init(Key(1), (44, D), x.dtype)
    h, after = net.apply(params, stats, x, Mode(train=True, norm="batch"))
    assert stats == after == {}
    return h


@pytest.mark.parametrize("net", NETS)
def test_a_text_is_read_by_itself_in_any_company(net: Any) -> None:
    x = texts()
    h = run(net, x)
    for i, length in enumerate(LENGTHS):
        alone = run(net, x[i : i + 1, : max(1, length)])
        torch.testing.assert_close(alone[0], h[i], rtol=0, atol=1e-12)
    order = torch.tensor([4, 2, 0, 3, 1])
    torch.testing.assert_close(run(net, x[order]), h[order], rtol=0, atol=1e-12)
    longer = x.clone()
    longer[2, 5, 0] += 1  # the last word counts
    assert not torch.equal(run(net, longer)[2], h[2])


@pytest.mark.parametrize("net", NETS)
def test_an_empty_text_has_features_and_gradients_of_zero(net: Any) -> None:
    for lengths in (LENGTHS, (0, 0)):
        x = texts(lengths).requires_grad_()
        params, _ = net.init(Key(1), (44, D), x.dtype)
        params = tree.map(lambda leaf: leaf.requires_grad_(), params)
        h, _ = net.apply(params, {}, x, Mode())
        assert not h[[i for i, length in enumerate(lengths) if length == 0]].any()
        grads = torch.autograd.grad(h.square().sum() + h.sum(), [x, *tree.leaves(params)])
        assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("net", NETS)
def test_a_pass_repeats_and_leaves_its_arguments_alone(net: Any) -> None:
    x = texts().float()
    params, _ = net.init(Key(1), (44, D), torch.float32)
    before = tree.digest((params, x))
    a, b = (net.apply(params, {}, x, Mode())[0] for _ in range(2))
    assert torch.equal(a, b)
    assert tree.digest((params, x)) == before
    double, _ = net.init(Key(1), (44, D), torch.float64)
    assert tree.digest(params) == tree.digest(tree.map(Tensor.float, double))


# A direction has gates * hidden * (words + hidden + 2) numbers: the vectors have 300, and there
# are two biases as in torch. Attention adds 64 * (100 + 1) + 64.
@pytest.mark.parametrize(
    ("net", "features", "count"),
    [
        (GRU(), 128, 3 * 128 * 430),
        (BiLSTM(), 100, 2 * 4 * 50 * 352),
        (BiLSTM(pooling="mean"), 100, 2 * 4 * 50 * 352),
        (BiLSTM(pooling="attention"), 100, 2 * 4 * 50 * 352 + 64 * 101 + 64),
    ],
)
def test_sizes_are_those_of_the_papers(net: Any, features: int, count: int) -> None:
    params, _ = net.init(Key(0), (44, 300), torch.float32)
    assert sum(map(Tensor.numel, tree.leaves(params))) == count
    assert net.out_features((44, 300)) == features
    x = torch.ones(2, 7, 301)
    assert net.apply(params, {}, x, Mode())[0].shape == (2, features)
    bound = net.hidden**-0.5
    assert 0.99 * bound < params["forward"]["input"]["weight"].abs().max() <= bound


def test_text_backbones_are_registered_and_say_what_they_are() -> None:
    assert (BACKBONES["gru"], BACKBONES["bilstm"]) == (GRU, BiLSTM)
    for net in (GRU(), BiLSTM()):
        assert isinstance(net, Backbone)
        assert (net.takes, net.norm_policies, net.vmappable) == (("text",), ("running",), False)
    assert GRU(kernel="cell").vmappable
    assert BiLSTM(kernel="cell").vmappable


@pytest.mark.parametrize("net", [GRU(), BiLSTM()])
def test_a_word_after_padding_is_refused(net: Any) -> None:
    x = texts()
    x[3, 4, -1] = 1
    with pytest.raises(DataError, match="text 3 has a word after padding"):
        run(net, x)


@pytest.mark.parametrize(("net", "shape"), diagonal(NETS[:2], [(2, 3, D), (2, 3, 8, 8)]))
def test_what_is_no_prepared_text_is_refused(net: Any, shape: Any) -> None:
    with pytest.raises(ConfigError) as error:
        run(net, torch.ones(shape))
    assert str(list(shape)) in str(error.value)
    assert "[n, words, 6]" in str(error.value)
