"""FedAvg, FedProx, Ditto, FedRep, Per-FedAvg and pFedMe: written out plainly, and in limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.methods.base.fedbabu import FedBABU
from fedshot.methods.personal.ditto import Ditto
from fedshot.methods.personal.fedavg import FedAvg
from fedshot.methods.personal.fedprox import FedProx
from fedshot.methods.personal.fedrep import FedRep
from fedshot.methods.personal.per_fedavg import PerFedAvg
from fedshot.methods.personal.pfedme import PFedMe
from fedshot.nn.models.mode import Mode
from fedshot.nn.optim import Optimizer
from methods.classification_oracle import BASE
from methods.personal.oracle import (
    CONV,
    Group,
    Weights,
    assert_close,
    conv_features,
    cross_entropy,
    descend,
    gradient,
    half_square,
    logits,
    mean,
    options,
    pixels,
    plain,
)

LR = 0.05
SGD = Optimizer("sgd", LR)


def made(kind: Any, **changes: Any) -> Any:
    return kind(**options(optimizer=SGD, local_steps=3, **changes))


def losses(group: Group) -> list[Any]:
    return [cross_entropy(*group.examples(k)) for k in group.ids]


def sizes(group: Group) -> list[float]:
    return [float(len(group.examples(k)[1])) for k in group.ids]


def test_fedavg_is_descent_at_the_clients_and_their_weighted_mean(tmp_path: Path) -> None:
    group = Group(made(FedAvg), tmp_path)
    w = plain(group.server.theta)
    for _ in range(2):
        group.round()
        w = mean([descend(loss, w, LR, 3) for loss in losses(group)], sizes(group))
        assert_close(group.server.theta, w)


def test_fedavg_answers_among_the_clients_own_classes(tmp_path: Path) -> None:
    group = Group(made(FedAvg), tmp_path)
    w = plain(group.round().theta)
    for answer in group.answers():
        q = group.episodic_test.eval_episodes[answer.eval_episode]
        columns = [BASE.index(int(c)) for c in q.classes]
        want = logits(w, pixels(q.query_x))[:, columns]
        torch.testing.assert_close(answer.logits, want, rtol=1e-9, atol=1e-9)


def test_batches_cut_each_pass_evenly_and_use_every_image_once(tmp_path: Path) -> None:
    group = Group(made(FedAvg, batch=4), tmp_path)
    steps = group.method.draw(group.host.data(1), Key(5)).steps  # nine images
    assert [len(step[0].y) for step in steps] == [3, 3, 3] * 3
    x, y = group.examples(1)
    for start in (0, 3, 6):
        seen = torch.cat([pixels(step[0].x) for step in steps[start : start + 3]])
        labels = torch.cat([step[0].y for step in steps[start : start + 3]])
        order = [int((row == x).all(1).nonzero()) for row in seen]
        assert sorted(order) == list(range(9))
        assert torch.equal(labels, y[order])


@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_fedprox_is_fedavg_with_a_pull(mu: float, tmp_path: Path) -> None:
    group = Group(made(FedProx, mu=mu), tmp_path / "prox")
    w = plain(group.server.theta)

    def pulled(loss: Any) -> Any:
        return lambda v: loss(v) + mu * half_square(v, w)

    want = mean([descend(pulled(loss), w, LR, 3) for loss in losses(group)], sizes(group))
    assert_close(group.round().theta, want)
    if not mu:
        plainly = Group(made(FedAvg), tmp_path / "avg").round()
        assert tree.digest(group.server.theta) == tree.digest(plainly.theta)


@pytest.mark.parametrize("pull", [0.0, 2.0])
def test_ditto_trains_a_global_model_and_a_personal_one(pull: float, tmp_path: Path) -> None:
    group = Group(made(Ditto, lambda_prox=pull, personal_steps=2), tmp_path)
    w = plain(group.server.theta)
    own: dict[int, Weights] = {}
    for t in range(2):
        for k, loss in enumerate(losses(group)):
            start = own.get(k, w)

            def near(v: Weights, loss: Any = loss, w: Weights = w) -> Tensor:
                return loss(v) + pull * half_square(v, w)

            own[k] = descend(near, start, LR, 2)
        w = mean([descend(loss, w, LR, 3) for loss in losses(group)], sizes(group))
        group.round()
        assert_close(group.server.theta, w)
        for k in group.ids:
            assert_close(group.private(k)["model"], own[k])
            assert int(group.private(k)["visits"]) == t + 1
    if not pull:  # training alone, from the first model, whatever the others do
        start = plain(group.method.init(Key(9)).theta)
        assert_close(own[2], descend(losses(group)[2], start, LR, 4))


def test_ditto_answers_with_the_personal_model_and_before_it_with_the_servers(
    tmp_path: Path,
) -> None:
    group = Group(made(Ditto), tmp_path)
    for visited in (False, True):
        if visited:
            group.round()
        for answer in group.answers():
            assert answer.client == answer.eval_episode
            own = plain(group.private(answer.eval_episode)["model"])
            q = group.episodic_test.eval_episodes[answer.eval_episode]
            columns = [BASE.index(int(c)) for c in q.classes]
            w = own if visited else plain(group.server.theta)
            want = logits(w, pixels(q.query_x))[:, columns]
            torch.testing.assert_close(answer.logits.double(), want, rtol=1e-5, atol=1e-5)


def test_fedrep_trains_the_head_first_and_shares_the_encoder(tmp_path: Path) -> None:
    group = Group(made(FedRep, head_steps=2), tmp_path)
    phi = plain(group.server.theta)
    heads = [plain(group.private(k)) for k in group.ids]
    for _ in range(2):
        bodies = []
        for k, loss in enumerate(losses(group)):
            heads[k] = descend(lambda h, loss=loss, phi=phi: loss(phi | h), heads[k], LR, 2)
            bodies.append(descend(lambda b, loss=loss, h=heads[k]: loss(b | h), phi, LR, 3))
        phi = mean(bodies, [1.0] * len(bodies))
        group.round()
        assert_close(group.server.theta, phi)
        for k in group.ids:
            assert_close(group.private(k), heads[k])
    for answer in group.answers():
        q, k = group.episodic_test.eval_episodes[answer.eval_episode], answer.eval_episode
        columns = [BASE.index(int(c)) for c in q.classes]
        want = logits(phi | heads[k], pixels(q.query_x))[:, columns]
        torch.testing.assert_close(answer.logits.double(), want, rtol=1e-5, atol=1e-5)


def test_fedrep_without_a_personal_head_is_fedavg(tmp_path: Path) -> None:
    """Where all clients hold as much, since FedRep's mean is plain."""
    held = (((0, 1), 4), ((1, 2), 4), ((3, 4), 4))
    rep = Group(made(FedRep, personal_head=False), tmp_path / "rep", held)
    avg = Group(made(FedAvg), tmp_path / "avg", held)
    for _ in range(2):
        assert_close(rep.round().theta, plain(avg.round().theta))
    assert rep.private(0) == {}


def test_fedrep_whose_heads_never_train_is_fedbabu(tmp_path: Path) -> None:
    """One client, whose head is the server's of FedBABU."""
    rep = Group(made(FedRep, head_steps=0), tmp_path / "rep", (((0, 1), 4),))
    babu = Group(
        FedBABU(**options(optimizer=SGD, local_steps=3, batch=8)), tmp_path / "babu", (((0, 1), 4),)
    )
    rep.server = rep.server._replace(theta=babu.server.theta)
    head = babu.server.h
    rep.host.store.save(0, (0, 0), {"classifier": head})
    rep.round()
    assert_close(rep.server.theta, plain(babu.round().theta), 1e-9)


def hessian_product(loss: Any, w: Weights, v: Weights) -> Weights:
    """Return the exact product by differentiating the gradient."""
    points = {n: x.detach().requires_grad_() for n, x in w.items()}
    grads = torch.autograd.grad(loss(points), list(points.values()), create_graph=True)
    dot = torch.stack([(g * x).sum() for g, x in zip(grads, v.values(), strict=True)]).sum()
    return dict(zip(w, torch.autograd.grad(dot, list(points.values())), strict=True))


@pytest.mark.parametrize("order", ["first", "hessian_free"])
def test_per_fedavg_takes_the_papers_outer_step(order: Any, tmp_path: Path) -> None:
    alpha, beta, delta = LR, 0.1, 1e-4
    method = made(PerFedAvg, order=order, beta=beta, delta=delta)
    group = Group(method, tmp_path)
    w = plain(group.server.theta)
    ends = []
    for loss in losses(group):
        v = w
        for _ in range(3):
            g = gradient(loss, descend(loss, v, alpha, 1))
            if order == "hessian_free":
                away = [{n: v[n] + s * delta * g[n] for n in v} for s in (1, -1)]
                up, down = (gradient(loss, there) for there in away)
                g = {n: g[n] - alpha * (up[n] - down[n]) / (2 * delta) for n in v}
            v = {n: v[n] - beta * g[n] for n in v}
        ends.append(v)
    assert_close(group.round().theta, mean(ends, [1.0] * 4))


def test_the_hessian_free_step_is_that_of_the_exact_hessian(tmp_path: Path) -> None:
    """Its difference from the exact product falls with delta squared; first order's stays."""
    group = Group(made(FedAvg), tmp_path)
    w, data = group.server.theta, group.host.data(1)
    loss = cross_entropy(*group.examples(1))
    here = plain(w)
    g = gradient(loss, descend(loss, here, 0.3, 1))
    product = hessian_product(loss, here, g)
    exact = {n: g[n] - 0.3 * product[n] for n in g}

    def error(order: Any, delta: float) -> float:
        opt = Optimizer("sgd", 0.3)
        one = PerFedAvg(**options(optimizer=opt, order=order, delta=delta))
        drawn = one.draw(data, Key(0))
        gradients = one.outer_gradient(w, {}, drawn.steps[0], Mode(seed=drawn.seed))
        found = plain(gradients.grads)
        return max(float((found[n] - exact[n]).abs().max()) for n in exact)

    assert error("hessian_free", 1e-3) < 1e-6
    assert error("hessian_free", 1e-3) < 1e-3 * error("first", 1e-3)


def test_per_fedavg_adapts_to_training_samples_and_never_to_scored_ones(tmp_path: Path) -> None:
    group = Group(made(PerFedAvg, beta=0.1, test_steps=2), tmp_path)
    w = plain(group.round().theta)
    for answer in group.answers():
        q = group.episodic_test.eval_episodes[answer.eval_episode]
        adapted = descend(cross_entropy(*group.examples(answer.eval_episode)), w, LR, 2)
        columns = [BASE.index(int(c)) for c in q.classes]
        want = logits(adapted, pixels(q.query_x))[:, columns]
        torch.testing.assert_close(answer.logits, want, rtol=1e-9, atol=1e-9)
        fewer = q._replace(query_x=q.query_x[:1])
        alone = group.method.logits(group.server.theta, group.server.stats, fewer)
        torch.testing.assert_close(alone, answer.logits[:1], rtol=1e-12, atol=1e-12)


def test_per_fedavg_adapts_under_the_statistics_of_the_training_samples(tmp_path: Path) -> None:
    group = Group(made(PerFedAvg, beta=0.1, test_steps=2, model=CONV), tmp_path)
    w = plain(group.round().theta)
    for answer in group.answers():
        q = group.episodic_test.eval_episodes[answer.eval_episode]
        columns = [BASE.index(int(c)) for c in q.classes]
        y = torch.tensor(columns)[q.support_y]

        def scores(w: Weights, x: Tensor, q: Any = q) -> Tensor:
            h = conv_features(w, q.support_x, x)
            return h @ w["classifier/weight"].T + w["classifier/bias"]

        def loss(w: Weights, q: Any = q, y: Tensor = y, scores: Any = scores) -> Tensor:
            return F.cross_entropy(scores(w, q.support_x), y)

        want = scores(descend(loss, w, LR, 2), q.query_x)[:, columns]
        torch.testing.assert_close(answer.logits, want, rtol=1e-7, atol=1e-8)


def test_per_fedavg_draws_three_batches_for_a_step(tmp_path: Path) -> None:
    group = Group(made(PerFedAvg, batch=4), tmp_path)
    drawn = group.method.draw(group.host.data(1), Key(5))
    assert [len(step) for step in drawn.steps] == [3, 3, 3]
    first = drawn.steps[0]
    assert not torch.equal(first[0].x, first[1].x)
    assert not torch.equal(first[1].x, first[2].x)
    with pytest.raises(ConfigError, match="plain SGD"):
        PerFedAvg(**options(optimizer=Optimizer("sgd", 0.1, momentum=0.5)))


def test_pfedme_moves_towards_the_proximal_points(tmp_path: Path) -> None:
    lam, eta, beta = 3.0, 0.02, 0.6
    group = Group(made(PFedMe, lambda_prox=lam, inner_steps=2, eta=eta, beta=beta), tmp_path)
    w = plain(group.server.theta)
    for _ in range(2):
        ends, points = [], []
        for loss in losses(group):
            v = w
            for _ in range(3):

                def near(u: Weights, loss: Any = loss, v: Weights = v) -> Tensor:
                    return loss(u) + lam * half_square(u, v)

                theta = descend(near, v, LR, 2)
                v = {n: v[n] - eta * lam * (v[n] - theta[n]) for n in v}
            ends.append(v)
            points.append(theta)
        average = mean(ends, [1.0] * 4)
        w = {n: (1 - beta) * w[n] + beta * average[n] for n in w}
        assert_close(group.round().theta, w)
        for k in group.ids:
            assert_close(group.private(k)["model"], points[k])


@pytest.mark.slow
def test_pfedme_moves_its_running_statistics_as_far_as_its_weights(tmp_path: Path) -> None:
    running = replace(CONV, norm_policy="running")
    start, half, whole, beyond = (
        made(PFedMe, model=running, beta=beta) for beta in (0.0, 0.5, 1.0, 2.0)
    )
    found = [Group(one, tmp_path / str(one.beta)).round() for one in (start, half, whole)]
    far = Group(beyond, tmp_path / "far").round()
    assert_close(far.stats, plain(found[2].stats))  # a variance is never below 0
    none, all_ = plain(found[0].theta), plain(found[2].theta)
    assert_close(far.theta, {n: 2 * all_[n] - none[n] for n in none})
    for part in ("theta", "stats"):
        none, some, all_ = (plain(getattr(server, part)) for server in found)
        assert_close(none, plain(getattr(start.init(Key(9)), part)))
        assert_close(some, {n: (none[n] + all_[n]) / 2 for n in none})
        assert any(not torch.equal(none[n], all_[n]) for n in none)


def test_pfedme_with_a_huge_pull_is_fedavg(tmp_path: Path) -> None:
    """One inner step of 1/lambda lands on w - grad/lambda, so eta lambda (w - theta) = eta grad."""
    held = (((0, 1), 4), ((1, 2), 4), ((3, 4), 4))
    lam = 1e4
    options_of = {
        "lambda_prox": lam,
        "inner_steps": 1,
        "eta": LR,
        "optimizer": Optimizer("sgd", 1 / lam),
    }
    me = Group(PFedMe(**options(local_steps=3, **options_of)), tmp_path / "me", held)
    avg = Group(made(FedAvg), tmp_path / "avg", held)
    for _ in range(2):
        assert_close(me.round().theta, plain(avg.round().theta), 1e-8)
