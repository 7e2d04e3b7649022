"""What pyproject.toml says of the package holds on a package index, too."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for line in project["dependencies"]:
        assert re.fullmatch(r"[\w-]+(\[\w+\])?>=[\d.]+(,<[\d.]+)?", line), line
