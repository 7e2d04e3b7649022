"""Features as data: read from a file or an array, trained on, tested, predicted and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedshot as fs
from covering import slow
from fedshot.config.load import Config
from fedshot.core.errors import ConfigError, DataError, InputError
from fedshot.data.dataset import Dataset
from fedshot.data.sources.npz import Npz
from fedshot.nn.models.backbones import MLP, Conv4
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.runs.prepare import PreparedRun

CLASSES, D = 9, 5
Y = np.repeat(np.arange(CLASSES), 12)
X = (np.arange(CLASSES)[Y, None] + np.random.default_rng(0).normal(size=(len(Y), D))).astype(
    np.float32
)
SMALL: dict[str, Any] = {
    "split": {"base": "0-4", "validation": [5, 6], "novel": [7, 8]},
    "partition": {"name": "iid", "clients": 2},
    "episode": {"way": 2, "shot": 1, "query": 2},
    "model": {"backbone": {"name": "mlp", "hidden": []}},
    "run": {"rounds": 1},
    "test": {"way": 2, "shot": 1, "query": 5, "episodes": 20, "validation_episodes": 5},
}


def test_npz_reads_float_rows_as_features(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    np.savez(path, x=X.astype(np.float64), y=Y)
    data = Npz(str(path)).load(None)
    assert (data.kind, data.shape) == ("features", (D,))
    np.testing.assert_array_equal(data.x, X)
    np.savez(path, x=X[:, None, :, None], y=Y)
    with pytest.raises(DataError, match=r"images, uint8 .* or features, float \[n, d\]"):
        Npz(str(path)).load(None)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.where(np.arange(len(Y))[:, None] == 7, np.float32("nan"), X), "row 7 holds NaN"),
        (X.astype(np.float64), "float32"),
        (X[:, :0], "at least one row and one column"),
        (X[:, ::2], "C order"),
    ],
)
def test_features_that_cannot_be_trained_on_are_refused(x: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Dataset("rows", x, Y, tuple("abcdefghi"))


@pytest.mark.parametrize("kind", [list, torch.from_numpy, np.float64])
def test_arrays_tensors_and_lists_of_arrays_are_features(kind: Any) -> None:
    data = fs.as_dataset((kind(X), Y))
    assert data.kind == "features"
    np.testing.assert_array_equal(data.x, X)


def test_clients_may_each_bring_rows_of_one_length() -> None:
    data = fs.as_dataset({"a": (X[:50], Y[:50]), "b": (torch.from_numpy(X[50:]), Y[50:])})
    np.testing.assert_array_equal(data.x, X)
    with pytest.raises(DataError, match="4 to 5 numbers"):
        fs.as_dataset({"a": (X[:50], Y[:50]), "b": (X[50:, :4], Y[50:])})


def test_a_perceptron_without_layers_gives_the_features_themselves() -> None:
    model = Model(MLP(hidden=()), None, (D,), dtype="float64")
    h, _ = model.features({"body": {}}, {}, torch.from_numpy(X), Mode())
    torch.testing.assert_close(h, torch.from_numpy(X).double(), rtol=0, atol=0)
    with pytest.raises(ConfigError, match=r"takes floats of shape \[n, 5\]"):
        model.features({"body": {}}, {}, torch.from_numpy(X[:, :3]), Mode())
    with pytest.raises(ConfigError, match="Conv4 takes images, but the data are features"):
        Model(Conv4(), None, (D,))


@pytest.mark.parametrize("method", ["fl_proto", *slow("fedncm", "fedfsl_naive", "fedavg_probe")])
def test_methods_train_on_features_and_their_runs_are_used(method: str, tmp_path: Path) -> None:
    model: dict[str, Any] = {"backbone": {"name": "mlp", "hidden": [8]}}
    if method == "fedncm":
        model["backbone"]["hidden"] = []
    if method == "fedfsl_naive":
        model["head"] = {"name": "linear", "way": 2}
    settings = SMALL | {"model": model}
    run = fs.train(settings, data=(X, Y), method=method, out=tmp_path / "run", progress=False)
    assert run.result is not None
    assert "given features" in run.result.baselines
    classifier = fs.FewShotClassifier(tmp_path / "run").fit(X[[0, 1, -2, -1]], [0, 0, 8, 8])
    found = classifier.predict(X[[2, -3]]).tolist()
    assert found == [0, 8] if method != "fedfsl_naive" else set(found) <= {0, 8}
    with pytest.raises(InputError, match=r"expected \[n, 5\]"):
        classifier.predict(X[:, :4])


def test_augmentation_of_features_is_refused() -> None:
    settings = SMALL | {"episode": {"way": 2, "shot": 1, "query": 2, "augment": {"flip": True}}}
    data = Dataset("rows", X, Y, tuple("012345678"))
    with pytest.raises(DataError, match="this dataset has features"):
        PreparedRun(Config.of(settings | {"method": "fl_proto"}).with_data(data))
