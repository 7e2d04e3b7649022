"""A trained run as a scikit-learn classifier: a few labelled examples in, predictions out.

    classifier = FewShotClassifier.from_run("runs/x")
    classifier.fit(images, ["cat", "cat", "dog", "dog"])
    classifier.predict(["1.jpg", "2.jpg"])

What happens between the two is the method's own: prototypes, gradient steps, a probe, the private
model of a client. `fit` keeps the examples; the method adapts to them when it is asked.
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

from fedshot.core.errors import CheckpointError, ConfigError, DataError, InputError
from fedshot.data.dataset import check_spellings
from fedshot.use.asked import Asked
from fedshot.use.calibration import Calibration, CalibrationWarning, calibration_of
from fedshot.use.inputs import Inputs, joined
from fedshot.use.labels import Labels, labels_of, told_apart
from fedshot.use.trained import TrainedRun

NONE = "none of these"


class FewShotClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # it has no types
    """A classifier for classes that nobody trained on, from a few examples of each.

    Args:
        run: folder of a run; its best round on the validation classes answers.
        client: whose model answers, where the method leaves models with its clients.
        calibrated: divide the logits by the temperature that `fedshot calibrate` stored with the
            run, if it did; `calibration_` says what was measured.
        accept_unknown: the share in (0, 1) of examples of other classes that may be taken for one
            of these; the rest, and what looks like it, is answered `unknown_label`. Needs a
            calibration. None answers one of the classes always.
        unknown_label: that answer.
        data_dir: folder of datasets, for the few runs that need their data (see `TrainedRun`).

    Attributes:
        classes_: labels, sorted, in the order of the columns of `predict_proba`.
        n_features_in_: numbers that make up an image for the model; not set for texts.
        calibration_: the measurement nearest to the shape of the support, or None.
    """

    def __init__(
        self,
        run: str | Path = "runs/run",
        *,
        client: int | None = None,
        calibrated: bool = True,
        accept_unknown: float | None = None,
        unknown_label: Any = NONE,
        data_dir: str | None = None,
    ) -> None:
        self.run = run
        self.client = client
        self.calibrated = calibrated
        self.accept_unknown = accept_unknown
        self.unknown_label = unknown_label
        self.data_dir = data_dir

    @classmethod
    def from_run(cls, run: str | Path, **options: Any) -> FewShotClassifier:
        """Return the classifier of a run, which is opened and checked at once.

        Raises CheckpointError, ConfigError or DataError when it cannot be used.
        """
        made = cls(run, **options)
        opened = made._open()
        if made.client is not None:
            opened.check_client(made.client)
        return made

    def fit(self, X: Any, y: Any) -> FewShotClassifier:  # noqa: N803  (scikit-learn's names)
        """Take labelled examples, forgetting earlier ones.

        Args:
            X: images: arrays [n, H, W, C] or [n, H, W], uint8 or shares in [0, 1]; paths, bytes of
                files, or PIL images. Texts: strings, paths (pathlib.Path), or lists of words.
            y: labels of any kind, one for each example; two classes at least.

        Raises InputError, a ValueError, for examples or labels that cannot be.
        """
        run = self._open()
        x = self._examples(X)
        with self._all_or_nothing():
            self._learn(run, x, labels_of(y, len(x)))
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> FewShotClassifier:  # noqa: N803
        """Add examples, of old classes or of new ones, to those that are there.

        For methods whose answer is made of the examples one by one, such as class means; what
        adapts by gradient steps takes all examples at once, with `fit`.

        Args:
            X: as in `fit`.
            y: as in `fit`.
            classes: labels that may occur, as scikit-learn has it; others are then refused. With
                it the first examples may be of one class; answers need two.
        """
        run = self._open()
        if not run.method.traits.adds_examples:
            raise ConfigError(
                f"{run.method.name}, as this run has it, adapts to all examples at once, so none "
                "can be added later. Call fit with all of them."
            )
        x = self._examples(X, fitting=not hasattr(self, "support_"))
        labels = labels_of(y, len(x))
        if classes is not None:
            strange = set(labels.tolist()) - set(np.asarray(classes).tolist())
            if strange:
                raise InputError(f"label {strange.pop()!r} is not among `classes`.")
        if hasattr(self, "support_"):
            self._check_unchanged()
            x, old = joined(self.support_, x), self.classes_[self.support_codes_]
            labels = labels_of([*old.tolist(), *labels.tolist()], len(x))
        with self._all_or_nothing():
            self._learn(run, x, labels, begun=classes is not None or self._begun)
        return self

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:  # noqa: N803
        """Return the share of examples whose label is predicted, by equality.

        Labels may be of any kind, and `sample_weight` [n] not negative.
        """
        said = self.predict(X).tolist()
        right = [bool(a == b) for a, b in zip(said, labels_of(y, len(said)).tolist(), strict=True)]
        if not right:
            raise InputError("there are no examples to score.")
        if sample_weight is None:
            return float(np.mean(right))
        weights = np.asarray(sample_weight, dtype=np.float64)
        sound = weights.shape == (len(right),) and np.isfinite(weights).all()
        if not sound or weights.min() < 0 or not weights.sum():
            raise InputError(
                f"sample_weight has shape {list(weights.shape)}; expected {len(right)} finite "
                "numbers that are not negative, some of them positive."
            )
        return float(np.average(right, weights=weights))

    def predict(self, X: Any) -> Labels:  # noqa: N803
        """Return the most probable label of each example, or `unknown_label`."""
        logits = self.logits(X)
        labels: Labels = self.classes_[logits.argmax(dim=1).numpy()]
        if self.accept_unknown is None:
            return labels
        out = np.empty(len(labels), dtype=object)
        out[:] = labels.tolist()
        out[~self.accepted(logits)] = self.unknown_label
        return out

    def predict_proba(self, X: Any) -> Labels:  # noqa: N803
        """Return probabilities [n, classes], those of a row summing to 1, for these classes."""
        return self.probabilities(self.logits(X))

    def probabilities(self, logits: Tensor) -> Labels:
        """Return what `predict_proba` makes of logits, float64 [n, classes]."""
        heat = self.calibration_.temperature if self.calibration_ else 1.0
        return torch.softmax(logits.double() / heat, dim=1).numpy()

    def accepted(self, logits: Tensor) -> Labels:
        """Return, for each row of logits, whether it is taken for one of the classes, bool [n]."""
        if self.accept_unknown is None or self.calibration_ is None:
            self._check_threshold(self.calibration_)
            return np.ones(len(logits), dtype=bool)
        self._check_threshold(self.calibration_)
        return self.calibration_.accepts(logits, self.accept_unknown).numpy()

    def logits(self, X: Any) -> Tensor:  # noqa: N803
        """Return the method's own logits [n, classes], before temperature and softmax."""
        check_is_fitted(self, "support_")
        self._check_unchanged()
        if len(self.classes_) < 2:
            raise InputError(
                f"all examples so far are of one class, {self.classes_.tolist()[0]!r}; answers "
                "need two classes at least. Add examples of another with partial_fit."
            )
        run = self._open()
        query = self._examples(X, fitting=False)
        if not len(query):
            return torch.empty((0, len(self.classes_)))
        found = torch.cat(run.answer(self._eval_episodes_of(run, query), self.client))
        wrong = int((~torch.isfinite(found).all(1)).sum())
        if wrong:
            raise CheckpointError(
                f"the model of {run.folder} at round {run.round} gives numbers that are not finite "
                f"for {wrong} of {len(found)} examples: its training, or the adaptation, diverged."
            )
        return found

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Put everything back as it was when something is refused."""
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _learn(self, run: TrainedRun, x: Tensor, labels: Labels, *, begun: bool = False) -> None:
        if run.method.traits.base_classes_only:
            raise ConfigError(
                f"{run.method.name} tells apart the {len(run.facts.base)} classes that it was "
                "trained on, and has no answer about others, whatever the examples. Choose a run "
                "of a method that learns from examples at test, such as fedavg_probe."
            )
        if not len(x):
            raise InputError("there are no examples (0 sample(s)); a minimum of 1 is required.")
        classes, codes = told_apart(labels)
        try:
            check_spellings(
                "the labels", [name for name in classes.tolist() if isinstance(name, str)]
            )
        except DataError as error:
            raise InputError(str(error)) from None
        if len(classes) < 2 and not begun:
            raise InputError(
                f"the examples are all of one class, {classes.tolist()[0]!r}; expected two classes "
                "at least. To tell one class from everything else, add examples of other things."
            )
        widest = run.method.traits.max_test_way
        if widest is not None and len(classes) > widest:
            raise InputError(
                f"the examples are of {len(classes)} classes, and the head of this run tells "
                f"{widest} apart. Use fewer classes, or a run with a wider model.head.way."
            )
        self.classes_, self.support_ = classes, x
        self.support_codes_ = torch.from_numpy(codes.astype(np.int64))
        if not run.facts.is_text:
            self.n_features_in_ = int(np.prod(run.facts.shape))
        self._fitted_with = self._settings()
        self.calibration_: Calibration | None = None
        if len(classes) < 2:
            return
        counts = np.bincount(codes)
        shot = int(np.median(counts))
        found = None
        if self.calibrated:
            asked = self.accept_unknown is not None
            found = calibration_of(run, len(classes), shot, self.client, thresholds=asked)
        self.calibration_ = found
        self._check_threshold(found)
        if self.accept_unknown is not None and found is not None:
            self._check_shape(found, counts, shot)
        if self.client is not None or run.keeps_private:  # else the server answers in any case
            if self.client is not None:
                run.check_client(self.client)
            run.answer(self._eval_episodes_of(run, x[:1]), self.client)

    def _check_threshold(self, found: Calibration | None) -> None:
        if self.accept_unknown is None:
            return
        if any(bool(label == self.unknown_label) for label in self.classes_.tolist()):
            raise InputError(
                f"unknown_label is {self.unknown_label!r}, and so is one of the classes; an answer "
                "would not say which is meant. Rename the class, or set unknown_label."
            )
        if found is None:
            raise ConfigError(
                f"accept_unknown is {self.accept_unknown}, which needs a measurement. Run `fedshot "
                f"calibrate {self.run}`{'' if self.calibrated else ', and leave calibrated on'}."
            )
        found.at(self.accept_unknown)

    def _check_shape(self, found: Calibration, counts: Labels, shot: int) -> None:
        """Warn where a threshold was measured on other episodes than the support makes."""
        way = len(counts)
        uneven = int(counts.min()) != int(counts.max())
        if (found.way, found.shot) == (way, shot) and not uneven:
            return
        each = f"{counts.min()} to {counts.max()} examples of each" if uneven else f"{shot}-shot"
        whose = f" --client {self.client}" if found.client is not None else ""
        same = (found.way, found.shot) == (way, shot)
        fix = (
            "Give as many examples of each class"
            if same
            else f"Run `fedshot calibrate {self.run} --way {way} --shot {shot}{whose}`"
        )
        warnings.warn(
            f"the threshold for {self.unknown_label!r} was measured on {found.way}-way "
            f"{found.shot}-shot episodes, and the examples are {way}-way, {each}: another share "
            f"than {self.accept_unknown:g} of unknown examples may be accepted. {fix}.",
            CalibrationWarning,
            stacklevel=4,
        )

    def _settings(self) -> tuple[Any, ...]:
        """Return what examples are fitted with."""
        return str(self.run), self.client, bool(self.calibrated)

    def _check_unchanged(self) -> None:
        now, then = self._settings(), self._fitted_with
        for name, new, old in zip(("run", "client", "calibrated"), now, then, strict=True):
            if new != old:
                raise ConfigError(
                    f"{name} is {new!r} now, and the examples were fitted when it was {old!r}. "
                    "Call fit again."
                )

    @property
    def _begun(self) -> bool:
        """Whether examples of one class are there, and others are to come."""
        return len(getattr(self, "classes_", ())) == 1

    @property
    def opened(self) -> TrainedRun:
        """The run, opened."""
        return self._open()

    @property
    def inputs(self) -> Inputs:
        """What makes examples of one's own into the run's."""
        self._open()
        return self._inputs

    def _eval_episodes_of(self, run: TrainedRun, query: Tensor) -> Asked:
        way, known = len(self.classes_), len(run.facts.class_names)
        classes = torch.arange(known, known + way)  # none of them is a class of the training data
        return Asked(
            self.support_,
            self.support_codes_,
            query,
            classes,
            run.config.run.device,
            whole=run.method.traits.transductive,
        )

    def _examples(self, X: Any, *, fitting: bool = True) -> Tensor:  # noqa: N803
        """Return examples as the model takes them; a subclass may read other kinds."""
        del fitting
        if isinstance(X, Tensor) and X.dtype in (torch.uint8, torch.int32):
            X = X.numpy(force=True)  # noqa: N806
        self._open()
        return self._inputs(X)

    def _open(self) -> TrainedRun:
        """Return the run, opened once for each setting of `run` and `data_dir`."""
        asked = (str(self.run), self.data_dir)
        if getattr(self, "_asked", None) != asked:
            self._run = TrainedRun(self.run, self.data_dir)
            self._inputs = Inputs(self._run.facts, self._run.config)
            self._asked = asked
        return self._run

    def __getstate__(self) -> dict[str, Any]:
        """Leave the opened run out: a copy opens the folder itself."""
        state: dict[str, Any] = super().__getstate__()
        return {k: v for k, v in state.items() if k not in ("_run", "_inputs", "_asked")}

    def __sklearn_tags__(self) -> Any:
        """Say that examples are images or texts, not rows of features."""
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.three_d_array = True
        tags.input_tags.one_d_array = True
        tags.input_tags.string = True
        return tags


__all__ = ["NONE", "FewShotClassifier"]
