"""Cases: a local step of F2L against one forward and backward pass of its images."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from case import Case, Options, Result
from ours import N
from timing import Contestant, interleave, rows, say, timed
from work import PreparedWork, Work

from fedshot.core.machine import arithmetic
from fedshot.core.seeds import Key
from fedshot.data.episodes.episode import ClientData
from fedshot.learners.classification import Batch
from fedshot.methods.f2l.f2l import F2L, F2LLocalState
from fedshot.methods.f2l.readings import InnerChoice
from fedshot.nn.gradients import value_and_grad
from fedshot.nn.heads import LinearHead
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model

BASE = tuple(range(10))
WORKS = (
    Work("resnet12-32-1shot", "resnet12", (32, 32, 3), clients=1, steps=1),
    Work("resnet12-32-5shot", "resnet12", (32, 32, 3), clients=1, steps=1, shot=5, query=11),
    Work("conv4-32-1shot", "conv4", (32, 32, 3), clients=1, steps=1),
)
OTHERS: dict[str, dict[str, Any]] = {
    "second order": {"inner": InnerChoice(order="second")},
    "without transfer and distillation": {"lambda_mi": 0.0, "lambda_kd": 0.0},
}


class Step:
    """One local step from the same state, optimisers and fine-tuning included."""

    def __init__(self, bench: PreparedWork, **options: Any) -> None:
        old = bench.model
        model = Model(old.backbone, LinearHead(5), old.shape, dtype=old.dtype)
        self.method = m = F2L(model, bench.episode, BASE, local_steps=1, **options)
        server = m.init(Key(0))
        private = m.init_client(0, Key(2))
        self.at = F2LLocalState(server.phi, private["psi"], server.stats, private["optimizer"])
        self.local_episodes = m.draw(ClientData(bench.dataset, bench.partition[0]), Key(1))

    def __call__(self) -> None:
        with arithmetic(N):
            self.method.local(self.at, self.local_episodes)


class Pass:
    """The loss of the base classes on all images of the same episode, and its gradient."""

    def __init__(self, step: Step) -> None:
        (e,) = step.local_episodes.steps[0]
        x = torch.cat([e.support_x, e.query_x])
        y = e.classes[torch.cat([e.support_y, e.query_y])]
        learner, stats = step.method.learner, step.at.stats
        seed = Mode(seed=step.local_episodes.seed).seed
        assert seed is not None
        episode_loss = partial(learner.episode_loss, stats=stats, batch=Batch(x, y), seed=seed)
        self.fn = lambda w: ((gradients := episode_loss(w)).loss, gradients)
        self.phi = step.at.phi

    def __call__(self) -> None:
        with arithmetic(N):
            value_and_grad(self.fn, self.phi)


def step(work: Work, options: Options) -> Result:
    """Measure a local step, its forms, and the pass."""
    what = f"one local step of F2L, {work.net}, {work.images} images of {work.shape[0]} px"
    result, bench = Result(what), PreparedWork(work)
    ours = Step(bench)
    forms = {} if options.quick else OTHERS
    everyone = [
        Contestant("one forward and backward pass", timed(Pass(ours)), N),
        Contestant("F2L, a local step", timed(ours), N),
        *(Contestant(f"F2L, {name}", timed(Step(bench, **form)), N)
          for name, form in forms.items()),
    ]  # fmt: skip
    interleave(everyone, options.repeats)
    result.rows = rows(everyone, everyone[0].name)
    result.notes.append(
        f"{say(N)}; the pass has no step of an optimiser, the local step has those of both models"
    )
    return result


CASES = [Case(f"f2l/{work.name}", partial(step, work)) for work in WORKS]
