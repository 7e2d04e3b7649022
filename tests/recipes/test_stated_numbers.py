"""Numbers in notes and pages are those of the stored cells, rounded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedshot.recipes.results import read, row_of
from fedshot.reports.significance import compare

ROOT = Path(__file__).parents[2]
CIFAR, FC100, HUFF = "cifar-fs/paper-tune4", "fedfsl-fc100/head-tune4", "f2l-huffpost/paper"
ROBUST, SWEEP = "robustness/small", "pfedfsl-fig2/small"

NOTES, PAGE = "results/cifar-fs/notes.md", "docs/methods"

# Page, text with {} for the number, folder of cells, cell, and the cell to which it is compared.
STATED = [
    (NOTES, "11.3 ± 0.5 | {} |", CIFAR, "naive.noniid-1", "local.noniid-1"),
    (NOTES, "| {} | 1.6 ± 0.4", CIFAR, "fedbabu.iid-5", "fedavg-probe.iid-5"),
    (NOTES, "| {} | -0.9", CIFAR, "fl-proto.iid-5", "fedavg-probe.iid-5"),
    (NOTES, "| {} | 0.4 ±", CIFAR, "naive.noniid-1", "fedavg-probe.noniid-1"),
    (f"{PAGE}/fedbabu.md", "{} below it", CIFAR, "fedavg-probe.iid-5", "fedbabu.iid-5"),
    ("results/fedfsl-fc100/notes.md", "| {} (2.3)", FC100, "naive.iid-5", "local.iid-5"),
    (f"{PAGE}/fsl_local.md", "and {} (five)", FC100, "naive.iid-5", "local.iid-5"),
    (f"{PAGE}/fedfsl_naive.md", "{} and 4.7", FC100, "naive.iid-5", "local.iid-5"),
    ("results/pfedfsl-fig2/notes.md", "m = 2 is {}", SWEEP, "standard.real", "m-2.real"),
    ("results/robustness/notes.md", "noise {}", ROBUST, "proto-mean.honest", "proto-mean.gaussian"),
    ("docs/lessons.md", "1.1 GB, has {}", HUFF, "fl-proto.iid-1", ""),
]  # fmt: skip


@pytest.mark.parametrize(("page", "text", "folder", "cell", "other"), STATED)
def test_a_stated_number_is_that_of_its_cells(
    page: str, text: str, folder: str, cell: str, other: str
) -> None:
    row, *than = (
        row_of(read(ROOT / "results" / folder / f"{one}.json")) for one in (cell, other) if one
    )
    found = compare(row, than[0]) if than else None
    value, half = (found.difference, found.interval) if found else (row.accuracy, row.interval)
    words = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    stated = text.format(f"{100 * value:.1f} ± {100 * half:.1f}")
    assert stated in words.replace("\N{MINUS SIGN}", "-")
