"""FRL against the paper's algorithm written out, its limit cases, and finite differences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from covering import covering, slow
from differences import direction, dot, slope
from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.data.episodes.group_sampler import GroupSampler
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import Partition
from fedshot.evaluation.episodic_test import EpisodicTest
from fedshot.learners.proto import Proto
from fedshot.methods.frl.client_share import EpisodeShare, shares_of
from fedshot.methods.frl.frl import FRL
from fedshot.methods.frl.group import Group
from fedshot.methods.frl.group_predictions import GroupNorms
from fedshot.methods.frl.local_steps import FewRoundLearner, Prototypes, pieces
from fedshot.nn.heads import LinearHead
from fedshot.nn.models.backbones import MLP
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.exchange import ClientWork
from methods.fedfsl.oracle import beside
from methods.frl.oracle import (
    CLASSES,
    CONV,
    FLAT,
    SPEC,
    K,
    Run,
    adapt,
    data_of,
    episode,
    flat,
    l_aux,
    l_local,
    means,
    method,
    net,
    net_by,
    small,
)

VARIANTS: tuple[Any, ...] = ("linear", "proto", "gpal")


def close(found: Any, want: dict[str, Tensor], tol: float = 1e-8) -> None:
    got = flat(found)
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=tol, atol=tol / 10, msg=name)


# ------------------------------------------------------------------------- one whole episode
@pytest.mark.parametrize(("variant", "by"), covering(VARIANTS, ["iid", "shards"]))
def test_an_episode_is_the_algorithm_of_the_paper(variant: Any, by: Any, tmp_path: Path) -> None:
    run = Run(method(variant=variant, refresh=False), tmp_path, by)
    before = flat(run.server.phi)
    want = episode(run.m, before, run.shares(), shrunk=False, refresh=False)
    after = run.play().phi
    close(after, want)
    assert any(not torch.equal(want[name], before[name]) for name in want)


@pytest.mark.parametrize(
    ("options", "shrunk", "refresh"),
    [
        ({"mode": "strict"}, False, True),
        ({"mode": "paper", "gamma": 0.3}, True, False),
        ({"loss": "literal", "inner_lr": 0.005, "refresh": False}, False, False),
        pytest.param({"inner_rounds": 0}, False, True, marks=pytest.mark.slow),
        ({"inner_rounds": 3, "gamma": 4.0}, False, True),
    ],
)
def test_options_follow_the_equations(
    options: dict[str, Any], shrunk: bool, refresh: bool, tmp_path: Path
) -> None:
    run = Run(method(**options), tmp_path)
    gamma = options.get("gamma")
    want = episode(run.m, flat(run.server.phi), run.shares(), shrunk, refresh)
    close(run.play().phi, want)
    assert run.m.local.gamma == (0.2 if gamma is None else gamma)


def test_the_answer_of_a_group_is_that_of_its_rounds_written_out(tmp_path: Path) -> None:
    """Inductive: a client's queries are normalised by its own supports."""
    m = method()
    episodic_test = group_exam(m.model)
    run = Run(m, tmp_path)
    found = m.evaluate(run.server, run.clients, episodic_test.eval_episodes, Key(5))

    eval_episode = episodic_test.eval_episodes[1]
    shares = [
        EpisodeShare(eval_episode.support_x[eval_episode.held.support == k],
              eval_episode.support_y[eval_episode.held.support == k],
              eval_episode.query_x[eval_episode.held.query == k],
              eval_episode.support_y[:0], torch.ones(3, dtype=torch.bool), ())
        for k in range(K)
    ]  # fmt: skip
    theta, told = adapt(m, flat(run.server.phi), shares, 2, shrunk=False, refresh=True)
    assert told is not None
    for k, share in enumerate(shares):
        f = net_by(theta, share.query_x, share.support_x).mean(-1)
        want = torch.stack([-(f - p).square().sum(-1) for p in told.values()], dim=1)
        torch.testing.assert_close(found[1].logits[eval_episode.held.query == k], want.float())


# ------------------------------------------------------------------------- prototypes
def test_global_prototypes_are_the_means_over_all_supports(tmp_path: Path) -> None:
    """And as printed they shrink by the share of the clients that lack the class."""
    for mode in ("strict", "paper"):
        m = small(method(variant="proto", mode=mode), refresh=False)
        run = Run(m, tmp_path / mode)
        shares = run.shares()
        told = m.learn(Group.of_shares(shares), run.server.phi, 3, 1, run.key).prototypes
        assert told is not None
        x = torch.cat([s.support_x for s in shares])
        y = torch.cat([s.support_y for s in shares])
        pooled = means(net(flat(run.server.phi), x).mean(-1), y)
        apart = [
            means(net(flat(run.server.phi), s.support_x).mean(-1), s.support_y) for s in shares
        ]
        lacking = 0
        for c in range(3):
            held = [(p[c], len(s.support_y) / len(y)) for p, s in zip(apart, shares, strict=True)
                    if c in p]  # fmt: skip
            mass = sum(part for _, part in held)
            lacking += mass < 1
            shrunk = torch.stack([p * part for p, part in held]).sum(0)
            torch.testing.assert_close(told.means[c], pooled[c] if mode == "strict" else shrunk)
            if mode == "paper":  # inside the hull of the clients' means, times the mass
                assert float(told.means[c].min()) >= 0
                assert float(shrunk.sum()) <= mass * max(float(p.sum()) for p, _ in held) + 1e-12
        assert lacking


def test_the_unweighted_mean_counts_every_client_alike() -> None:
    local = FewRoundLearner(FLAT, "proto", prototypes="unweighted")
    own = Prototypes(torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.tensor([True, False]))
    other = Prototypes(torch.tensor([[5.0, 5.0], [2.0, 2.0]]), torch.tensor([True, True]))
    one, n_one = local.summands(own, torch.tensor([9.0, 0.0]))
    two, n_two = local.summands(other, torch.tensor([1.0, 4.0]))
    told, _ = local.global_prototypes(one + two, n_one + n_two)
    assert told.means.tolist() == [[3.0, 4.0], [2.0, 2.0]]
    assert told.held.tolist() == [True, True]


@pytest.mark.parametrize("variant", ["proto", "gpal"])
def test_a_client_with_one_class_has_no_local_gradient_and_takes_part(
    variant: Any, tmp_path: Path
) -> None:
    m = method(variant=variant)
    run = Run(m, tmp_path)
    lonely = one_class(run.shares()[0])
    reply = m.update({"theta": run.server.phi}, {}, lonely)
    assert all(not leaf.any() for leaf in tree.leaves(reply.up["theta"]))
    assert reply.weight == len(lonely.support_y)
    assert reply.up["counts"].tolist().count(0.0) == 2
    told = Prototypes(torch.randn(3, 3, generator=Key(0).torch()).double(), torch.ones(3) > 0)
    pulled = m.update({"theta": run.server.phi, "prototypes": told}, {}, lonely)
    moved = any(bool(leaf.any()) for leaf in tree.leaves(pulled.up["theta"]))
    assert moved == (variant == "gpal")
    meta = m.meta_gradient({"theta": run.server.phi, "prototypes": told}, {}, lonely)
    assert any(bool(leaf.any()) for leaf in tree.leaves(meta.up["gradient"]))


def one_class(share: EpisodeShare) -> EpisodeShare:
    y = torch.zeros_like(share.support_y)
    return share._replace(support_y=y, query_y=torch.zeros_like(share.query_y))


def test_no_rounds_are_a_prototypical_network_on_the_pooled_supports(tmp_path: Path) -> None:
    m = small(method(variant="proto", inner_rounds=2, test_rounds=0))
    episodic_test, run = group_exam(FLAT), Run(m, tmp_path)
    answers = m.evaluate(run.server, run.clients, episodic_test.eval_episodes, Key(5))
    for u, answer in enumerate(answers):
        whole = episodic_test.eval_episodes[u]._replace(held=())
        want = Proto(FLAT).answer(run.server.phi, {}, whole)
        torch.testing.assert_close(answer.logits, want.float())


def test_a_full_batch_step_of_a_head_is_the_step_on_the_pooled_supports(tmp_path: Path) -> None:
    m = small(method(variant="linear", inner_rounds=1))
    run = Run(m, tmp_path)
    apart = run.shares()
    whole = apart[0]._replace(
        support_x=torch.cat([s.support_x for s in apart]),
        support_y=torch.cat([s.support_y for s in apart]),
    )
    there = m.learn(Group.of_shares(apart), run.server.phi, 3, 1, run.key).theta
    alone = m.learn(Group.of_shares([whole]), run.server.phi, 3, 1, run.key).theta
    close(there, flat(alone), 1e-9)


# ------------------------------------------------------------------------- losses
def features(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.randn(8, 4, 6, generator=Key(seed).torch(), dtype=torch.float64)
    return g, torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])


def told() -> Prototypes:
    rows = torch.randn(3, 4, generator=Key(9).torch(), dtype=torch.float64)
    return Prototypes(rows, torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize("loss", ["softmax", "literal"])
def test_losses_are_the_sums_of_the_paper(loss: Any) -> None:
    g, y = features()
    p = dict(enumerate(told().means))
    local = FewRoundLearner(FLAT, "gpal", loss=loss)
    torch.testing.assert_close(
        g.shape[-1] * local.aux_loss(g, y, told()), l_aux(g, y, p, literal=loss == "literal")
    )
    f = g.mean(-1)
    own, _ = local.prototypes_of(f, y, 3)
    want = l_local(f, y, means(f, y), literal=loss == "literal")
    torch.testing.assert_close(local.local_loss(f, y, own), want)


def test_gpal_over_positions_is_a_mean_or_of_the_pool() -> None:
    g, y = features()
    p = dict(enumerate(told().means))
    pooled = FewRoundLearner(FLAT, "gpal", positions="pooled").aux_loss(g, y, told())
    torch.testing.assert_close(pooled, l_local(g.mean(-1), y, p))
    assert method(mode="official").local.positions == "pooled"
    flat_map = g[:, :, :1]
    one = FewRoundLearner(FLAT, "gpal", positions="mean").aux_loss(flat_map, y, told())
    torch.testing.assert_close(one, l_local(flat_map[:, :, 0], y, p))


def test_the_literal_loss_has_no_bound() -> None:
    """Classes further apart lower it without end, and a lonely class has no logarithm."""
    values = []
    for far in (1.0, 10.0, 100.0):
        f = torch.tensor([[far], [far], [-far], [-far]], dtype=torch.float64)
        y = torch.tensor([0, 0, 1, 1])
        local = FewRoundLearner(FLAT, "proto", loss="literal")
        values.append(float(local.local_loss(f, y, local.prototypes_of(f, y, 2)[0])))
    assert values == pytest.approx([-4.0, -400.0, -40000.0])
    f, y = torch.randn(4, 3, generator=Key(0).torch()).double(), torch.zeros(4, dtype=torch.int64)
    local = FewRoundLearner(FLAT, "proto", loss="literal")
    alone = local.local_loss(f, y, local.prototypes_of(f, y, 2)[0])
    torch.testing.assert_close(alone, (f - f.mean(0)).square().sum(-1).mean())


def test_a_class_whose_clients_were_lost_does_not_count() -> None:
    g, y = features()
    lost = told()._replace(held=torch.tensor([True, True, False]))
    local = FewRoundLearner(FLAT, "gpal")
    p = {c: lost.means[c] for c in (0, 1)}
    torch.testing.assert_close(6 * local.aux_loss(g, y, lost), l_aux(g[:6], y[:6], p))


def test_minibatches_cover_the_supports_and_none_is_tiny() -> None:
    for n, size in ((30, 60), (30, 7), (31, 10), (5, 2), (3, 1)):
        cut = pieces(n, size)
        rows = [i for piece in cut for i in range(piece.start, piece.stop)]
        assert rows == list(range(n))
        assert min(p.stop - p.start for p in cut) >= min(n, max(1, size // 2))


# ------------------------------------------------------------------------- the server's step
def test_the_step_is_slower_after_so_many_communication_rounds(tmp_path: Path) -> None:
    m = small(method(inner_rounds=3, optimizer=Optimizer("adam", 0.01), decay_round=8))
    run = Run(m, tmp_path)
    g = direction(run.server.phi, 1)
    quick, _ = m.optimizer.update(g, run.server.outer, run.server.phi)
    for exchanges, factor in ((0, 1.0), (7, 1.0), (8, 0.1), (100, 0.1)):
        server = run.server._replace(exchanges=torch.tensor(exchanges))
        phi = m.step(server, g, {}, 0).phi
        want = tree.map(lambda w, q, f=factor: w + f * (q - w), server.phi, quick)
        close(phi, flat(want), 1e-9)
    late = run.server._replace(exchanges=torch.tensor(10**6))
    close(replace(m, decay_round=0).step(late, g, {}, 0).phi, flat(quick), 1e-12)
    assert int(run.play().exchanges) == 4


@pytest.mark.parametrize(
    "options",
    [
        *slow({"variant": "linear"}, {"variant": "proto", "refresh": False}),
        {"variant": "gpal", "refresh": True, "gamma": 0.7},
        {"variant": "gpal", "refresh": False, "local_steps": 2, "prototypes": "shrunk"},
    ],
    ids=lambda o: "-".join(map(str, o.values())),
)
def test_the_exact_gradient_through_the_rounds_is_that_of_differences(
    options: dict[str, Any], tmp_path: Path
) -> None:
    m = small(method(**{"inner_lr": 0.1, **options, "order": "exact"}), optimizer=unit_step())
    run, other = Run(m, tmp_path), Run(replace(m, order="first"), tmp_path / "first")
    # Beside the start, where biases are zero and dead units sit on a kink.
    run.server = other.server = run.server._replace(phi=beside(run.server.phi, 0.05))
    group = Group.of_shares(run.shares())

    def loss(phi: Any) -> Tensor:
        learnt = m.learn(group, phi, 3, m.inner_rounds, run.key)
        points = {"theta": learnt.theta}
        if learnt.prototypes is not None:
            points |= {"means": learnt.prototypes.means}
        n = [len(s.support_y) + len(s.query_y) for s in run.shares()]
        each = [m.query_loss(points, learnt.prototypes, {}, s)[0] for s in run.shares()]
        return sum(w * value for w, value in zip(n, each, strict=True)) / sum(n)  # type: ignore[return-value]

    exact = tree.sub(run.server.phi, run.play().phi)
    first = tree.sub(run.server.phi, other.play().phi)
    for seed in (2, 3):
        along = direction(run.server.phi, seed)
        want = slope(loss, run.server.phi, along, h=1e-5)
        torch.testing.assert_close(dot(exact, along), want, rtol=1e-5, atol=1e-6)
        assert abs(float(dot(first, along) - want)) > 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"variant": "linear"},
        {"variant": "gpal", "refresh": True, "gamma": 0.7},
        {"variant": "proto", "refresh": False, "local_steps": 2, "uploaded": "after"},
    ],
    ids=lambda o: "-".join(map(str, o.values())),
)
def test_the_way_back_has_the_dropout_masks_of_the_way_there(
    options: dict[str, Any], tmp_path: Path
) -> None:
    noisy = replace(FLAT, backbone=MLP((6, 5), dropout=0.3))
    m = method(noisy, **{"inner_lr": 0.1, **options, "order": "exact"}, optimizer=unit_step())
    run = Run(m, tmp_path)
    run.server = run.server._replace(phi=beside(run.server.phi, 0.05))
    data = [run.host.data(k) for k in range(K)]
    last = run.key.at("step", m.inner_rounds + 1, "work", "meta_gradient", "client")
    shares = [m.draw(data[k], last.at(k)) for k in range(K)]
    n = [len(s.support_y) + len(s.query_y) for s in shares]

    def loss(phi: Any) -> Tensor:
        learnt = m.learn(Group.of_data(data), phi, 3, m.inner_rounds, run.key)
        points = {"theta": learnt.theta}
        points |= {} if learnt.prototypes is None else {"means": learnt.prototypes.means}
        each = [m.query_loss(points, learnt.prototypes, {}, s)[0] for s in shares]
        return sum(w * value for w, value in zip(n, each, strict=True)) / sum(n)  # type: ignore[return-value]

    found = tree.sub(run.server.phi, run.play().phi)
    for seed in (2, 3):
        along = direction(run.server.phi, seed)
        want = slope(loss, run.server.phi, along, h=1e-5)
        torch.testing.assert_close(dot(found, along), want, rtol=1e-5, atol=1e-6)


def unit_step() -> Optimizer:
    return Optimizer("sgd", 1.0)


# ------------------------------------------------------------------------- who has what
def test_the_server_with_proxy_data_gets_the_bits_that_clients_give(tmp_path: Path) -> None:
    m = FRL(
        replace(CONV, dtype="float32"), SPEC, tuple(range(CLASSES)), resampled=True, inner_rounds=2
    )
    run = Run(m, tmp_path, workers=2)
    proxies = Group.of_data([run.host.data(k) for k in range(K)])
    alone, metrics = m.round(run.server, proxies, run.key)
    assert tree.digest(run.play()) == tree.digest(alone)
    assert run.metrics == metrics


def test_an_episode_has_one_deal_in_all_its_exchanges(tmp_path: Path) -> None:
    run = Run(method(), tmp_path)
    shares = run.shares()
    for k in range(K):
        at = run.key.at("step", 3, "work", "meta_gradient", "client", k)
        again = run.m.draw(run.host.data(k), at)
        assert tree.digest(again._replace(seed=())) == tree.digest(shares[k]._replace(seed=()))
        assert not torch.equal(again.seed, shares[k].seed)
    other = Key(3).at("round", ROUND_AFTER).at("step", 0, "work", "update", "client", 0)
    fresh = run.m.draw(run.host.data(0), other)
    assert tree.digest(fresh._replace(seed=())) != tree.digest(shares[0]._replace(seed=()))


@pytest.mark.parametrize(
    ("variant", "prototypes"), [("proto", "global"), ("proto", "local"), ("linear", "local")]
)
def test_an_exchange_reads_the_part_that_it_works_on(
    variant: Any, prototypes: Any, tmp_path: Path
) -> None:
    """Supports where clients learn, queries for the gradient; of the one episode, as ever."""
    m = method(variant=variant, order="exact", query_prototypes=prototypes)
    both = (variant, prototypes) == ("proto", "local")
    run = Run(m, tmp_path)
    whole = run.shares()
    for work in (m.update, m.census, m.meta_gradient, m.pull_update, m.pull_census):
        asked = ClientWork.of(work)
        for k in range(K):
            at = run.key.at("step", 1, "work", asked.name, "client", k)
            drawn = asked.draw(run.host.data(k), at)
            read = {"support": asked.name != "meta_gradient" or both,
                    "query": asked.name == "meta_gradient"}  # fmt: skip
            for part, wanted in read.items():
                x, all_x = (getattr(share, f"{part}_x") for share in (drawn, whole[k]))
                assert torch.equal(x, all_x if wanted else all_x[:0])
                y, all_y = (getattr(share, f"{part}_y") for share in (drawn, whole[k]))
                assert torch.equal(y, all_y), "labels tell how many there are"


ROUND_AFTER = 8


def test_users_keep_their_images_and_label_by_the_base_classes(tmp_path: Path) -> None:
    """The form for real devices: nothing is dealt anew, and every round halves what there is."""
    rows = np.arange(CLASSES * 24).reshape(CLASSES, 2, 12)
    users = Partition.of(
        [np.concatenate([rows[k, 0], rows[(k + 1) % CLASSES, 1]]) for k in range(CLASSES)]
    )
    m = replace(method(variant="proto", inner_rounds=1), resampled=False)
    run = Run(m, tmp_path, partition=users)
    assert m.slots == CLASSES
    for k, share in enumerate(run.shares()):
        assert sorted(set(share.support_y.tolist())) == sorted({k, (k + 1) % CLASSES})
        assert len(share.support_y) == len(share.query_y) == 12
    before = tree.digest(run.server.phi)
    assert tree.digest(run.play().phi) != before
    assert run.metrics["loss"] < 10
    with pytest.raises(ConfigError, match=r"model.head.way is 3, but an episode may have"):
        replace(m, variant="linear")


def test_bytes_are_those_of_the_table(tmp_path: Path) -> None:
    """Per client: theta down and up in each exchange, prototypes down from the second round on."""
    for variant, refresh in (("linear", True), ("proto", True), ("gpal", False)):
        m = method(variant=variant, inner_rounds=3, refresh=refresh)
        run = Run(m, tmp_path / variant)
        run.play()
        theta = tree.nbytes(run.server.phi)
        d, n = 3, 3  # channels and classes
        down, up = 4 * theta, 4 * theta  # R + 1 exchanges
        if variant != "linear":
            prototypes = n * d * 8 + n  # means, and which there are
            down += 3 * prototypes
            up += 3 * (n * d * 8 + n * 8)  # sums and counts
            if refresh:
                down, up = down + theta, up + n * d * 8 + n * 8
        assert run.meter.total("train", "down") == K * down
        assert run.meter.total("train", "up") == K * up


# ------------------------------------------------------------------------- tests of groups
def group_exam(model: Model, way: Any = 3, by: Any = "shards", spare: int = 0) -> EpisodicTest:
    dataset = data_of(model.shape)
    spec, group = EpisodeSpec(way, 6, 6), GroupSampler(K, by, spare=spare)
    return EpisodicTest.draw(dataset, range(CLASSES), spec, 3, Key(4), None, group)


def test_trained_for_some_rounds_and_tested_after_others(tmp_path: Path) -> None:
    m = method(inner_rounds=2)
    run, episodic_test = Run(m, tmp_path), group_exam(CONV)
    by_rounds = {}
    for rounds in (0, 2):
        tested = replace(m, test_rounds=rounds)
        trained = replace(m, inner_rounds=rounds)
        answers = [
            one.evaluate(run.server, run.clients, episodic_test.eval_episodes, Key(5))
            for one in (tested, trained)
        ]
        assert all(torch.equal(a.logits, b.logits) for a, b in zip(*answers, strict=True))
        by_rounds[rounds] = answers[0][0].logits
    assert not torch.equal(by_rounds[2], by_rounds[0])
    default = m.evaluate(run.server, run.clients, episodic_test.eval_episodes, Key(5))
    assert torch.equal(default[0].logits, by_rounds[2])


@pytest.mark.parametrize("variant", VARIANTS)
def test_episodes_may_have_a_random_way(variant: Any, tmp_path: Path) -> None:
    model = replace(FLAT, head=LinearHead(5))
    m = replace(method(model, variant=variant), episode=EpisodeSpec((2, 5), 6, 6))
    run = Run(m, tmp_path)
    ways = set()
    for t in range(6):
        run.key = Key(3).at("round", t)
        run.clients._keys.clear()
        shares = run.shares()
        way = int(shares[0].open.sum())
        ways.add(way)
        assert len(shares[0].open) == 5
        assert {c for s in shares for c in s.support_y.tolist()} == set(range(way))
        run.server = run.play()
    assert len(ways) > 1
    if variant == "linear":  # a class out of use gives its outputs no gradient
        used = shares[0]._replace(open=torch.arange(5) < 2, support_y=shares[0].support_y % 2)
        moved = m.update({"theta": run.server.phi}, {}, used).up["theta"]["head"]
        assert not moved["weight"][2:].any()
        assert moved["weight"][:2].any()
    episodic_test = group_exam(model, (2, 5), "iid")
    for answer in m.evaluate(run.server, run.clients, episodic_test.eval_episodes, Key(5)):
        way = len(episodic_test.eval_episodes[answer.eval_episode].classes)
        assert answer.logits.shape == (6 * way, way)


def test_a_query_is_answered_by_itself_unless_transductive(tmp_path: Path) -> None:
    episodic_test = group_exam(CONV)
    eval_episode = episodic_test.eval_episodes[0]
    assert eval_episode.held
    order = torch.arange(len(eval_episode.query_x))[5:]
    fewer = eval_episode._replace(
        query_x=eval_episode.query_x[order],
        held=eval_episode.held._replace(query=eval_episode.held.query[order]),
    )
    for policy, alike in (("group", True), ("support", True), ("transductive", False)):
        m = method(replace(CONV, norm_policy=policy))
        run = Run(m, tmp_path / policy)
        (whole,) = m.evaluate(run.server, run.clients, [eval_episode], Key(5))
        (part,) = m.evaluate(run.server, run.clients, [fewer], Key(5))
        assert torch.allclose(whole.logits[order], part.logits, atol=1e-6) == alike
        assert m.traits.transductive == (not alike)
    assert FRL.norm_policy({"mode": "official"}) == "transductive"


@pytest.mark.parametrize("variant", ["linear", "proto", "gpal"])
def test_one_model_answers_a_query_whoever_holds_it(variant: Any, tmp_path: Path) -> None:
    """With shards, the batch-norm statistics of a hand tell which classes are in it."""
    eval_episode = group_exam(CONV).eval_episodes[0]
    assert eval_episode.held
    other = eval_episode._replace(
        held=eval_episode.held._replace(query=eval_episode.held.query.flip(0))
    )
    assert not torch.equal(other.held.query, eval_episode.held.query)
    for policy, alike in (("group", True), ("support", False)):
        m = method(replace(CONV, norm_policy=policy), variant=variant)
        run = Run(m, tmp_path / policy)
        both = [m.evaluate(run.server, run.clients, [q], Key(5))[0] for q in (eval_episode, other)]
        assert torch.allclose(both[0].logits, both[1].logits, rtol=0, atol=1e-9) == alike
    assert FRL.norm_policy({"mode": "strict"}) == "group"


def test_a_groups_statistics_are_its_clients_moments_joined(tmp_path: Path) -> None:
    """In the first layer those of all supports together; in the next, of what each one saw."""
    m = method(replace(CONV, norm_policy="group"))
    theta = Run(m, tmp_path).server.phi
    shares = shares_of(group_exam(CONV).eval_episodes[0], 3)
    norms = GroupNorms(m.local, {}, shares)
    found = norms(theta)
    assert norms(theta) is found, "the same model is not asked again"
    conv = theta["body"]["conv1"]
    x = torch.cat([s.support_x for s in shares]).permute(0, 3, 1, 2).double() / 127.5 - 1
    h = torch.nn.functional.conv2d(x, conv["weight"], conv["bias"], padding=1)
    torch.testing.assert_close(found["norm1"]["mean"], h.mean((0, 2, 3)))
    torch.testing.assert_close(found["norm1"]["var"], h.var((0, 2, 3), unbiased=False))
    own = [m.local.maps(theta, {}, s.support_x, Mode(norm="capture"))[1] for s in shares]
    n = torch.tensor([len(s.support_y) for s in shares], dtype=torch.float64)[:, None] / len(x)
    mean, var = (torch.stack([one["norm2"][part] for one in own]) for part in ("mean", "var"))
    want = (n * (var + mean**2)).sum(0) - (n * mean).sum(0) ** 2
    torch.testing.assert_close(found["norm2"]["var"], want)
    alone = GroupNorms(m.local, {}, shares[:1])(theta)
    torch.testing.assert_close(alone, own[0])
    for policy, stats in (("support", {}), ("transductive", {}), ("running", own[0])):
        local = replace(m.local, model=replace(CONV, norm_policy=policy))
        assert GroupNorms(local, stats, shares)(theta) == (stats or None)


def test_running_statistics_are_those_of_the_queries_and_serve_at_test(tmp_path: Path) -> None:
    """Then, without rounds, it does not matter who holds what."""
    m = method(replace(CONV, norm_policy="running"), variant="proto", inner_rounds=0)
    run = Run(m, tmp_path)
    conv = run.server.phi["body"]["conv1"]
    n = [len(s.support_y) + len(s.query_y) for s in run.shares()]
    seen = []
    for share in run.shares():
        x = share.query_x.permute(0, 3, 1, 2).double() / 127.5 - 1
        h = torch.nn.functional.conv2d(x, conv["weight"], conv["bias"], padding=1)
        seen.append(h.mean((0, 2, 3)))
    want = sum(part * mean for part, mean in zip(n, seen, strict=True)) / sum(n)
    after = run.play()
    torch.testing.assert_close(after.stats["norm1"]["mean"], 0.1 * want)
    eval_episode = group_exam(CONV).eval_episodes[0]
    answers = m.evaluate(after, run.clients, [eval_episode, eval_episode._replace(held=())], Key(5))
    torch.testing.assert_close(answers[0].logits, answers[1].logits, rtol=1e-5, atol=1e-6)


def test_a_group_that_diverges_answers_with_nan(tmp_path: Path) -> None:
    m = small(method(variant="linear", inner_lr=1e200))
    run, episodic_test = Run(m, tmp_path), group_exam(FLAT)
    answers = m.evaluate(run.server, run.clients, episodic_test.eval_episodes, Key(5))
    assert all(not answer.logits.isfinite().any() for answer in answers)


# ------------------------------------------------------------------------- refusals
def test_a_head_is_asked_for_where_it_is_needed() -> None:
    with pytest.raises(ConfigError, match="the model has no head"):
        method(Model(MLP((4,)), None, (6, 6, 1)), variant="linear")
