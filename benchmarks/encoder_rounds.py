"""Measure rounds on features that are computed once against rounds with the encoder in them.

    python benchmarks/encoder_rounds.py --config FILE --data-dir FOLDER

FILE is a configuration with `model.encoder`. Both runs are the same but for one thing: the second
computes the features of each example whenever an episode draws it. Their rounds alternate in one
process, and the least CPU seconds of each are compared, because other load only adds to them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from fedshot.config.load import Config, load
from fedshot.core.errors import ConfigError
from fedshot.data.dataset import Dataset, Ints
from fedshot.data.encoders.encoded import features_of
from fedshot.data.encoders.frozen import LoadedEncoder
from fedshot.data.files.places import find_data_dir
from fedshot.data.tokens import RawTexts
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun, read_examples

EXAMPLES = "fedshot.data.episodes.episode.examples"


class InTheLoop:
    """Features of the examples of a dataset, computed whenever they are asked for."""

    def __init__(self, raw: Dataset, encoder: LoadedEncoder) -> None:
        self.raw, self.encoder = raw, encoder

    def __call__(self, _: Dataset, rows: Ints) -> torch.Tensor:
        """Return features [n, d] of rows of a dataset."""
        x = self.raw.x
        block = (
            tuple(x.texts[i] for i in rows) if isinstance(x, RawTexts) else self.raw.pixels[rows]
        )
        return torch.from_numpy(np.concatenate(list(features_of(block, self.encoder))))


def seconds_of_rounds(config: Config, data_dir: str | None) -> Iterator[tuple[str, float, float]]:
    """Yield (way, CPU seconds, seconds) of each round, one way after the other."""
    prepared, options = PreparedRun(config, data_dir), config.model.encoder
    if options is None:
        raise ConfigError("the configuration has no model.encoder. Set it.")
    raw = read_examples(config, data_dir)
    encoder = options.load(raw.kind, str(config.run.devices[0]), find_data_dir(data_dir))
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        runs = [Experiment(prepared, folder).run() for folder in folders]
        next(runs[0]), next(runs[1])  # round 0, validation
        for _ in range(config.run.rounds):
            for way, run in zip(("once", "in the loop"), runs, strict=True):
                called = InTheLoop(raw, encoder)
                with mock.patch(EXAMPLES, called) if way != "once" else ExitStack():
                    cpu, start = time.process_time(), time.perf_counter()
                    record = next(run)
                    yield way, time.process_time() - cpu, time.perf_counter() - start
                assert record.round


def main() -> None:
    """Print the seconds of a round both ways, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    config = Config.of(load(options.config))
    least: dict[str, tuple[float, float]] = {}
    for way, cpu, wall in seconds_of_rounds(config, options.data_dir):
        before = least.get(way, (cpu, wall))
        least[way] = min(before[0], cpu), min(before[1], wall)
        print(f"{way}: {cpu:.3f} s of CPU, {wall:.3f} s", flush=True)
    once, inside = least["once"], least["in the loop"]
    print(f"once {once}, in the loop {inside}; {inside[0] / once[0]:.0f} times as fast")


if __name__ == "__main__":
    main()
