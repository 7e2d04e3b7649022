"""Calibrate the confidence of a run on episodes of its validation classes.

One half of the episodes is used to fit a temperature and thresholds (see `confidence`), the other
half to measure their errors, on other images if each class has enough. Both halves have the same
classes and, if clients predict in turn, the same clients. Every episode also has queries of a class
that is not in its support set, if there are enough classes.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from fedshot.protocol.method import Prediction
from fedshot.use.calibration import Calibration
from fedshot.use.confidence import (
    LabelledLogits,
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
    client: int | str | None = None,
) -> Calibration:
    """Return the calibration of a run; its data must be on this machine.

    Args:
        run: the run.
        way: number of classes of an episode; None for the way of the run's test.
        shot: number of support examples per class; None for the shot of the run's test.
        episodes: number of episodes, at least 4.
        client: number or name of the client whose model predicts; None for the server's model, or
            for the models of all clients in turn.

    Raises ConfigError for too few validation classes, DataError for missing or too few data.
    """
    check_kind("run", run, TrainedRun, "Open one with TrainedRun(folder).")
    test = run.config.test
    way = test.spec.max_way if way is None else way
    shot = test.shot if shot is None else shot
    if shot < 1:
        raise ConfigError(f"shot is {shot}; expected at least 1.")
    if episodes < 4:
        raise ConfigError(f"episodes is {episodes}; expected at least 4, in two halves.")
    rows = run.federated.rows.validation
    dataset = run.federated.dataset
    classes = run.federated.classes_of(rows)
    if not classes and not run.dataset_info.novel:
        raise ConfigError(
            f"{run.folder} tests its clients on their own classes and has no validation classes to "
            "measure confidence on. Calibrate a run with novel classes and split.validation."
        )
    if not classes:
        raise ConfigError(
            f"{run.folder} has no validation classes to measure confidence on, and the novel "
            "classes are for the test alone. Train with split.validation."
        )
    if way > len(classes) or way < 2:
        raise ConfigError(_wrong_way(way, len(classes)))
    most = run.method.traits.max_test_way
    if most is not None and way > most:
        raise ConfigError(
            f"way is {way}; expected at most {most}, the number of outputs of this run's head. "
            "Choose a smaller way."
        )
    number = None if client is None else run.client_number(client)
    with_unknown = way < len(classes)
    spec = EpisodeSpec(way + with_unknown, shot, test.query, labels=run.config.episode.labels)
    key = Key(test.seed).at("exam", "calibration")
    tasks, apart = _halves(dataset, rows, classes, spec, episodes, key)
    if with_unknown:
        tasks = _without_one(tasks, shot, key)
    test_episodes = EpisodicTest(dataset, tasks).eval_episodes.on(run.config.run.devices[0])
    labelled = _labelled(run.evaluate(test_episodes, number), _labels(tasks, dataset.y))
    known, half = labelled.y >= 0, labelled.measures
    heat, end = temperature(labelled.logits[known & ~half], labelled.y[known & ~half])
    logits, y = labelled.logits[known & half].double(), labelled.y[known & half]
    before, after = torch.softmax(logits, 1), torch.softmax(logits / heat, 1)
    return Calibration(
        round=run.round,
        way=way,
        shot=shot,
        client=number,
        episodes=episodes,
        seed=test.seed,
        apart=apart,
        temperature=heat,
        end=end,
        ece_interval=error_interval(after, y, labelled.episode[known & half]),
        accuracy=float((logits.argmax(1) == y).double().mean()),
        ece_before=expected_calibration_error(before, y),
        ece_after=expected_calibration_error(after, y),
        **thresholds(labelled, heat),
    )


def _wrong_way(way: int, classes: int) -> str:
    """Return the error message for a way that the number of validation classes does not allow."""
    if classes > 2:
        return (
            f"way is {way}, but there are {classes} validation classes; expected 2 to {classes}. "
            "Choose another way."
        )
    if classes == 2:
        return (
            f"way is {way}, but there are 2 validation classes; expected 2. Another way needs a "
            "run with at least three validation classes (split.validation)."
        )
    return (
        f"{classes} validation class is too few to measure confidence on; expected at least two, "
        "and three to detect examples of unknown classes. Train with more (split.validation)."
    )


def _halves(
    dataset: Dataset,
    rows: Ints,
    classes: Sequence[int],
    spec: EpisodeSpec,
    episodes: int,
    key: Key,
) -> tuple[Tasks, bool]:
    """Return (episodes, whether the halves share no image); the half for fitting comes first.

    If half of the images of a class are too few for an episode, both halves use all images.
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
    return Tasks(*map(np.concatenate, both)), apart


def _without_one(tasks: Tasks, shot: int, key: Key) -> Tasks:
    """Remove a random class from the support of every episode, but not from its queries."""
    rng = key.at("stranger").numpy()
    support, classes = [], []
    for u in range(len(tasks)):
        way = len(tasks.classes[u])
        kept = np.delete(np.arange(way), int(rng.integers(way)))
        classes.append(tasks.classes[u][kept])
        support.append(np.asarray(tasks.support[u]).reshape(way, shot)[kept].reshape(-1))
    return Tasks(np.stack(support), tasks.query, np.stack(classes))


def _labels(tasks: Tasks, y: np.ndarray[Any, Any]) -> list[Tensor]:
    """Return the labels of the queries of each episode; -1 for classes outside its support.

    `y` is the class of each row of the dataset.
    """
    labels = []
    for u in range(len(tasks)):
        match = y[tasks.query[u]][:, None] == tasks.classes[u]
        labels.append(torch.from_numpy(np.where(match.any(1), match.argmax(1), -1)))
    return labels


def _labelled(predictions: Sequence[Prediction], labels: Sequence[Tensor]) -> LabelledLogits:
    if not predictions or not all(bool(torch.isfinite(p.logits).all()) for p in predictions):
        raise CheckpointError(
            "the model gives no logits, or logits that are not finite, because it diverged. "
            "Calibrate another run."
        )
    episode = torch.cat([torch.full((len(p.logits),), p.eval_episode) for p in predictions])
    return LabelledLogits(
        torch.cat([p.logits for p in predictions]),
        torch.cat([labels[p.eval_episode] for p in predictions]),
        episode >= len(labels) - len(labels) // 2,
        episode,
    )
