"""Measuring how far a run's confidence can be trusted, on episodes of its validation classes.

Half of the episodes fit a temperature and thresholds (see `confidence`), the other half measures,
on other images where there are enough of each class; the classes are the same. The halves follow
each other, so that clients who answer in turn have part in both. Every episode also asks about a
class that is not in its support.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedshot.core.errors import CheckpointError, ConfigError, check_kind
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset, Ints
from fedshot.data.episodes.episode import Tasks
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.evaluation.episodic_test import EpisodicTest
from fedshot.nn.losses import cross_entropy
from fedshot.protocol.method import Prediction
from fedshot.use.calibration import Calibration
from fedshot.use.confidence import (
    Marked,
    error_interval,
    expected_calibration_error,
    temperature,
    thresholds,
)
from fedshot.use.trained import TrainedRun


def measure(
    run: TrainedRun,
    *,
    way: int | None = None,
    shot: int | None = None,
    episodes: int = 400,
    client: int | None = None,
) -> Calibration:
    """Measure a run on episodes of its validation classes; its data must be there.

    Args:
        run: the run.
        way: classes of an episode; by default as in the run's test.
        shot: examples of each; likewise.
        episodes: how many, 4 at least.
        client: whose model answers; None for the server's, or for all clients in turn.

    Raises:
        ConfigError: the run has no validation classes, or too few.
        DataError: its data are not there, or do not fill such episodes.
    """
    check_kind("run", run, TrainedRun, "Open one with TrainedRun(folder).")
    test = run.config.test
    way = test.spec.max_way if way is None else way
    shot = test.shot if shot is None else shot
    if shot < 1:
        raise ConfigError(f"shot is {shot}; expected 1 at least.")
    if episodes < 4:
        raise ConfigError(f"episodes is {episodes}; expected at least 4, half of them to measure.")
    rows = run.federated.rows.validation
    dataset = run.federated.dataset
    classes = np.unique(dataset.y[rows]).tolist()
    if not classes and not run.facts.novel:
        raise ConfigError(
            f"the clients of {run.folder} are tested on their own classes, and no others were set "
            "aside: there is nothing to measure confidence on."
        )
    if not classes:
        raise ConfigError(
            f"{run.folder} has no validation classes, which confidence is measured on; the novel "
            "ones are for the test alone. Train with split.validation."
        )
    if way > len(classes) or way < 2:
        raise ConfigError(
            f"way is {way}, and there are {len(classes)} validation classes; expected 2 to "
            f"{len(classes)}. Pass --way."
        )
    widest = run.method.traits.max_test_way
    if widest is not None and way > widest:
        raise ConfigError(f"way is {way}; the head of this run tells {widest} apart.")
    if client is not None:
        run.check_client(client)
    stranger = way < len(classes)
    spec = EpisodeSpec(way + stranger, shot, test.query, labels=run.config.episode.labels)
    key = Key(test.seed).at("exam", "calibration")
    tasks, apart = _halves(dataset, rows, classes, spec, episodes, key)
    asked, truth = (
        _without_one(tasks, dataset.y, shot, key) if stranger else _as_is(tasks, dataset.y)
    )
    answers = run.evaluate(
        EpisodicTest(dataset, asked).eval_episodes.on(run.config.run.device), client
    )
    found = _judged(_marked(answers, truth))
    return replace(
        found, round=run.round, way=way, shot=shot, client=client, episodes=episodes,
        seed=test.seed, apart=apart,
    )  # fmt: skip


def _judged(marked: Marked) -> Calibration:
    known, half = marked.y >= 0, marked.measures
    heat, end = temperature(marked.logits[known & ~half], marked.y[known & ~half])
    logits, y = marked.logits[known & half].double(), marked.y[known & half]
    before, after = torch.softmax(logits, 1), torch.softmax(logits / heat, 1)
    return Calibration(
        round=0, way=0, shot=0, client=None, episodes=0, seed=0,
        temperature=heat,
        at_bound=bool(end),
        end=end,
        ece_interval=error_interval(after, y, marked.episode[known & half]),
        accuracy=float((logits.argmax(1) == y).double().mean()),
        ece_before=expected_calibration_error(before, y),
        ece_after=expected_calibration_error(after, y),
        nll_before=float(cross_entropy(logits, y)),
        nll_after=float(cross_entropy(logits / heat, y)),
        **thresholds(marked, heat),
    )  # fmt: skip


def _halves(
    dataset: Dataset,
    rows: Ints,
    classes: Sequence[int],
    spec: EpisodeSpec,
    episodes: int,
    key: Key,
) -> tuple[Tasks, bool]:
    """Return the episodes that fit and then those that measure, and whether they share no image.

    Where half of a class's images cannot fill an episode, both halves are of all images.
    """
    counts = (episodes - episodes // 2, episodes // 2)
    mixed = key.at("halves").numpy().permutation(rows)
    places = np.concatenate([np.flatnonzero(dataset.y[mixed] == c) for c in classes])
    parts = [np.sort(mixed[places[first::2]]) for first in (0, 1)]
    apart = all(int((dataset.y[p] == c).sum()) >= spec.min_images for p in parts for c in classes)
    fit, measured = (
        Tasks.draw(dataset, classes, spec, n, key.at(name), part if apart else rows)
        for name, n, part in zip(("fit", "measure"), counts, parts, strict=True)
    )
    both = ((fit.support, measured.support), (fit.query, measured.query),
            (fit.classes, measured.classes))  # fmt: skip
    return Tasks(*(np.concatenate(two) for two in both)), apart


def _without_one(
    tasks: Tasks, y: np.ndarray[Any, Any], shot: int, key: Key
) -> tuple[Tasks, list[Tensor]]:
    """Take one class of every episode out of its support, and leave its queries in."""
    rng = key.at("stranger").numpy()
    support, classes = [], []
    for u in range(len(tasks)):
        way = len(tasks.classes[u])
        kept = np.delete(np.arange(way), int(rng.integers(way)))
        classes.append(tasks.classes[u][kept])
        support.append(np.asarray(tasks.support[u]).reshape(way, shot)[kept].reshape(-1))
    asked = Tasks(np.stack(support), tasks.query, np.stack(classes))
    return _as_is(asked, y)


def _as_is(tasks: Tasks, y: np.ndarray[Any, Any]) -> tuple[Tasks, list[Tensor]]:
    truth = []
    for u in range(len(tasks)):
        match = y[tasks.query[u]][:, None] == tasks.classes[u]
        truth.append(torch.from_numpy(np.where(match.any(1), match.argmax(1), -1)))
    return tasks, truth


def _marked(answers: Sequence[Prediction], truth: Sequence[Tensor]) -> Marked:
    sound = [(a, torch.isfinite(a.logits).all(1)) for a in answers]
    if not sound or not all(bool(finite.all()) for _, finite in sound):
        raise CheckpointError(
            "some answers to the episodes are missing or not finite; confidence cannot be measured "
            "on a model that diverged."
        )
    episode = torch.cat([torch.full((len(a.logits),), a.eval_episode) for a, _ in sound])
    return Marked(
        torch.cat([a.logits for a, _ in sound]),
        torch.cat([truth[a.eval_episode] for a, _ in sound]),
        episode >= len(truth) - len(truth) // 2,
        episode,
    )
