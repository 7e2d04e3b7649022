"""FedFSL-MI-Adv against its two stages written out, and what each stage leaves alone."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from covering import covering
from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.learners.learner import Maml
from fedshot.methods.fedfsl import fedfsl_mi_adv
from fedshot.methods.fedfsl import prediction_regularizer as nn_nearness
from fedshot.methods.fedfsl.fedfsl_mi_adv import FedFSLMIAdv
from fedshot.methods.fedfsl.prediction_regularizer import ReferenceLogits
from fedshot.nn.heads import LinearHead
from fedshot.nn.losses import floored_kl, jensen_shannon, kl, mean_gap
from fedshot.nn.models.backbones import MLP
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer, shortened
from oracles.fedfsl import (
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
    stepper,
    task_loss,
)


def method(**changes: Any) -> FedFSLMIAdv:
    return FedFSLMIAdv(**options(**changes))


def as_head(second: Any) -> Weights:
    return {f"head.{name}": leaf for name, leaf in flat(second).items()}


def gap(m: FedFSLMIAdv, a: Tensor, b: Tensor) -> Tensor:
    """Eq. (14) for one task, and what may stand in its place; of probabilities."""
    if m.discrepancy == "l1":
        return (a - b).abs().mean()
    if m.discrepancy == "js":
        mid = (a + b) / 2
        both = (F.kl_div(mid.log(), one, reduction="batchmean") for one in (a, b))
        return sum(both) / 2  # type: ignore[return-value]
    ratio = a.clamp_min(m.min_prob) / b.clamp_min(m.min_prob)
    return (a * ratio.log()).sum() / len(a)


def client_update(
    run: Run, start: Weights, k: int, second: Weights | None = None, reference: Any = None
) -> Weights:
    """ClientUpdate of the revised version's algorithm 1, or of the first version's 2."""
    m, drawn = run.method, run.drawn(k)
    fixed = start if reference is None else reference
    leaves = {n: leaf.detach().clone().requires_grad_() for n, leaf in start.items()}
    body = {n: leaf for n, leaf in leaves.items() if n.startswith("body")}
    first = {n: leaf for n, leaf in leaves.items() if n.startswith("head")}
    made = as_head(drawn.second) if second is None else second
    other = {n: leaf.detach().clone().requires_grad_() for n, leaf in made.items()}

    def mean_loss(step: Any, weight: float) -> Tensor:
        losses = []
        for e in step:
            both = [body | first, body | other]
            loss = sum(task_loss(w, e, m.inner) for w in both)
            if m.mi_counts:
                loss = loss + sum(regularizer(m, fixed, w, e) for w in both)
            losses.append(
                loss + weight * gap(m, *(p(w, e, m.adv_predictions, m.inner) for w in both))
            )
        return sum(losses) / len(losses)  # type: ignore[return-value]

    heads, features = [*first.values(), *other.values()], list(body.values())
    by_heads, by_features = stepper(m.optimizer, heads), stepper(m.optimizer, features)

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
    for chunk in [[s] for s in steps] if m.turns == "batch" else [steps]:
        for stage in (stage_1, stage_2):
            for step in chunk:
                stage(step)
    return {n: leaf.detach() for n, leaf in (body | first).items()}


# ------------------------------------------------------------------------- the two stages
@pytest.mark.parametrize(
    ("opt", "alternation", "mi"), covering([SGD, ADAM], ["batch", "round"], [True, False])
)
def test_two_rounds_equal_the_stages_written_out(
    opt: Optimizer, alternation: Any, mi: bool, tmp_path: Path
) -> None:
    m = method(
        optimizer=opt, alternation=alternation, mi_in_stages=mi, eta=0.3, lambda_adv=0.4,
        gamma=2.0, local_steps=3, episodes_per_step=2,
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
        {"mode": "paper", "epsilon": 0.05},
        {"discrepancy": "l1"},
        {"discrepancy": "js"},
        {"predictions": "unadapted_query"},
        {"adv_predictions": "unadapted_query"},
        {"adv_predictions": "adapted_both"},
        {"min_prob": 0.3},
        {"inner": replace(INNER, order="first")},
        {"inner": replace(INNER, order="second", adapts="head")},
        {"inner": replace(INNER, order="first", adapts="head"), "adv_predictions": "adapted_both"},
        {"inner": replace(INNER, adapts="head"), "predictions": "unadapted_query"},
    ],
    ids=str,
)
def test_a_round_with_other_options_equals_the_stages_too(changes: Any, tmp_path: Path) -> None:
    run = Run(method(eta=0.3, lambda_adv=0.4, gamma=2.0, **changes), tmp_path, 1)
    assert_rounds(1, run, lambda w, k: client_update(run, w, k))


@pytest.mark.parametrize("weigh_by", ["episodes", "examples"])
def test_the_others_are_the_reference_here_too(weigh_by: Any, tmp_path: Path) -> None:
    run = Run(method(gamma=2.0, reference="exclusive", weigh_by=weigh_by), tmp_path, 2)
    if weigh_by == "examples":
        holds_less(run, 1)
    w = flat(run.server.w)
    run.round()
    sent = [client_update(run, w, k) for k in range(2)]
    w = mean_of(run, sent)
    run.round()
    then = [client_update(run, w, k, None, sent[1 - k]) for k in range(2)]
    close(run.server.w, mean_of(run, then))


@pytest.mark.parametrize("without", [{"gamma": 0.0}, {"mi_in_stages": False}], ids=str)
def test_without_mi_there_are_no_others(without: Any, tmp_path: Path) -> None:
    """One client may train, nothing is kept or sent for the reference, and the bits are equal."""
    told = {"predictions": "adapted_both", **without}
    run = Run(method(reference="exclusive", **told), tmp_path / "a", 1)
    plain = Run(method(**without), tmp_path / "b", 1)
    assert tree.difference(run.round(), plain.round()) is None
    assert run.private(0) == {}


def test_with_two_equal_heads_only_the_tasks_are_left(tmp_path: Path) -> None:
    """The heads stay equal, their discrepancy and its gradient zero, and the features' steps are
    twice as long as those of turns with one head."""
    m = method(second_head="copy", noise=0.0, gamma=0.0, eta=9.0, lambda_adv=9.0, optimizer=SGD)
    run = Run(m, tmp_path, 1)
    start = flat(run.server.w)
    run.round()
    w = {n: leaf.clone().requires_grad_() for n, leaf in start.items()}
    parts = [[leaf for n, leaf in w.items() if n.startswith(s)] for s in ("head", "body")]
    by = [stepper(SGD, part) for part in parts]
    for step in run.drawn(0).local_episodes.steps:
        for part, optimizer, times in zip(parts, by, (1, 2), strict=True):
            for leaf, grad in zip(
                part, torch.autograd.grad(task_loss(w, step[0]), part), strict=True
            ):
                leaf.grad = times * grad
            optimizer.step()
    close(run.server.w, {n: leaf.detach() for n, leaf in w.items()})
    assert abs(run.metrics["discrepancy"]) < 1e-12


def test_without_weights_the_second_head_is_a_second_task_and_no_more(tmp_path: Path) -> None:
    run = Run(method(gamma=0.0, eta=0.0, lambda_adv=0.0), tmp_path, 1)
    assert_rounds(1, run, lambda w, k: client_update(run, w, k))
    ends = {
        kind: tree.digest(
            Run(
                method(gamma=0.0, eta=0.0, lambda_adv=0.0, discrepancy=kind), tmp_path / kind, 1
            ).round()
        )
        for kind in ("kl", "l1", "js")
    }
    assert len(set(ends.values())) == 1


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("kind", ["kl", "l1", "js"])
def test_the_gradients_of_the_stages_equal_finite_differences(
    stage: int, kind: Any, tmp_path: Path
) -> None:
    m = method(eta=0.3, lambda_adv=0.4, gamma=2.0, clip="none", discrepancy=kind)
    run = Run(m, tmp_path, 1)
    (e, seed), reference = run.episode(), run.server.w
    w = beside(reference, 0.05)
    heads, body = {"first": w["head"], "second": run.drawn(0).second}, w["body"]

    def value(at: Any) -> Tensor:
        told = ReferenceLogits(m.regularizer, m.learner, reference)
        if stage == 1:
            return m.stage_1(told, body, at, {}, e, seed).loss
        return m.stage_2(told, heads, at, {}, e, seed).loss

    assert_slopes(value, heads if stage == 1 else body)


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


@pytest.mark.parametrize("alternation", ["batch", "round"])
def test_stage_1_leaves_the_features_and_stage_2_the_heads_to_the_bit(
    alternation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    before, reply = visit(method(alternation=alternation), tmp_path)
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


@pytest.mark.parametrize("second_head", ["fresh", "persistent", "copy"])
def test_the_second_head_is_not_in_the_upload(
    second_head: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    w, reply = visit(method(second_head=second_head), tmp_path)
    assert reply.up.keys() == {"w", "stats"}
    assert tree.difference(w, reply.up["w"]) is None
    second = spy.calls[-2][1]["second"]
    changes = [tree.sub(second, spy.calls[0][0]["second"]), tree.sub(second, w["head"])]
    for hidden in (second, *changes):
        for leaf in tree.leaves(hidden):
            assert not any(torch.equal(leaf, sent) for sent in tree.leaves(reply.up["w"])), (
                second_head
            )
    if second_head == "persistent":
        assert tree.digest(reply.private["second"]) == tree.digest(second)
    else:
        assert reply.private == {}


def test_a_fresh_head_is_new_in_every_round_and_for_every_client(tmp_path: Path) -> None:
    run, seen = Run(method(), tmp_path, 2), set()
    for t in (1, 2):
        run.t = t
        seen |= {tree.digest(run.drawn(k).second) for k in range(2)}
    assert len(seen) == 4


def test_a_copied_head_is_near_the_first(tmp_path: Path) -> None:
    run = Run(method(second_head="copy", noise=0.01), tmp_path, 1)
    run.t = 1
    spread = torch.cat([leaf.flatten() for leaf in tree.leaves(run.drawn(0).second)]).std()
    assert 0.005 < float(spread) < 0.02


def test_a_persistent_head_goes_on_where_it_was(tmp_path: Path) -> None:
    run = Run(method(second_head="persistent"), tmp_path, 1)
    w = flat(run.server.w)
    kept = as_head(run.private(0)["second"])
    run.round()
    close(run.server.w, client_update(run, w, 0, kept))
    later = as_head(run.private(0)["second"])
    assert not torch.equal(later["head.weight"], kept["head.weight"])
    w = flat(run.server.w)
    run.round()
    close(run.server.w, client_update(run, w, 0, later))


def test_states_keep_their_form_so_that_a_run_can_be_resumed(tmp_path: Path) -> None:
    m = method(reference="exclusive", second_head="persistent")
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


def test_jensen_shannon_is_symmetric_and_at_most_log_2() -> None:
    a, b = far()
    torch.testing.assert_close(jensen_shannon(a, b), jensen_shannon(b, a))
    torch.testing.assert_close(float(jensen_shannon(a, b)), math.log(2))
    assert float(jensen_shannon(a, a)) == 0
    assert abs(float(mean_gap(a, b)) - 2 / 3) < 1e-12


@pytest.mark.parametrize("longest", [0.05, 1e9])
def test_a_long_gradient_is_shortened_and_a_short_one_keeps_its_bits(longest: float) -> None:
    grads = {"a": torch.tensor([3.0, 0.0]), "b": (torch.tensor([[4.0]]),)}
    found = shortened(grads, longest)
    norm = torch.stack([g.square().sum() for g in tree.leaves(found)]).sum().sqrt()
    torch.testing.assert_close(float(norm), min(5.0, longest))
    assert (tree.digest(found) == tree.digest(grads)) == (longest > 5)
    zero = tree.zeros_like(grads)
    assert tree.digest(shortened(zero, longest)) == tree.digest(zero)


def test_stage_1_alone_has_short_gradients(tmp_path: Path) -> None:
    """With plain SGD of rate 1 a step is as long as its gradient."""
    step = Optimizer("sgd", 1.0)
    m = method(max_grad_norm=0.01, optimizer=step, local_steps=1, second_head="persistent")
    run = Run(m, tmp_path, 1)
    w, kept = run.server.w, run.private(0)["second"]
    run.round()
    heads = tree.leaves(tree.sub(run.server.w["head"], w["head"]))
    heads += tree.leaves(tree.sub(run.private(0)["second"], kept))
    norm = torch.stack([h.square().sum() for h in heads]).sum().sqrt()
    torch.testing.assert_close(float(norm), 0.01, rtol=1e-6, atol=0)
    body = tree.leaves(tree.sub(run.server.w["body"], w["body"]))
    assert float(torch.stack([b.square().sum() for b in body]).sum().sqrt()) > 0.02


# ------------------------------------------------------------------------- options
def test_the_mode_decides_what_is_not_said() -> None:
    found = [
        (m.regularizer.clipping, m.turns, m.mi_counts)
        for m in (method(mode=mode) for mode in ("strict", "paper", "v1"))
    ]
    assert found == [("coef", "batch", True), ("log", "batch", True), ("none", "round", False)]
    m = method(mode="v1", mi_in_stages=True, alternation="batch")
    assert (m.turns, m.mi_counts) == ("batch", True)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"eta": -0.1}, r"eta is -0\.1; expected"),
        ({"lambda_adv": -1}, r"lambda_adv is -1; expected"),
        ({"min_prob": 0.0}, r"min_prob is 0\.0; expected a probability between 0 and 1"),
        ({"max_grad_norm": -1.0}, r"max_grad_norm is -1\.0; expected"),
        ({"discrepancy": "l2"}, r"discrepancy is 'l2'\. Did you mean 'l1'"),
        ({"second_head": "new"}, r"second_head is 'new'\."),
        ({"alternation": "rounds"}, r"alternation is 'rounds'\. Did you mean 'round'"),
        ({"adv_predictions": "query"}, r"adv_predictions is 'query'\."),
        ({"mode": "v2"}, r"mode is 'v2'\. Did you mean 'v1'"),
    ],
)
def test_impossible_options_are_refused(wrong: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        method(**wrong)


@pytest.mark.parametrize("alternation", ["batch", "round"])
def test_the_reference_answers_each_episode_once(
    alternation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    plain = nn_nearness.reference_logits

    def counted(learner: Any, params: Any, stats: Any, episode: Any, *rest: Any) -> Any:
        asked.append(episode)
        return plain(learner, params, stats, episode, *rest)

    monkeypatch.setattr(nn_nearness, "reference_logits", counted)
    m = method(gamma=2.0, alternation=alternation, local_steps=3)
    visit(m, tmp_path)
    assert len(asked) == len({id(e) for e in asked}) == m.n_episodes


@pytest.mark.parametrize(
    ("alternation", "reference", "looks"),
    [("round", "global", 6), ("round", "exclusive", 9), ("batch", "global", 7.5)],
)
def test_heads_share_what_the_reference_sees_of_an_episode_while_they_have_its_body(
    alternation: Any, reference: Any, looks: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Support, query and support again pass the reference, stage 1, which may share it, and 2.

    In turns by batch it does so in the first of two steps. Dropout tells the two supports apart.
    """
    plain, seen = Maml.look, [0]

    def counted(self: Any, *args: Any) -> Any:
        seen[0] += 1
        return plain(self, *args)

    monkeypatch.setattr(Maml, "look", counted)
    heads_alone = replace(INNER, adapts="head", lr=0.1)
    m = method(
        model=Model(MLP((8, 7), dropout=0.3), LinearHead(3), (6, 6, 1), dtype="float64"),
        inner=heads_alone,
        predictions="adapted_both",
        gamma=2.0,
        reference=reference,
        mode="v1",
        mi_in_stages=True,
        alternation=alternation,
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
    assert alone[1] == 9 * 2 * m.n_episodes
    assert shared[1] == looks * 2 * m.n_episodes
