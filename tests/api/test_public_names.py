"""What `import fedshot` offers, and what it imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fedshot as fs
from fedshot.methods.registry import METHODS


def said(program: str) -> str:
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


def test_the_import_brings_no_other_package():
    program = (
        "import sys; before = set(sys.modules); import fedshot;"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}"
        " - {'fedshot', 'importlib', '__future__', 'warnings', '_weakrefset', 'weakref'}))"
    )
    assert said(program) == ""


def test_every_public_name_is_there():
    assert set(fs.__all__) <= set(dir(fs))
    assert [name for name in fs.__all__ if not getattr(fs, name).__doc__] == []


def test_another_name_is_refused():
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        _ = fs.tarin


@pytest.mark.slow
def test_methods_are_listed_also_once_the_package_of_that_name_is_imported():
    program = "import fedshot as fs, fedshot.methods; print(len(fs.methods()), fs.methods.__name__)"
    count, name = said(program).split()
    # Other tests register methods of their own.
    known = [one for one in METHODS.values() if one.__module__.startswith("fedshot.")]
    assert int(count) == len(known) > 20
    assert name == "fedshot.methods"
