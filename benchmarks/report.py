"""docs/benchmarks.md from results.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INTRO = """\
# Speed, memory and peers

Written by `make bench` (`python benchmarks/run.py`); the numbers are in `benchmarks/results.json`.
`make bench-peers` makes the environment that Flower, learn2learn, higher, easyfsl and JAX run in.

Everyone in a table did the same work in one run, in turn (A, B, C, A, B, C, ...). Work that takes
less than half a second is done several times in a turn, and its mean counts. Ratios hold within a
table; seconds belong to the machine. Before a table was measured, the updates of all in it
were compared, and the relative difference stands below it: in float64 the largest of any tensor; in
float32, where rounding decides now and then which pixel of a pool is the largest, that of the whole
update.

- **fedshot** runs with its guard and its ledger, draws its episodes, and turns bytes into floats,
  all of which is counted. A name behind it is the fleet; "bf16" is `model.bf16`, which makes other
  updates.
- **simulator** is the ordinary loop: `copy.deepcopy`, `load_state_dict` and `torch.optim.Adam` for
  each client, then the mean of the state dicts. Its episodes lie ready in memory as floats, in its
  own layout; that is not counted. "nchw" has the strides of plain memory, with one channel too. It
  runs in a process of its own, as torch finds it; "settings of fedshot" gives that process what
  every run of fedshot has: freed memory is kept, and numbers below 1e-38, such as the gradients of
  confident predictions, are taken for 0, as some processors need long for them.
- **The ceiling** is the best 3x3 convolution, forwards and backwards, that was found on this
  machine by the direct sum, measured in the same turns. A step counts as three forward passes of
  direct sums; where fedshot convolves by Winograd's algorithm, its share can be above 1.
"""


def page(results: dict[str, Any]) -> str:
    """Return the page."""
    parts = [INTRO]
    for name, found in results["cases"].items():
        parts.append(f"\n## {name}\n\n{found['what']}.\n")
        if found["rows"]:
            parts.append(_table(found["rows"]))
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


def _table(rows: Sequence[dict[str, Any]]) -> str:
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
