"""docs/benchmarks.md and docs/benchmarks/ from results.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FRONT = """\
# Speed

Five measurements on two cores. A factor says how many times as long as fedshot the fastest variant
of the peer takes: above 1, fedshot is faster. Of several cases the table gives the smallest and the
largest factor.

| work | compared with | result | tables |
|---|---|---|---|
"""
METHOD = """
## How it is measured

`make bench` (`python benchmarks/run.py`) runs the measurements and writes these pages; the numbers
are in `benchmarks/results.json`. `make bench-peers` makes the environment in which Flower,
learn2learn, higher, easyfsl and JAX run.

All programs of a table do the same work on the same machine, in turn (A, B, C, A, B, C, ...). Work
that takes less than half a second is repeated within a turn, and its mean counts. Compare numbers
within a table only: each table names its machine.

Before a table is measured, the updates of all its programs are compared. The page shows the
relative difference: in float64 the largest of any tensor, in float32 that of the whole update,
because rounding can change which pixel of a pool is the largest.

- **fedshot** runs with its guard and its ledger, draws its episodes, and converts bytes to floats;
  all of that is measured. The word after the name is the fleet. "bf16" is `model.bf16`, which
  computes other updates.
- **simulator** is the ordinary loop: `copy.deepcopy`, `load_state_dict` and `torch.optim.Adam` for
  each client, then the mean of the state dicts. Its episodes are in memory as floats, in its own
  layout; preparing them is not measured. "nchw" has the strides of plain memory, also for one
  channel. It runs in a process of its own with torch's defaults. "settings of fedshot" gives that
  process the settings of every fedshot run: the allocator keeps freed memory, and numbers below
  1e-38 count as 0, because some processors are slow on them.
- **The ceiling** is the best direct 3x3 convolution, forwards and backwards, that was found on this
  machine, measured in the same turns. A step counts as three forward passes of direct convolutions.
  Where fedshot uses Winograd's algorithm, its share can exceed 1.
"""
TITLES = {
    "training": "Speed: rounds of training",
    "parts": "Speed: methods, tests, exchange and memory",
}
TRAINING = ("simulator/", "flower/", "jax/")  # the cases of the page on training
FIGURES = (
    ("a round of FL-Proto", "the ordinary PyTorch loop", "simulator/", "simulator", "training"),
    ("the same", "Flower's simulation", "flower/", "Flower", "training"),
    ("a meta-gradient of MAML", "learn2learn, higher", "maml/", "", "parts"),
    ("1,000 test episodes", "easyfsl", "evaluation/", "easyfsl", "parts"),
)


def front(results: Mapping[str, Any]) -> str:
    """Return the front page: the five figures, and how they are measured."""
    rows = [
        f"| {work} | {peer} | {_factors(results, cases, rows)} | [{name}](benchmarks/{name}.md) |"
        for work, peer, cases, rows, name in FIGURES
    ]
    if "exchange/no-work" in results["cases"]:
        sizes = {(row["clients"], row["parameters"]): row
                 for row in results["cases"]["exchange/no-work"]["rows"]}  # fmt: skip
        if row := sizes.get((100, 1_000_000)):
            rows.append(
                "| guard, ledger and exact mean, per client of 1,000,000 parameters | no work | "
                f"{row['threads, us a client'] / 1000:.1f} ms | [parts](benchmarks/parts.md) |"
            )
    return FRONT + "\n".join(rows) + "\n" + METHOD


def _factors(results: Mapping[str, Any], cases: str, peer: str) -> str:
    """Return the smallest and the largest factor of the fastest variant of a peer over cases."""
    fastest = []
    for name, found in results["cases"].items():
        factors = [
            row["times the reference, medians"]
            for row in found["rows"]
            if name.startswith(cases)
            and row["who"].startswith(peer)
            and not row["who"].startswith("fedshot")
        ]
        if factors:
            fastest.append((min(factors), name.removeprefix(cases)))
    if not fastest:
        return "not measured"
    (low, lowest), (high, highest) = min(fastest), max(fastest)
    if low == high:
        return f"{low:.2g} times"
    return f"{low:.2g} ({lowest}) to {high:.2g} times ({highest})"


def pages(results: Mapping[str, Any], shares: str) -> dict[str, str]:
    """Return the pages of tables, keyed by name; `shares` is the text on the kernels' shares."""
    found = {}
    for page, title in TITLES.items():
        parts = [f"# {title}\n\n[How it is measured](../benchmarks.md#how-it-is-measured).\n"]
        parts += [_case(name, case) for name, case in results["cases"].items()
                  if name.startswith(TRAINING) == (page == "training")]  # fmt: skip
        found[page] = "".join(parts)
    found["parts"] += f"\n{shares}"
    return found


def _case(name: str, found: Mapping[str, Any]) -> str:
    parts = [f"\n## {name}\n\n{found['what']}.\n"]
    if found["rows"]:
        parts.append(table(found["rows"]))
    repeats = found["repeats"]
    lines = [f"Medians and minima of {repeats} turns.", *(f"{n}." for n in found["notes"])]
    lines.append(f"{found['machine']}; commit {found['commit']}; `{found['command']}`.")
    if found["checks"]:
        worst = max(found["checks"].values())
        lines.append(f"Compared first; the largest relative difference is {worst:.2g}:")
    parts.append("\n" + " ".join(lines) + "\n")
    if found["checks"]:
        items = [f"- {of}: {value:.2g}" for of, value in found["checks"].items()]
        parts.append("\n" + "\n".join(items) + "\n")
    if found["left_out"]:
        items = [f"- {who}: {why}" for who, why in found["left_out"].items()]
        parts.append("\nLeft out:\n\n" + "\n".join(items) + "\n")
    return "".join(parts)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a Markdown table with a column for each of their keys."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [_line(columns), _line("---" for _ in columns)]
    lines += [_line(_cell(row.get(name)) for name in columns) for row in rows]
    return "\n" + "\n".join(lines) + "\n"


def _line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
