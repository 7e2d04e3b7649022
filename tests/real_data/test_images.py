"""The published image sets below $FEDSHOT_DATA load whole, with their counts and splits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedshot.core.errors import DataError
from fedshot.data.sources.cifar import Cifar100
from fedshot.data.sources.mini_imagenet import MiniImageNet
from fedshot.data.sources.mnist import Mnist
from fedshot.data.sources.omniglot import Omniglot
from fedshot.data.sources.registry import SOURCES
from fedshot.data.sources.tiered_imagenet import TieredImageNet
from fedshot.data.sources.verification import check

pytestmark = pytest.mark.data


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSHOT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def needs(name: str) -> Path:
    folder = os.environ.get("FEDSHOT_DATA")
    if not folder or not (Path(folder) / name).is_dir():
        pytest.skip(f"needs {name} below $FEDSHOT_DATA")
    return Path(folder)


@pytest.mark.parametrize(
    ("source", "folder", "shape", "per_class", "split"),
    [
        (Omniglot(), "omniglot", (32_460, 28, 28, 1), 20, [1028, 172, 423]),
        (Cifar100("fc100"), "cifar100", (24_000, 32, 32, 3), 240, [60, 20, 20]),
        (Cifar100("cifar_fs"), "cifar100", (24_000, 32, 32, 3), 240, [64, 16, 20]),
        (MiniImageNet(), "miniimagenet", (10_000, 84, 84, 3), 100, [64, 16, 20]),
        (Mnist(), "mnist", (10_000, 28, 28, 1), None, [5, 0, 5]),
    ],
)
def test_a_set_has_its_counts_and_split_and_is_decoded_once(
    source, folder, shape, per_class, split, monkeypatch
):
    data_dir = needs(folder)
    dataset = source.load(data_dir)
    assert dataset.x.shape == shape
    if per_class is not None:
        assert set(np.bincount(dataset.y).tolist()) == {per_class}
    found = dataset.standard
    assert [len(part) for part in (found.base, found.validation, found.novel)] == split
    monkeypatch.setattr(
        "fedshot.data.files.cache.load_or_build", lambda *_: pytest.fail("built again")
    )
    monkeypatch.setattr(
        "fedshot.data.files.fingerprints.hash_file", lambda *_: pytest.fail("read again")
    )
    again = source.load(data_dir)
    assert again.digest == dataset.digest
    assert isinstance(again.x.base, np.memmap)
    assert str(again.x.base.filename).startswith(os.environ["FEDSHOT_CACHE"])


def test_the_pickles_of_cifar_hold_the_images_of_the_png_files():
    data_dir = needs("cifar100")
    sample = Cifar100(file="cifar-100-python.sample.tar.gz").load(data_dir)
    assert np.bincount(sample.y).tolist() == [7] * 100
    pngs = Cifar100().load(data_dir)
    known = {(int(c), x.tobytes()) for c, x in zip(pngs.y, pngs.x, strict=True)}
    assert all((int(c), x.tobytes()) in known for c, x in zip(sample.y, sample.x, strict=True))


def test_the_splits_that_come_with_fedshot_are_those_beside_the_data(tmp_path):
    for folder, source in (("omniglot", Omniglot()), ("miniimagenet", MiniImageNet())):
        data_dir = needs(folder)
        (tmp_path / folder).mkdir()
        for path in (data_dir / folder).glob("*.zip"):
            if path.name != "all_runs.zip":
                (tmp_path / folder / path.name).symlink_to(path)
        assert source.load(tmp_path).standard == source.load(data_dir).standard


def test_tiered_imagenet_without_images_says_what_to_put_where():
    with pytest.raises(DataError, match="tieredimagenet holds no images"):
        TieredImageNet().load(needs("tieredimagenet"))


@pytest.mark.parametrize("name", ["omniglot", "cifar100", "mini_imagenet", "mnist"])
def test_check_finds_no_problem(name):
    data_dir = needs({"mini_imagenet": "miniimagenet"}.get(name, name))
    findings = check(name, data_dir)
    assert [str(finding) for finding in findings if finding.level == "problem"] == []
    assert name in SOURCES
    if name == "cifar100":
        assert any("240 of 600 images per class" in finding.text for finding in findings)


MEASURE = """
import resource, sys
from pathlib import Path
from PIL import Image
from fedshot.data.sources.cifar import Cifar100
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
import torch; torch.ones(8, 8) @ torch.ones(8, 8); Image.init()
before = peak()
dataset = Cifar100().load(Path(sys.argv[1]))
print(peak() - before, dataset.x.nbytes)
"""


@pytest.mark.slow
def test_the_first_load_of_cifar_takes_1_3_times_its_bytes(tmp_path):
    data_dir = needs("cifar100")
    answer = subprocess.run(
        [sys.executable, "-c", MEASURE, str(data_dir)],
        env={**os.environ, "FEDSHOT_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    added, raw = map(float, answer.stdout.split())
    assert added < 1.3 * raw
