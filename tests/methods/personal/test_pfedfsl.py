"""pFedFSL: formula by formula, and a round against one written out plainly."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.fleets.guard import Guard
from fedshot.fleets.unreliable import Unreliable
from fedshot.learners.average_distance import (
    AverageDistance,
    average_distance_logits,
    distances,
    own_logits,
)
from fedshot.learners.classification import Batch
from fedshot.methods.personal.pfedfsl import PFedFSL
from fedshot.methods.personal.sparse import SoftThreshold, pack, packing_flaw, unpack
from fedshot.nn.models.mode import Mode
from fedshot.nn.optim import Optimizer
from fedshot.protocol.clients import Clients
from fedshot.reports.own_features import features_picture, own_features
from methods.classification_oracle import BASE
from methods.personal.oracle import (
    CONV,
    MODEL,
    Group,
    Weights,
    conv_features,
    features,
    gradient,
    options,
    plain,
)
from system.runs import finished, last_hash, stopped

LR, IOTA = 0.05, 0.01


def method(**changes: Any) -> PFedFSL:
    known = {"clients": 4, "m": 2, "delay": 0, "iota": IOTA, "optimizer": Optimizer("sgd", LR)}
    return PFedFSL(**options(**known | changes))


def plain_loss(w: Weights, x: Tensor, y: Tensor, own: str) -> Tensor:
    """Return eq. (5) of the small net."""
    return loss_of(features(w, x), y, own)


def loss_of(h: Tensor, y: Tensor, own: str) -> Tensor:
    """Return eq. (5), one pair of samples after another."""
    total = []
    for j in range(len(h)):
        scores = {}
        for c in sorted(set(y.tolist())):
            members = [i for i in range(len(h)) if y[i] == c]
            if own == "without" and y[j] == c and len(members) > 1:
                members.remove(j)
            away = [0 * h[i].sum() if i == j else root(h[j] - h[i]) for i in members]
            scores[c] = -torch.stack(away).mean()
        log_all = torch.logsumexp(torch.stack(list(scores.values())), 0)
        total.append(log_all - scores[int(y[j])])
    return torch.stack(total).mean()


def stepped(v: Tensor, g: Tensor, one: PFedFSL) -> Tensor:
    """Return a weight one step further: of eq. (7), or of ISTA."""
    if one.l1 == "subgradient":
        return v - LR * (g + one.iota * v.sign())
    to = v - LR * g
    return torch.where(to.abs() > LR * one.iota, to - LR * one.iota * to.sign(), 0.0)


def root(gap: Tensor) -> Tensor:
    return (gap.square().sum() + 1e-12).sqrt()


def with_biases(group: Group) -> None:
    """Let no weight start at 0, where rounding would decide the sign that the penalty follows."""

    def away(leaf: Tensor) -> Tensor:
        noise = torch.randn(leaf.shape, generator=Key(leaf.numel()).torch(), dtype=leaf.dtype)
        return leaf + 0.3 * noise.sign() + 0.1 * noise

    start = tree.map(away, group.server.start)
    group.server = group.server._replace(start=start)


def models(n: int, seed: int = 0) -> list[Tree]:
    made = [AverageDistance(MODEL, 5).init(Key(seed + i)) for i in range(n)]
    return [{"theta": theta, "stats": stats} for theta, stats in made]


def sample(group: Group, k: int = 1) -> Batch:
    return group.method.draw(group.host.data(k), Key(0)).whole


@pytest.mark.parametrize(
    ("changes", "own", "judged"),
    [
        ({}, "without", "without"),
        ({"mode": "paper", "start": "common"}, "with", "with"),
        # Own models start with biases of 0; rounding would decide the sign that a penalty follows.
        pytest.param({"mode": "paper", "iota": 0.0}, "with", "with", marks=pytest.mark.slow),
        pytest.param({"own_sample": "with"}, "with", "without", marks=pytest.mark.slow),
        pytest.param({"weigh_by": "loss"}, "without", "with", marks=pytest.mark.slow),
        pytest.param({"l1": "proximal"}, "without", "without", marks=pytest.mark.slow),
    ],
)
def test_two_rounds_are_those_written_out(
    changes: dict[str, Any], own: str, judged: str, tmp_path: Path
) -> None:
    one = method(local_steps=3, **changes)
    group = Group(one, tmp_path)
    with_biases(group)
    held = [plain(group.server.start["theta"]) for _ in group.ids]
    if one.starting == "own":
        root_key = Key(int(group.server.seed))
        held = [plain(one.learner.init(root_key.at("client", i))[0]) for i in group.ids]
        assert not torch.equal(held[0]["body/linear1/weight"], held[1]["body/linear1/weight"])
    q = np.zeros((4, 4))
    np.fill_diagonal(q, -np.inf)
    for t in (1, 2):
        before = group.server
        key = Key(9).at("round", t)
        sent = {i: group.method.neighbours(before, group.ids, i, key) for i in group.ids}
        group.round()
        trained = []
        for i in group.ids:
            x, y = group.examples(i)
            received = [held[j] for j in (*sent[i], i)]
            losses = [float(plain_loss(w, x, y, judged)) for w in received]
            raw = np.exp(-np.array(losses))
            weights = raw / raw.sum()
            w = {
                n: sum(float(a) * one[n] for a, one in zip(weights, received, strict=True))
                for n in held[0]
            }
            for _ in range(3):
                g = gradient(lambda w, x=x, y=y: plain_loss(w, x, y, own), w)
                w = {n: stepped(v, g[n], one) for n, v in w.items()}
            trained.append(w)
            q[i, sent[i]] += weights[:-1] - weights[-1]
            for n, value in group.banked(i).items():
                torch.testing.assert_close(value, w[n], rtol=1e-7, atol=1e-8)
        held = trained
        np.testing.assert_allclose(group.server.q.numpy(), q, rtol=1e-7, atol=1e-9)
    assert np.abs(q[np.isfinite(q)]).max() > 1e-3  # the second round's models differ


def test_weights_sum_to_one_and_go_with_their_models(tmp_path: Path) -> None:
    group = Group(method(), tmp_path)
    whole, three = sample(group), models(3)
    weights, mixed = group.method.fuse(three, whole)
    assert float(weights.sum()) == pytest.approx(1, abs=1e-12)
    assert len(set(weights.tolist())) == 3
    for order in permutations(range(3)):
        again, same = group.method.fuse([three[i] for i in order], whole)
        torch.testing.assert_close(again, weights[list(order)], rtol=1e-12, atol=0)
        for leaf, other in zip(tree.leaves(same), tree.leaves(mixed), strict=True):
            torch.testing.assert_close(leaf, other, rtol=1e-12, atol=1e-14)


def test_a_high_temperature_makes_the_weights_alike_and_a_low_one_picks(tmp_path: Path) -> None:
    group = Group(method(), tmp_path)
    whole, three = sample(group), models(3)
    hot, cold = (replace(group.method, temperature=t).fuse(three, whole)[0] for t in (1e9, 1e-6))
    torch.testing.assert_close(hot, torch.full((3,), 1 / 3, dtype=torch.float64))
    assert sorted(cold.tolist()) == pytest.approx([0, 0, 1])


def test_identical_models_weigh_alike_and_leave_the_affinities(tmp_path: Path) -> None:
    group = Group(method(), tmp_path)
    (one,) = models(1)
    weights, mixed = group.method.fuse([one, one, one], sample(group))
    assert weights.tolist() == [weights[0]] * 3
    assert group.method.gain(weights).tolist() == [0, 0]
    for leaf, first in zip(tree.leaves(mixed), tree.leaves(one), strict=True):
        torch.testing.assert_close(leaf, first, rtol=1e-14, atol=1e-16)
    before = group.server.q
    assert torch.equal(group.round().q, before)  # in round 1 all models are the first


def test_the_diagonal_stays_minus_infinity_and_the_delay_is_kept(tmp_path: Path) -> None:
    group = Group(method(delay=2), tmp_path)
    off = ~torch.eye(4, dtype=torch.bool)
    for t in range(1, 5):
        q = group.round().q
        assert bool((q.diagonal() == -torch.inf).all())
        assert bool(q[off].isfinite().all())
        assert bool((q[off] != 0).any()) == (t > 2)


def test_before_the_delay_is_over_neighbours_are_uniform() -> None:
    many = method(clients=7, m=3)
    server = many.init(Key(0))
    seen: Counter[int] = Counter()
    places = np.zeros((3, 7))
    draws = 3000
    for draw in range(draws):
        chosen = many.neighbours(server, range(7), 2, Key(draw))
        assert len(set(chosen)) == 3
        assert 2 not in chosen
        seen.update(chosen)
        for place, j in enumerate(chosen):
            places[place, j] += 1
    expected = draws * 3 / 6
    chi2 = sum((seen[j] - expected) ** 2 / expected for j in range(7) if j != 2)
    assert chi2 < 25  # 5 degrees of freedom; without replacement it spreads less than chi-squared
    spread = (places[:, [0, 1, 3, 4, 5, 6]] - draws / 6) ** 2 / (draws / 6)
    assert spread.sum() < 50  # the order is one of chance, too


def test_the_highest_affinities_are_chosen_and_random_choice_ignores_them() -> None:
    few = method(clients=5, m=2)
    server = few.init(Key(0))
    q = server.q.clone()
    q[0] = torch.tensor([-torch.inf, 0.3, -0.2, 0.0, 0.5], dtype=torch.float64)
    server = server._replace(q=q)
    chosen = [few.neighbours(server, range(5), 0, Key(s)) for s in range(40)]
    assert {frozenset(c) for c in chosen} == {frozenset({1, 4})}
    assert {tuple(c) for c in chosen} == {(1, 4), (4, 1)}  # in no order that tells who is who
    third = [replace(few, m=3).neighbours(server, range(5), 0, Key(s)) for s in range(5)]
    assert {frozenset(c) for c in third} == {frozenset({1, 3, 4})}  # untried before bad
    anybody = [
        replace(few, choose="random").neighbours(server, range(5), 0, Key(s)) for s in range(80)
    ]
    assert {j for c in anybody for j in c} == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("difference", [0.2, -0.1]),
        ("positive", [0.2, 0.0]),
    ],
)
def test_what_is_added_to_the_affinities(rule: Any, expected: list[float]) -> None:
    weights = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    assert method(affinity=rule).gain(weights).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("own", ["with", "without"])
def test_coinciding_features_give_no_nan(own: Any) -> None:
    h = torch.ones(6, 3, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 0, 1, 1, 2, 2])
    loss = -own_logits(h, y, 4, own).log_softmax(-1).gather(1, y[:, None]).mean()
    (grad,) = torch.autograd.grad(loss, h)
    assert float(loss.detach()) == pytest.approx(np.log(3), abs=1e-5)  # nobody holds class 3
    assert bool(grad.isfinite().all())
    assert float(grad.abs().max()) < 1e-3


def test_distances_are_those_of_cdist_far_from_the_origin() -> None:
    a = torch.randn(5, 4, generator=Key(0).torch(), dtype=torch.float64)
    b = torch.randn(7, 4, generator=Key(1).torch(), dtype=torch.float64)
    for shift in (0.0, 1e3):
        torch.testing.assert_close(
            distances(a + shift, b + shift), torch.cdist(a, b), rtol=1e-8, atol=1e-8
        )
    y = torch.tensor([0, 0, 1, 1, 1, 2, 2])
    want = torch.stack([-torch.cdist(a, b[y == c]).mean(1) for c in range(3)], 1)
    torch.testing.assert_close(average_distance_logits(a, b, y, 3), want, rtol=1e-8, atol=1e-8)


def test_a_sample_alone_in_its_class_is_included_or_dropped() -> None:
    h = torch.randn(4, 3, generator=Key(3).torch(), dtype=torch.float64)
    y = torch.tensor([0, 0, 1, 1])
    alone = torch.tensor([0, 0, 0, 1])
    keep, drop = (AverageDistance(MODEL, 3, "without", word) for word in ("include", "drop"))
    assert torch.equal(keep._loss(h, y)[0], drop._loss(h, y)[0])
    each = -own_logits(h, alone, 3, "without").log_softmax(-1).gather(1, alone[:, None])[:, 0]
    assert float(keep._loss(h, alone)[0]) == pytest.approx(float(each.mean()))
    assert float(drop._loss(h, alone)[0]) == pytest.approx(float(each[:3].mean()))


def test_samples_that_are_all_alone_teach_and_weigh_only_where_they_are_included(
    tmp_path: Path,
) -> None:
    held = (((0, 1), 1), ((0, 1, 2), 1), ((3, 4), 1), ((2, 3, 4), 1))
    for word in ("include", "drop"):
        group = Group(method(alone=word, iota=0.0), tmp_path / word, held)
        first = plain(group.server.start["theta"])
        seen = group.method.weighting_learner.loss(group.server.start["theta"], {}, sample(group))
        group.round()
        assert (float(seen) > 0) == (word == "include")
        gaps = [float((group.banked(1)[n] - w).abs().max()) for n, w in first.items()]
        still = max(gaps) < 1e-12
        assert still == (word == "drop")


def test_soft_thresholding_is_the_minimum_of_its_proximal_problem() -> None:
    w = {"body": {"linear": {"weight": torch.tensor([0.3, -0.02, 0.0, -0.5], dtype=torch.float64)},
                  "norm1": {"weight": torch.tensor([0.001], dtype=torch.float64)}}}  # fmt: skip
    zero = tree.zeros_like(w)
    opt = SoftThreshold(Optimizer("sgd", 0.1), 0.5)
    found, _ = opt.update(zero, opt.init(w), w)
    start, end = w["body"]["linear"]["weight"], found["body"]["linear"]["weight"]
    assert end.tolist() == pytest.approx([0.25, 0.0, 0.0, -0.45])
    assert end[1] == 0
    assert found["body"]["norm1"]["weight"].tolist() == [0.001]  # batch norm is left alone
    grid = torch.linspace(-1, 1, 20001, dtype=torch.float64)
    for a, b in zip(start, end, strict=True):
        value = (grid - a).square() / 2 + 0.05 * grid.abs()
        assert float(grid[value.argmin()]) == pytest.approx(float(b), abs=1e-4)
    every, _ = replace(opt, norms=True).update(zero, opt.init(w), w)
    assert every["body"]["norm1"]["weight"].tolist() == [0.0]


@pytest.mark.parametrize(("steps", "zeros"), [(2500, 0.30), (417, 0.05)])
def test_the_penalty_alone_zeroes_as_many_weights_as_there_are_steps(
    steps: int, zeros: float
) -> None:
    """Weights uniform in +-1/24, as in torch's 64 filters of 64 channels; the paper's iota.

    500 rounds have 2,500 steps of a client, and 417 where 5 of 30 clients take part.
    """
    w = {"weight": torch.linspace(-1 / 24, 1 / 24, 10_001, dtype=torch.float64)}
    opt, still = SoftThreshold(Optimizer("sgd", 0.01), 5e-4), tree.zeros_like(w)
    state = opt.init(w)
    for _ in range(steps):
        w, state = opt.update(still, state, w)
    assert float((w["weight"] == 0).double().mean()) == pytest.approx(zeros, abs=1e-3)


def test_the_penalty_is_on_batch_norm_only_where_it_is_asked_for(tmp_path: Path) -> None:
    group = Group(method(model=CONV), tmp_path)
    batch, seed = sample(group), Key(0).tensor()
    theta, stats = group.server.start["theta"], group.server.start["stats"]
    bare = replace(group.method, iota=0.0).objective(theta, stats, batch, seed).loss
    every = dict(tree.items(theta))
    norms = sum(float(w.abs().sum()) for path, w in every.items() if "/norm" in path)
    rest = sum(float(w.abs().sum()) for path, w in every.items() if "/norm" not in path)
    assert norms == 4 * 6  # four norms of six channels, weights of 1 and biases of 0
    for asked, total in ((False, rest), (True, rest + norms)):
        gradients = replace(group.method, penalise_norms=asked).objective(theta, stats, batch, seed)
        assert float(gradients.loss - bare) == pytest.approx(IOTA * total, rel=1e-9)
        assert float(gradients.extra["penalty"]) == pytest.approx(IOTA * total, rel=1e-9)
        steps = replace(group.method, l1="proximal", penalise_norms=asked).steps
        found, _ = steps.update(tree.zeros_like(theta), steps.init(theta), theta)
        least = LR * IOTA if asked else 0.0
        for path, w in tree.items(found):
            if "/norm" in path and path.endswith("weight"):
                assert w.tolist() == pytest.approx([1 - least] * 6, rel=1e-12)


def test_a_packed_tree_is_the_tree_in_fewer_bytes() -> None:
    whole = {"a": torch.tensor([[0.0, 1.5], [-0.0, 2.0]]), "b": torch.zeros(13)}
    packed = pack(whole)
    assert tree.nbytes(packed) == 3 + 2 * 4  # 17 bits, two numbers
    for leaf, other in zip(tree.leaves(unpack(packed, whole)), tree.leaves(whole), strict=True):
        assert torch.equal(leaf, other)
    assert packing_flaw(packed, whole) is None
    assert "there are 1 values" in str(
        packing_flaw(packed._replace(values=packed.values[:1]), whole)
    )
    assert "expected" in str(packing_flaw(packed._replace(mask=packed.mask[:2]), whole))
    assert "expected" in str(packing_flaw(whole, whole))
    nothing = tree.zeros_like(whole)
    assert tree.nbytes(pack(nothing)) == 3
    assert bool((unpack(pack(nothing), whole)["b"] == 0).all())


def test_the_ledger_shows_m_models_down_and_what_zeros_save(tmp_path: Path) -> None:
    one = method(m=3)
    start = one.init(Key(9)).start
    size, clients = tree.nbytes(start), 4
    group = Group(one, tmp_path / "dense")
    for _ in range(2):
        group.round()
    lines = {line: n // 2 for line, n in group.meter.bytes.items()}
    assert lines["train", "train", "down", "models"] == 3 * size * clients
    assert lines["train", "train", "down", "own"] == size * clients
    assert lines["train", "train", "up", "model"] == size * clients
    assert lines["train", "train", "up", "weights"] == 4 * 8 * clients

    sparse = Group(replace(one, l1="proximal", iota=0.3), tmp_path / "sparse")
    sparse.round()
    sent = sparse.meter.bytes["train", "train", "up", "model"]
    numbers = size // 8
    zeros = [sum(int((w == 0).sum()) for w in sparse.banked(k).values()) for k in range(clients)]
    assert min(zeros) > numbers / 10
    assert sent == sum(-(-numbers // 8) + 8 * (numbers - n) for n in zeros)
    assert sent < 0.9 * size * clients
    before = sparse.meter.bytes["train", "train", "down", "models"]
    sparse.round()
    assert sparse.meter.bytes["train", "train", "down", "models"] - before < 3 * sent * 1.01
    assert all(a.logits.isfinite().all() for a in sparse.answers())


def test_without_federation_every_client_trains_alone(tmp_path: Path) -> None:
    """-nF: no models come down, and one client's training does not depend on the others."""
    four = Group(method(m=0), tmp_path / "four")
    with_biases(four)
    for _ in range(2):
        four.round()
    assert ("train", "train", "down", "models") not in {
        line for line, n in four.meter.bytes.items() if n
    }
    w = plain(four.server.start["theta"])
    x, y = four.examples(2)
    for _ in range(2 * four.method.local_steps):
        g = gradient(lambda w: plain_loss(w, x, y, "without"), w)
        w = {n: v - LR * (g[n] + IOTA * v.sign()) for n, v in w.items()}
    for n, value in four.banked(2).items():
        torch.testing.assert_close(value, w[n], rtol=1e-7, atol=1e-8)


def test_models_lie_on_the_disk_and_only_affinities_at_the_server(tmp_path: Path) -> None:
    group = Group(method(), tmp_path)
    size = tree.nbytes(group.round())
    assert size == tree.nbytes(group.server.start) + 16 * 8 + 2 * 8
    assert len(list((tmp_path / "bank").glob("*/*.safetensors"))) == 4
    part = group.spy.exchanges[-1].reduce["model"]
    held = part.start(4)
    held.add(0, group.spy.seen[0].up["model"], 1.0)
    assert held.result() == {0: {}}  # gathered, and put away


def test_an_answer_is_the_average_distance_to_ones_own_samples(tmp_path: Path) -> None:
    group = Group(method(), tmp_path)
    group.round()
    answers = group.answers()
    assert [(a.eval_episode, a.client) for a in answers] == [(k, k) for k in group.ids]
    for answer in answers:
        q, w = (
            group.episodic_test.eval_episodes[answer.eval_episode],
            group.banked(answer.eval_episode),
        )
        x, y = group.examples(answer.eval_episode)
        own = features(w, x)
        asked = features(w, q.query_x.permute(0, 3, 1, 2).double().flatten(1) / 127.5 - 1)
        places = [BASE.index(int(c)) for c in q.classes]
        want = torch.stack([-torch.cdist(asked, own[y == p]).mean(1) for p in places], 1)
        torch.testing.assert_close(answer.logits.double(), want, rtol=1e-5, atol=1e-6)


def test_running_statistics_are_mixed_with_the_weights_of_their_models(tmp_path: Path) -> None:
    running = replace(CONV, norm_policy="running")
    group = Group(method(model=running, local_steps=1, iota=0.0), tmp_path)
    made = [AverageDistance(running, 5).init(Key(i)) for i in range(3)]
    held = [
        {"theta": theta, "stats": tree.map(lambda v, i=i: v + 0.3 * i, stats)}
        for i, (theta, stats) in enumerate(made)
    ]
    drawn = group.method.draw(group.host.data(0), Key(0))
    up = group.method.train({"models": held[:2], "own": held[2]}, {}, drawn).up
    weights = up["weights"].tolist()
    assert min(weights) > 0.01
    mixed = {
        part: tree.map(lambda *v: sum(a * b for a, b in zip(weights, v, strict=True)),
                       *(one[part] for one in held))
        for part in ("theta", "stats")
    }  # fmt: skip
    x, mode = drawn.batches.steps[0][0].x, Mode(True, "batch")
    zeros, ones = (tree.map(lambda v, a=a: 0 * v + a, mixed["stats"]) for a in (0.0, 1.0))
    low, high = (running.features(mixed["theta"], at, x, mode)[1] for at in (zeros, ones))
    kept = plain(tree.map(lambda a, b: b - a, low, high))  # the share of the old statistics
    for n, value in plain(up["model"]["stats"]).items():
        want = plain(low)[n] + kept[n] * plain(mixed["stats"])[n]
        torch.testing.assert_close(value, want, rtol=1e-9, atol=1e-12)


def test_batch_norm_weighs_and_answers_by_the_statistics_of_ones_own_samples(
    tmp_path: Path,
) -> None:
    group = Group(method(model=CONV), tmp_path)
    group.round()
    for answer in group.answers():
        k = answer.eval_episode
        x, y = group.host.data(k).all()
        y = torch.tensor([BASE.index(int(c)) for c in y])
        q, w = group.episodic_test.eval_episodes[k], group.banked(k)
        own, asked = (conv_features(w, x, images) for images in (x, q.query_x))
        places = [BASE.index(int(c)) for c in q.classes]
        want = torch.stack([-torch.cdist(asked, own[y == p]).mean(1) for p in places], 1)
        torch.testing.assert_close(answer.logits.double(), want, rtol=1e-5, atol=1e-6)
        clients = Clients(group.spy, group.ids, round=group.t, phase="evaluate")
        theta = group.method.stored_model(group.server, clients, k)["theta"]
        judged = group.method.weighting_learner.loss(theta, {}, sample(group, k))
        assert float(judged) == pytest.approx(float(loss_of(own, y, "without")), rel=1e-8)


def test_own_first_models_differ_and_common_ones_do_not() -> None:
    for start, n in (("own", 4), ("common", 1)):
        one = method(start=start)
        server = one.init(Key(0))
        clients: Any = SimpleNamespace(recall=lambda i, first: (i, first)[1])
        digests = {tree.digest(one.stored_model(server, clients, i)) for i in range(4)}
        assert len(digests) == n


def test_a_cohort_changes_its_own_rows_alone(tmp_path: Path) -> None:
    group = Group(method(), tmp_path)
    group.round()
    before = group.server.q
    after = group.round(cohort=2).q
    cohort = set(group.spy.exchanges[-1].to)
    moved = {i for i in range(4) if not torch.equal(before[i], after[i])}
    assert moved == cohort
    assert len(cohort) == 2


OWN: dict[str, Any] = {
    "split": {"base": ["0-9"]},
    "partition": {"name": "pathological", "clients": 6, "way": 3, "shot": 4},
    "episode": {"way": 2, "shot": 1, "query": 1, "queries": "up_to"},
    "method": {"name": "pfedfsl", "m": 2, "delay": 1, "local_steps": 2},
    "run": {"rounds": 4, "cohort": 4, "choose": "last"},
}


def test_a_run_that_was_stopped_ends_in_the_same_bits(tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole", OWN)
    expected = whole.result()
    stopped(tmp_path / "half", 2, OWN)
    again = finished(tmp_path / "half", OWN)
    assert last_hash(tmp_path / "half") == last_hash(tmp_path / "whole")
    assert again.result().to_json() == expected.to_json()
    assert expected.episodes == 6
    assert len(expected.clients) == 6


@pytest.mark.slow
def test_the_features_of_a_client_are_those_of_its_training_and_test_images(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", OWN)
    client, data = run.prepared.clients[2], run.prepared.dataset
    assert run.prepared.client_split.test is not None
    train, test = run.prepared.client_split.train[client], run.prepared.client_split.test[client]
    new, pixels = own_features(run, client), own_features(run, client, original=True)
    assert new.points.shape == (len(train) + len(test), 16)
    for space in (new, pixels):
        assert space.tested.tolist() == [False] * len(train) + [True] * len(test)
        for rows, part in ((train, ~space.tested), (test, space.tested)):
            told = [name for name, there in zip(space.names, part, strict=True) if there]
            assert sorted(told) == sorted(data.class_names[c] for c in data.y[rows])
    for rows, part in ((train, ~pixels.tested), (test, pixels.tested)):
        seen = pixels.points[part] * 255
        assert sorted(seen.tolist()) == sorted(data.x[rows].reshape(len(rows), -1).tolist())
    spaces = {"original": pixels, "new": new}
    picture, again = (features_picture(spaces) for _ in range(2))
    assert picture == again
    assert all(f">{title}<" in picture for title in spaces)
    with pytest.raises(ConfigError, match="client 99 is not tested"):
        own_features(run, 99)


@pytest.mark.parametrize("trouble", ["nan", "shape", "overflow", "missing"])
def test_a_packed_upload_that_is_none_is_refused(trouble: Any, tmp_path: Path) -> None:
    group = Group(method(l1="proximal", iota=0.3), tmp_path)
    bad = Unreliable(group.meter, lambda _, c: trouble if c == 1 else None)
    clients = Clients(Guard(bad), group.ids, round=1)
    group.method.round(group.server, clients, Key(0))
    assert [(c, fault.kind) for c, fault in clients.faults] == [(1, "refused")]
    held = [group.meter.bank.load(c, (9, 0)) is not None for c in group.ids]
    assert held == [True, False, True, True]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"m": 4}, "m is 4; expected 0 to 3, the number of other clients"),
        ({"l1": "proximal", "optimizer": Optimizer("adam")}, "Set it to 'sgd'"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        method(**changes)
