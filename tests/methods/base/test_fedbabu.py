"""FedBABU: the body against torch.optim, under a classifier that neither changes nor travels up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from covering import slow
from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.learners.probe import FeatureProbe
from fedshot.methods.base.fedavg_probe import FedAvgProbe
from fedshot.methods.base.fedbabu import FedBABU
from methods.classification_oracle import (
    SGD,
    Run,
    Twin,
    assert_readout,
    each_visit,
    options,
    train,
    unequal_clients,
)


def method(backbone: str = "conv4", **changes: Any) -> FedBABU:
    return FedBABU(**options(backbone, **changes))


def twin(server: Any) -> Twin:
    made = Twin(server.theta["body"], server.h, server.stats)
    made.classifier.requires_grad_(False)
    return made


@each_visit
def test_one_client_is_torch_optim_on_the_body_alone(
    backbone: str, opt: Any, steps: int, tmp_path: Path
) -> None:
    run = Run(method(backbone, optimizer=opt, local_steps=steps), tmp_path)
    for _ in range(2):
        alone = twin(run.server)
        server = run.round()
        train(alone, opt, run.drawn(0).steps)
        alone.assert_is(server.theta["body"], server.h, server.stats)


@unequal_clients
def test_the_server_gets_the_mean_of_the_bodies_weighted_by_their_images(
    images: tuple[int, ...], tmp_path: Path
) -> None:
    run = Run(method("mlp", local_steps=3), tmp_path, images)
    before = run.server
    after = run.round()
    bodies = []
    for k in range(3):
        alone = twin(before)
        train(alone, SGD, run.drawn(k).steps)
        bodies.append(dict(alone.body.named_parameters()))
    for path, leaf in tree.items(after.theta["body"]):
        each = [
            n / sum(images) * b[path.replace("/", ".")] for n, b in zip(images, bodies, strict=True)
        ]
        torch.testing.assert_close(leaf, torch.stack(each).sum(0).detach(), rtol=1e-11, atol=1e-12)


def test_the_classifiers_bits_never_change_and_are_the_same_for_all_clients(
    tmp_path: Path,
) -> None:
    run = Run(method(local_steps=3), tmp_path, (3, 5, 9))
    drawn = tree.digest(run.server.h)
    body = tree.digest(run.server.theta)
    for _ in range(3):
        assert tree.digest(run.round().h) == drawn
        exchange = run.spy.exchanges[-1]
        assert {tree.digest(exchange.message(k)["h"]) for k in range(3)} == {drawn}
    assert tree.digest(run.server.theta) != body


def test_the_classifier_is_absent_from_uploads_and_from_the_ledger_up(tmp_path: Path) -> None:
    run = Run(method(), tmp_path, (10, 10))
    run.round()
    size = 8 * sum(leaf.numel() for leaf in tree.leaves(run.server.theta))
    h = {leaf.numpy().tobytes() for leaf in tree.leaves(run.server.h)}
    for reply in run.spy.seen.values():
        assert set(reply.up) == {"theta", "stats"}
        assert set(reply.up["theta"]) == {"body"}
        assert not h & {leaf.numpy().tobytes() for leaf in tree.leaves(dict(reply.up))}
    up = {r["part"]: r["bytes"] for r in run.meter.to_json() if r["direction"] == "up"}
    assert set(up) == {"theta", "stats"}
    assert up["theta"] == 2 * size
    down = {r["part"] for r in run.meter.to_json() if r["direction"] == "down"}
    assert down == {"theta", "h", "stats"}


def test_it_starts_where_fedavg_does_and_parts_from_it_in_the_second_step(tmp_path: Path) -> None:
    """The body's first gradient is the same; then FedAvg's classifier has moved."""
    ends = []
    for steps in (1, 2):
        babu = Run(method("mlp", local_steps=steps), tmp_path / f"b{steps}")
        m = FedAvgProbe(**options("mlp", local_steps=steps))
        average = Run(m, tmp_path / f"a{steps}")
        # The two draw under keys named after their work.
        drawn = babu.method.draw(babu.host.data(0), Key(1))
        s = babu.server
        down = {"theta": s.theta, "h": s.h, "stats": s.stats}
        one = babu.method.train(down, {}, drawn).up["theta"]["body"]
        t = average.server
        assert tree.digest((t.body, t.classifier)) == tree.digest((s.theta["body"], s.h))
        down = {"theta": {"body": t.body, "classifier": t.classifier}, "stats": t.stats}
        other = m.classify(down, {}, drawn).up["theta"]["body"]
        ends.append(
            max(
                float((a - b).abs().max())
                for a, b in zip(*map(tree.leaves, (one, other)), strict=True)
            )
        )
    assert ends[0] < 1e-14
    assert ends[1] > 1e-4


@pytest.mark.parametrize("many", [True, False])
def test_at_test_a_new_head_takes_gradient_steps_on_features_of_length_one(
    many: bool, tmp_path: Path
) -> None:
    run = Run(method(finetune_lr=0.5, finetune_steps=7), tmp_path)
    body = twin(run.round()).eval()
    eval_episodes = run.eval_episodes(many)
    for q, found in zip(eval_episodes, run.answers(eval_episodes), strict=True):
        with torch.no_grad():
            support, query = (F.normalize(body.features(x)) for x in (q.support_x, q.query_x))
        head = nn.Linear(support.shape[1], 3).double()
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        sgd = torch.optim.SGD(head.parameters(), 0.5)
        for _ in range(7):
            sgd.zero_grad()
            F.cross_entropy(head(support), q.support_y).backward()
            sgd.step()
        torch.testing.assert_close(found, head(query).detach(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("probe", ["ridge", *slow("mean", "logistic")])
def test_the_other_probes_answer_too(probe: Any, tmp_path: Path) -> None:
    run = Run(method(probe=probe), tmp_path)
    body, eval_episodes = twin(run.round()), run.eval_episodes(many=False)
    assert_readout(FeatureProbe(probe), body, eval_episodes, run.answers(eval_episodes))


def test_a_classifier_needs_two_base_classes() -> None:
    with pytest.raises(ConfigError, match="number of base classes is 1; a classifier needs at"):
        replace(method(), classes=(3,))
