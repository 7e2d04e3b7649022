"""GRU and biLSTM against torch.nn modules on packed texts, and against each other's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from covering import covering, pairwise
from differences import noise
from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.recurrent import GRU, BiLSTM

EXACT = {"rtol": 1e-10, "atol": 1e-10}
KERNELS = ("fused", "cell")
NETS = [GRU(4), BiLSTM(3), BiLSTM(3, "mean"), BiLSTM(3, "attention", 5)]
LENGTHS = (3, 6, 1, 5, 6)


def texts(lengths: tuple[int, ...], columns: int, d: int, seed: int = 0) -> Tensor:
    """Return prepared texts with rubbish in the padding."""
    mask = (torch.arange(columns) < torch.tensor(lengths)[:, None]).double()
    return torch.cat([noise(len(lengths), columns, d, seed=seed), mask[..., None]], -1)


def with_kernel(net: Any, kernel: str) -> Any:
    return type(net)(**{**vars(net), "kernel": kernel})


def copy(module: nn.Module, p: tree.Tree, suffix: str = "") -> None:
    for torchs, ours in (("ih", "input"), ("hh", "state")):
        for part in ("weight", "bias"):
            getattr(module, f"{part}_{torchs}_l0{suffix}").data.copy_(p[ours][part])


def grads_of(module: nn.Module, suffix: str = "") -> list[Tensor]:
    """Return the module's gradients in the order of our leaves: input bias, weight, state ..."""
    return [
        getattr(module, f"{part}_{name}_l0{suffix}").grad
        for name in ("ih", "hh")
        for part in ("bias", "weight")
    ]


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_gru_equals_the_torch_module_on_packed_texts(kernel: Any) -> None:
    net = GRU(4, kernel)
    params, _ = net.init(Key(1), (7, 3), torch.float64)
    module = nn.GRU(3, 4, batch_first=True).double()
    copy(module, params["forward"])
    x = texts(LENGTHS, 7, 3)
    w = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
    got, _ = net.apply(w, {}, x, Mode())
    packed = pack_padded_sequence(x[..., :-1], torch.tensor(LENGTHS), True, enforce_sorted=False)
    want = module(packed)[1][0]
    torch.testing.assert_close(got, want, **EXACT)
    want.sin().sum().backward()
    for g, t in zip(
        torch.autograd.grad(got.sin().sum(), tree.leaves(w)), grads_of(module), strict=True
    ):
        torch.testing.assert_close(g, t, **EXACT)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("pooling", ["last", "mean", "attention"])
def test_the_bilstm_equals_the_torch_module_on_packed_texts(kernel: Any, pooling: Any) -> None:
    net = BiLSTM(3, pooling, 5, kernel)
    params, _ = net.init(Key(1), (7, 2), torch.float64)
    module = nn.LSTM(2, 3, batch_first=True, bidirectional=True).double()
    copy(module, params["forward"])
    copy(module, params["backward"], "_reverse")
    x = texts(LENGTHS, 7, 2)
    w = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
    got, _ = net.apply(w, {}, x, Mode())
    packed = pack_padded_sequence(x[..., :-1], torch.tensor(LENGTHS), True, enforce_sorted=False)
    out, (end, _) = module(packed)
    states, _ = pad_packed_sequence(out, batch_first=True)
    rows = []
    for i, length in enumerate(LENGTHS):  # each text by itself, without masks
        own = states[i, :length]
        if pooling == "attention":
            p = params["attention"]
            keys = torch.tanh(own @ p["project"]["weight"].T + p["project"]["bias"])
            rows.append(torch.softmax(keys @ p["score"]["weight"][0], 0) @ own)
        else:
            rows.append(own.mean(0) if pooling == "mean" else torch.cat([end[0, i], end[1, i]]))
    want = torch.stack(rows)
    torch.testing.assert_close(got, want, **EXACT)
    want.sin().sum().backward()
    grads = torch.autograd.grad(got.sin().sum(), tree.leaves(w))
    names = [name for name, _ in tree.items(w)]
    ours = {name: g for name, g in zip(names, grads, strict=True) if "attention" not in name}
    theirs = grads_of(module, "_reverse") + grads_of(module)  # "backward" sorts before "forward"
    for g, t in zip(ours.values(), theirs, strict=True):
        torch.testing.assert_close(g, t, **EXACT)


@pytest.mark.parametrize(("net", "kernel"), covering(NETS, KERNELS))
def test_first_and_second_derivatives_are_right_with_an_empty_text(net: Any, kernel: Any) -> None:
    net = with_kernel(net, kernel)
    params, _ = net.init(Key(2), (3, 2), torch.float64)
    x = texts((2, 0, 3), 3, 2)
    names = [name for name, _ in tree.items(params)]

    def loss(*flat: Tensor) -> Tensor:
        w = tree.rebuild(params, dict(zip(names, flat, strict=True)))
        return net.apply(w, {}, x, Mode())[0].sin().sum()

    at = [leaf.clone().requires_grad_() for leaf in tree.leaves(params)]
    assert all(g.any() for g in torch.autograd.grad(loss(*at), at)), "would pass on zeros"
    assert torch.autograd.gradcheck(loss, at, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, at, fast_mode=True)


@pytest.mark.parametrize(("hidden", "n", "net"), pairwise([1, 5, 33], [1, 5], [GRU, BiLSTM]))
def test_first_derivatives_in_float32_are_those_of_float64(net: Any, n: int, hidden: int) -> None:
    """By the words, too, and of the kernels that float32 alone has."""

    def slope(kernel: Any, dtype: torch.dtype) -> list[Tensor]:
        made = net(hidden, kernel=kernel)
        params, _ = made.init(Key(2), (6, 4), dtype)
        x = texts(LENGTHS[:n], 6, 4).to(dtype).requires_grad_()
        at = [x, *(leaf.requires_grad_() for leaf in tree.leaves(params))]
        h, _ = made.apply(params, {}, x, Mode())
        return list(torch.autograd.grad(h.sum() + h.sin().sum(), at))  # of the sum: strides of 0

    for got, want in zip(slope("fused", torch.float32), slope("cell", torch.float64), strict=True):
        assert want.any()
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("net", NETS)
def test_second_derivatives_in_float32_are_those_of_float64(net: Any) -> None:
    # torch has other LSTM kernels for float32 (oneDNN); gradgradcheck in float64 never meets them.
    def curvature(net: Any, dtype: torch.dtype) -> list[Tensor]:
        params, _ = net.init(Key(2), (6, 4), dtype)
        at = [leaf.requires_grad_() for leaf in tree.leaves(params)]
        h, _ = net.apply(params, {}, texts(LENGTHS, 6, 4).to(dtype), Mode())
        first = torch.autograd.grad(h.sin().sum(), at, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), at))

    exact = curvature(with_kernel(net, "cell"), torch.float64)
    for got, want in zip(curvature(net, torch.float32), exact, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("net", NETS)
def test_stacked_clients_and_their_gradients_equal_the_loop(net: Any) -> None:
    net, alone = with_kernel(net, "cell"), with_kernel(net, "fused")
    many = [net.init(Key(i), (6, 2), torch.float64)[0] for i in range(3)]
    lengths = ((3, 6, 0), (1, 2, 4), (6, 5, 6))
    x = torch.stack([texts(row, 6, 2, seed=i) for i, row in enumerate(lengths)])

    def loss(w: tree.Tree, x: Tensor, net: Any) -> Tensor:
        return net.apply(w, {}, x, Mode())[0].sin().sum()

    def grad(w: tree.Tree, x: Tensor) -> tree.Tree:
        return torch.func.grad(loss)(w, x, net)

    got = torch.func.vmap(grad)(tree.stack(many), x)
    for i, w in enumerate(many):
        at = tree.map(lambda leaf: leaf.clone().requires_grad_(), w)
        want = torch.autograd.grad(loss(at, x[i], alone), tree.leaves(at))
        for a, b in zip(tree.leaves(tree.index(got, i)), want, strict=True):
            torch.testing.assert_close(a, b, **EXACT)
