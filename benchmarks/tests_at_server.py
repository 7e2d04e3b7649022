"""Cases: a test of many episodes, against easyfsl's evaluation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import payloads
import torch
from case import Case, Options, Result, agree
from children import Child, PeerError
from nets import build
from ours import FLEETS, REFERENCE, N, Round, taking
from timing import Contestant, interleave, rows, timed
from work import PreparedWork, Work, named

from fedshot.core.machine import arithmetic
from fedshot.core.seeds import Key
from fedshot.data.episodes.episode import Tasks
from fedshot.evaluation.episodic_test import EpisodicTest, Score, score
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.meter import Meter
from fedshot.fleets.private import PrivateStore
from fedshot.protocol.clients import Clients
from fedshot.protocol.method import ModelState

WORK = Work("conv4-32", "conv4", (32, 32, 3), clients=30, steps=1)  # 6,000 images in 10 classes
EPISODES, TIE = 1000, 2e-4


class Evaluation:
    """The test on a fleet: predictions and their score."""

    def __init__(
        self, bench: PreparedWork, server: ModelState, tasks: Tasks, fleet: str, at: Path
    ) -> None:
        self._bench, self._server, self._plan = bench, server, FLEETS[fleet]
        self._dataset, self._tasks = bench.dataset, tasks
        store = PrivateStore(at / "clients")
        host = Host(bench.method, bench.dataset, bench.partition, store, bench.key)
        self._fleet = Guard(Meter(self._plan.make(host)))
        self._test = EpisodicTest(bench.dataset, tasks)

    def __call__(self) -> Score:
        clients = Clients(self._fleet, [0], quorum=0.0, phase="evaluate")
        eval_episodes = self._test.eval_episodes
        with arithmetic(self._plan.threads):
            answers = self._bench.method.evaluate(self._server, clients, eval_episodes, Key(4))
        return score(answers, self._test)


def rows_of(tasks: Tasks, y: Any) -> list[list[int]]:
    """Return the rows of each episode as easyfsl's sampler gives them: class by class."""
    found = []
    for support, query, classes in zip(tasks.support, tasks.query, tasks.classes, strict=True):
        both = np.concatenate([support, query])
        found.append(np.concatenate([both[y[both] == c] for c in classes]).tolist())
    return found


def easyfsl(options: Options) -> Result:
    """Measure a test of 5-way 1-shot episodes with 15 queries a class."""
    n = 20 if options.quick else EPISODES
    result = Result(f"{n} episodes of 5-way 1-shot with 15 queries a class, Conv4-32, 32x32x3")
    bench, folder = PreparedWork(WORK), options.folder / "test"
    folder.mkdir()
    server = Round(bench, "threads", folder)()  # its running statistics are of these images
    tasks = Tasks.draw(bench.dataset, range(10), bench.episode, n, Key(5))
    ours = {f: Evaluation(bench, server, tasks, f, folder) for f in taking("conv4")}
    everyone = [
        Contestant(f"fedshot, {f}", timed(evaluate_chosen), FLEETS[f].cores)
        for f, evaluate_chosen in ours.items()
    ]
    module = build(bench.net)
    module.load_state_dict(named(server.theta, server.stats), strict=False)
    y = bench.dataset.y
    x = bench.model.prepare(torch.from_numpy(bench.dataset.pixels)).contiguous()
    spec = {"net": bench.net, "state": module.state_dict(), "x": x, "y": y.tolist(), "shot": 1,
            "query": 15, "episodes": rows_of(tasks, y)}  # fmt: skip
    payloads.write(folder / "test.safetensors", spec)
    try:
        with Child("peer_easyfsl.py", folder, str(N)) as child:
            theirs = float(child.check("given", folder / "accuracy.safetensors"))
            for fleet, evaluate_chosen in ours.items():
                of = f"{fleet} and easyfsl, accuracy on the same episodes"
                agree(result.checks, of, abs(evaluate_chosen().accuracy - theirs), TIE)
            result.notes += [str(child.facts["version"]), f"accuracy {theirs:.4f}"]
            for layout in ("nchw", "channels_last"):
                for workers, where in ((0, "loader in the same process"), (2, "2 loader workers")):
                    run = child.go(f"{layout}-{workers}")
                    everyone.append(Contestant(f"easyfsl, {layout}, {where}", run, N))
            interleave(everyone, options.repeats)
    except PeerError as error:
        result.left_out["easyfsl"] = str(error)
        interleave(everyone, options.repeats)
    result.rows = rows(everyone, REFERENCE)
    return result


CASES = [Case("evaluation/1000-episodes", partial(easyfsl))]
