"""FedMeta against closed forms, torch.func, finite differences, and torch.optim at the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from covering import covering, pairwise
from differences import direction, dot, slope
from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import Episode
from fedshot.learners.local_training import mean_gradient
from fedshot.learners.maml import InnerLoop, Maml
from fedshot.learners.meta_sgd import MetaSgd
from fedshot.methods.base.fedmeta import FedMeta
from fedshot.nn.heads import LinearHead
from fedshot.nn.models.backbones import MLP, Conv4
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from methods.classification_oracle import SPEC, Run
from torch_optimizers import torch_optimizer

SGD, ADAM = Optimizer("sgd", 0.1), Optimizer("adam", 0.01)
NET = Model(MLP((8, 7)), LinearHead(3), (6, 6, 1), dtype="float64")
WITH_NORM = Model(Conv4(4), LinearHead(3), (6, 6, 1), "support", dtype="float64")
SEED = Key(0).tensor()


def method(**changes: Any) -> FedMeta:
    defaults: dict[str, Any] = {"inner": InnerLoop(0.1, 2, 3), "episodes": 2, "optimizer": SGD}
    return FedMeta(NET, SPEC, **(defaults | changes))


def logits(w: Tree, x: Tensor) -> Tensor:
    h = (x.permute(0, 3, 1, 2).double() / 127.5 - 1).flatten(1)
    for name in ("linear1", "linear2"):
        h = F.linear(h, w["body"][name]["weight"], w["body"][name]["bias"]).relu()
    return F.linear(h, w["head"]["weight"], w["head"]["bias"])


def support_loss(w: Tree, e: Episode) -> Tensor:
    return F.cross_entropy(logits(w, e.support_x), e.support_y)


def query_loss(w: Tree, e: Episode) -> Tensor:
    return F.cross_entropy(logits(w, e.query_x), e.query_y)


def adapted(w: Tree, alpha: Tree, e: Episode, steps: int) -> Tree:
    for _ in range(steps):
        grads = torch.func.grad(support_loss)(w, e)
        w = tree.map(lambda p, a, g: p - a * g, w, alpha, grads)
    return w


def constant(w: Tree, lr: float) -> Tree:
    return tree.map(lambda leaf: torch.full_like(leaf, lr), w)


def by_hand(w: Tree, alpha: Tree, e: Episode, inner: InnerLoop) -> tuple[Tree, Tree]:
    """Return the gradients of the query loss after adapting, by w and by alpha."""
    if inner.order == "second":

        def loss(both: tuple[Tree, Tree]) -> Tensor:
            return query_loss(adapted(*both, e, inner.steps), e)

        return torch.func.grad(loss)((w, alpha))  # type: ignore[no-any-return]
    end, total = w, constant(w, 0.0)
    for _ in range(inner.steps):
        grads = torch.func.grad(support_loss)(end, e)
        total = tree.add(total, grads)
        end = tree.map(lambda p, a, g: p - a * g, end, alpha, grads)
    at_end = torch.func.grad(query_loss)(end, e)
    return at_end, tree.map(lambda g, s: -g * s, at_end, total)


def mean(trees: list[Tree]) -> Tree:
    return tree.map(lambda *each: torch.stack(each).mean(0), *trees)


def close(a: Tree, b: Tree, tol: float = 1e-11) -> None:
    torch.testing.assert_close(a, b, rtol=tol, atol=tol / 10)


def episodes(run: Run, k: int) -> tuple[Episode, ...]:
    (step,) = run.drawn(k).steps
    return step  # type: ignore[no-any-return]


# Without inner steps: FedSGD


def test_without_inner_steps_a_round_is_a_gradient_step_on_all_queries(tmp_path: Path) -> None:
    """Of all clients' queries at once: the queries are as many in each episode."""
    run = Run(method(inner=InnerLoop(steps=0), optimizer=SGD), tmp_path, (8, 10, 12))
    w = run.server.theta
    after = run.round().theta
    every = [e for k in range(3) for e in episodes(run, k)]
    x, y = torch.cat([e.query_x for e in every]), torch.cat([e.query_y for e in every])
    grads = torch.func.grad(lambda w: F.cross_entropy(logits(w, x), y))(w)
    close(after, tree.map(lambda p, g: p - 0.1 * g, w, grads))


# With them


@pytest.mark.parametrize("order", ["first", "second"])
@pytest.mark.parametrize("learned", [False, True])
def test_a_client_sends_the_mean_gradient_of_its_query_loss_after_adapting(
    learned: bool, order: Any, tmp_path: Path
) -> None:
    inner = InnerLoop(0.1, 3, order=order)
    run = Run(method(inner=inner, learned_steps=learned), tmp_path, (8, 12))
    w = run.server.theta["start"] if learned else run.server.theta
    run.round()
    for k in range(2):
        each = [by_hand(w, constant(w, 0.1), e, inner) for e in episodes(run, k)]
        found, (start, alpha) = run.spy.seen[k].up["gradient"], mean(each)
        close(found, {"start": start, "alpha": alpha} if learned else start)


@pytest.mark.parametrize("opt", [SGD, ADAM, Optimizer("sgd", 0.1, momentum=0.9)], ids=str)
def test_the_server_is_torch_optim_on_the_mean_gradient(opt: Optimizer, tmp_path: Path) -> None:
    """Its state goes on from round to round."""
    run = Run(method(optimizer=opt, learned_steps=True), tmp_path, (8, 12))
    leaves = [leaf.clone().requires_grad_() for leaf in tree.leaves(run.server.theta)]
    by = torch_optimizer(opt, leaves)
    for _ in range(3):
        theta = run.round().theta
        sent = [reply.up["gradient"] for reply in run.spy.seen.values()]
        total = run.spy.exchanges[-1].reduce["gradient"].start(2)
        for k in range(2):
            total.add(k, sent[k], 2.0)
        grads = total.result()  # to the bit: Adam makes much of 1e-13 where a gradient is near 0
        torch.testing.assert_close(grads, mean(sent), rtol=0, atol=1e-12)
        for leaf, grad in zip(leaves, tree.leaves(grads), strict=True):
            leaf.grad = grad
        by.step()
        close(tree.leaves(theta), [leaf.detach() for leaf in leaves])


def test_one_client_of_one_episode_is_maml_with_torch_optim(tmp_path: Path) -> None:
    run = Run(method(episodes=1, optimizer=ADAM), tmp_path)
    w = tree.map(lambda leaf: leaf.clone().requires_grad_(), run.server.theta)
    adam = torch.optim.Adam(tree.leaves(w), ADAM.lr)
    after = run.round().theta
    (e,) = episodes(run, 0)
    here = w
    for _ in range(2):
        slopes = torch.autograd.grad(support_loss(here, e), tree.leaves(here), create_graph=True)
        moved = [p - 0.1 * g for p, g in zip(tree.leaves(here), slopes, strict=True)]
        here = tree.rebuild(here, dict(zip(dict(tree.items(here)), moved, strict=True)))
    query_loss(here, e).backward()
    adam.step()
    close(after, tree.detach(w))


# Meta-SGD


def shaken(params: Tree, seed: int) -> Tree:
    rng = Key(seed).torch()

    def shake(leaf: Tensor) -> Tensor:
        return leaf + 0.05 * torch.rand(leaf.shape, generator=rng, dtype=leaf.dtype)

    return tree.map(shake, params)


def one_episode(tmp_path: Path) -> Episode:
    run = Run(method(), tmp_path)
    run.round()
    return episodes(run, 0)[0]


def gradient(learner: Any, params: Tree, stats: Tree, e: Episode) -> Tree:
    w = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
    learner.episode_loss(w, stats, e, SEED).loss.backward()
    return tree.map(lambda leaf: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, w)


@pytest.mark.parametrize("model", [NET, WITH_NORM], ids=["mlp", "conv4"])
@pytest.mark.parametrize("adapts", ["all", "head"])
def test_the_gradient_by_alpha_equals_finite_differences(
    model: Model, adapts: Any, tmp_path: Path
) -> None:
    learner = MetaSgd(model, InnerLoop(0.1, 3, adapts=adapts))
    params, stats = learner.init(Key(2))
    params, e = shaken(params, 1), one_episode(tmp_path)
    found = gradient(learner, params, stats, e)["alpha"]
    for seed in (1, 2, 3):
        along = direction(params["alpha"], seed)
        want = slope(
            lambda alpha: learner.episode_loss(params | {"alpha": alpha}, stats, e, SEED).loss,
            params["alpha"], along,
        )  # fmt: skip
        torch.testing.assert_close(dot(found, along), want, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("model", "adapts", "order"),
    pairwise([NET, WITH_NORM], ["all", "head"], ["first", "second"]),
)
def test_with_a_constant_alpha_it_is_maml(
    model: Model, adapts: Any, order: Any, tmp_path: Path
) -> None:
    """The same loss, gradient with respect to the initialisation, and predictions."""
    inner, e = InnerLoop(0.05, 3, 4, order, adapts), one_episode(tmp_path)
    one, other = MetaSgd(model, inner), Maml(model, inner)
    params, stats = one.init(Key(2))
    start, _ = other.init(Key(2))
    assert tree.digest(params["start"]) == tree.digest(start)
    close(gradient(one, params, stats, e)["start"], gradient(other, start, stats, e), 1e-9)
    q = Run(method(), tmp_path / "exam").episodic_test(2).eval_episodes[0]
    close(one.answer(params, stats, q).detach(), other.answer(start, stats, q).detach(), 1e-9)


def test_only_what_adapts_has_step_sizes() -> None:
    params, _ = MetaSgd(NET, InnerLoop(adapts="head")).init(Key(0))
    assert tree.difference(params["start"]["head"], params["alpha"]) is None


def test_step_sizes_are_learned_sent_down_and_used_at_test(tmp_path: Path) -> None:
    run = Run(method(learned_steps=True), tmp_path)
    first = run.server.theta["alpha"]
    assert {float(v) for leaf in tree.leaves(first) for v in leaf.flatten()} == {0.1}
    run.round()
    run.round()
    sent = run.spy.exchanges[-1].message(0)["theta"]["alpha"]
    assert tree.digest(sent) != tree.digest(first)
    start, alpha = (run.server.theta[name] for name in ("start", "alpha"))
    eval_episodes = run.episodic_test(2).eval_episodes
    for q, found in zip(eval_episodes, run.answers(eval_episodes), strict=True):
        e = Episode(q.support_x, q.support_y, q.query_x, q.support_y, q.classes)
        close(found, logits(adapted(start, alpha, e, 3), q.query_x))


def test_without_learned_steps_no_step_sizes_are_sent(tmp_path: Path) -> None:
    run = Run(method(), tmp_path)
    run.round()
    assert set(run.spy.exchanges[0].message(0)["theta"]) == {"body", "head"}
    assert set(run.spy.seen[0].up["gradient"]) == {"body", "head"}
    eval_episodes = run.episodic_test(2).eval_episodes
    for q, found in zip(eval_episodes, run.answers(eval_episodes), strict=True):
        w = run.server.theta
        e = Episode(q.support_x, q.support_y, q.query_x, q.support_y, q.classes)
        close(found, logits(adapted(w, constant(w, 0.1), e, 3), q.query_x))


def test_the_server_leaves_running_statistics_to_the_mean(tmp_path: Path) -> None:
    """They move by the clients' mean change, not by a step of the outer optimiser."""
    model = Model(Conv4(4), LinearHead(3), (6, 6, 1), "running", dtype="float64")
    run = Run(FedMeta(model, SPEC, InnerLoop(0.1, 1), optimizer=ADAM, episodes=2), tmp_path, (8, 9))
    before = run.server.stats
    after = run.round().stats
    close(after, tree.add(before, mean([r.up["stats"] for r in run.spy.seen.values()])))
    assert tree.digest(after) != tree.digest(before)


@pytest.mark.parametrize(("order", "adapts"), covering(["first", "second"], ["all", "head"]))
def test_stacked_clients_have_the_gradients_of_single_ones(
    order: Any, adapts: Any, tmp_path: Path
) -> None:
    learner = MetaSgd(WITH_NORM, InnerLoop(0.1, 2, order=order, adapts=adapts))
    run = Run(method(), tmp_path)
    run.round()
    each = [shaken(learner.init(Key(k))[0], k) for k in range(2)]

    def one(params: Tree, e: Episode) -> Tree:
        return mean_gradient(learner.episode_loss, params, {}, (e,), Mode(seed=SEED)).grads

    stacked = tree.map(lambda *leaves: torch.stack(leaves), *each)
    both = tree.map(lambda *leaves: torch.stack(leaves), *episodes(run, 0))
    found = torch.func.vmap(one)(stacked, both)
    for k, (params, e) in enumerate(zip(each, episodes(run, 0), strict=True)):
        close(tree.index(found, k), one(params, e), 1e-9)
