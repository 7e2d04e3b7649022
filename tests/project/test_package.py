"""What pyproject.toml says of the package holds on a package index, too."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from trove_classifiers import classifiers

import fedshot
from floors import floors

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def metadata(repository: str) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, Any] = {}
    module.Metadata(str(ROOT), {"repository": repository}).update(found)
    return found


@pytest.mark.parametrize("address", ["", "https://host.example/owner/fedshot"])
def test_no_link_of_the_readme_is_relative_on_a_package_index(address: str) -> None:
    found = metadata(address)
    links = [link for link in LINK.findall(found["readme"]["text"]) if not link.startswith("#")]
    assert bool(links) == bool(found["urls"]) == bool(address)
    for link in [*links, found["urls"].get("Documentation", f"{address}/blob/HEAD/LICENSE")]:
        assert link.startswith(f"{address}/blob/HEAD/")
        assert (ROOT / link.removeprefix(f"{address}/blob/HEAD/").partition("#")[0]).exists()
    assert all(url.startswith(address) for url in found["urls"].values())


def test_every_dependency_has_a_floor_that_make_test_floors_installs() -> None:
    found = dict(floors())
    assert {"torch", "numpy", "plotly", "shtab"} <= found.keys()


def test_the_version_is_one_and_the_classifiers_exist() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == fedshot.__version__
    assert PROJECT["dynamic"] == ["version", "readme", "urls"]
    assert set(PROJECT["classifiers"]) <= classifiers


def test_an_extra_is_pinned_like_the_rest() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {same(line.partition("==")[0]) for line in lines if "==" in line}
    # `make` installs none of these from an index.
    unpinned = {"datasets", "fedshot", "timm", "torchvision"}
    extras = sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])
    assert {same(re.split(r"[\[>=<]", line)[0]) for line in extras} - unpinned <= pinned


def same(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
