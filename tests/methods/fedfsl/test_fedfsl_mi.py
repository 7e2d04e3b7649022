"""FedFSL-MI against its objective written out: the divergence, its clips, its references."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from covering import covering, pairwise
from fedshot.config.load import Config
from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.learners.maml import InnerLoop
from fedshot.methods.fedfsl.fedfsl_mi import FedFSLMI
from fedshot.methods.fedfsl.fedfsl_mi_adv import FedFSLMIAdv
from fedshot.methods.fedfsl.fedfsl_naive import FedFSLNaive
from fedshot.methods.fedfsl.leave_one_out import (
    first_pool,
    first_share,
    leave_one_out,
    next_pool,
    next_share,
)
from fedshot.methods.fedfsl.predictions import Predictions
from fedshot.nn.gradients import value_and_grad
from fedshot.nn.heads import LinearHead
from fedshot.nn.losses import clipped_kl, kl
from fedshot.nn.models.backbones import Conv4
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.runs.prepare import PreparedRun
from methods.fedfsl.oracle import (
    ADAM,
    SGD,
    Run,
    Weights,
    assert_objective,
    assert_rounds,
    assert_same_bits,
    average,
    close,
    flat,
    holds_less,
    local_training,
    mean_of,
    options,
    regularizer,
    task_loss,
)

CLIPS = ("none", "log", "coef")
MODES = ("v1", "paper", "strict")  # which have these clips
PREDICTIONS = get_args(Predictions)
EPS = 0.2


def method(**changes: Any) -> FedFSLMI:
    return FedFSLMI(**options(**changes))


def client_update(run: Run, start: Weights, k: int, reference: Weights) -> Weights:
    """Eq. (12) of the revised version, eq. (13) of the first."""
    m = run.method

    def loss(w: Weights, e: Any) -> Tensor:
        return task_loss(w, e) + regularizer(m, reference, w, e)

    return local_training(start, run.drawn(k).steps, m.optimizer, loss)


# ------------------------------------------------------------------------- the objective
@pytest.mark.parametrize(("opt", "mode"), covering([SGD, ADAM], MODES))
def test_two_rounds_equal_the_objective_written_out(
    opt: Optimizer, mode: str, tmp_path: Path
) -> None:
    m = method(gamma=2.0, mode=mode, epsilon=0.05, optimizer=opt, episodes_per_step=2)
    run = Run(m, tmp_path, 3)
    assert_rounds(2, run, lambda w, k: client_update(run, w, k, w))
    assert run.metrics["mi"] > 1e-5


@pytest.mark.parametrize("kind", PREDICTIONS)
def test_predictions_are_taken_where_the_option_says(kind: Any, tmp_path: Path) -> None:
    run = Run(method(gamma=2.0, predictions=kind, local_steps=3), tmp_path, 1)
    assert_rounds(1, run, lambda w, k: client_update(run, w, k, w))


def test_predictions_differ_by_kind(tmp_path: Path) -> None:
    ends = {
        kind: tree.digest(Run(method(predictions=kind), tmp_path / kind, 1).round())
        for kind in PREDICTIONS
    }
    assert len(set(ends.values())) == 2


@pytest.mark.parametrize(("mode", "kind"), covering(["v1", "paper"], PREDICTIONS))
def test_the_gradient_equals_finite_differences(mode: Any, kind: Any, tmp_path: Path) -> None:
    """Through the inner steps of the client; "strict" has no gradient of a value, by design."""
    m = method(gamma=2.0, mode=mode, epsilon=0.9, predictions=kind)
    assert_objective(m, tmp_path, 0.02)


@pytest.mark.parametrize("mode", ["strict", "paper", "v1"])
def test_without_gamma_it_is_fedfsl_naive_to_the_bit(mode: Any, tmp_path: Path) -> None:
    naive = Run(FedFSLNaive(**options()), tmp_path / "naive", 3)
    mi = Run(method(gamma=0.0, mode=mode), tmp_path / "mi", 3)
    assert_same_bits(naive, mi)


def test_without_gamma_the_other_reference_changes_nothing_either(tmp_path: Path) -> None:
    naive = Run(FedFSLNaive(**options()), tmp_path / "naive", 3)
    mi = Run(method(gamma=0.0, reference="exclusive"), tmp_path / "mi", 3)
    assert_same_bits(naive, mi)


# ------------------------------------------------------------------------- at w_k = w^t
@pytest.mark.parametrize(
    ("mode", "kind", "order"), pairwise(MODES, PREDICTIONS, ["first", "second"])
)
def test_the_divergence_from_itself_is_zero_with_a_zero_gradient(
    mode: Any, kind: Any, order: Any, tmp_path: Path
) -> None:
    """With dropout, too: both models have the same masks."""
    model = Model(Conv4(width=4, dropout=0.2), LinearHead(3), (6, 6, 1), "support", "float64")
    inner = InnerLoop(lr=0.1, steps=2, order=order)
    m = method(model=model, inner=inner, gamma=50.0, mode=mode, predictions=kind)
    run = Run(m, tmp_path, 1)
    (e, seed), w = run.episode(), run.server.w

    def plain(v: Any) -> Any:
        return m.learner.episode_loss(v, {}, e, seed).loss, {}

    def whole(v: Any) -> Any:
        gradients = m.objective(w, v, {}, e, seed)
        return gradients.loss, gradients.extra["mi"]

    want_loss, _, want = value_and_grad(plain, w)
    loss, mi, grad = value_and_grad(whole, w)
    assert abs(float(mi)) < 1e-14
    torch.testing.assert_close(loss, want_loss, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_the_divergence_has_no_part_in_the_first_local_step(mode: Any, tmp_path: Path) -> None:
    def after(steps: int, kind: Any, **more: Any) -> Any:
        folder = tmp_path / f"{kind.name}{steps}"
        return Run(kind(**options(local_steps=steps) | more), folder, 2).round().w

    more = {"gamma": 50.0, "mode": mode}
    torch.testing.assert_close(
        after(1, FedFSLMI, **more), after(1, FedFSLNaive), rtol=1e-12, atol=1e-13
    )
    with pytest.raises(AssertionError):
        torch.testing.assert_close(after(2, FedFSLMI, **more), after(2, FedFSLNaive))


# ------------------------------------------------------------------------- the clips
def far() -> tuple[Tensor, Tensor]:
    """Logits whose ratios lie outside the band, on both sides of it."""
    one = torch.tensor([[3.0, 0.5, -3.0], [0.5, 4.0, 0.2]], dtype=torch.float64)
    return one, -one


def near() -> tuple[Tensor, Tensor]:
    rng = Key(0).torch()
    one = torch.randn(4, 3, generator=rng, dtype=torch.float64)
    return one, one + 0.03 * torch.randn(4, 3, generator=rng, dtype=torch.float64)


def gradient(p_logits: Tensor, q_logits: Tensor, clip: Any) -> Tensor:
    z = q_logits.clone().requires_grad_()
    return torch.autograd.grad(clipped_kl(p_logits, z, clip, EPS), z)[0]


def jacobian(q: Tensor) -> Tensor:
    return torch.diag(q) - q[:, None] * q[None, :]


def coefficients(p_logits: Tensor, q_logits: Tensor, clip: str) -> Tensor:
    """Return the derivative with respect to q: -p/q, clipped to the band or 0 outside it."""
    r = p_logits.softmax(-1) / q_logits.softmax(-1)
    if clip == "coef":
        return -r.clamp(1 - EPS, 1 + EPS)
    return -r * ((r > 1 - EPS) & (r < 1 + EPS)) if clip == "log" else -r


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("pair", [far, near], ids=["far", "near"])
def test_the_gradient_is_the_ratio_where_the_clip_leaves_it(clip: str, pair: Any) -> None:
    a, b = pair()
    q, c = b.softmax(-1), coefficients(a, b, clip)
    want = torch.stack([jacobian(q[i]) @ c[i] for i in range(len(q))]) / len(q)
    torch.testing.assert_close(gradient(a, b, clip), want, rtol=1e-12, atol=1e-15)


def test_log_dies_outside_the_band_and_coef_does_not() -> None:
    a, b = far()
    assert torch.equal(gradient(a, b, "log"), torch.zeros_like(b))
    assert bool((gradient(a, b, "coef").norm(dim=-1) > 1e-3).all())
    # coef pulls the right way: a small step lowers the divergence
    assert kl(a, b - 0.1 * gradient(a, b, "coef")) < kl(a, b)


def test_log_pushes_apart_where_some_classes_of_a_row_lie_outside_the_band() -> None:
    """The first ratio is 1.33, outside; the others are 0.86, inside."""
    p, q = (torch.tensor([row]).double().log() for row in ((0.4, 0.3, 0.3), (0.3, 0.35, 0.35)))
    wanted = {
        "none": (-0.100, 0.050, 0.050),
        "log": (0.180, -0.090, -0.090),
        "coef": (-0.072, 0.036, 0.036),
    }
    apart = {}
    for clip, want in wanted.items():
        torch.testing.assert_close(gradient(p, q, clip), torch.tensor([want]).double())
        z = q
        for _ in range(300):
            z = z - 0.05 * gradient(p, z, clip)
        apart[clip] = float(kl(p, z))
    assert max(apart["none"], apart["coef"]) < 1e-6
    assert apart["log"] > 2 * float(kl(p, q))


def test_log_is_warned_of_where_it_is_used() -> None:
    for told, chosen in (
        (True, {"mode": "paper"}),
        (False, {"mode": "paper", "gamma": 0.0}),
        (False, {}),
    ):
        assert bool(method(**chosen).traits.warnings) is told
    adv = {"mode": "paper", "mi_in_stages": False}
    assert not FedFSLMIAdv(**options(**adv)).traits.warnings
    assert FedFSLMIAdv(**options(mode="paper")).traits.warnings
    config = Config.of({"method": {"name": "fedfsl_mi", "mode": "paper"}})
    (text,) = (told for told in PreparedRun(config).notices() if "clips" in told)
    assert "away from the reference" in text


def test_through_the_softmax_coef_pulls_with_epsilon_at_most() -> None:
    """Probabilities sum to 1, so only what the ratio differs from 1 moves a logit."""
    for a, b in (far(), near()):
        for row, q in zip(gradient(a, b, "coef") * len(b), b.softmax(-1), strict=True):
            assert bool((row.abs() <= 2 * EPS * q * (1 - q) + 1e-15).all())


def test_inside_the_band_all_clips_are_the_divergence() -> None:
    a, b = near()
    for clip in ("log", "coef"):
        torch.testing.assert_close(clipped_kl(a, b, clip, EPS), kl(a, b), rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(
            gradient(a, b, clip), gradient(a, b, "none"), rtol=1e-10, atol=1e-14
        )


@pytest.mark.parametrize("clip", ["log", "coef"])
@pytest.mark.parametrize("pair", [far, near], ids=["far", "near"])
def test_clipped_gradients_obey_the_bound_of_the_lemma(clip: str, pair: Any) -> None:
    """At most (1 + eps) by q, class by class; through the softmax, that times its Jacobian."""
    a, b = pair()
    assert float(coefficients(a, b, clip).abs().max()) <= 1 + EPS
    for row, q in zip(gradient(a, b, clip) * len(b), b.softmax(-1), strict=True):
        bound = (1 + EPS) * len(q) ** 0.5 * float(torch.linalg.matrix_norm(jacobian(q), 2))
        assert float(row.norm()) <= bound
    assert float(coefficients(*far(), "none").abs().max()) > 100


def test_coef_reports_the_divergence() -> None:
    for a, b in (far(), near()):
        torch.testing.assert_close(clipped_kl(a, b, "coef", EPS), kl(a, b))


def test_the_first_argument_is_a_constant() -> None:
    a, b = near()
    a.requires_grad_()
    for clip in CLIPS:
        loss = clipped_kl(a, b.requires_grad_(), clip, EPS)  # type: ignore[arg-type]
        assert torch.autograd.grad(loss, a, allow_unused=True) == (None,)


def test_extreme_logits_give_finite_gradients() -> None:
    z = torch.tensor([[200.0, -200.0, 0.0]])
    for clip in CLIPS:
        assert bool(gradient(z, -z, clip).isfinite().all())


def test_the_mode_decides_the_clip() -> None:
    assert tuple(method(mode=mode).clip for mode in MODES) == CLIPS


# ------------------------------------------------------------------------- the other clients
def models(n: int) -> list[Any]:
    rng = Key(5).torch()
    return [{"a": torch.randn(3, 2, generator=rng, dtype=torch.float64)} for _ in range(n)]


def pooled(w: list[Any], weights: list[int]) -> tuple[Any, Any, list[Any]]:
    """Return (mean, pool, shares) of one round."""
    pool = first_pool("exclusive")
    shares = [next_share(first_share(m), m, b, pool) for m, b in zip(w, weights, strict=True)]
    total = sum(weights)
    mean = {"a": sum(b * m["a"] for m, b in zip(w, weights, strict=True)) / total}
    return mean, next_pool(pool, total), shares


def test_it_is_the_weighted_mean_of_the_others_and_the_sums_add_up() -> None:
    w, b = models(4), [1, 2, 3, 10]
    mean, pool, shares = pooled(w, b)
    found = [leave_one_out(mean, pool, share)["a"] for share in shares]
    for k in range(4):  # eq. (11) of the first version
        rest = [c for c in range(4) if c != k]
        want = sum(b[c] * w[c]["a"] for c in rest) / sum(b[c] for c in rest)
        torch.testing.assert_close(found[k], want, rtol=1e-13, atol=1e-14)
    left = sum((sum(b) - b[k]) * found[k] for k in range(4))
    torch.testing.assert_close(left, 3 * sum(b[k] * w[k]["a"] for k in range(4)))


def test_who_has_no_part_in_the_mean_has_the_mean_for_a_reference() -> None:
    w = models(3)
    mean, pool, shares = pooled(w, [1, 1, 1])
    assert leave_one_out(mean, pool, first_share(w[0])) is not mean
    assert torch.equal(leave_one_out(mean, pool, first_share(w[0]))["a"], mean["a"])
    later = next_pool(pool, 2)  # a round without client 0
    assert torch.equal(leave_one_out(mean, later, shares[0])["a"], mean["a"])
    mean, pool, shares = pooled(w[:1], [2])  # a round of its own alone
    assert torch.equal(leave_one_out(mean, pool, shares[0])["a"], mean["a"])


def test_float32_models_lose_nothing_by_it() -> None:
    w = [{"a": m["a"].float()} for m in models(2)]
    mean, pool, shares = pooled(w, [7, 7])
    found = leave_one_out({"a": mean["a"].float()}, pool, shares[0])["a"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, w[1]["a"], rtol=1e-6, atol=1e-6)


def test_three_rounds_with_the_others_as_reference_equal_the_equations(tmp_path: Path) -> None:
    """Client 2 misses the second round, so it has w^t in the third, and the others each other."""
    run = Run(method(gamma=2.0, reference="exclusive"), tmp_path, 3)
    w, last = flat(run.server.w), dict[int, Weights]()
    for to in ([0, 1, 2], [0, 1], [0, 1, 2]):
        run.round(to)
        new = {}
        for k in to:
            rest = [last[c] for c in last if c != k] if k in last else []
            new[k] = client_update(run, w, k, average(rest) if rest else w)
        w, last = average(list(new.values())), new
        close(run.server.w, w)


def test_the_other_is_the_reference_however_much_it_holds(tmp_path: Path) -> None:
    run = Run(method(gamma=2.0, reference="exclusive", weigh_by="examples"), tmp_path, 2)
    holds_less(run, 1)
    w = flat(run.server.w)
    run.round()
    sent = [client_update(run, w, k, w) for k in range(2)]
    w = mean_of(run, sent)
    close(run.server.w, w)
    run.round()
    close(run.server.w, mean_of(run, [client_update(run, w, k, sent[1 - k]) for k in range(2)]))


def test_the_others_cost_no_bytes_but_two_numbers(tmp_path: Path) -> None:
    global_, exclusive = (
        Run(method(reference=reference), tmp_path / reference, 3)
        for reference in ("global", "exclusive")
    )
    for run in (global_, exclusive):
        run.round()
    up, down = (
        [r.meter.total("train", way) for r in (global_, exclusive)] for way in ("up", "down")
    )
    assert up[0] == up[1]
    assert down[1] - down[0] == 3 * (8 + 8)


def test_one_client_has_no_others(tmp_path: Path) -> None:
    run = Run(method(reference="exclusive"), tmp_path, 1)
    with pytest.raises(ConfigError, match=r"there is only one client\. Set it to 'global', or use"):
        run.round()
