"""The set Transformer against torch.nn.TransformerEncoderLayer with copied weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from covering import slow
from differences import noise
from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.methods.f2l.set_transformer import SetTransformer
from fedshot.nn.models.mode import Mode

EXACT = {"rtol": 1e-10, "atol": 1e-10}
D, S, Q = 12, 6, 4
QUERIES = ("support_context", "query_set", "alone")


def layer(d: int, heads: int, hidden: int) -> tuple[SetTransformer, tree.Tree]:
    net = SetTransformer(heads, hidden)
    params = net.init(Key(0), d, torch.float64)
    flat = {k: v + 0.3 * noise(*v.shape, seed=i) for i, (k, v) in enumerate(tree.items(params))}
    return net, tree.rebuild(params, flat)


def torchs(net: SetTransformer, p: tree.Tree, d: int) -> nn.Module:
    module = nn.TransformerEncoderLayer(d, net.heads, net.hidden, 0.1, batch_first=True).double()
    module.load_state_dict(
        {
            "self_attn.in_proj_weight": p["qkv"]["weight"],
            "self_attn.in_proj_bias": p["qkv"]["bias"],
            **{f"self_attn.out_proj.{k}": v for k, v in p["out"].items()},
            **{
                f"{name}.{k}": v
                for name in ("linear1", "linear2", "norm1", "norm2")
                for k, v in p[name].items()
            },
        }
    )
    return module.eval()


@pytest.mark.parametrize("queries", QUERIES)
def test_the_layer_equals_the_torch_module(queries: Any) -> None:
    net, params = layer(D, 3, 10)
    module = torchs(net, params, D)
    s, q = noise(S, D, seed=50), noise(Q, D, seed=51)
    w = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
    got_s, got_q = net.apply(w, s, q, Mode(), queries)
    if queries == "support_context":
        hidden = torch.ones(S + Q, S + Q, dtype=torch.bool)  # True: may not be attended to
        hidden[:, :S] = False
        hidden.fill_diagonal_(False)
        both = module(torch.cat([s, q])[None], src_mask=hidden)[0]
        want_s, want_q = both[:S], both[S:]
    else:
        want_s = module(s[None])[0]
        want_q = module(q[None])[0] if queries == "query_set" else module(q[:, None])[:, 0]
    torch.testing.assert_close(got_s, want_s, **EXACT)
    torch.testing.assert_close(got_q, want_q, **EXACT)

    ours = torch.autograd.grad(got_s.sin().sum() + got_q.cos().sum(), tree.leaves(w))
    (want_s.sin().sum() + want_q.cos().sum()).backward()
    names = [name.replace("/", ".") for name, _ in tree.items(w)]
    theirs = {
        name.replace("self_attn.in_proj_", "qkv.").replace("self_attn.out_proj", "out"): p.grad
        for name, p in module.named_parameters()
    }
    for name, g in zip(names, ours, strict=True):
        torch.testing.assert_close(g, theirs[name], **EXACT)


@pytest.mark.parametrize("queries", [QUERIES[0], *slow(*QUERIES[1:])])
def test_first_and_second_derivatives_are_right_with_dropout(queries: Any) -> None:
    net, params = layer(4, 2, 3)
    net = SetTransformer(2, 3, dropout=0.3)
    mode = Mode(train=True, seed=Key(1).tensor())
    names = [name for name, _ in tree.items(params)]

    def loss(s: Tensor, q: Tensor, *flat: Tensor) -> Tensor:
        w = tree.rebuild(params, dict(zip(names, flat, strict=True)))
        a, b = net.apply(w, s, q, mode, queries)
        return a.sin().sum() + b.cos().sum()

    at = [noise(3, 4, seed=60), noise(2, 4, seed=61), *tree.leaves(params)]
    at = [leaf.clone().requires_grad_() for leaf in at]
    assert torch.autograd.gradcheck(loss, at, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, at, fast_mode=True)
