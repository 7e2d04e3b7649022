"""Milliseconds of one answer, and images answered in a second, by a run's classifier.

    python benchmarks/use.py RUN

Five classes of five examples; one image at a time, then 1,000 at once. The images are noise of the
run's own size as uint8 arrays, since time does not depend on what they show; decoding files comes
on top. One intra-op thread or as many as the run says; medians.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fedshot.use.classifier import FewShotClassifier
from fedshot.use.trained import TrainedRun

WAY, SHOT, MANY = 5, 5, 1000


def seconds(work: Callable[[], object], turns: int) -> float:
    """Return the median of some turns, after one that does not count."""
    taken = []
    for _ in range(turns + 1):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[1:])


def main(run: Path) -> None:
    begun = time.perf_counter()
    classifier = FewShotClassifier.from_run(run)
    shape = TrainedRun(run).dataset_info.shape
    draw = np.random.default_rng(0)

    def noise(n: int) -> np.ndarray:
        return draw.integers(0, 256, (n, *shape), dtype=np.uint8)

    classifier.fit(noise(WAY * SHOT), np.repeat(np.arange(WAY), SHOT))
    opened = time.perf_counter() - begun
    one, many = noise(1), noise(MANY)
    single = seconds(lambda: classifier.predict(one), 50)
    whole = seconds(lambda: classifier.predict(many), 5)
    print(
        f"{run}: {WAY}-way {SHOT}-shot, {shape}, {torch.get_num_threads()} threads of the process"
    )
    print(f"opened and fitted in {opened:.2f} s")
    print(f"one image: {1000 * single:.1f} ms")
    print(f"{MANY} images: {whole:.2f} s, {MANY / whole:.0f} a second")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
