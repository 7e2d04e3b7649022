"""FRL's options, each against a whole episode, or a client's part in it, written out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.methods.frl.client_share import EpisodeShare
from fedshot.methods.frl.group import Group
from fedshot.methods.frl.local_steps import Prototypes, pieces
from fedshot.nn.models.backbones import MLP, Conv4
from fedshot.nn.models.model import Model
from fedshot.nn.models.resnet import ResNet12
from methods.frl.oracle import (
    CONV,
    FLAT,
    K,
    Means,
    Run,
    Weights,
    flat,
    gradient,
    head_loss,
    l_local,
    leaf,
    means,
    method,
    net,
)
from methods.frl.test_frl import close, features, told


def stepped(w: Weights, loss: Tensor, lr: float) -> Weights:
    step = gradient(loss, w)
    return {name: value.detach() - lr * step[name] for name, value in w.items()}


def fixed(found: Means) -> Means:
    return {c: p.detach() for c, p in found.items()}


def rows(w: Weights, x: Tensor) -> Tensor:
    return net(w, x).mean(-1)


def weighed(parts: list[Weights], n: list[float]) -> Weights:
    return {
        name: sum(part[name] * size for part, size in zip(parts, n, strict=True)) / sum(n)  # type: ignore[misc]
        for name in parts[0]
    }


def pooled_means(shares: list[EpisodeShare], own: list[Means]) -> Means:
    """The means over all supports of a class, of the clients' means."""
    found: Means = {}
    for c in range(3):
        n = [int((s.support_y == c).sum()) for s in shares]
        held = [k for k, mine in enumerate(own) if c in mine]
        found[c] = torch.stack([own[k][c] * n[k] for k in held]).sum(0) / sum(n)
    return found


# ------------------------------------------------------------------------- whole episodes
@pytest.mark.parametrize("variant", ["proto", "gpal"])
def test_an_episode_as_the_authors_later_code_has_it(variant: Any, tmp_path: Path) -> None:
    """Prototypes after the step, all clients alike; queries meet their client's own.

    The loss by the global ones is GPAL's: "proto" has none of it.
    """
    m = method(FLAT, mode="official", variant=variant, gamma=1.5, inner_lr=0.1)
    run = Run(m, tmp_path)
    phi, shares = flat(run.server.phi), run.shares()
    theta, known = phi, None
    gamma = 1.5 if variant == "gpal" else 0.0
    for _ in range(m.inner_rounds):
        news, owns = [], []
        for s in shares:
            w = leaf(theta)
            f = rows(w, s.support_x)
            loss = l_local(f, s.support_y, means(f, s.support_y))
            if known is not None:
                loss = loss + gamma * l_local(f, s.support_y, known)
            news.append(stepped(w, loss, m.inner_lr))
            owns.append(means(rows(news[-1], s.support_x), s.support_y))
        theta = weighed(news, [1.0] * K)
        known = {c: torch.stack([o[c] for o in owns if c in o]).mean(0) for c in range(3)}
    assert known is not None
    each = []
    for s in shares:
        w = leaf(theta)
        f, own = rows(w, s.query_x), means(rows(w, s.support_x), s.support_y)
        loss = l_local(f, s.query_y, own) + gamma * l_local(f, s.query_y, known)
        each.append(gradient(loss, w))
    g = weighed(each, [1.0] * K)
    close(run.play().phi, {name: phi[name] - m.optimizer.lr * g[name] for name in phi})


def test_several_local_steps_and_queries_among_the_classes_a_client_holds(tmp_path: Path) -> None:
    m = method(
        FLAT,
        variant="proto",
        inner_rounds=1,
        inner_lr=0.1,
        local_steps=2,
        query_classes="held",
        refresh=False,
    )
    run = Run(m, tmp_path)
    phi, shares = flat(run.server.phi), run.shares()
    news, owns = [], []
    for s in shares:
        w = phi
        owns.append(fixed(means(rows(w, s.support_x), s.support_y)))
        for _ in range(2):
            w = leaf(w)
            f = rows(w, s.support_x)
            w = stepped(w, l_local(f, s.support_y, means(f, s.support_y)), m.inner_lr)
        news.append(w)
    theta = weighed(news, [float(len(s.support_y)) for s in shares])
    known, each = pooled_means(shares, owns), []
    assert any(len(set(s.query_y.tolist())) < 3 for s in shares)
    for s in shares:
        w = leaf(theta)
        mine = {c: known[c] for c in set(s.query_y.tolist())}
        each.append(gradient(l_local(rows(w, s.query_x), s.query_y, mine), w))
    g = weighed(each, [float(len(s.support_y) + len(s.query_y)) for s in shares])
    close(run.play().phi, {name: phi[name] - m.optimizer.lr * g[name] for name in phi})


@pytest.mark.parametrize("variant", ["linear", "proto"])
def test_minibatches_are_steps_of_their_own(variant: Any, tmp_path: Path) -> None:
    """Prototypes of a step are its batch's; those uploaded are of all supports, at theta_r."""
    m = method(FLAT, variant=variant, inner_lr=0.1, inner_batch=4, local_steps=2)
    run = Run(m, tmp_path)
    phi = flat(run.server.phi)
    whole = run.shares()[0]
    both = [torch.cat([s.support_x for s in run.shares()]), torch.cat(
        [s.support_y for s in run.shares()])]  # fmt: skip
    share = whole._replace(support_x=both[0][:10], support_y=both[1][:10])
    w, x, y = phi, share.support_x, share.support_y
    for _ in range(2):
        for at in (slice(0, 4), slice(4, 8), slice(8, 10)):
            w = leaf(w)
            if variant == "linear":
                loss = head_loss(w, x[at], y[at])
            else:
                f = rows(w, x[at])
                loss = l_local(f, y[at], means(f, y[at]))
            w = stepped(w, loss, m.inner_lr)
    reply = m.update({"theta": run.server.phi}, {}, share)
    close(reply.up["theta"], {name: w[name] - phi[name] for name in w})
    if variant == "proto":
        want, counts = means(rows(phi, x), y), [int((y == c).sum()) for c in range(3)]
        assert reply.up["counts"].tolist() == counts
        for c, p in want.items():
            torch.testing.assert_close(reply.up["sums"][c], p * counts[c])


@pytest.mark.parametrize("batch", [None, 4])
@pytest.mark.parametrize("uploaded", ["before", "last", "after"])
def test_prototypes_are_of_the_model_before_or_after_a_step(
    uploaded: Any, batch: int | None, tmp_path: Path
) -> None:
    """Three local steps: "last" is the model that enters the third, as algorithm 1 has it."""
    m = method(FLAT, uploaded=uploaded, inner_lr=0.1, inner_batch=batch, local_steps=3)
    run = Run(m, tmp_path)
    share = run.shares()[0]
    x, y = share.support_x, share.support_y
    entered, w = [], flat(run.server.phi)
    for _ in range(3):
        entered.append(w)
        for at in [slice(0, len(y))] if batch is None else pieces(len(y), batch):
            w = leaf(w)
            f = rows(w, x[at])
            w = stepped(w, l_local(f, y[at], means(f, y[at])), m.inner_lr)
    at_theta = {"before": entered[0], "last": entered[2], "after": w}[uploaded]
    reply = m.update({"theta": run.server.phi}, {}, share)
    for c, p in means(rows(at_theta, x), y).items():
        torch.testing.assert_close(reply.up["sums"][c], p * int((y == c).sum()))


def test_as_printed_prototypes_are_those_of_the_last_repetition() -> None:
    assert method(FLAT, mode="paper").local.uploaded == "last"
    assert method(FLAT).local.uploaded == "before"


def test_equal_weights_are_of_models_and_of_gradients(tmp_path: Path) -> None:
    m = method(FLAT, variant="linear", inner_rounds=1, inner_lr=0.1, weights="equal")
    run = Run(m, tmp_path)
    shares = run.shares()
    cut = shares[0]
    shares[0] = cut._replace(support_x=cut.support_x[:2], support_y=cut.support_y[:2])
    phi = flat(run.server.phi)
    news = []
    for s in shares:
        w = leaf(phi)
        news.append(stepped(w, head_loss(w, s.support_x, s.support_y), m.inner_lr))
    theta = weighed(news, [1.0] * K)
    each = []
    for s in shares:
        w = leaf(theta)
        each.append(gradient(head_loss(w, s.query_x, s.query_y), w))
    g = weighed(each, [1.0] * K)
    server, _ = m.round(run.server, Group.of_shares(shares), run.key)
    close(server.phi, {name: phi[name] - m.optimizer.lr * g[name] for name in phi})


# ------------------------------------------------------------------------- positions
def test_gamma_weighs_a_map_and_not_its_positions_in_every_mode() -> None:
    """Every position holds the same, so that a map weighs what each of its positions does."""
    y = features()[1]
    row = torch.randn(8, 4, 1, generator=Key(0).torch()).double()
    alone = l_local(row[:, :, 0], y, dict(enumerate(told().means)))
    for side, positions in ((32, 4), (84, 25)):
        model = Model(Conv4(width=3), CONV.head, (side, side, 1), "support", "float64")
        g = row.expand(-1, -1, positions)
        for mode in ("strict", "paper", "official"):
            for gamma, weight in ((None, 0.2), (0.2, 0.2), (0.7, 0.7)):
                local = method(model, mode=mode, gamma=gamma).local
                assert local.map_positions == positions
                with_aux, without = (local.support_loss(g, y, 3, p)[0] for p in (told(), None))
                torch.testing.assert_close(with_aux - without, weight * alone)


def test_the_global_loss_of_queries_is_no_sum_over_positions(tmp_path: Path) -> None:
    """On pooled features: `gamma` weighs it as it is, however many positions the map has."""
    m = method(CONV, mode="paper", variant="gpal", query_prototypes="local", inner_rounds=1)
    assert m.local.map_positions == 4
    run = Run(m, tmp_path)
    share, phi = run.shares()[0], run.server.phi
    own, known = torch.randn(3, 3, generator=Key(5).torch()).double(), torch.ones(3) > 0
    at = {"theta": phi, "means": own}
    loss, _ = m.query_loss(at, Prototypes(own, known), run.server.stats, share)
    alone, _ = replace(m, gamma=0.0).query_loss(at, Prototypes(own, known), run.server.stats, share)
    f = rows(flat(phi), share.query_x)
    by_all = l_local(f, share.query_y, dict(enumerate(own)))
    torch.testing.assert_close(loss - alone, 0.2 * by_all)


def test_gpal_over_positions_asks_for_a_map() -> None:
    resnet = Model(ResNet12(widths=(2, 2, 2, 2)), CONV.head, (32, 32, 1), "support")
    flattened = replace(CONV, backbone=Conv4(width=3, features=2))
    for model in (resnet, FLAT, flattened):
        with pytest.raises(ConfigError, match="has no feature map"):
            method(model, positions="mean")
        for mode in ("strict", "paper", "official"):
            m = method(model, mode=mode)
            assert (m.local.positions, m.local.gamma) == ("pooled", 0.2)
    assert method(Model(MLP((4,)), None, (6, 6, 1)), variant="proto", positions="mean")
