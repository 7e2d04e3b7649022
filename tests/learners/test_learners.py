"""Learners against networks written out by hand, torch.func, torch.nn and finite differences."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, get_args

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
from fedshot.learners.feature_cache import worth_caching
from fedshot.learners.learner import EvalEpisode
from fedshot.learners.maml import InnerLoop, Maml
from fedshot.learners.proto import Proto
from fedshot.methods.fedfsl.predictions import (
    EpisodePredictions,
    Predictions,
    SharedFeatures,
    paired_predictions,
)
from fedshot.nn.gradients import value_and_grad
from fedshot.nn.heads import LinearHead
from fedshot.nn.models.backbones import MLP, Conv4
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.use.query_episodes import QueryEpisodes

POLICIES = ("running", "support", "transductive")
SEED = Key(0).tensor()
WAY = 3


@dataclass(frozen=True)
class OneScale:
    """A backbone with one parameter: h = tanh(scale * mean pixel)."""

    def init(self, key: Key, shape: Any, dtype: torch.dtype) -> tuple[Tree, Tree]:
        return {"scale": torch.tensor([0.8], dtype=dtype)}, {}

    def out_features(self, shape: Any) -> int:
        return 1

    def apply(self, params: Tree, stats: Tree, x: Tensor, mode: Mode) -> tuple[Tensor, Tree]:
        return torch.tanh(params["scale"] * x.flatten(1).mean(1, keepdim=True)), stats


@dataclass(frozen=True)
class OneSlope:
    """A head with one parameter: logits (s h, -s h)."""

    def init(self, key: Key, n_features: int, dtype: torch.dtype) -> Tree:
        return {"slope": torch.tensor([1.3], dtype=dtype)}

    def logits(self, params: Tree, h: Tensor) -> Tensor:
        return torch.cat([h, -h], 1) * params["slope"]


def images(n: int, side: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (n, side, side, 1), dtype=torch.uint8, generator=Key(seed).torch())


def episode(way: int = WAY, shot: int = 2, query: int = 4, side: int = 6, seed: int = 0) -> Episode:
    y = torch.arange(way)
    return Episode(
        images(way * shot, side, seed),
        y.repeat_interleave(shot),
        images(way * query, side, seed + 100),
        y.repeat_interleave(query),
        y + 10,
    )


def eval_episode(e: Episode) -> EvalEpisode:
    return EvalEpisode(e.support_x, e.support_y, e.query_x, e.classes)


def mlp() -> Model:
    return Model(MLP((7,)), LinearHead(WAY), (6, 6, 1), dtype="float64")


def conv4(policy: str = "running") -> Model:
    return Model(Conv4(4), LinearHead(WAY), (6, 6, 1), policy, dtype="float64")  # type: ignore[arg-type]


def two_parameters() -> Model:
    return Model(OneScale(), OneSlope(), (6, 6, 1), dtype="float64")


def trained(model: Model) -> tuple[Tree, Tree]:
    """Draw a model whose running statistics, scales and shifts are not the initial ones."""
    params, stats = model.init(Key(5))
    g = Key(6).torch()

    def shake(leaf: Tensor) -> Tensor:
        return leaf + 0.2 * torch.rand(leaf.shape, generator=g, dtype=leaf.dtype)

    return tree.map(shake, params), tree.map(shake, stats)


def gradient(learner: Any, params: Tree, stats: Tree, e: Episode) -> Tree:
    return value_and_grad(
        lambda w: ((gradients := learner.episode_loss(w, stats, e, SEED)).loss, gradients), params
    )[2]


def prepared(x: Tensor) -> Tensor:
    return (x.permute(0, 3, 1, 2).double() / 255 - 0.5) / 0.5


def by_hand(
    params: Tree, stats: Tree, support_x: Tensor, query_x: Tensor, policy: str
) -> tuple[Tensor, Tensor]:
    """Pass support and queries through a Conv4 layer by layer, normalising as the policy says."""
    hs, hq = prepared(support_x), prepared(query_x)
    for i in range(1, 5):
        p, norm = params["body"][f"conv{i}"], params["body"][f"norm{i}"]
        hs, hq = (F.conv2d(h, p["weight"], p["bias"], padding=1) for h in (hs, hq))
        of_support = (hs.mean((0, 2, 3)), hs.var((0, 2, 3), unbiased=False))
        if policy == "running":
            s = q = (stats[f"norm{i}"]["mean"], stats[f"norm{i}"]["var"])
        elif policy == "support":
            s = q = of_support
        else:
            s, q = of_support, (hq.mean((0, 2, 3)), hq.var((0, 2, 3), unbiased=False))

        def layer(h: Tensor, seen: tuple[Tensor, Tensor], norm: Tree = norm) -> Tensor:
            mean, var = (v[:, None, None] for v in seen)
            z = (h - mean) / (var + 1e-5).sqrt()
            z = (z * norm["weight"][:, None, None] + norm["bias"][:, None, None]).relu()
            return F.max_pool2d(z, 2) if min(z.shape[-2:]) >= 2 else z

        hs, hq = layer(hs, s), layer(hq, q)
    return hs.flatten(1), hq.flatten(1)


def distances_by_hand(hs: Tensor, y: Tensor, hq: Tensor) -> Tensor:
    means = [hs[y == c].detach().mean(0) for c in range(int(y.max()) + 1)]
    return torch.tensor(
        [[-float(((q - m) ** 2).sum()) for m in means] for q in hq.detach()], dtype=torch.float64
    )


class Twin(torch.nn.Module):
    """Conv4 as a torch.nn module, with torch's own running statistics."""

    def __init__(self, params: Tree, stats: Tree) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList()
        for i in range(1, 5):
            conv, norm = params["body"][f"conv{i}"], params["body"][f"norm{i}"]
            c_out, c_in = conv["weight"].shape[:2]
            block = torch.nn.ModuleDict(
                {"conv": torch.nn.Conv2d(c_in, c_out, 3, padding=1).double()}
                | {"norm": torch.nn.BatchNorm2d(c_out).double()}
            )
            block["conv"].load_state_dict(conv)
            state = {"running_mean": stats[f"norm{i}"]["mean"]}
            state |= {"running_var": stats[f"norm{i}"]["var"]}
            block["norm"].load_state_dict(norm | state, strict=False)
            self.blocks.append(block)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block["norm"](block["conv"](x)).relu()
            x = F.max_pool2d(x, 2) if min(x.shape[-2:]) >= 2 else x
        return x.flatten(1)

    def stats(self) -> Tree:
        return {
            f"norm{i}": {"mean": b["norm"].running_mean, "var": b["norm"].running_var}
            for i, b in enumerate(self.blocks, start=1)
        }


# Prototypes


@pytest.mark.parametrize("policy", POLICIES)
def test_proto_answers_are_minus_squared_distances_to_class_means(policy: str) -> None:
    model, e = conv4(policy), episode()
    params, _ = trained(model)
    _, stats = trained(conv4())
    hs, hq = by_hand(params, stats, e.support_x, e.query_x, policy)
    got = Proto(model).answer(params, stats if policy == "running" else {}, eval_episode(e))
    torch.testing.assert_close(got, distances_by_hand(hs, e.support_y, hq), rtol=1e-11, atol=1e-12)


def test_proto_lesson_is_the_cross_entropy_of_supports_and_queries_passed_together() -> None:
    model, e = conv4(), episode()
    params, stats = trained(model)
    h = Twin(params, stats)(prepared(torch.cat([e.support_x, e.query_x])))
    n = len(e.support_y)
    logits = distances_by_hand(h[:n], e.support_y, h[n:])
    gradients = Proto(model).episode_loss(params, stats, e, SEED)
    torch.testing.assert_close(
        gradients.loss, F.cross_entropy(logits, e.query_y), rtol=1e-12, atol=0
    )
    assert gradients.accuracy == (logits.argmax(1) == e.query_y).double().mean()


def test_proto_lessons_have_right_gradients() -> None:
    learner, e = Proto(conv4()), episode()
    params, stats = trained(learner.model)
    params = {"body": params["body"]}
    grad = gradient(learner, params, stats, e)
    for seed in range(3):
        along = direction(params, seed)
        want = slope(lambda w: learner.episode_loss(w, stats, e, SEED).loss, params, along, 1e-5)
        torch.testing.assert_close(dot(grad, along), want, rtol=1e-8, atol=1e-9)


def test_proto_prototypes_do_not_depend_on_the_order_of_the_support() -> None:
    learner, e = Proto(conv4("support")), episode()
    params, stats = trained(learner.model)
    order = torch.randperm(len(e.support_y), generator=Key(1).torch())
    other = eval_episode(e)._replace(support_x=e.support_x[order], support_y=e.support_y[order])
    torch.testing.assert_close(
        learner.answer(params, stats, other),
        learner.answer(params, stats, eval_episode(e)),
        rtol=1e-12,
        atol=1e-13,
    )


# What a query's answer may depend on


def learners(policy: str) -> list[Any]:
    model = conv4(policy)
    return [
        Proto(model),
        Maml(model, InnerLoop(lr=0.1, test_steps=2)),
        Maml(model, InnerLoop(lr=0.1, test_steps=2, adapts="head")),
    ]


def answers(learner: Any, query_x: Tensor) -> Tensor:
    params, stats = trained(learner.model)
    logits: Tensor = learner.answer(
        params, stats, eval_episode(episode())._replace(query_x=query_x)
    )
    return logits


@pytest.mark.parametrize("policy", ["running", "support"])
@pytest.mark.parametrize("which", range(3), ids=["proto", "maml", "anil"])
def test_an_inductive_answer_ignores_the_other_queries(policy: str, which: int) -> None:
    learner, x = learners(policy)[which], episode().query_x
    first = answers(learner, x)[:1]
    alone = answers(learner, x[:1])
    in_other_company = answers(learner, torch.cat([x[:1], images(7, 6, seed=50)]))[:1]
    last = answers(learner, x.flip(0))[-1:]
    for got in (alone, in_other_company, last):
        torch.testing.assert_close(got, first, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("which", range(3), ids=["proto", "maml", "anil"])
def test_a_transductive_answer_depends_on_the_other_queries(which: int) -> None:
    learner, x = learners("transductive")[which], episode().query_x
    first = answers(learner, x)[:1]
    torch.testing.assert_close(answers(learner, x.flip(0))[-1:], first, rtol=1e-11, atol=1e-12)
    in_other_company = answers(learner, torch.cat([x[:1], images(7, 6, seed=50)]))[:1]
    assert (in_other_company - first).abs().max() > 1e-3


@pytest.mark.parametrize(("policy", "which"), covering(POLICIES, range(3)))
def test_an_answer_changes_nothing_and_holds_no_graph(policy: str, which: int) -> None:
    learner, q = learners(policy)[which], eval_episode(episode())
    params, stats = trained(learner.model)
    before = tree.digest((params, stats, q))
    assert not learner.answer(params, stats, q).requires_grad
    assert tree.digest((params, stats, q)) == before


# Running statistics


def test_a_proto_lesson_moves_the_statistics_as_one_pass_of_torch() -> None:
    model, e = conv4(), episode()
    params, stats = trained(model)
    twin = Twin(params, stats)
    twin(prepared(torch.cat([e.support_x, e.query_x])))
    got = Proto(model).episode_loss(params, stats, e, SEED).stats
    torch.testing.assert_close(got, twin.stats(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("adapts", ["all", "head"])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_maml_lesson_moves_the_statistics_by_one_pass_of_the_queries(
    adapts: Any, steps: int
) -> None:
    model, e = conv4(), episode()
    params, stats = trained(model)
    learner = Maml(model, InnerLoop(lr=0.1, steps=steps, adapts=adapts))
    adapted = adapted_by_torch(model, params, e, 0.1, steps, adapts)
    twin = Twin(adapted, stats)
    twin(prepared(e.query_x))
    got = learner.episode_loss(params, stats, e, SEED).stats
    torch.testing.assert_close(tree.detach(got), twin.stats(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("policy", ["support", "transductive"])
def test_without_the_running_policy_there_are_no_statistics(policy: str) -> None:
    model = conv4(policy)
    params, stats = model.init(Key(0))
    assert stats == {}
    assert Proto(model).episode_loss({"body": params["body"]}, stats, episode(), SEED).stats == {}
    assert Maml(model).episode_loss(params, stats, episode(), SEED).stats == {}


# MAML


def batch_logits(model: Model, params: Tree, x: Tensor) -> Tensor:
    """Pass one batch by its own statistics, with layers of torch.nn.functional alone."""
    if isinstance(model.backbone, MLP):
        p = params["body"]["linear1"]
        h = F.linear(prepared(x).flatten(1), p["weight"], p["bias"]).relu()
    elif isinstance(model.backbone, OneScale):
        h = torch.tanh(params["body"]["scale"] * prepared(x).flatten(1).mean(1, keepdim=True))
        return torch.cat([h, -h], 1) * params["head"]["slope"]
    else:
        h, _ = by_hand(params, {}, x, x, "transductive")
    return F.linear(h, params["head"]["weight"], params["head"]["bias"])


def adapted_by_torch(
    model: Model, params: Tree, e: Episode, lr: float, steps: int, adapts: str
) -> Tree:
    """Take MAML's inner steps as one would write them with torch.func."""
    parts = ["body", "head"] if adapts == "all" else ["head"]

    def loss(some: Tree, rest: Tree) -> Tensor:
        return F.cross_entropy(batch_logits(model, rest | some, e.support_x), e.support_y)

    for _ in range(steps):
        some = {part: params[part] for part in parts}
        grad = torch.func.grad(loss)(some, params)
        params = params | tree.map(lambda w, g: w - lr * g, some, grad)
    return params


def outer_by_torch(params: Tree, model: Model, e: Episode, inner: InnerLoop) -> Tensor:
    adapted = adapted_by_torch(model, params, e, inner.lr, inner.steps, inner.adapts)
    return F.cross_entropy(batch_logits(model, adapted, e.query_x), e.query_y)


MODELS = {"two parameters": two_parameters(), "mlp": mlp(), "conv4": conv4("support")}


def episode_for(model: Model) -> Episode:
    return episode(way=2 if isinstance(model.head, OneSlope) else WAY)


@pytest.mark.parametrize(("name", "steps", "adapts"), pairwise(MODELS, [1, 4], ["all", "head"]))
def test_the_maml_loss_and_its_second_order_gradient_equal_those_of_torch_func(
    name: str, steps: int, adapts: Any
) -> None:
    model = MODELS[name]
    inner, e = InnerLoop(lr=0.2, steps=steps, adapts=adapts), episode_for(model)
    params, stats = trained(model)
    want, value = torch.func.grad_and_value(outer_by_torch)(params, model, e, inner)
    learner = Maml(model, inner)
    torch.testing.assert_close(
        learner.episode_loss(params, stats, e, SEED).loss.detach(), value, rtol=1e-11, atol=0
    )
    got = gradient(learner, params, stats, e)
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


def test_the_maml_gradient_of_a_network_equals_finite_differences() -> None:
    model = conv4()
    learner, e = Maml(model, InnerLoop(lr=0.2, steps=3)), episode()
    params, stats = trained(model)
    grad = gradient(learner, params, stats, e)
    for seed in range(2):
        along = direction(params, seed)
        want = slope(lambda w: learner.episode_loss(w, stats, e, SEED).loss, params, along, 1e-6)
        torch.testing.assert_close(dot(grad, along), want, rtol=1e-6, atol=1e-7)


def test_the_first_order_maml_gradient_is_the_query_gradient_at_the_adapted_point() -> None:
    model, e = mlp(), episode()
    params, stats = trained(model)
    inner = InnerLoop(lr=0.2, steps=4, order="first")
    adapted = adapted_by_torch(model, params, e, 0.2, 4, "all")
    want = torch.func.grad(lambda w: F.cross_entropy(batch_logits(model, w, e.query_x), e.query_y))(
        adapted
    )
    torch.testing.assert_close(
        gradient(Maml(model, inner), params, stats, e), want, rtol=1e-11, atol=1e-14
    )


def test_the_orders_of_maml_differ_where_the_support_loss_is_curved() -> None:
    model, e = two_parameters(), episode(way=2)
    params, stats = model.init(Key(0))
    first, second = (
        gradient(Maml(model, InnerLoop(lr=0.5, steps=3, order=order)), params, stats, e)
        for order in ("first", "second")
    )
    assert (first["body"]["scale"] - second["body"]["scale"]).abs() > 1e-4


@dataclass(frozen=True)
class Shift(OneSlope):
    """A head whose support loss is linear in its parameter where the logits saturate."""

    def logits(self, params: Tree, h: Tensor) -> Tensor:
        return torch.cat([h.sign() * 1e3 + params["slope"], h * 0.0], 1)


def test_the_orders_of_maml_agree_where_the_hessian_is_zero() -> None:
    # exp(-1000) is 0 in float64, so the cross-entropy of the support is linear, its Hessian 0.
    model = dataclasses.replace(two_parameters(), head=Shift())
    e = episode(way=2)
    params, stats = model.init(Key(0))
    first, second = (
        gradient(Maml(model, InnerLoop(lr=0.5, steps=3, order=order)), params, stats, e)
        for order in ("first", "second")
    )
    assert first["head"]["slope"].abs() > 0.01
    assert tree.digest(first) == tree.digest(second)


@pytest.mark.parametrize("adapts", ["all", "head"])
@pytest.mark.parametrize("order", ["first", "second"])
def test_no_inner_steps_leave_the_plain_query_loss(order: Any, adapts: Any) -> None:
    model, e = mlp(), episode()
    params, stats = trained(model)
    learner = Maml(model, InnerLoop(steps=0, order=order, adapts=adapts))

    def plain(w: Tree) -> Tensor:
        return F.cross_entropy(batch_logits(model, w, e.query_x), e.query_y)

    gradients = learner.episode_loss(params, stats, e, SEED)
    torch.testing.assert_close(gradients.loss, plain(params), rtol=1e-14, atol=0)
    torch.testing.assert_close(
        gradient(learner, params, stats, e), torch.func.grad(plain)(params), rtol=1e-12, atol=1e-14
    )


def test_a_head_wider_than_the_episode_uses_its_first_outputs() -> None:
    model, e = dataclasses.replace(mlp(), head=LinearHead(WAY + 2)), episode()
    params, stats = trained(model)
    narrow = params | {"head": tree.map(lambda t: t[:WAY], params["head"])}
    inner = InnerLoop(lr=0.2, steps=3, test_steps=3)
    wide, same = Maml(model, inner), Maml(mlp(), inner)
    grad = gradient(wide, params, stats, e)
    torch.testing.assert_close(
        tree.map(lambda t: t[:WAY], grad["head"]), gradient(same, narrow, stats, e)["head"]
    )
    assert not any(t[WAY:].any() for t in tree.leaves(grad["head"]))
    assert wide.answer(params, stats, eval_episode(e)).shape == (len(e.query_y), WAY)


@pytest.mark.parametrize("adapts", ["all", "head"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_maml_answer_adapts_on_the_support_by_the_policy(policy: str, adapts: Any) -> None:
    model, e = conv4(policy), episode()
    params, _ = trained(model)
    _, stats = trained(conv4())
    start, parts = params, ["body", "head"] if adapts == "all" else ["head"]

    def logits(w: Tree, x: Tensor, policy: str) -> Tensor:
        h = by_hand(w, stats, e.support_x, x, policy)[1]
        return F.linear(h, w["head"]["weight"], w["head"]["bias"])

    for _ in range(3):
        some = {part: params[part] for part in parts}
        grad = torch.func.grad(
            lambda s, w: F.cross_entropy(logits(w | s, e.support_x, "support"), e.support_y)
        )(some, params)
        params = params | tree.map(lambda w, g: w - 0.2 * g, some, grad)
    learner = Maml(model, InnerLoop(lr=0.2, steps=9, test_steps=3, adapts=adapts))
    got = learner.answer(start, stats if policy == "running" else {}, eval_episode(e))
    torch.testing.assert_close(got, logits(params, e.query_x, policy), rtol=1e-9, atol=1e-11)


def test_lessons_pass_the_dropout_of_steps_and_queries_with_seeds_of_their_own() -> None:
    model = dataclasses.replace(mlp(), backbone=MLP((50,), dropout=0.5))
    e = episode()
    params, stats = trained(model)
    learner = Maml(model, InnerLoop(lr=0.1, steps=2))
    losses = [
        learner.episode_loss(params, stats, e, Key(s).tensor()).loss.item() for s in (0, 0, 1)
    ]
    assert losses[0] == losses[1] != losses[2]
    modes = [Mode(True, "batch", seed=SEED).layer(i).seed for i in (-1, 0, 1)]
    assert len({int(seed) for seed in modes if seed is not None}) == 3


@pytest.mark.parametrize("adapts", ["all", "head"])
def test_with_global_labels_a_wide_head_is_the_head_of_the_episodes_classes(adapts: Any) -> None:
    """Output c is class c: the rows of an episode's classes, alone, are a head of that way."""
    e = episode()._replace(classes=torch.tensor([8, 1, 5]))
    wide = Model(Conv4(4), LinearHead(9), (6, 6, 1), "support", dtype="float64")
    params, stats = trained(wide)
    params["head"] = tree.map(lambda leaf: 3 * leaf, params["head"])
    narrow = params | {"head": tree.map(lambda leaf: leaf[e.classes], params["head"])}
    inner = InnerLoop(lr=0.3, steps=2, test_steps=3, adapts=adapts)
    one, other = Maml(wide, inner, "global"), Maml(conv4("support"), inner)
    here, there = (gradient(m, w, stats, e) for m, w in ((one, params), (other, narrow)))
    torch.testing.assert_close(here["body"], there["body"])
    torch.testing.assert_close(tree.map(lambda leaf: leaf[e.classes], here["head"]), there["head"])
    rest = [c for c in range(9) if c not in e.classes.tolist()]
    assert all(not leaf[rest].any() for leaf in tree.leaves(here["head"]))
    torch.testing.assert_close(
        one.answer(params, stats, eval_episode(e)),
        other.answer(narrow, stats, eval_episode(e)),
    )


@pytest.mark.parametrize("order", ["first", "second"])
@pytest.mark.parametrize("adapts", ["all", "head"])
def test_heads_on_one_body_see_what_each_would_see_alone(
    adapts: Any, order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Maml(conv4(), InnerLoop(lr=0.3, steps=2, order=order, adapts=adapts))
    params, stats = trained(learner.model)
    heads = {"one": params["head"], "other": direction(params["head"], 3)}
    e, passes = episode(), []
    real = Model.features
    monkeypatch.setattr(Model, "features", lambda *args: passes.append(1) or real(*args))

    def by_itself(w: Tree) -> EpisodePredictions:
        adapted = learner.adapt(w, stats, e, SEED)
        query, moved = learner.predict(adapted, stats, e.query_x, e.classes, SEED, -1)
        before, _ = learner.predict(w, stats, e.query_x, e.classes, SEED, -1)
        told = {"adapted_query": query, "unadapted_query": before}
        return EpisodePredictions(query, moved, told)

    def total(w: Tree, together: bool) -> tuple[Tensor, Any]:
        both = list(w["heads"].values())
        if together:
            found = paired_predictions(
                learner, w["body"], both, stats, e, SEED, get_args(Predictions)
            )
        else:
            found = [by_itself({"body": w["body"], "head": head}) for head in both]
        losses = [(p.square() * (1 + u)).sum() for u, one in enumerate(found)
                  for p in (one.query, *one.p.values())]  # fmt: skip
        return torch.stack(losses).sum(), found[1].stats

    w = {"body": params["body"], "heads": heads}
    apart, moved, wanted = value_and_grad(lambda w: total(w, together=False), w)
    alone = len(passes)
    value, stats_of_both, grads = value_and_grad(lambda w: total(w, together=True), w)
    torch.testing.assert_close(value, apart)
    torch.testing.assert_close(grads, wanted)
    torch.testing.assert_close(stats_of_both, moved)
    assert len(passes) - alone == (2 if adapts == "head" else alone)


def test_looks_are_shared_while_body_statistics_and_noise_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = dataclasses.replace(conv4(), backbone=Conv4(4, dropout=0.3))
    learner, x = Maml(model), episode().query_x
    params, stats = trained(model)
    passes: list[int] = []
    real = Model.features
    monkeypatch.setattr(Model, "features", lambda *args: passes.append(1) or real(*args))
    looks, body = SharedFeatures(learner, params["body"]), params["body"]
    other = torch.tensor(5)
    asked = [(stats, SEED, 0), (stats, SEED, -1), (stats, other, 0), ({**stats}, SEED, 0)]
    for seen, seed, site in asked:
        for _ in range(2):
            before = len(passes)
            h, moved = looks(body, seen, x, seed, site)
        assert len(passes) == before
        wanted = learner.features(params, seen, x, seed, site)
        assert tree.digest({"h": h, "moved": moved}) == tree.digest(
            {"h": wanted[0], "moved": wanted[1]}
        )
    before = len(passes)
    looks({**body}, stats, x, SEED, 0)  # as equal as can be, but it may move
    assert len(passes) == before + 1

    def slope(w: Tree) -> tuple[Tensor, None]:
        return SharedFeatures(learner, w)(w, stats, x, SEED, 0)[0].square().sum(), None

    assert max(float(g.abs().max()) for g in tree.leaves(value_and_grad(slope, body)[2])) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_heads_that_adapt_alone_look_at_a_test_s_support_once(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Maml(conv4(policy), InnerLoop(adapts="head"))
    params, stats = trained(learner.model)
    passes: list[int] = []
    real = Model.features
    monkeypatch.setattr(Model, "features", lambda *args: passes.append(1) or real(*args))
    learner.answer(params, stats, eval_episode(episode()))
    assert len(passes) == 2


def test_a_support_set_shared_by_blocks_of_queries_is_embedded_once() -> None:
    x = torch.zeros((1000, 4, 4, 1), dtype=torch.uint8)
    episodes = QueryEpisodes(x[:6], torch.arange(6) % 2, x, torch.arange(2))
    assert worth_caching(episodes)
    assert (len(episodes), episodes.distinct) == (4, 1006)
    assert len(episodes.episode_index(3).query) == len(episodes[3].query_x) == 1000 - 3 * 256
