"""Values of the report's comparison table: a row per method, with its interval as a bar."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedshot.reports.significance import ComparisonRow
from fedshot.reports.table import COLUMNS, caption, cells, remark, sections


def comparison_values(rows: Sequence[ComparisonRow]) -> dict[str, Any] | None:
    """Return the values for the table's template; None without rows."""
    if not rows:
        return None
    low, high = _scale(rows)
    baselines = [row.accuracy for row in rows if row.baseline]

    def along(share: float) -> str:
        return f"{100 * (100 * share - low) / (high - low):.2f}%"

    def values(row: ComparisonRow) -> dict[str, Any]:
        label, accuracy, *numbers, _ = cells(row, rows)
        mean, _, half = accuracy.partition(" ± ")
        left, right = max(row.accuracy - row.interval, 0.0), min(row.accuracy + row.interval, 1.0)
        exact = (row.episodes, row.seeds, row.bytes_down, row.bytes_up, row.seconds)
        return {
            "label": label,
            "baseline": row.baseline,
            "accuracy": row.accuracy,
            "mean": mean,
            "half": half,
            "left": along(left),
            "width": f"{100 * 100 * (right - left) / (high - low):.2f}%",
            "at": along(row.accuracy),
            "numbers": list(zip(COLUMNS[2:-1], exact, numbers, strict=True)),
            "remark": remark(row, rows),
            "note": row.note,
        }

    bars = f"Bars show the interval and the mean on a scale from {low} to {high} %."
    line = " The thin vertical line is the best baseline." if baselines else ""
    return {
        "columns": [name.replace(" ± 95 %", ", %") for name in COLUMNS],
        "sections": [[values(row) for row in section] for section in sections(rows)],
        "line": along(max(baselines)) if baselines else "",
        "caption": f"{caption(rows)} {bars}{line}",
    }


def _scale(rows: Sequence[ComparisonRow]) -> tuple[int, int]:
    """Return the ends of the bars' scale: two whole percentages that enclose all intervals."""
    lows = (100 * (row.accuracy - row.interval) for row in rows)
    highs = (100 * (row.accuracy + row.interval) for row in rows)
    low = min(max(math.floor(min(lows)), 0), 99)
    return low, max(min(math.ceil(max(highs)), 100), low + 1)
