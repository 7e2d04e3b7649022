"""A trained run as a scikit-learn classifier, fitted to a few labelled examples.

    classifier = FewShotClassifier.from_run("runs/x")
    classifier.fit(images, ["cat", "cat", "dog", "dog"])
    classifier.predict(["1.jpg", "2.jpg"])

`fit` stores the examples. `predict` lets the run's method adapt to them as it does at test: with
prototypes, gradient steps, a probe, or a client's private model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from fedshot.core.errors import CheckpointError, ConfigError, DataError, InputError, as_path
from fedshot.core.text import typed
from fedshot.data.dataset import check_spellings
from fedshot.use.calibration import Calibration, CalibrationWarning, calibration_of
from fedshot.use.inputs import Inputs, joined
from fedshot.use.labels import Labels, encoded, labels_of
from fedshot.use.query_episodes import QueryEpisodes
from fedshot.use.trained import TrainedRun

NONE = "none of these"


class FewShotClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # it has no types
    """A classifier for new classes, from a few examples of each.

    Args:
        run: folder of a run; the model of its chosen round predicts.
        client: number or name of the client whose model predicts, for methods whose clients keep
            models.
        calibrated: divide the logits by the temperature that `fedshot calibrate` stored with the
            run, if the run has been calibrated.
        accept_unknown: share, in (0, 1), of the examples of unknown classes that may be accepted
            as one of the known classes; rejected examples get `unknown_label`. Needs a
            calibration. None accepts every example.
        unknown_label: label of rejected examples.
        data_dir: folder of datasets, for runs that need their data (see `TrainedRun`).
        encoder: the `torch.nn.Module` of `model.encoder`, if it was passed to the run in Python.
        backbone: the `torch.nn.Module` of `model.backbone`, if it was passed to the run in Python.

    Attributes:
        classes_: sorted labels, in the order of the columns of `predict_proba`.
        n_features_in_: number of values in one image, H * W * C; not set for texts.
        calibration_: the stored calibration nearest to the examples' way and shot, which is in use;
            None without one.
    """

    def __init__(
        self,
        run: str | Path = "runs/run",
        *,
        client: int | str | None = None,
        calibrated: bool = True,
        accept_unknown: float | None = None,
        unknown_label: Any = NONE,
        data_dir: str | None = None,
        encoder: Any = None,
        backbone: Any = None,
    ) -> None:
        self.run = run
        self.client = client
        self.calibrated = calibrated
        self.accept_unknown = accept_unknown
        self.unknown_label = unknown_label
        self.data_dir = data_dir
        self.encoder = encoder
        self.backbone = backbone

    @classmethod
    def from_run(cls, run: str | Path, **options: Any) -> FewShotClassifier:
        """Open a run, check it, and return its classifier.

        Raises CheckpointError, ConfigError or DataError if the run cannot be used.
        """
        classifier = cls(run, **options)
        _ = classifier._client
        return classifier

    def fit(self, X: Any, y: Any) -> FewShotClassifier:  # noqa: N803  (scikit-learn's names)
        """Store labelled examples, in place of the examples of an earlier call.

        Args:
            X: images: arrays [n, H, W, C] or [n, H, W], uint8 or floats in [0, 1], tensors also
                [n, C, H, W]; paths, bytes of files, or PIL images. Texts: strings, paths
                (pathlib.Path), or lists of words. Features: [n, d].
            y: labels of any type, one for each example, of at least two classes.

        Raises InputError, a ValueError, for invalid examples or labels.
        """
        run = self.opened
        x = self._examples(X)
        with self._rolled_back_on_error():
            self._learn(run, x, labels_of(y, len(x)))
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> FewShotClassifier:  # noqa: N803
        """Add examples of old or new classes to the stored ones.

        Only for methods that can add examples later, such as those with class means; methods that
        adapt by gradient steps need all examples at once, with `fit`.

        Args:
            X: as in `fit`.
            y: as in `fit`.
            classes: all labels that may occur, as in scikit-learn; other labels are errors. If
                given, the first examples may all be of one class, but `predict` needs two classes.

        Raises ConfigError if the method cannot add examples, and InputError as `fit`.
        """
        run = self.opened
        if not run.method.traits.adds_examples:
            raise ConfigError(
                f"{run.method.name}, with the options of this run, adapts to all examples at once, "
                "so none can be added later. Call fit with all of them."
            )
        x = self._examples(X, fitting=not hasattr(self, "support_"))
        labels = labels_of(y, len(x))
        if classes is not None:
            others = set(labels.tolist()) - set(np.asarray(classes).tolist())
            if others:
                raise InputError(f"label {others.pop()!r} is not among `classes`.")
        if hasattr(self, "support_"):
            self._check_unchanged()
            x, old = joined(self.support_, x), self.classes_[self.support_codes_]
            labels = labels_of([*old.tolist(), *labels.tolist()], len(x))
        # Examples of other classes may follow later.
        one_class = classes is not None or len(getattr(self, "classes_", ())) == 1
        with self._rolled_back_on_error():
            self._learn(run, x, labels, one_class=one_class)
        return self

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:  # noqa: N803
        """Return the accuracy in [0, 1] for labels of any type; `sample_weight` [n] is at least 0.

        Raises InputError for invalid examples, labels or weights.
        """
        predicted = self.predict(X).tolist()
        labels = labels_of(y, len(predicted)).tolist()
        right = [bool(a == b) for a, b in zip(predicted, labels, strict=True)]
        if not right:
            raise InputError("there are no examples to score.")
        if sample_weight is None:
            return float(np.mean(right))
        weights = np.asarray(sample_weight, dtype=np.float64)
        valid = weights.shape == (len(right),) and np.isfinite(weights).all()
        if not valid or weights.min() < 0 or not weights.sum():
            raise InputError(
                f"sample_weight has shape {list(weights.shape)}; expected {len(right)} finite "
                "numbers, none negative and at least one positive."
            )
        return float(np.average(right, weights=weights))

    def predict(self, X: Any) -> Labels:  # noqa: N803
        """Return the most probable label of each example, [n]; `unknown_label` if it is rejected.

        Raises InputError for invalid examples, and scikit-learn's NotFittedError before `fit`.
        """
        logits = self.logits(X)
        labels: Labels = self.classes_[logits.argmax(dim=1).numpy()]
        if self.accept_unknown is None:
            return labels
        out = np.empty(len(labels), dtype=object)
        out[:] = labels.tolist()
        out[~self.accepted(logits)] = self.unknown_label
        return out

    def predict_proba(self, X: Any) -> Labels:  # noqa: N803
        """Return probabilities, float64 [n, classes]; each row sums to 1. Raises as `logits`."""
        return self.probabilities(self.logits(X))

    def probabilities(self, logits: Tensor) -> Labels:
        """Return probabilities from logits at the calibrated temperature, float64 [n, classes]."""
        temperature = self.calibration_.temperature if self.calibration_ else 1.0
        return torch.softmax(logits.double() / temperature, dim=1).numpy()

    def accepted(self, logits: Tensor) -> Labels:
        """Return whether the example of each row of logits is accepted as known, bool [n]."""
        self._check_threshold(self.calibration_)
        if self.accept_unknown is None or self.calibration_ is None:
            return np.ones(len(logits), dtype=bool)
        return self.calibration_.accepts(logits, self.accept_unknown).numpy()

    def logits(self, X: Any) -> Tensor:  # noqa: N803
        """Return the method's logits [n, classes], before temperature and softmax.

        Raises as `predict`, and CheckpointError if the logits are not finite.
        """
        check_is_fitted(self, "support_")
        self._check_unchanged()
        if len(self.classes_) < 2:
            raise InputError(
                f"all examples so far are of one class, {self.classes_.tolist()[0]!r}; expected at "
                "least two classes. Add examples of another class with partial_fit."
            )
        run = self.opened
        query = self._examples(X, fitting=False)
        if not len(query):
            return torch.empty((0, len(self.classes_)))
        found = torch.cat(run.logits(self._eval_episodes(run, query), self._client))
        wrong = int((~torch.isfinite(found).all(1)).sum())
        if wrong:
            raise CheckpointError(
                f"the model of {run.folder} at round {run.round} gives logits that are not finite "
                f"for {wrong} of {len(found)} examples, because its training or the adaptation "
                "diverged. Use another run, or train with smaller step sizes."
            )
        return found

    @contextmanager
    def _rolled_back_on_error(self) -> Iterator[None]:
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _learn(
        self, run: TrainedRun, x: Tensor, labels: Labels, *, one_class: bool = False
    ) -> None:
        if run.method.traits.base_classes_only:
            raise ConfigError(
                f"{run.method.name} predicts only the {len(run.dataset_info.base)} classes that it "
                "was trained on, and cannot learn others. Choose a run of a method that learns "
                "from examples at test, such as fedavg_probe."
            )
        if not len(x):
            raise InputError("there are no examples (0 sample(s)); a minimum of 1 is required.")
        classes, codes = encoded(labels)
        try:
            check_spellings(
                "the labels", [name for name in classes.tolist() if isinstance(name, str)]
            )
        except DataError as error:
            raise InputError(str(error)) from None
        if len(classes) < 2 and not one_class:
            raise InputError(
                f"the examples are all of one class, {classes.tolist()[0]!r}; expected at least "
                "two classes. To recognise a single class, add examples of other things."
            )
        most = run.method.traits.max_test_way
        if most is not None and len(classes) > most:
            raise InputError(
                f"the examples are of {len(classes)} classes; expected at most {most}, the number "
                "of outputs of this run's head. Use fewer classes, or a run with a larger "
                "model.head.way."
            )
        self.classes_, self.support_ = classes, x
        self.support_codes_ = torch.from_numpy(codes.astype(np.int64))
        info = run.dataset_info
        if not info.reads_text:
            self.n_features_in_ = int(np.prod(info.original or info.shape))
        self._fitted_with = self._settings()
        self.calibration_: Calibration | None = None
        if len(classes) < 2:
            return
        counts, client = np.bincount(codes), self._client
        shot = int(np.median(counts))
        if self.calibrated:
            self.calibration_ = calibration_of(
                run, len(classes), shot, client, thresholds=self.accept_unknown is not None
            )
        self._check_threshold(self.calibration_)
        if self.accept_unknown is not None and self.calibration_ is not None:
            self._warn_of_shape(self.calibration_, counts, shot)
        if client is not None or run.keeps_private:  # otherwise the server can always predict
            run.logits(self._eval_episodes(run, x[:1]), client)

    @property
    def _client(self) -> int | None:
        """The number of `client`. Raises ConfigError unless the client has its own model."""
        run = self.opened
        return None if self.client is None else run.client_number(self.client)

    def _check_threshold(self, found: Calibration | None) -> None:
        if self.accept_unknown is None:
            return
        if any(bool(label == self.unknown_label) for label in self.classes_.tolist()):
            raise InputError(
                f"unknown_label is {self.unknown_label!r}, which is also one of the classes. "
                "Rename the class, or set another unknown_label."
            )
        if found is None:
            raise ConfigError(
                f"accept_unknown is {self.accept_unknown}, which needs a calibration. Run `fedshot "
                f"calibrate {typed(self.run)}`"
                f"{'' if self.calibrated else ', and leave calibrated on'}."
            )
        found.at(self.accept_unknown)

    def _warn_of_shape(self, found: Calibration, counts: Labels, shot: int) -> None:
        """Warn if the threshold was measured with a different way or shot than the examples'."""
        way = len(counts)
        uneven = int(counts.min()) != int(counts.max())
        same = (found.way, found.shot) == (way, shot)
        if same and not uneven:
            return
        each = f"{counts.min()} to {counts.max()} examples of each" if uneven else f"{shot}-shot"
        client = f" --client {found.client}" if found.client is not None else ""
        fix = (
            "Give the same number of examples of each class"
            if same
            else f"Run `fedshot calibrate {typed(self.run)} --way {way} --shot {shot}{client}`"
        )
        warnings.warn(
            f"the threshold for {self.unknown_label!r} was measured on {found.way}-way "
            f"{found.shot}-shot episodes, but the examples are {way}-way, {each}: the share of "
            f"unknown examples that are accepted may differ from {self.accept_unknown:g}. {fix}.",
            CalibrationWarning,
            stacklevel=4,
        )

    def _settings(self) -> tuple[Any, ...]:
        return str(self.run), self.client, bool(self.calibrated)

    def _check_unchanged(self) -> None:
        now, then = self._settings(), self._fitted_with
        for name, new, old in zip(("run", "client", "calibrated"), now, then, strict=True):
            if new != old:
                raise ConfigError(
                    f"{name} is {new!r}, but the examples were fitted with {old!r}. Call fit again."
                )

    @property
    def opened(self) -> TrainedRun:
        """The opened run, reopened only if its folder, `data_dir` or a module changes."""
        asked = (str(self.run), self.data_dir, self.encoder, self.backbone)
        if getattr(self, "_asked", None) != asked:
            folder = as_path("run", self.run)
            self._run = run = TrainedRun(
                folder, self.data_dir, encoder=self.encoder, backbone=self.backbone
            )
            self._inputs = Inputs(run.dataset_info, run.config, run.encode)
            self._asked = asked
        return self._run

    @property
    def inputs(self) -> Inputs:
        """The function that converts examples to inputs of the run's model."""
        _ = self.opened
        return self._inputs

    def _eval_episodes(self, run: TrainedRun, query: Tensor) -> QueryEpisodes:
        way, known = len(self.classes_), len(run.dataset_info.class_names)
        classes = torch.arange(known, known + way)  # numbers unused in the training data
        return QueryEpisodes(
            self.support_,
            self.support_codes_,
            query,
            classes,
            run.config.run.devices[0],
            whole=run.method.traits.transductive,
        )

    def _examples(self, X: Any, *, fitting: bool = True) -> Tensor:  # noqa: N803
        """Return examples as inputs of the model; a subclass may convert other types."""
        del fitting
        return self.inputs(X)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling, without the opened run, which the copy opens itself."""
        state: dict[str, Any] = super().__getstate__()
        return {k: v for k, v in state.items() if k not in ("_run", "_inputs", "_asked")}

    def __sklearn_tags__(self) -> Any:
        """Declare that examples are images or texts, not rows of features."""
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.three_d_array = True
        tags.input_tags.one_d_array = True
        tags.input_tags.string = True
        return tags


__all__ = ["NONE", "FewShotClassifier"]
