"""Print the lowest versions that pyproject.toml allows, as `make test-floors` installs them.

These are the dependencies, torch excepted, and the extras that these tests use.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

EXTRAS = ("completion", "reports")


def floors() -> Iterator[tuple[str, str]]:
    """Yield the name and the lowest version of each."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    extras = (project["optional-dependencies"][extra] for extra in EXTRAS)
    for line in sum(extras, project["dependencies"]):
        found = re.fullmatch(r"([\w-]+)>=([\d.]+)(,<[\d.]+)?", line)
        if found is None:
            raise ValueError(f"{line!r} has no lowest version; expected such as 'numpy>=1.26'")
        yield found[1], found[2]


if __name__ == "__main__":
    print("\n".join(f"{name}=={floor}" for name, floor in floors() if name != "torch"))
