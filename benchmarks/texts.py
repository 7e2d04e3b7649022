"""Cases: a bidirectional LSTM over a batch of texts, forwards and backwards, against torch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from case import Case, Options, Result, agree
from timing import Contestant, interleave, rows, timed
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fedshot.core import tree
from fedshot.core.machine import arithmetic
from fedshot.core.seeds import Key
from fedshot.nn.models.recurrence import bilstm, init_recurrence

TEXTS, D, HIDDEN, VOCABULARY = 80, 100, 50, 20_000
REFERENCE = "fedshot"
ROUNDED = 1e-3  # relative, of a gradient in float32
Run = Callable[[], list[Tensor]]


def batch(words: int) -> tuple[Tensor, Tensor]:
    """Return texts [80, words, 100] and their lengths; words are as frequent as Zipf's law says."""
    at = Key(0).torch()
    frequent = 1 / torch.arange(1, VOCABULARY + 1)
    which = torch.multinomial(frequent, TEXTS * words, True, generator=at).view(TEXTS, words)
    lengths = torch.randint(max(1, words // 10), words + 1, (TEXTS,), generator=at)
    lengths[0] = words
    mask = (torch.arange(words) < lengths[:, None]).float()
    return torch.randn(VOCABULARY, D, generator=at)[which] * mask[..., None], lengths


def contestants(words: int) -> dict[str, Run]:
    """Return who runs the layer; each gives the gradient by all weights."""
    x, lengths = batch(words)
    mask = (torch.arange(words) < lengths[:, None]).float()
    names = ("forward", "backward")
    p = {n: init_recurrence(Key(1).at(n), D, HIDDEN, 4, torch.float32) for n in names}
    p = tree.map(lambda leaf: leaf.requires_grad_(), p)
    layer = nn.LSTM(D, HIDDEN, batch_first=True, bidirectional=True)
    weights = []
    with torch.no_grad():
        for name, end in zip(names, ("", "_reverse"), strict=True):
            for part, short in (("input", "ih"), ("state", "hh")):
                for kind in ("weight", "bias"):
                    leaf = getattr(layer, f"{kind}_{short}_l0{end}")
                    leaf.copy_(p[name][part][kind])
                    weights.append((f"{name}/{part}/{kind}", leaf))
    leaves = dict(tree.items(p))

    def own() -> list[Tensor]:
        states, _ = bilstm(p, x, mask, "fused")
        loss = (states * mask[..., None]).square().sum()
        return list(torch.autograd.grad(loss, [leaves[name] for name, _ in weights]))

    def packed() -> list[Tensor]:
        texts = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(layer(texts)[0], batch_first=True)
        return list(torch.autograd.grad(states.square().sum(), [leaf for _, leaf in weights]))

    def padded() -> list[Tensor]:
        # The backward direction would begin in the padding; the arithmetic is as much.
        loss = (layer(x)[0] * mask[..., None]).square().sum()
        return list(torch.autograd.grad(loss, [leaf for _, leaf in weights]))

    return {REFERENCE: own, "torch.nn.LSTM, packed": packed, "torch.nn.LSTM, padding read": padded}


def layer(words: int, options: Options) -> Result:
    """Measure the layer in one thread."""
    words = min(words, 5) if options.quick else words
    result = Result(
        f"a bidirectional LSTM of {HIDDEN}, forwards and backwards, {TEXTS} texts of up to {words} "
        f"words of {D} numbers, in one thread"
    )
    runs = contestants(words)
    everyone = []
    with arithmetic(1):
        ours, theirs = runs[REFERENCE](), runs["torch.nn.LSTM, packed"]()
        for a, b in zip(ours, theirs, strict=True):
            of = f"gradient {list(a.shape)}"
            agree(result.checks, of, float((a - b).norm() / b.norm()), ROUNDED)
        everyone = [Contestant(name, timed(run)) for name, run in runs.items()]
        interleave(everyone, options.repeats)
    result.rows = rows(everyone, REFERENCE)
    return result


CASES = [Case(f"layers/bilstm-{words}", partial(layer, words)) for words in (20, 500)]
