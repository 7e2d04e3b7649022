"""FedFSL-MI-Adv against its two stages written out, and what each stage leaves alone."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from covering import covering, slow
from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.learners.maml import Maml
from fedshot.methods.fedfsl import fedfsl_mi_adv
from fedshot.methods.fedfsl import prediction_regularizer as nn_nearness
from fedshot.methods.fedfsl.fedfsl_mi_adv import FedFSLMIAdv
from fedshot.methods.fedfsl.prediction_regularizer import ReferenceLogits, RegularizedMaml
from fedshot.nn.heads import LinearHead
from fedshot.nn.losses import floored_kl, kl
from fedshot.nn.models.backbones import MLP
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer, clip_grad_norm
from methods.fedfsl.oracle import (
    ADAM,
    INNER,
    SGD,
    Run,
    Weights,
    assert_rounds,
    assert_slopes,
    beside,
    close,
    flat,
    holds_less,
    mean_of,
    options,
    p,
    regularizer,
    task_loss,
)
from torch_optimizers import torch_optimizer


def method(**changes: Any) -> FedFSLMIAdv:
    return FedFSLMIAdv(**options(**changes))


def as_head(second: Any) -> Weights:
    return {f"head.{name}": leaf for name, leaf in flat(second).items()}


def gap(m: FedFSLMIAdv, a: Tensor, b: Tensor) -> Tensor:
    """Eq. (14) for one task; of probabilities."""
    ratio = a.clamp_min(m.min_prob) / b.clamp_min(m.min_prob)
    return (a * ratio.log()).sum() / len(a)


def client_update(run: Run, start: Weights, k: int, reference: Weights | None = None) -> Weights:
    """ClientUpdate of the revised version's algorithm 1, or of the first version's 2."""
    m, drawn = run.method, run.drawn(k)
    fixed = start if reference is None else reference
    leaves = {n: leaf.detach().clone().requires_grad_() for n, leaf in start.items()}
    body = {n: leaf for n, leaf in leaves.items() if n.startswith("body")}
    first = {n: leaf for n, leaf in leaves.items() if n.startswith("head")}
    made = as_head(drawn.second)
    other = {n: leaf.detach().clone().requires_grad_() for n, leaf in made.items()}

    def mean_loss(step: Any, weight: float) -> Tensor:
        losses = []
        for e in step:
            both = [body | first, body | other]
            loss = sum(task_loss(w, e, m.inner) for w in both)
            if m.has_mi:
                loss = loss + sum(regularizer(m, fixed, w, e) for w in both)
            losses.append(
                loss + weight * gap(m, *(p(w, e, m.adv_predictions, m.inner) for w in both))
            )
        return sum(losses) / len(losses)  # type: ignore[return-value]

    heads, features = [*first.values(), *other.values()], list(body.values())
    by_heads, by_features = (
        torch_optimizer(m.optimizer, heads),
        torch_optimizer(m.optimizer, features),
    )

    def stage_1(step: Any) -> None:  # eq. (15)
        grads = torch.autograd.grad(mean_loss(step, -m.eta), heads)
        for leaf, grad in zip(heads, grads, strict=True):
            leaf.grad = grad
        by_heads.step()

    def stage_2(step: Any) -> None:  # eq. (16)
        grads = torch.autograd.grad(mean_loss(step, m.lambda_adv), features)
        for leaf, grad in zip(features, grads, strict=True):
            leaf.grad = grad
        by_features.step()

    steps = drawn.local_episodes.steps
    for chunk in [[s] for s in steps] if m.mode != "v1" else [steps]:
        for stage in (stage_1, stage_2):
            for step in chunk:
                stage(step)
    return {n: leaf.detach() for n, leaf in (body | first).items()}


# ------------------------------------------------------------------------- the two stages
@pytest.mark.parametrize(
    ("opt", "mode", "mi"), covering([SGD, ADAM], ["strict", "v1"], [True, False])
)
def test_two_rounds_equal_the_stages_written_out(
    opt: Optimizer, mode: Any, mi: bool, tmp_path: Path
) -> None:
    m = method(
        optimizer=opt, mode=mode, mi_in_stages=mi, eta=0.3, lambda_adv=0.4,
        gamma=2.0, local_steps=2, episodes_per_step=2,
    )  # fmt: skip
    run = Run(m, tmp_path, 2)
    assert_rounds(2, run, lambda w, k: client_update(run, w, k))
    assert run.metrics["discrepancy"] > 1e-3
    assert (run.metrics.get("mi", 0.0) > 1e-5) == mi


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "paper"},
        {"mode": "v1"},
        {"epsilon": 0.05},
        *slow({"mode": "paper", "epsilon": 0.05}),
        {"predictions": "unadapted_query"},
        {"adv_predictions": "unadapted_query"},
        {"min_prob": 0.3},
        *slow(
            {"inner": replace(INNER, order="first")},
            {"inner": replace(INNER, order="second", adapts="head")},
            {"inner": replace(INNER, order="first", adapts="head")},
            {"inner": replace(INNER, adapts="head"), "predictions": "unadapted_query"},
        ),
    ],
    ids=str,
)
def test_a_round_with_other_options_equals_the_stages_too(changes: Any, tmp_path: Path) -> None:
    run = Run(method(eta=0.3, lambda_adv=0.4, gamma=2.0, **changes), tmp_path, 1)
    assert_rounds(1, run, lambda w, k: client_update(run, w, k))


@pytest.mark.parametrize("weigh_by", [*slow("episodes"), "examples"])
def test_the_others_are_the_reference_here_too(weigh_by: Any, tmp_path: Path) -> None:
    run = Run(method(gamma=2.0, reference="exclusive", weigh_by=weigh_by), tmp_path, 2)
    if weigh_by == "examples":
        holds_less(run, 1)
    w = flat(run.server.w)
    run.round()
    sent = [client_update(run, w, k) for k in range(2)]
    w = mean_of(run, sent)
    run.round()
    then = [client_update(run, w, k, sent[1 - k]) for k in range(2)]
    close(run.server.w, mean_of(run, then))


@pytest.mark.parametrize("without", [{"gamma": 0.0}, {"mi_in_stages": False}], ids=str)
def test_without_mi_there_are_no_others(without: Any, tmp_path: Path) -> None:
    """One client may train, nothing is kept or sent for the reference, and the bits are equal."""
    told = {"predictions": "unadapted_query", **without}
    run = Run(method(reference="exclusive", **told), tmp_path / "a", 1)
    plain = Run(method(**without), tmp_path / "b", 1)
    assert tree.difference(run.round(), plain.round()) is None
    assert run.private(0) == {}


def test_with_two_equal_heads_only_the_tasks_are_left(tmp_path: Path) -> None:
    """The heads stay equal, their discrepancy and its gradient zero, and the features' steps are
    twice as long as those of turns with one head."""
    run = Run(method(gamma=0.0, eta=9.0, lambda_adv=9.0, optimizer=SGD), tmp_path, 1)
    run.t, w = 1, run.server.w
    start, drawn = flat(w), run.drawn(0)
    reply = run.method.train({"w": w, "stats": {}}, {}, drawn._replace(second=w["head"]))
    w = {n: leaf.clone().requires_grad_() for n, leaf in start.items()}
    parts = [[leaf for n, leaf in w.items() if n.startswith(s)] for s in ("head", "body")]
    by = [torch_optimizer(SGD, part) for part in parts]
    for step in drawn.local_episodes.steps:
        for part, optimizer, times in zip(parts, by, (1, 2), strict=True):
            for leaf, grad in zip(
                part, torch.autograd.grad(task_loss(w, step[0]), part), strict=True
            ):
                leaf.grad = times * grad
            optimizer.step()
    close(reply.up["w"], {n: leaf.detach() - start[n] for n, leaf in w.items()})
    assert abs(float(reply.metrics["discrepancy"])) < 1e-12


def test_without_weights_the_second_head_is_a_second_task_and_no_more(tmp_path: Path) -> None:
    run = Run(method(gamma=0.0, eta=0.0, lambda_adv=0.0), tmp_path, 1)
    assert_rounds(1, run, lambda w, k: client_update(run, w, k))


@pytest.mark.parametrize("stage", [1, 2])
def test_the_gradients_of_the_stages_equal_finite_differences(
    stage: Literal[1, 2], tmp_path: Path
) -> None:
    m = method(eta=0.3, lambda_adv=0.4, gamma=2.0, mode="v1", mi_in_stages=True)
    run = Run(m, tmp_path, 1)
    (e, seed), reference = run.episode(), run.server.w
    w = beside(reference, 0.05)
    heads, body = {"first": w["head"], "second": run.drawn(0).second}, w["body"]

    fixed, moving = (body, heads) if stage == 1 else (heads, body)

    def value(at: Any) -> Tensor:
        return m.objective(stage, ReferenceLogits(m, reference), fixed, at, {}, e, seed).loss

    assert_slopes(value, moving)


# ------------------------------------------------------------------------- what stays as it is
class Spy:
    """What each call of `local_sgd` started from and came to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, Any]] = []
        real = fedfsl_mi_adv.local_sgd

        def watched(episode_loss: Any, optimizer: Any, params: Any, *args: Any, **more: Any) -> Any:
            done = real(episode_loss, optimizer, params, *args, **more)
            self.calls.append((params, done.params))
            return done

        monkeypatch.setattr(fedfsl_mi_adv, "local_sgd", watched)


def visit(m: FedFSLMIAdv, folder: Path) -> tuple[Any, Any]:
    """Return the weights that client 0 starts from, and its reply."""
    run = Run(m, folder, 1)
    run.t = 1
    w = run.server.w
    return w, m.train({"w": w, "stats": {}}, run.private(0), run.drawn(0))


@pytest.mark.parametrize("mode", ["strict", "v1"])
def test_stage_1_leaves_the_features_and_stage_2_the_heads_to_the_bit(
    mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    before, reply = visit(method(mode=mode), tmp_path)
    stages = [spy.calls[0::2], spy.calls[1::2]]
    assert all(set(params) == {"first", "second"} for params, _ in stages[0])
    assert all(tree.difference(params, before["body"]) is None for params, _ in stages[1])
    assert tree.digest(spy.calls[0][0]["first"]) == tree.digest(before["head"])
    assert tree.digest(spy.calls[1][0]) == tree.digest(before["body"])  # after a whole stage 1
    for (_, ended), (begun, _) in zip(stages[0], stages[0][1:], strict=False):
        assert tree.digest(begun) == tree.digest(ended)  # stage 2 lay between them
    for (_, ended), (begun, _) in zip(stages[1], stages[1][1:], strict=False):
        assert tree.digest(begun) == tree.digest(ended)
    last = {"body": stages[1][-1][1], "head": stages[0][-1][1]["first"]}
    assert tree.digest(reply.up["w"]) == tree.digest(tree.sub(last, before))


def test_the_second_head_is_not_in_the_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    w, reply = visit(method(), tmp_path)
    assert reply.up.keys() == {"w", "stats"}
    assert tree.difference(w, reply.up["w"]) is None
    second = spy.calls[-2][1]["second"]
    changes = [tree.sub(second, spy.calls[0][0]["second"]), tree.sub(second, w["head"])]
    for hidden in (second, *changes):
        for leaf in tree.leaves(hidden):
            assert not any(torch.equal(leaf, sent) for sent in tree.leaves(reply.up["w"]))
    assert reply.private == {}


def test_a_fresh_head_is_new_in_every_round_and_for_every_client(tmp_path: Path) -> None:
    run, seen = Run(method(), tmp_path, 2), set()
    for t in (1, 2):
        run.t = t
        seen |= {tree.digest(run.drawn(k).second) for k in range(2)}
    assert len(seen) == 4


def test_states_keep_their_form_so_that_a_run_can_be_resumed(tmp_path: Path) -> None:
    m = method(reference="exclusive", optimizer_state="keep")
    run = Run(m, tmp_path, 3)
    run.round([0, 2])
    assert tree.difference(m.init(Key(1)), run.server) is None
    for k in range(3):
        assert tree.difference(m.init_client(0, Key(1)), run.private(k)) is None


# ------------------------------------------------------------------------- bounds
def far() -> tuple[Tensor, Tensor]:
    one = torch.tensor([[40.0, 0.0, -40.0]], dtype=torch.float64)
    return one, -one


def test_the_floor_bounds_the_divergence_and_is_nothing_above_it() -> None:
    a, b = far()
    assert kl(a, b) > 70
    torch.testing.assert_close(
        floored_kl(a, b, 1e-4), torch.tensor(math.log(1e4), dtype=torch.float64)
    )
    c = torch.randn(5, 3, generator=Key(0).torch(), dtype=torch.float64)
    torch.testing.assert_close(floored_kl(c, -c, 1e-4), kl(c, -c), rtol=1e-12, atol=0)
    assert float(floored_kl(c, c, 0.3)) == 0


@pytest.mark.parametrize("longest", [0.05, 1e9])
def test_a_long_gradient_is_clip_grad_norm_and_a_short_one_keeps_its_bits(
    longest: float,
) -> None:
    grads = {"a": torch.tensor([3.0, 0.0]), "b": (torch.tensor([[4.0]]),)}
    found = clip_grad_norm(grads, longest)
    norm = torch.stack([g.square().sum() for g in tree.leaves(found)]).sum().sqrt()
    torch.testing.assert_close(float(norm), min(5.0, longest))
    assert (tree.digest(found) == tree.digest(grads)) == (longest > 5)
    zero = tree.zeros_like(grads)
    assert tree.digest(clip_grad_norm(zero, longest)) == tree.digest(zero)


def test_stage_1_alone_has_short_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With plain SGD of rate 1 a step is as long as its gradient."""
    spy = Spy(monkeypatch)
    _, reply = visit(
        method(max_grad_norm=0.01, optimizer=Optimizer("sgd", 1.0), local_steps=1), tmp_path
    )
    heads = tree.leaves(tree.sub(*reversed(spy.calls[0])))
    norm = torch.stack([h.square().sum() for h in heads]).sum().sqrt()
    torch.testing.assert_close(float(norm), 0.01, rtol=1e-6, atol=0)
    body = tree.leaves(reply.up["w"]["body"])
    assert float(torch.stack([b.square().sum() for b in body]).sum().sqrt()) > 0.02


# ------------------------------------------------------------------------- options
def test_the_mode_decides_what_is_not_said() -> None:
    found = [(m.clip, m.has_mi) for m in (method(mode=mode) for mode in ("strict", "paper", "v1"))]
    assert found == [("coef", True), ("log", True), ("none", False)]
    assert method(mode="v1", mi_in_stages=True).has_mi


@pytest.mark.parametrize("mode", ["strict", "v1"])
def test_the_reference_answers_each_episode_once(
    mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    plain = RegularizedMaml.reference_logits

    def counted(self: Any, reference: Any, stats: Any, episode: Any, *rest: Any) -> Any:
        asked.append(episode)
        return plain(self, reference, stats, episode, *rest)

    monkeypatch.setattr(RegularizedMaml, "reference_logits", counted)
    m = method(gamma=2.0, mode=mode, mi_in_stages=True, local_steps=3)
    visit(m, tmp_path)
    assert len(asked) == len({id(e) for e in asked}) == m.n_episodes


@pytest.mark.parametrize(
    ("mode", "reference", "looks"),
    [("v1", "global", 4), ("v1", "exclusive", 6), ("strict", "global", 5)],
)
def test_heads_share_what_the_reference_sees_of_an_episode_while_they_have_its_body(
    mode: Any, reference: Any, looks: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Support and query pass the reference, stage 1, which may share it, and 2.

    In turns by batch it does so in the first of two steps.
    """
    plain, seen = Maml.features, [0]

    def counted(self: Any, *args: Any) -> Any:
        seen[0] += 1
        return plain(self, *args)

    monkeypatch.setattr(Maml, "features", counted)
    heads_alone = replace(INNER, adapts="head", lr=0.1)
    m = method(
        model=Model(MLP((8, 7), dropout=0.3), LinearHead(3), (6, 6, 1), dtype="float64"),
        inner=heads_alone,
        gamma=2.0,
        reference=reference,
        mode=mode,
        mi_in_stages=True,
    )

    def train(name: str) -> tuple[str, int]:
        run = Run(m, tmp_path / name, 2)
        run.round()
        seen[0] = 0
        return tree.digest(run.round().w), seen[0]

    shared = train("shared")
    monkeypatch.setattr(nn_nearness, "SharedFeatures", lambda *_: None)
    alone = train("alone")
    assert shared[0] == alone[0]
    assert alone[1] == 6 * 2 * m.n_episodes
    assert shared[1] == looks * 2 * m.n_episodes
