"""`check` says what is there, what is a subset, and what is wrong."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from fedshot.core.errors import DataError
from fedshot.data.files import cache
from fedshot.data.sources.verification import Finding, check


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FEDSHOT_CACHE", str(tmp_path / "cache"))
    mnist = tmp_path / "mnist"
    mnist.mkdir()
    for name, array in (
        ("t10k-images-idx3-ubyte.gz", np.zeros((30, 28, 28), np.uint8)),
        ("t10k-labels-idx1-ubyte.gz", np.arange(30, dtype=np.uint8) % 10),
    ):
        head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        (mnist / name).write_bytes(head + array.tobytes())
    return tmp_path


def texts(findings: list[Finding], level: str) -> str:
    return "\n".join(finding.text for finding in findings if finding.level == level)


def test_a_subset_is_told_as_one(folder):
    findings = check("mnist", folder)
    assert "a subset: 30 of 70000 images, 3 images per class" in texts(findings, "note")
    assert "halves: t10k" in texts(findings, "note")
    assert "10 of 10 classes" in texts(findings, "ok")
    assert "split mnist: 5/0/5 classes" in texts(findings, "ok")


def test_a_hash_that_differs_is_a_problem_with_the_files_name(folder):
    said = texts(check("mnist", folder), "problem")
    assert "t10k-images-idx3-ubyte.gz: md5 of its content differs. Fetch it again." in said


def test_what_cannot_be_loaded_is_a_problem_and_not_an_exception(folder):
    said = texts(check("cifar100", folder), "problem")
    assert "Put the file cifar-100-python.tar.gz into" in said


def test_class_lists_without_images_are_told(folder):
    findings = check("tiered_imagenet", folder)
    assert "class lists: 351/97/160 classes" in texts(findings, "ok")
    assert "holds no images" in texts(findings, "problem")


def test_a_cache_that_was_changed_is_a_problem(folder, monkeypatch):
    monkeypatch.setattr(cache, "verify", lambda _: False)
    assert "the cache differs from what was written" in texts(check("mnist", folder), "problem")


def test_an_unknown_name_is_refused(folder):
    with pytest.raises(
        DataError, match=r"'mnits' is not a dataset that fedshot can check.*Did you mean 'mnist'"
    ):
        check("mnits", folder)
