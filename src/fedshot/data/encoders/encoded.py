"""Turns a dataset of images or raw texts into a dataset of features."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from fedshot.core.machine import arithmetic, begin_thread, cores
from fedshot.data.dataset import Dataset, Encoding, Features
from fedshot.data.encoders.frozen import Block, LoadedEncoder
from fedshot.data.files.cache import cached_features, in_memory
from fedshot.data.files.fingerprints import hash_json
from fedshot.data.tokens import RawTexts

BLOCK = 32  # examples that the encoder sees at once; another number changes the last bits
_EVERY = 10.0  # seconds between two lines of the log


def encoded(dataset: Dataset, encoder: LoadedEncoder) -> Dataset:
    """Return the dataset with features, float32 [n, d], in place of its images or raw texts.

    Its hash is computed from the hashes of the data and the encoder, not from the features, so it
    is the same on all machines.
    """
    x = dataset.x.texts if isinstance(dataset.x, RawTexts) else dataset.pixels
    blocks = partial(_with_progress, x, encoder)
    if encoder.options.cache:
        features = cached_features(dataset.name, _key(dataset, encoder), len(dataset), blocks)
    else:
        features = in_memory(len(dataset), blocks())
    encoding = Encoding(str(encoder.options.digest), dataset.shape, dataset)
    return replace(
        dataset, x=features, known_digest=encoded_digest(dataset, encoder), encoding=encoding
    )


def encoded_digest(dataset: Dataset, encoder: LoadedEncoder) -> str:
    """Return the hash of the dataset that `encoded` returns."""
    return hash_json([dataset.digest, encoder.options.digest])


def _with_progress(x: Block, encoder: LoadedEncoder) -> Iterator[Features]:
    """Yield the features of consecutive blocks; log the progress every ten seconds.

    Raises ConfigError if the features of an example depend on others, or on chance.
    """
    done, shown = 0, time.monotonic()
    for features in features_of(x, encoder):
        if not done:
            encoder.check(x)
        yield features
        done += len(features)
        if time.monotonic() - shown >= _EVERY:
            shown = time.monotonic()
            text = "features of %s of %s examples computed"
            logging.getLogger("fedshot").info(text, f"{done:,}", f"{len(x):,}")


def features_of(x: Block, encoder: LoadedEncoder) -> Iterator[Features]:
    """Yield the features of consecutive blocks of images or texts, float32 [k, d] each.

    Each block is computed by one thread, so that the number of threads does not change them.
    """
    workers = cores() if encoder.parallel and encoder.device.type == "cpu" else 1
    running: deque[Future[Features]] = deque()
    with (
        arithmetic(1),
        ThreadPoolExecutor(workers, initializer=begin_thread, initargs=(1, True)) as pool,
    ):
        try:
            for start in range(0, len(x), BLOCK):
                block = x[start : start + BLOCK]
                inputs = encoder.network.prepare(block)
                running.append(pool.submit(encoder.forward, inputs, len(block)))
                if len(running) > workers:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:  # also if the caller stops iterating
            for future in running:
                future.cancel()


def _key(dataset: Dataset, encoder: LoadedEncoder) -> str:
    """Return a hash of everything that can change a bit of the features."""
    machine = (torch.__version__, torch.backends.cpu.get_cpu_capability())
    digests = dataset.digest, encoder.options.digest
    return hash_json([*digests, "float32", encoder.device.type, *machine])
