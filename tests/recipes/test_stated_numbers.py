"""Numbers in notes and pages are those of the stored cells, rounded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedshot.recipes.results import read, row_of
from fedshot.reports.significance import compare

ROOT = Path(__file__).parents[2]
CIFAR, FC100, HUFF = "cifar-fs/paper-tune4", "fedfsl-fc100/head-tune4", "f2l-huffpost/paper"
ROBUST, SWEEP = "robustness/small", "pfedfsl-fig2/small"

TWEETS, DIGITS, READ = "fedfsl-sent140/small-tune4", "fedfsl-fig6/small", "f2l-readings/small"
NOTES, PAGE = "results/cifar-fs/notes.md", "docs/methods"
READINGS = "results/f2l-readings/notes.md"
OWN, FIVE = "results/pfedfsl-table1/notes.md", "mnist-n5-k5-path"

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
    (NOTES, "1.3 ± 0.4 | {} |", CIFAR, "prox.noniid-5", "naive.noniid-5"),
    ("results/fedfsl-fc100/notes.md", "| {} (2.0)", FC100, "mi.noniid-1", "naive.noniid-1"),
    (f"{PAGE}/fsl_local.md", "{} on Sent140", TWEETS, "naive.noniid-5", "local.noniid-5"),
    (f"{PAGE}/fedfsl_mi_adv.md", "by {} points", DIGITS, "mi-adv.iid-1", "mi.iid-1"),
    (READINGS, "is {} points", READ, "code-client-mi.iid-5", "code-client.iid-5"),
    (OWN, "5.6 ± 3.5 | {} |", "pfedfsl-table1/small", f"pfedfsl-paper.{FIVE}", f"pfedfsl.{FIVE}"),
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
