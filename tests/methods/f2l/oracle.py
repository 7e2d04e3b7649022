"""What F2L's equations say, written out with torch.nn, torch.autograd and torch.optim.

Sums are loops over rows, as the paper writes them. Nothing here calls fedshot.nn, but to say what
the model is.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import Episode
from fedshot.methods.f2l.f2l import F2L, F2LLocalState
from fedshot.methods.f2l.readings import InnerChoice, OptimizerChoice
from fedshot.methods.f2l.set_transformer import SetTransformer
from fedshot.nn.heads import LinearHead
from methods import classification_oracle
from methods.classification_oracle import BASE, Run, Twin
from torch_optimizers import torch_optimizer

WAY = 3
HEADS = {"mlp": 7, "conv4": 2}
Weights = dict[str, Tensor]
Features = tuple[Tensor, Tensor]  # of support and queries


def method(backbone: str = "mlp", **changes: Any) -> F2L:
    """Return F2L on a small model without dropout."""
    model = replace(classification_oracle.model(backbone), head=LinearHead(WAY))
    found: dict[str, Any] = {
        "model": model,
        "episode": classification_oracle.SPEC,
        "classes": BASE,
        "mode": "strict",
        "transformer": SetTransformer(HEADS[backbone], hidden=5, dropout=0.0),
        "inner": InnerChoice(lr=0.3),
        "local_steps": 2,
        "optimizer": OptimizerChoice(lr=0.01),
    }
    return F2L(**found | changes)


def begin(m: F2L, folder: Path) -> tuple[F2LLocalState, Any]:
    """Return a state with nothing at zero, and what client 0 draws."""
    run = Run(m, folder)
    server = m.init(Key(9))
    psi = beside(m.client_model.init(Key(3), torch.float64))
    drawn = m.draw(run.host.data(0), Key(5))
    return F2LLocalState(server.phi, psi, server.stats, m.client_steps.init(psi)), drawn


def beside(w: Tree) -> Tree:
    rng = Key(2).torch()
    return tree.map(lambda x: x + 0.3 * torch.randn(x.shape, generator=rng, dtype=x.dtype), w)


class Client(nn.Module):
    """The client-model as torch's own Transformer layer under a mask, and a linear layer."""

    def __init__(self, m: F2L, psi: Tree) -> None:
        super().__init__()
        d, net = m.model.out_features, m.transformer
        self.layer = nn.TransformerEncoderLayer(d, net.heads, net.hidden, 0.0, batch_first=True)
        self.double()
        encoder = psi["encoder"]
        names = {"qkv": "self_attn.in_proj_", "out": "self_attn.out_proj."}
        held = {
            f"{names.get(part, f'{part}.')}{leaf}": value
            for part, leaves in encoder.items()
            for leaf, value in leaves.items()
        }
        self.layer.load_state_dict(held)
        if "head" in psi:
            self.head = nn.Linear(d, WAY).double()
            self.head.load_state_dict(psi["head"])
        self.mode = m.reading.queries

    def weights(self) -> Weights:
        return dict(self.named_parameters())

    def encode(self, w: Weights, s: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """Eq. (22), and the queries after it, by what each may see."""
        n, k = len(s), len(q)
        sees = torch.zeros(n + k, n + k, dtype=torch.bool)
        sees[:n, :n] = True
        sees[n:, n:] = torch.eye(k, dtype=torch.bool) if self.mode != "query_set" else True
        sees[n:, :n] = self.mode == "support_context"
        layer = {name.removeprefix("layer."): x for name, x in w.items() if "layer." in name}
        both = torch.cat([s, q])[None]
        with sdpa_kernel(SDPBackend.MATH):  # which has second derivatives
            g = functional_call(self.layer, layer, (both,), {"src_mask": ~sees})[0]
        return g[:n], g[n:]


def classify(w: Weights, g: Tensor) -> Tensor:
    return g @ w["head.weight"].T + w["head.bias"]


def with_prototypes(w: Weights, g: Tensor, y: Tensor) -> Weights:
    c = torch.stack([g[y == k].mean(0) for k in range(WAY)])
    return w | {"head.weight": 2 * c, "head.bias": -(c**2).sum(1)}


def tuned(m: F2L, net: Client, w: Weights, s: Tensor, y: Tensor) -> Weights:
    """Eq. (3), as often as there are steps; psi~ as a function of psi."""
    inner = m.client_model.inner
    if m.reading.head_start == "prototypes":
        apart = {name: 1 * x for name, x in w.items()}  # from here on the head is a weight, too
        w = with_prototypes(apart, net.encode(w, s, s[:0])[0], y)
    start = w
    if inner.order == "first":
        w = {name: x.detach().requires_grad_() for name, x in w.items()}
    for _ in range(inner.steps):
        loss = F.cross_entropy(classify(w, net.encode(w, s, s[:0])[0]), y)
        moving = {n: x for n, x in w.items() if inner.adapts == "all" or n.startswith("head")}
        grads = torch.autograd.grad(loss, list(moving.values()), create_graph=True)
        w = w | {n: x - inner.lr * g for (n, x), g in zip(moving.items(), grads, strict=True)}
    if inner.order == "second":
        return w
    # First order: where psi~ is, moving as psi moves.
    return {n: start[n] + (w[n] - start[n]).detach() for n in w}


def transfer(m: F2L, h_phi: Tensor, h_psi: Tensor, z_psi: Tensor, y: Tensor) -> Tensor:
    """Eqs. (9), (10) and (13)."""
    h_phi, h_psi, p = F.normalize(h_phi), F.normalize(h_psi), z_psi.softmax(1)
    d, read = len(y), m.reading
    if read.mi_loss == "shots":
        rows = [(y == c).nonzero()[:, 0] for c in range(WAY)]
        terms = []
        for j in range(len(rows[0]) - 1):
            for c in range(WAY):
                scores = [h_phi[rows[c][j + 1]] @ h_psi[rows[e][j]] / read.mi_tau
                          for e in range(WAY)]  # fmt: skip
                terms.append(-(scores[c] - torch.stack(scores).logsumexp(0)))
        return torch.stack(terms).mean()
    total = torch.zeros((), dtype=torch.float64)
    for j in range(d):
        same_j = [k for k in range(d) if y[k] == y[j]]
        for i in same_j:
            a = p[i, y[j]] / sum(p[k, y[j]] for k in same_j)
            over = range(d) if read.mi_denominator == "all" else same_j
            e = [torch.exp(-((h_phi[i] - h_psi[k]) ** 2).sum() / 2 / read.mi_tau) for k in over]
            own = torch.exp(-((h_phi[i] - h_psi[j]) ** 2).sum() / 2 / read.mi_tau)
            total = total - a * torch.log(own / sum(e)) / d
    return total


def distillation(m: F2L, z_phi: Tensor, z_psi: Tensor, y: Tensor) -> Tensor:
    """Eqs. (16) to (19), of the logits of the task's classes."""
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(y)):
        if m.reading.kd_targets == "sum":
            target = z_phi[i] / z_phi[i].sum()
            total = total - (target * z_psi[i].log_softmax(0)).sum()
            continue
        z = z_phi[i].detach()
        negative = max(z[c] for c in range(WAY) if c != y[i])
        t = torch.sigmoid(torch.exp(negative) / torch.exp(z[y[i]]))
        q = torch.exp(z / t) / torch.exp(z / t).sum()
        term = -(q * torch.log(torch.exp(z_psi[i] / t) / torch.exp(z_psi[i] / t).sum())).sum()
        total = total + term
    return total / len(y)


def weighed(m: F2L, ce: Tensor, term: Tensor, weight: float) -> Tensor:
    return (
        (1 - weight) * ce + weight * term if m.reading.weights == "shared" else ce + weight * term
    )


def encoded(twin: Twin, e: Episode, again: bool = False) -> Features:
    """Return the features of support and queries; running statistics move, but not `again`."""
    for norm in twin.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = 0.0 if again else 0.1
    h = twin.features(torch.cat([e.support_x, e.query_x]))
    return h[: len(e.support_y)], h[len(e.support_y) :]


class Oracle:
    """One client's visits: phi from what is sent, psi and its optimiser its own."""

    def __init__(self, m: F2L, phi: Tree, psi: Tree, stats: Tree) -> None:
        self.m, self.client = m, Client(m, psi)
        self.by_psi = torch_optimizer(m.client_steps, self.client.parameters())
        self.receive(phi, stats)

    def receive(self, phi: Tree, stats: Tree) -> None:
        self.twin = Twin(phi["body"], phi["classifier"], stats)
        self.by_phi = torch_optimizer(self.m.server_steps, self.twin.parameters())

    def visit(self, steps: Any) -> None:
        for step in steps:
            self.step(step)

    def step(self, step: tuple[Episode, ...]) -> None:
        """Lines 4 to 7 of algorithm 1; several episodes make the mean of their losses."""
        read, w = self.m.reading, self.client.weights()
        seen = [encoded(self.twin, e) for e in step]
        losses = [self.both(e, w, h, h) for e, h in zip(step, seen, strict=True)]
        grads_phi = gradients([a + b for a, b in losses], list(self.twin.parameters()))
        grads_psi = gradients([b for _, b in losses], list(w.values()))
        if read.client_phi == "new":
            old = [(s.detach(), q.detach()) for s, q in seen]
            move(self.by_phi, self.twin, grads_phi)
            now = [encoded(self.twin, e, again=True) for e in step]
            each = zip(step, now, old, strict=True)
            after = [self.both(e, w, h, before)[1] for e, h, before in each]
            move(self.by_psi, self.client, gradients(after, list(w.values())))
            return
        move(self.by_phi, self.twin, grads_phi)
        move(self.by_psi, self.client, grads_psi)

    def both(self, e: Episode, w: Weights, h: Features, old: Features) -> tuple[Tensor, Tensor]:
        """Return (L_phi, L_psi) of the features h; psi is fine-tuned on the old ones."""
        m, read = self.m, self.m.reading
        (s, q), y, base = h, e.support_y, e.classes
        adapted = tuned(m, self.client, w, old[0].detach(), y)
        g_s, g_q = self.client.encode(adapted, s.detach(), q.detach())
        z_s, z_q = classify(adapted, g_s), classify(adapted, g_q)
        source = adapted
        if read.mi_from == "psi":
            source = w
            if read.head_start == "prototypes":
                source = with_prototypes(w, self.client.encode(w, s.detach(), s[:0])[0], y)
            g_s = self.client.encode(source, s.detach(), q.detach())[0]
            z_s = classify(source, g_s)
        g_s, z_s = g_s.detach(), z_s.detach()
        if read.mi_gradient == "both":
            fixed = {name: x.detach() for name, x in source.items()}
            g_s = self.client.encode(fixed, s, q)[0]
            z_s = classify(fixed, g_s)
        base_s, base_q = self.twin.classifier(s), self.twin.classifier(q)
        ce = F.cross_entropy(base_s, base[y])
        if read.server_rows == "both":
            ce = F.cross_entropy(torch.cat([base_s, base_q]), base[torch.cat([y, e.query_y])])
        server = weighed(m, ce, transfer(m, s, g_s, z_s, y), read.lambda_mi)
        kd = distillation(m, base_q[:, base], z_q, e.query_y)
        if read.kd_targets == "softmax":
            kd_free = torch.autograd.grad(kd, list(self.twin.parameters()), retain_graph=True,
                                          allow_unused=True)  # fmt: skip
            assert all(g is None for g in kd_free)
        return server, weighed(m, F.cross_entropy(z_q, e.query_y), kd, read.lambda_kd)


def gradients(losses: list[Tensor], at: list[Tensor]) -> tuple[Tensor, ...]:
    total = torch.stack(losses).mean()
    return torch.autograd.grad(
        total, at, retain_graph=True, allow_unused=True, materialize_grads=True
    )


def move(by: torch.optim.Optimizer, net: nn.Module, grads: tuple[Tensor, ...]) -> None:
    for p, g in zip(net.parameters(), grads, strict=True):
        p.grad = g.detach()
    by.step()


def close(found: Tensor, want: Tensor, tol: float = 1e-8) -> None:
    torch.testing.assert_close(found, want.detach(), rtol=tol, atol=tol / 10)


def assert_client(net: Client, psi: Tree) -> None:
    """Compare a client-model with torch's.

    But for the bias of keys, which moves no softmax: its gradient is rounding, of which Adam makes
    steps.
    """
    want, d = net.weights(), len(psi["encoder"]["norm1"]["bias"])
    names = {"qkv": "self_attn.in_proj_", "out": "self_attn.out_proj."}
    for part, leaves in psi["encoder"].items():
        for leaf, value in leaves.items():
            both = value, want[f"layer.{names.get(part, f'{part}.')}{leaf}"]
            if (part, leaf) == ("qkv", "bias"):
                both = tuple(torch.cat([b[:d], b[2 * d :]]) for b in both)
            close(*both)
    if "head" in psi:
        for leaf, value in psi["head"].items():
            close(value, want[f"head.{leaf}"])
