"""Images of the digits in folders, for the command `predict`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedshot as fs
from fedshot.cli.main import main
from fedshot.data.sources.digits import Digits


def support_and_query(folder: Path) -> list[str]:
    """Write three images of the digits 7 and 8 each as support, and those of 7 as queries.

    Returns the arguments of `predict` that name them.
    """
    digits = Digits().load(None)
    for part, classes in (("support", (7, 8)), ("query", (7,))):
        for c in classes:
            place = folder / part / digits.class_names[c]
            place.mkdir(parents=True)
            for i in digits.images_of([c])[:3].tolist():
                Image.fromarray(digits.pixels[i, :, :, 0]).save(place / f"{i:04}.png")
    return ["--support", str(folder / "support"), "--query", str(folder / "query")]


def check_predictions(run: Path, paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Assert that `predict` on the files of `support_and_query` agrees with FewShotClassifier."""
    digits = Digits().load(None)
    capsys.readouterr()
    assert main(["predict", str(run), *paths, "--json"]) == 0
    found = [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()]
    rows = np.concatenate([digits.images_of([c])[:3] for c in (7, 8)])
    x, names = digits.pixels[rows], [digits.class_names[c] for c in digits.y[rows]]
    assert found == fs.FewShotClassifier(run).fit(x, names).predict(x[:3]).tolist()
