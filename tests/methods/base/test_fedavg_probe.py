"""FedAvg with a probe: against torch.nn and torch.optim, and from features written out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from covering import covering
from fedshot.core import tree
from fedshot.core.errors import ConfigError, DataError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.augment import Augment
from fedshot.data.episodes.episode import ClientData
from fedshot.learners.classification import Classifier
from fedshot.learners.probe import FeatureProbe
from fedshot.learners.proto import Proto
from fedshot.methods.base.fedavg_probe import FedAvgProbe
from fedshot.nn.optim import Optimizer
from methods.classification_oracle import (
    ADAM,
    BASE,
    SPEC,
    Run,
    Twin,
    assert_readout,
    each_visit,
    model,
    options,
    train,
    unequal_clients,
)
from system.runs import experiment, finished, last_hash, stopped


def method(backbone: str = "conv4", **changes: Any) -> FedAvgProbe:
    return FedAvgProbe(**options(backbone, **changes))


def twin(server: Any) -> Twin:
    return Twin(server.body, server.classifier, server.stats)


@each_visit
def test_one_client_is_torch_optim_on_cross_entropy(
    backbone: str, opt: Any, steps: int, tmp_path: Path
) -> None:
    run = Run(method(backbone, optimizer=opt, local_steps=steps), tmp_path)
    for _ in range(2):
        twins = twin(run.server)
        server = run.round()
        losses = train(twins, opt, run.drawn(0).steps)
        twins.assert_is(server.body, server.classifier, server.stats)
        assert run.metrics["loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-11)


@pytest.mark.parametrize(
    ("rounds", "factors"),
    [(4, [1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, (1 - 0.5**0.5) / 2]), (1, [1, 1])],
)
def test_the_step_size_falls_along_half_a_cosine_and_then_stays(
    rounds: int, factors: list[float], tmp_path: Path
) -> None:
    opt = Optimizer("sgd", 0.1, momentum=0.9)
    run = Run(method("mlp", optimizer=opt, local_steps=2, decay_rounds=rounds), tmp_path)
    for factor in factors:
        twins = twin(run.server)
        server = run.round()
        train(twins, replace(opt, lr=0.1 * factor), run.drawn(0).steps)
        twins.assert_is(server.body, server.classifier, server.stats)


def trained_alone(run: Run, before: Any, k: int) -> tuple[Tree, Tree, Tree]:
    """Return what client k's own steps lead to."""
    alone = twin(before)
    train(alone, run.method.optimizer, run.drawn(k).steps)

    def values(like: Tree) -> Tree:
        return {n: {k: getattr(alone.body[n], k).detach() for k in p} for n, p in like.items()}

    stats = {
        n: {"mean": alone.body[n].running_mean, "var": alone.body[n].running_var}
        for n in before.stats
    }
    head = {k: getattr(alone.classifier, k).detach() for k in before.classifier}
    return values(before.body), head, stats


@unequal_clients
def test_the_server_gets_the_mean_of_the_clients_weighted_by_their_images(
    images: tuple[int, ...], tmp_path: Path
) -> None:
    run = Run(method(local_steps=3), tmp_path, images)
    before = run.server
    after = run.round()
    models = [trained_alone(run, before, k) for k in range(3)]
    assert [int(run.spy.seen[k].weight) for k in range(3)] == [5 * n for n in images]
    shares = [n / sum(images) for n in images]
    want = tree.map(lambda *w: sum(s * x for s, x in zip(shares, w, strict=True)), *models)
    found = (after.body, after.classifier, after.stats)
    torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-12)


def test_labels_are_the_places_of_the_base_classes(tmp_path: Path) -> None:
    run = Run(method(batch=40), tmp_path)
    ((batch,),) = run.method.draw(run.host.data(0), Key(3)).steps
    x, labels = run.host.data(0).batch(40, Key(3).at("batches").numpy())
    assert torch.equal(batch.x, x)
    assert [BASE[i] for i in batch.y.tolist()] == labels.tolist()
    assert set(batch.y.tolist()) == set(range(5))


def test_an_example_of_another_class_is_refused(tmp_path: Path) -> None:
    run = Run(method(), tmp_path)
    strange = ClientData(run.data, np.arange(60, 80))
    with pytest.raises(
        DataError, match="has an example of class 2, which is not one of the 5 base"
    ):
        run.method.draw(strange, Key(0))


def test_batches_are_augmented_like_episodes(tmp_path: Path) -> None:
    plain = method()
    moved = replace(plain, episode=replace(SPEC, augment=Augment(crop_padding=1)))
    data = Run(plain, tmp_path).host.data(0)
    (one,), (other,) = (m.draw(data, Key(0)).steps[0] for m in (plain, moved))
    assert torch.equal(one.y, other.y)
    assert not torch.equal(one.x, other.x)


def test_the_encoder_starts_where_that_of_prototypes_does() -> None:
    m = method()
    theta, stats = Proto(m.model).init(Key(2))
    assert tree.digest(m.init(Key(2)).body) == tree.digest(theta["body"])
    assert tree.digest(m.init(Key(2)).stats) == tree.digest(stats)


@pytest.mark.parametrize(("probe", "many"), covering(["mean", "logistic", "ridge"], [True, False]))
def test_a_test_is_answered_by_the_probe_on_running_features(
    probe: Any, many: bool, tmp_path: Path
) -> None:
    """The same whether each example is embedded once or each question by itself."""
    run = Run(method(local_steps=3, probe=probe, ridge_lambda=0.3, logistic_c=2.0), tmp_path)
    encoder, eval_episodes = twin(run.round()), run.eval_episodes(many)
    assert_readout(
        FeatureProbe(probe, 2.0, 0.3), encoder, eval_episodes, run.answers(eval_episodes)
    )


def test_a_cosine_classifier_ignores_the_length_of_features_and_rows(tmp_path: Path) -> None:
    learner = Classifier(model("mlp"), 5, "cosine", 4.0)
    params, stats = learner.init(Key(1))
    (batch,) = (
        Run(method("mlp"), tmp_path)
        .method.draw(Run(method("mlp"), tmp_path).host.data(0), Key(0))
        .steps[0]
    )
    h = learner.embed(params, stats, batch.x)
    cosines = F.cosine_similarity(h[:, None], params["classifier"]["weight"][None], dim=-1)
    want = F.cross_entropy(4.0 * cosines, batch.y)
    found = learner.episode_loss(params, stats, batch, Key(0).tensor()).loss
    torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-12)


# After `classify_rounds`: prototypes


def test_prototypes_take_over_after_exactly_that_many_rounds(tmp_path: Path) -> None:
    run = Run(method(classify_rounds=2), tmp_path)
    classifier, tau = [], []
    for _ in range(4):
        server = run.round()
        classifier.append(tree.digest(server.classifier))
        tau.append(float(server.tau))
    assert [e.work.name for e in run.spy.exchanges] == ["classify"] * 2 + ["compare"] * 2
    assert int(run.server.rounds) == 4
    assert tau[:2] == [10.0, 10.0]
    assert len(set(tau)) == 3
    assert classifier[0] != classifier[1]
    assert classifier[1] == classifier[2] == classifier[3]


@pytest.mark.parametrize(("rounds", "name"), [(None, "classify"), (0, "compare")])
def test_the_ends_are_classification_alone_and_prototypes_alone(
    rounds: int | None, name: str, tmp_path: Path
) -> None:
    run = Run(method(classify_rounds=rounds), tmp_path)
    run.round()
    run.round()
    assert [e.work.name for e in run.spy.exchanges] == [name, name]


def test_a_step_of_prototypes_is_torch_optim_on_scaled_cosines(tmp_path: Path) -> None:
    m = method("mlp", classify_rounds=0, meta_optimizer=ADAM, local_steps=3, scale=7.0)
    run = Run(m, tmp_path)
    alone = twin(run.server)
    tau = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    server = run.round()
    adam = torch.optim.Adam([*alone.body.parameters(), tau], ADAM.lr)
    for (e,) in run.drawn(0).steps:
        adam.zero_grad()
        s, q = (F.normalize(alone.features(x)) for x in (e.support_x, e.query_x))
        means = torch.stack([s[e.support_y == c].mean(0) for c in range(3)])
        cosines = F.cosine_similarity(q[:, None], means[None], dim=-1)
        F.cross_entropy(tau * cosines, e.query_y).backward()
        adam.step()
    alone.assert_is(server.body, server.classifier, server.stats)
    torch.testing.assert_close(server.tau, tau.detach(), rtol=1e-11, atol=0)
    assert float(server.tau) != 7.0


def test_the_switch_survives_a_stop_before_it_and_after_it(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "method": {"name": "fedavg_probe", "classify_rounds": 2, "local_steps": 2, "batch": 8}
    }
    finished(tmp_path / "whole", changes)
    for stop in (1, 2, 3):
        folder = tmp_path / str(stop)
        stopped(folder, stop, changes)
        resumed = finished(folder, changes)
        assert int(resumed.server.rounds) == 4
        assert last_hash(folder) == last_hash(tmp_path / "whole")
        works = {row["work"] for row in resumed.meter.to_json()}
        assert works >= {"classify", "compare"}


def test_a_setting_tells_the_method_its_base_classes(tmp_path: Path) -> None:
    split = {"base": ["7", "2", "4-5"], "novel": ["0", "1", "3"]}
    small = {"episode": {"way": 4}, "test": {"way": 3}, "split": split}
    made = experiment(tmp_path, small, {"method": {"name": "fedavg_probe"}}).method
    assert made.classes == (2, 4, 5, 7)  # type: ignore[attr-defined]


def test_a_classifier_needs_two_base_classes() -> None:
    with pytest.raises(ConfigError, match="number of base classes is 1; a classifier needs at"):
        replace(method(), classes=(3,))
