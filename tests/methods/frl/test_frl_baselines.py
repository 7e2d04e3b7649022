"""What FRL is compared with: each against its own definition written out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from covering import slow
from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.learners.learner import EvalEpisode
from fedshot.learners.proto import Proto
from fedshot.methods.frl.client_share import EpisodeShare, shares_of
from fedshot.methods.frl.frl_fedavg import FRLFedAvg
from fedshot.methods.frl.frl_finetune import FRLFinetune
from fedshot.methods.frl.frl_frozen import FRLFrozen
from fedshot.methods.frl.frl_one_shot import FRLOneShot, set_aside, split_among
from fedshot.methods.frl.frl_personal import FRLPersonal
from fedshot.methods.frl.local_steps import fresh_head
from fedshot.nn.optim import Optimizer
from methods.frl.oracle import (
    CLASSES,
    CONV,
    FLAT,
    SGD,
    SPEC,
    K,
    Run,
    Weights,
    adapt,
    flat,
    gradient,
    head_loss,
    l_local,
    leaf,
    means,
    method,
    net,
)
from methods.frl.test_frl import close, group_exam

BASE = tuple(range(CLASSES))


def head_logits(w: Weights, x: Tensor) -> Tensor:
    return F.linear(net(w, x).flatten(1), w["head/weight"], w["head/bias"])


def rounds_of(theta: Any, eval_episode: EvalEpisode, rounds: int, lr: float) -> Weights:
    """FedAvg with a head, written out."""
    m = method(FLAT, variant="linear", inner_lr=lr)
    found, _ = adapt(m, flat(theta), shares_of(eval_episode), rounds, shrunk=False, refresh=False)
    return found


def test_fedavg_from_a_random_start_is_fedavg_written_out(tmp_path: Path) -> None:
    m = FRLFedAvg(FLAT, SPEC, test_rounds=2, inner_lr=0.2)
    run, episodic_test = Run(m, tmp_path), group_exam(FLAT)
    assert m.round(run.server, run.clients, run.key) == (run.server, {})
    for u, answer in enumerate(
        m.evaluate(run.server, run.clients, episodic_test.eval_episodes, Key(5))
    ):
        w = rounds_of(run.server.theta, episodic_test.eval_episodes[u], 2, 0.2)
        want = head_logits(w, episodic_test.eval_episodes[u].query_x).float()
        torch.testing.assert_close(answer.logits, want, rtol=1e-5, atol=1e-6)


def test_a_random_start_has_no_running_statistics(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="frl_fedavg never trains running statistics"):
        FRLFedAvg(replace(CONV, norm_policy="running"), SPEC)
    assert FLAT.norm_policy == "running"  # without batch norm there are none to train
    assert FRLFedAvg(FLAT, SPEC)


def test_fine_tuning_starts_from_the_prepared_encoder_and_a_fresh_head(tmp_path: Path) -> None:
    m = FRLFinetune(FLAT, SPEC, BASE, test_rounds=2, inner_lr=0.2)
    run, episodic_test = Run(m, tmp_path), group_exam(FLAT)
    answers = m.evaluate(run.server, run.clients, episodic_test.eval_episodes, Key(5))
    heads = []
    for u, answer in enumerate(answers):
        head = fresh_head(FLAT, run.server.theta["body"], Key(5).at("question", u))
        heads.append(tree.digest(head))
        w = rounds_of(
            {"body": run.server.theta["body"], "head": head}, episodic_test.eval_episodes[u], 2, 0.2
        )
        want = head_logits(w, episodic_test.eval_episodes[u].query_x).float()
        torch.testing.assert_close(answer.logits, want, rtol=1e-5, atol=1e-6)
    assert len(set(heads)) == len(heads)


def prepared(m: Any, run: Run) -> tuple[Weights, Weights]:
    """The encoder and classifier of a run, and the gradient on all batches of its next round."""
    w = leaf(flat({"body": run.server.theta["body"], "head": run.server.theta["classifier"]}))
    losses = []
    for k in range(K):
        key = run.key.at("work", "prepare", "client", k)
        ((batch,),) = m.draw(run.host.data(k), key).steps
        losses.append(head_loss(w, batch.x, batch.y))
    return w, gradient(torch.stack(losses).mean(), w)


def renamed(theta: Any) -> Any:
    return {"body": theta["body"], "head": theta["classifier"]}


@pytest.mark.parametrize("by", ["server", "clients"])
def test_the_preparation_is_a_step_on_all_batches(by: Any, tmp_path: Path) -> None:
    """For SGD it does not matter who takes it; and it is a tenth after so many rounds."""
    for decay_round, factor in ((20000, 1.0), (5, 0.1)):
        m = FRLFinetune(
            FLAT, SPEC, BASE, batch=9, optimizer=SGD, prepare_by=by, decay_round=decay_round
        )
        run = Run(m, tmp_path / str(decay_round))
        run.server = run.server._replace(exchanges=torch.tensor(5))
        w, step = prepared(m, run)
        after = run.play()
        want = {name: value.detach() - factor * SGD.lr * step[name] for name, value in w.items()}
        close(renamed(after.theta), want)
        assert int(after.exchanges) == 6


def test_the_preparations_adam_remembers_the_rounds_before(tmp_path: Path) -> None:
    m = FRLFinetune(FLAT, SPEC, BASE, batch=9, optimizer=Optimizer("adam", 0.01))
    run = Run(m, tmp_path)
    w = leaf(flat(renamed(run.server.theta)))
    adam = torch.optim.Adam(list(w.values()), lr=0.01)
    for t in range(3):
        run.key = Key(3).at("round", t)
        _, g = prepared(m, run)
        for name, value in w.items():
            value.grad = g[name]
        adam.step()
        run.server = run.play()
        close(renamed(run.server.theta), {name: value.detach() for name, value in w.items()})


def test_clients_may_take_steps_of_their_own_in_the_preparation(tmp_path: Path) -> None:
    """Federated averaging of fresh optimisers: one step of Adam is a sign."""
    m = FRLFinetune(
        FLAT, SPEC, BASE, batch=9, prepare_by="clients", optimizer=Optimizer("adam", 0.01)
    )
    run = Run(m, tmp_path)
    want = flat(renamed(run.server.theta))
    for k in range(K):
        w = leaf(flat(renamed(run.server.theta)))
        ((batch,),) = m.draw(run.host.data(k), run.key.at("work", "prepare", "client", k)).steps
        g = gradient(head_loss(w, batch.x, batch.y), w)
        for name, step in g.items():
            want[name] -= 0.01 * step / (step.abs() + 1e-8) / K
    close(renamed(run.play().theta), want)
    with pytest.raises(ConfigError, match="prepare_steps is 2, but with prepare_by 'server'"):
        replace(m, prepare_by="server", prepare_steps=2)
    with pytest.raises(ConfigError, match="prepare_by is 'nobody'"):
        replace(m, prepare_by="nobody")  # type: ignore[arg-type]


def test_what_shares_a_preparation_has_the_same_encoder(tmp_path: Path) -> None:
    digests = set()
    for i, cls in enumerate((FRLFinetune, FRLFrozen, FRLOneShot)):
        run = Run(cls(CONV, SPEC, BASE, batch=6), tmp_path / str(i))  # type: ignore[operator]
        digests.add(tree.digest(run.play()._asdict()))
    assert len(digests) == 1


def test_the_frozen_control_does_not_care_who_holds_what(tmp_path: Path) -> None:
    model = replace(CONV, norm_policy="running")
    m = FRLFrozen(model, SPEC, BASE)
    run, episodic_test = Run(m, tmp_path), group_exam(model)
    eval_episode = episodic_test.eval_episodes[0]
    assert eval_episode.held
    other = eval_episode._replace(
        held=eval_episode.held._replace(
            support=eval_episode.held.support[torch.randperm(18, generator=Key(0).torch())]
        )
    )
    pooled = eval_episode._replace(held=())
    found = m.evaluate(run.server, run.clients, [eval_episode, other, pooled], Key(5))
    for answer in found[1:]:
        torch.testing.assert_close(answer.logits, found[0].logits, rtol=1e-5, atol=1e-6)
    flat_model = FRLFrozen(FLAT, SPEC, BASE)
    run = Run(flat_model, tmp_path / "flat")
    eval_episode = group_exam(FLAT).eval_episodes[0]
    (answer,) = flat_model.evaluate(run.server, run.clients, [eval_episode], Key(5))
    want = Proto(FLAT).answer(
        {"body": run.server.theta["body"]}, {}, eval_episode._replace(held=())
    )
    torch.testing.assert_close(answer.logits, want.float(), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------- one-shot
def one_shot(**options: Any) -> FRLOneShot:
    given: dict[str, Any] = {"inner_lr": 0.2, "test_rounds": 1, "candidates": 0, "keep": 2}
    return FRLOneShot(FLAT, SPEC, BASE, **(given | options))


def candidates_of(m: FRLOneShot, theta: Weights, shares: list[EpisodeShare]) -> list[Any]:
    """Every candidate's model, held-out accuracy, and number of examples, written out."""
    found = []
    for s in shares:
        aside = set_aside(s.support_y, m.holdout)
        w = leaf(theta)
        x, y = s.support_x, s.support_y
        step = gradient(head_loss(w, x[~aside], y[~aside]), w)
        new = {name: value.detach() - m.inner_lr * step[name] for name, value in w.items()}
        hits = head_logits(new, x[aside]).argmax(1) == y[aside]
        score = float(hits.double().mean()) if len(hits) else 0.0
        found.append((new, score, int((~aside).sum()), set(y.tolist())))
    return found


@pytest.mark.parametrize("last", ["average", "ensemble"])
def test_the_best_candidates_are_kept_and_joined(last: Any, tmp_path: Path) -> None:
    m = one_shot(last=last)
    run, episodic_test = Run(m, tmp_path), group_exam(FLAT, by="iid")
    for u, answer in enumerate(
        m.evaluate(run.server, run.clients, episodic_test.eval_episodes, Key(5))
    ):
        eval_episode = episodic_test.eval_episodes[u]
        head = fresh_head(FLAT, run.server.theta["body"], Key(5).at("question", u))
        theta = flat({"body": run.server.theta["body"], "head": head})
        every = candidates_of(m, theta, shares_of(eval_episode))
        best = sorted(range(K), key=lambda k, e=every: (-e[k][1], k))[:2]
        n = [every[k][2] for k in best]
        if last == "average":
            w = {
                name: torch.stack(
                    [every[k][0][name] * size / sum(n) for k, size in zip(best, n, strict=True)]
                ).sum(0)
                for name in theta
            }
            p = head_logits(w, eval_episode.query_x).softmax(-1)
        else:
            each = [head_logits(every[k][0], eval_episode.query_x).softmax(-1) for k in best]
            p = torch.stack(each).mean(0)
        torch.testing.assert_close(answer.logits.exp(), p.float(), rtol=1e-4, atol=1e-6)


def test_all_candidates_kept_with_nothing_unseen_are_fedavg_on_the_rest(tmp_path: Path) -> None:
    m = one_shot(keep=K)
    run, episodic_test = Run(m, tmp_path), group_exam(FLAT, by="iid")
    body = run.server.theta["body"]
    theta = flat({"body": body, "head": fresh_head(FLAT, body, Key(5).at("question", 0))})
    every = candidates_of(m, theta, shares_of(episodic_test.eval_episodes[0]))
    total = sum(n for _, _, n, _ in every)
    w = {name: torch.stack([new[name] * n / total for new, _, n, _ in every]).sum(0)
         for name in theta}  # fmt: skip
    answer = m.evaluate(run.server, run.clients, episodic_test.eval_episodes, Key(5))[0]
    want = head_logits(w, episodic_test.eval_episodes[0].query_x).log_softmax(-1).float()
    torch.testing.assert_close(answer.logits, want, rtol=1e-4, atol=1e-5)


def test_a_class_that_no_kept_client_holds_cannot_be_answered(tmp_path: Path) -> None:
    m = one_shot(keep=1)
    run, episodic_test = Run(m, tmp_path), group_exam(FLAT)
    unseen = 0
    for u, answer in enumerate(
        m.evaluate(run.server, run.clients, episodic_test.eval_episodes, Key(5))
    ):
        shares = shares_of(episodic_test.eval_episodes[u])
        head = fresh_head(FLAT, run.server.theta["body"], Key(5).at("question", u))
        every = candidates_of(m, flat({"body": run.server.theta["body"], "head": head}), shares)
        best = min(range(K), key=lambda k, e=every: (-e[k][1], k))
        for c in range(3):
            hidden = bool((answer.logits[:, c] == -1e9).all())
            assert hidden == (c not in every[best][3])
            unseen += hidden
    assert unseen


def test_a_class_that_any_round_has_seen_can_be_answered(tmp_path: Path) -> None:
    m = one_shot(keep=1, test_rounds=2, inner_lr=1.0)
    run, episodic_test = Run(m, tmp_path), group_exam(FLAT)
    more = 0
    for u, answer in enumerate(
        m.evaluate(run.server, run.clients, episodic_test.eval_episodes, Key(5))
    ):
        head = fresh_head(FLAT, run.server.theta["body"], Key(5).at("question", u))
        theta, seen = flat({"body": run.server.theta["body"], "head": head}), []
        for _ in range(2):
            every = candidates_of(m, theta, shares_of(episodic_test.eval_episodes[u]))
            best = min(range(K), key=lambda k, e=every: (-e[k][1], k))
            theta = every[best][0]
            seen.append(every[best][3])
        for c in range(3):
            hidden = bool((answer.logits[:, c] == -1e9).all())
            assert hidden == (c not in seen[0] | seen[1])
        more += bool(seen[0] - seen[1])
    assert more
    none = replace(m, test_rounds=0).evaluate(
        run.server, run.clients, episodic_test.eval_episodes, Key(5)
    )
    assert all(bool((answer.logits > -1e9).all()) for answer in none)


def test_spare_clients_are_candidates_and_nobody_elses(tmp_path: Path) -> None:
    plain, more = group_exam(FLAT, by="iid", spare=K), one_shot(keep=2 * K)
    run = Run(more, tmp_path)
    eval_episode = plain.eval_episodes[0]
    assert eval_episode.held
    with_spare = more.evaluate(run.server, run.clients, [eval_episode], Key(5))[0].logits
    without = eval_episode._replace(
        held=eval_episode.held._replace(
            spare=eval_episode.held.spare[:0],
            spare_x=eval_episode.held.spare_x[:0],
            spare_y=eval_episode.held.spare_y[:0],
        )
    )
    alone = more.evaluate(run.server, run.clients, [without], Key(5))[0].logits
    assert not torch.equal(with_spare, alone)
    other = FRLFinetune(FLAT, SPEC, BASE)
    both = [other.evaluate(run.server, run.clients, [q], Key(5))[0].logits
            for q in (eval_episode, without)]  # fmt: skip
    assert torch.equal(*both)


def test_supports_are_split_among_more_candidates() -> None:
    eval_episode = group_exam(FLAT, by="iid").eval_episodes[0]
    shares = shares_of(eval_episode)
    split = split_among(shares, 2 * K)
    assert len(split) == 2 * K
    for i, share in enumerate(shares):
        pair = split[2 * i : 2 * i + 2]
        assert sorted(torch.cat([s.support_y for s in pair]).tolist()) == sorted(
            share.support_y.tolist()
        )
    assert split_among(shares, 0) == shares
    with pytest.raises(ConfigError, match="cannot be split evenly"):
        split_among(shares, 2 * K + 1)


def test_some_of_each_class_are_set_aside() -> None:
    y = torch.tensor([0, 1, 0, 0, 1, 2, 0])
    assert set_aside(y, 0.5).tolist() == [False, False, False, True, True, False, True]
    assert not set_aside(torch.tensor([0, 1, 2]), 0.9).any()


def test_no_more_are_kept_than_are_tried() -> None:
    with pytest.raises(ConfigError, match="keep is 5 and candidates is 4"):
        one_shot(keep=5, candidates=4)


# ------------------------------------------------------------------------- personalised
@pytest.mark.parametrize("variant", ["linear", *slow("proto")])
def test_personal_training_is_its_definition(variant: Any, tmp_path: Path) -> None:
    m = FRLPersonal(CONV, SPEC, BASE, resampled=True, variant=variant, inner_lr=0.02, optimizer=SGD)
    run = Run(m, tmp_path, "iid")
    phi, shares = flat(run.server.phi), [
        m.draw(run.host.data(k), run.key.at("step", 0, "work", "meta_gradient", "client", k))
        for k in range(K)
    ]  # fmt: skip
    g = {name: torch.zeros_like(value) for name, value in phi.items()}
    for s in shares:
        w = leaf(phi)
        if variant == "linear":
            loss = head_loss(w, s.support_x, s.support_y)
        else:
            f = net(w, s.support_x).mean(-1)
            loss = l_local(f, s.support_y, means(f, s.support_y))
        step = gradient(loss, w)
        w = leaf({name: value - 0.02 * step[name] for name, value in w.items()})
        if variant == "linear":
            loss = head_loss(w, s.query_x, s.query_y)
        else:
            own = means(net(w, s.support_x).mean(-1), s.support_y)
            loss = l_local(net(w, s.query_x).mean(-1), s.query_y, own)
        mine = gradient(loss, w)
        g = {name: value + mine[name] / K for name, value in g.items()}
    want = {name: value - SGD.lr * g[name] for name, value in phi.items()}
    close(run.play().phi, want)
    episodic_test = group_exam(CONV)
    answers = m.evaluate(run.server, run.clients, episodic_test.eval_episodes, Key(5))
    like = method(variant=variant, inner_rounds=3)
    same = like.evaluate(
        like.init(Key(2))._replace(phi=run.server.phi),
        run.clients,
        episodic_test.eval_episodes,
        Key(5),
    )
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(answers, same, strict=True))


def test_personal_steps_slow_down_after_so_many_rounds(tmp_path: Path) -> None:
    m = FRLPersonal(FLAT, SPEC, BASE, resampled=True, optimizer=SGD, decay_round=5)
    early, late = Run(m, tmp_path / "a"), Run(m, tmp_path / "b")
    late.server = late.server._replace(exchanges=torch.tensor(5))
    moved = [tree.sub(run.play().phi, run.server.phi) for run in (early, late)]
    close(moved[1], {k: 0.1 * v for k, v in flat(moved[0]).items()}, 1e-6)
