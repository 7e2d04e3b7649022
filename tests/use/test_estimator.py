"""scikit-learn's own checks of an estimator.

They are written for rows of numbers, which a run does not take, so they stop at the tag that says
so. `Rows` makes images of rows and leaves everything else to the classifier, so that they run. What
then still does not hold is listed with its reason, here and in docs/use.md.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.exceptions import SkipTestWarning
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from fedshot.use.classifier import FewShotClassifier
from system.runs import finished

# What does not hold, and what cannot be tried here: check, reason.
EXCEPTIONS: dict[str, str] = {}
SKIPPED = {
    "check_array_api_input": "needs SCIPY_ARRAY_API in the environment",
    "check_classifier_data_not_an_array": "its second half needs pandas",
}
PAGE = Path(__file__).parents[2] / "docs" / "use.md"


class Rows(FewShotClassifier):
    """Takes rows of numbers: each becomes an image of 8 x 8, its numbers in the first pixels."""

    def _examples(self, X: Any, *, fitting: bool = True) -> Tensor:  # noqa: N803
        if not fitting:
            check_is_fitted(self, "support_")
        rows = validate_data(self, X, reset=fitting, dtype=np.float64)
        images = np.zeros((len(rows), 64))
        images[:, : min(64, rows.shape[1])] = np.tanh(rows[:, :64] / 10) * 127 + 128
        assert self.opened
        return torch.from_numpy(images.astype(np.uint8).reshape(-1, 8, 8, 1))

    def _learn(self, run: Any, x: Tensor, labels: Any, *, one_class: bool = False) -> None:
        features = self.n_features_in_
        super()._learn(run, x, labels, one_class=one_class)
        self.n_features_in_ = features

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.one_d_array = True, False
        return tags


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs") / "run"
    finished(made, {"method": {"name": "fl_proto", "local_steps": 10}, "run": {"rounds": 4}})
    return made


def test_the_checks_for_rows_stop_at_the_tag(folder: Path) -> None:
    with pytest.warns(SkipTestWarning, match="Can't test estimator FewShotClassifier"):
        found = check_estimator(FewShotClassifier(folder), on_fail=None, on_skip="warn")
    assert [one["check_name"] for one in found if one["status"] == "failed"] == []


@pytest.mark.slow
def test_every_check_passes_on_images_made_of_rows_but_those_listed(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_estimator(Rows(folder), on_fail=None, on_skip=None)
    failed = {one["check_name"]: one["exception"] for one in found if one["status"] == "failed"}
    assert failed.keys() == EXCEPTIONS.keys(), {k: repr(e)[:300] for k, e in failed.items()}
    skipped = {one["check_name"] for one in found if one["status"] == "skipped"}
    assert skipped <= SKIPPED.keys()
    assert sum(one["status"] == "passed" for one in found) > 50


def test_the_page_lists_these_exceptions() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`(check_\w+)`", text)) - {"check_estimator"}
    assert named == EXCEPTIONS.keys() | SKIPPED.keys()
