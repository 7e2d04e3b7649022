"""Cases: a trained run in use, one image at a time and a thousand at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from case import Case, Options, Result
from timing import Contestant, interleave, rows, timed

from fedshot.config.load import Config
from fedshot.core.machine import cores
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun
from fedshot.use.classifier import FewShotClassifier

WAY, SHOT = 5, 5
METHODS: dict[str, dict[str, Any]] = {
    "fl_proto": {"name": "fl_proto", "local_steps": 1},
    "fedfsl_naive": {"name": "fedfsl_naive", "local_steps": 1, "inner": {"order": "first"}},
}
SIZES = {28: 1, 84: 3}  # channels by side


def trained(folder: Path, method: str, side: int) -> Path:
    """Return the folder of a run of one round; how well it is trained does not change its speed."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (100, side, side, SIZES[side]), dtype=np.uint8)
    np.savez(folder / f"{side}.npz", x=x, y=np.arange(100) % 10)
    settings = {
        "data": {"name": "npz", "path": str(folder / f"{side}.npz")},
        "split": {"base": ["0-4"], "novel": ["5-9"]},
        "partition": {"name": "iid", "clients": 2},
        "episode": {"way": 5, "shot": 1, "query": 2},
        "model": {
            "backbone": {"name": "conv4", "width": 64},
            "head": {"name": "linear", "way": WAY},
        },
        "method": METHODS[method],
        "run": {"rounds": 1, "cohort": 1, "workers": cores()},
        "test": {"way": 5, "shot": 1, "query": 2, "episodes": 2},
    }
    run = Experiment(PreparedRun(Config.of(settings)), folder / f"{method}-{side}")
    for _ in run.run():
        pass
    return run.folder


def answers(options: Options) -> Result:
    """Measure `predict` after `fit`, on arrays."""
    many = 20 if options.quick else 1000
    result = Result(f"`predict` of 1 and of {many:,} images, {WAY}-way {SHOT}-shot, Conv4-64")
    rng = np.random.default_rng(1)
    everyone = []
    for side in [28] if options.quick else SIZES:
        x = rng.integers(0, 256, (many, side, side, SIZES[side]), dtype=np.uint8)
        y = np.repeat(np.arange(WAY), SHOT)
        for method in METHODS:
            classifier = FewShotClassifier.from_run(trained(options.folder, method, side))
            classifier.fit(np.resize(x, (len(y), *x.shape[1:])), y)
            for n in (1, many):
                of = f"{method}, {side}x{side}, {n:,} image{'s' * (n > 1)}"
                call = timed(lambda c=classifier, q=x[:n]: c.predict(q))
                everyone.append(Contestant(of, call, cores()))
    interleave(everyone, options.repeats)
    result.rows = rows(everyone, everyone[0].name)
    result.notes.append(
        "fl_proto embeds the support in every call; fedfsl_naive takes its ten gradient steps on "
        "it in every call, and in every 256 images of a call"
    )
    return result


CASES = [Case("use/predict", answers)]
