"""`local_sgd` and FSL-local against torch.optim and against themselves, one step at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from covering import covering
from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.episode import ClientData, Episode
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.pooled import Iid
from fedshot.evaluation.episodic_test import EpisodicTest
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.private import PrivateStore
from fedshot.fleets.sequential import Sequential
from fedshot.learners.learner import EpisodeLoss
from fedshot.learners.local_training import LocalEpisodes, local_sgd, sample_episodes
from fedshot.learners.maml import InnerLoop, Maml
from fedshot.learners.proto import Proto
from fedshot.methods.base.fsl_local import FSLLocal
from fedshot.nn.gradients import value_and_grad
from fedshot.nn.heads import LinearHead
from fedshot.nn.models.backbones import MLP, Conv4
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.clients import Clients
from torch_optimizers import torch_optimizer

SPEC = EpisodeSpec(way=3, shot=2, query=3)
OPTIMIZERS = [
    Optimizer("sgd", 0.05),
    Optimizer("sgd", 0.05, momentum=0.9, weight_decay=0.1),
    Optimizer("adam", 0.01, weight_decay=0.1),
]


def dataset() -> Dataset:
    rng = np.random.Generator(np.random.Philox(0))
    x = rng.integers(0, 256, (5 * 20, 6, 6, 1), dtype=np.uint8)
    return Dataset("noise", x, np.repeat(np.arange(5), 20), tuple("abcde"))


def host(method: Any, folder: Path, clients: int = 2) -> Host:
    data = dataset()
    deal = Iid(clients).assign(data, np.arange(len(data)), Key(3), SPEC)
    return Host(method, data, deal.train, PrivateStore(folder), Key(4))


def local_episodes(steps: int, per_step: int, seed: int = 0) -> LocalEpisodes:
    data = dataset()
    whole = Iid(1).assign(data, np.arange(len(data)), Key(3), SPEC).train
    return sample_episodes(ClientData(data, whole[0]), SPEC, steps, per_step, Key(seed))


def model(backbone: Any = MLP((7,))) -> Model:  # noqa: B008
    return Model(backbone, LinearHead(3), (6, 6, 1), dtype="float64")


def close(a: Tree, b: Tree, tol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def proto_loss_by_torch(w: Tree, e: Episode) -> Tensor:
    """ProtoNet's loss with torch.cdist and boolean masks."""
    p = w["body"]["linear1"]
    s, q = (
        F.linear((x.permute(0, 3, 1, 2).double() / 127.5 - 1).flatten(1), p["weight"], p["bias"])
        for x in (e.support_x, e.query_x)
    )
    means = torch.stack([s.relu()[e.support_y == c].mean(0) for c in range(3)])
    return F.cross_entropy(-torch.cdist(q.relu(), means).square(), e.query_y)


@pytest.mark.parametrize("opt", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("per_step", [1, 3])
def test_local_steps_equal_those_of_torch_on_the_mean_loss(opt: Optimizer, per_step: int) -> None:
    learner, drawn = Proto(model()), local_episodes(4, per_step)
    params, stats = learner.init(Key(1))
    got = local_sgd(learner.episode_loss, opt, params, stats, drawn)

    theirs = tree.map(lambda t: t.clone().requires_grad_(), params)
    stepper = torch_optimizer(opt, tree.leaves(theirs))
    losses = []
    for step in drawn.steps:
        stepper.zero_grad()
        loss = torch.stack([proto_loss_by_torch(theirs, e) for e in step]).mean()
        loss.backward()
        stepper.step()
        losses.append(loss.detach())
    close(got.params, tree.detach(theirs), 1e-11)
    close(got.metrics["loss"], torch.stack(losses).mean(), 1e-11)
    assert int(got.state.step) == 4


@pytest.mark.parametrize(("opt", "which"), covering(OPTIMIZERS, ["proto", "maml"]))
def test_three_episodes_a_step_equal_one_step_on_their_mean_loss(
    opt: Optimizer, which: str
) -> None:
    learner: Any = Proto(model()) if which == "proto" else Maml(model(), InnerLoop(0.1, 2))
    params, stats = learner.init(Key(1))
    drawn = local_episodes(1, 3)
    got = local_sgd(learner.episode_loss, opt, params, stats, drawn)

    def mean(w: Tree) -> tuple[Tensor, None]:
        every = [learner.episode_loss(w, stats, e, drawn.seed).loss for e in drawn.steps[0]]
        return torch.stack(every).mean(), None

    _, _, grad = value_and_grad(mean, params)
    want, state = opt.update(grad, opt.init(params), params)
    close(got.params, want)
    close(got.state, state)


@pytest.mark.parametrize("opt", OPTIMIZERS, ids=str)
def test_a_visit_in_two_parts_that_hands_on_the_state_equals_one_visit(opt: Optimizer) -> None:
    learner, drawn = Proto(model()), local_episodes(6, 1)
    params, stats = learner.init(Key(1))
    whole = local_sgd(learner.episode_loss, opt, params, stats, drawn)
    first = local_sgd(
        learner.episode_loss, opt, params, stats, drawn._replace(steps=drawn.steps[:2])
    )
    rest = drawn._replace(steps=drawn.steps[2:])
    second = local_sgd(learner.episode_loss, opt, first.params, first.stats, rest, first.state)
    assert tree.digest((second.params, second.state)) == tree.digest((whole.params, whole.state))


def test_without_a_state_the_optimiser_starts_afresh() -> None:
    learner, drawn, opt = Proto(model()), local_episodes(3, 1), Optimizer("adam", 0.01)
    params, stats = learner.init(Key(1))
    first = local_sgd(learner.episode_loss, opt, params, stats, drawn)
    kept = local_sgd(learner.episode_loss, opt, first.params, first.stats, drawn, first.state)
    fresh = local_sgd(learner.episode_loss, opt, first.params, first.stats, drawn)
    zero = local_sgd(
        learner.episode_loss, opt, first.params, first.stats, drawn, opt.init(first.params)
    )
    assert tree.digest(fresh.params) == tree.digest(zero.params)
    assert int(fresh.state.step) == 3
    assert (tree.leaves(fresh.params)[1] - tree.leaves(kept.params)[1]).abs().max() > 1e-4


@pytest.mark.parametrize("which", ["proto", "maml"])
def test_every_episode_moves_the_running_statistics_once_in_turn(which: str) -> None:
    net = model(Conv4(4))
    learner: Any = Proto(net) if which == "proto" else Maml(net, InnerLoop(0.1, 2))
    params, stats = learner.init(Key(1))
    drawn = local_episodes(1, 3)
    got = local_sgd(learner.episode_loss, Optimizer("sgd", 0.1), params, stats, drawn)
    want = stats
    for e in drawn.steps[0]:  # all from the parameters before the step
        want = tree.detach(learner.episode_loss(params, want, e, drawn.seed).stats)
    close(got.stats, want)
    assert got.stats["norm1"].keys() == {"mean", "var"}


@pytest.mark.parametrize("which", ["proto", "maml"])
def test_nothing_that_comes_back_holds_a_graph_and_nothing_given_is_changed(which: str) -> None:
    net = model(Conv4(4))
    learner: Any = Proto(net) if which == "proto" else Maml(net, InnerLoop(0.1, 2))
    params, stats = learner.init(Key(1))
    state = Optimizer().init(params)
    drawn = local_episodes(2, 2)
    before = tree.digest((params, stats, state, drawn))
    got = local_sgd(learner.episode_loss, Optimizer(), params, stats, drawn, state)
    assert tree.digest((params, stats, state, drawn)) == before
    assert not any(t.requires_grad for t in tree.leaves((params, stats, state)))
    back = (got.params, got.stats, got.state, dict(got.metrics))
    assert not any(t.requires_grad or t.grad_fn for t in tree.leaves(back))


def test_every_episode_gets_a_seed_of_its_own_that_the_visit_decides() -> None:
    def seeds(drawn: LocalEpisodes) -> list[int]:
        seen = []

        def episode_loss(w: Tree, stats: Tree, e: Episode, seed: Tensor) -> EpisodeLoss:
            seen.append(int(seed))
            return EpisodeLoss(w.square().sum(), stats, torch.tensor(0.0))

        local_sgd(episode_loss, Optimizer(), torch.ones(2), {}, drawn)
        return seen

    first, again, other = (
        seeds(local_episodes(3, 2)),
        seeds(local_episodes(3, 2)),
        seeds(local_episodes(3, 2, seed=1)),
    )
    assert len(set(first)) == 6
    assert first == again
    assert not set(first) & set(other)


def test_metrics_are_means_over_all_episodes() -> None:
    values = iter([1.0, 2.0, 3.0, 6.0])

    def episode_loss(w: Tree, stats: Tree, e: Episode, seed: Tensor) -> EpisodeLoss:
        v = next(values)
        return EpisodeLoss(0.0 * w.sum() + v, stats, torch.tensor(v / 10))

    got = local_sgd(episode_loss, Optimizer(), torch.ones(2), {}, local_episodes(2, 2))
    assert got.metrics["loss"] == 3.0
    assert float(got.metrics["accuracy"]) == pytest.approx(0.3, rel=1e-6)


# FSL-local


def local_method(which: str, **changes: Any) -> FSLLocal:
    defaults: dict[str, Any] = {
        "model": model(Conv4(4)),
        "episode": SPEC,
        "learner_name": which,
        "inner": InnerLoop(0.1, 2, 2),
        "local_steps": 2,
        "episodes_per_step": 2,
        "optimizer": Optimizer("adam", 0.01),
    }
    return FSLLocal(**(defaults | changes))


@pytest.mark.parametrize("which", ["proto", "maml"])
def test_a_local_client_trains_as_if_it_were_alone_and_keeps_its_optimiser(
    which: str, tmp_path: Path
) -> None:
    method = local_method(which)
    h = host(method, tmp_path)
    fleet = Guard(Sequential(h))
    server = method.init(Key(9))
    alone = {}
    for k in (0, 1):
        first = method.init_client(k, Key(4).at("client", k))
        alone[k] = (first["theta"], first["stats"], first["optimizer"])
    for t in (1, 2, 3):
        key = Key(9).at("round", t)
        server, metrics = method.round(server, Clients(fleet, [0, 1], round=t), key)
        losses = []
        for k, (theta, stats, state) in alone.items():
            drawn = method.draw(h.data(k), key.at("work", "train", "client", k))
            got = local_sgd(
                method.learner.episode_loss, method.optimizer, theta, stats, drawn, state
            )
            alone[k] = (got.params, got.stats, got.state)
            losses.append(float(got.metrics["loss"]))
        assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-12)
    assert server == {}
    for k, want in alone.items():
        kept = h.private(k, (3, 0))
        got_k = (kept["theta"], kept["stats"], kept["optimizer"])
        assert tree.digest(got_k) == tree.digest(want)
        assert int(kept["optimizer"].step) == 6
    assert tree.digest(alone[0]) != tree.digest(alone[1])


def test_a_local_prototype_client_equals_a_loop_of_torch(tmp_path: Path) -> None:
    method = local_method("proto", model=model(), optimizer=Optimizer("adam", 0.01, 0.0, 0.1))
    h = host(method, tmp_path)
    theirs = method.init_client(0, Key(4).at("client", 0))["theta"]
    theirs = tree.map(lambda t: t.clone().requires_grad_(), theirs)
    adam = torch_optimizer(method.optimizer, tree.leaves(theirs))
    for t in (1, 2, 3):
        key = Key(9).at("round", t)
        method.round({}, Clients(Guard(Sequential(h)), [0, 1], round=t), key)
        for step in method.draw(h.data(0), key.at("work", "train", "client", 0)).steps:
            adam.zero_grad()
            torch.stack([proto_loss_by_torch(theirs, e) for e in step]).mean().backward()
            adam.step()
    close(h.private(0, (3, 0))["theta"], tree.detach(theirs), 1e-10)


@pytest.mark.parametrize("by", ["round_robin", "all"])
def test_local_models_answer_the_shared_questions_with_their_own_weights(
    by: Any, tmp_path: Path
) -> None:
    method = local_method("proto", test_clients=by)
    h = host(method, tmp_path)
    episodic_test = EpisodicTest.draw(h._dataset, range(5), SPEC, 5, Key(8))
    clients = Clients(Guard(Sequential(h)), [0, 1], round=0, phase="evaluate")
    answers = method.evaluate({}, clients, episodic_test.eval_episodes, Key(7))
    who = sorted((a.eval_episode, a.client) for a in answers)
    everyone = [(u, k) for u in range(5) for k in (0, 1)]
    assert who == (everyone if by == "all" else [(u, u % 2) for u in range(5)])
    for u, client, logits in answers:
        assert client is not None
        own = h.private(client, (0, 0))
        want = method.learner.answer(own["theta"], own["stats"], episodic_test.eval_episodes[u])
        assert torch.equal(logits, want.float())


def test_an_unknown_learner_is_refused() -> None:
    with pytest.raises(ConfigError, match="Proto"):
        local_method("Proto")
