"""Messages that say which clients' replies were lost or rejected, why, and how often.

A run may lose a client in every round and still reach its quorum. Without this report, nobody would
notice a broken machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshot.core.text import count, joined, shortened

if TYPE_CHECKING:
    from fedshot.runs.recorder import Record

_MOST = 10  # maximum number of lines printed about faults in a run
_NAMED = 3  # maximum number of clients named in the closing sentence
_REASON = 300  # maximum length of a reason


class FaultReport:
    """Follows the rounds of a run and reports faults: replies that were lost or rejected.

    It also reports replies whose influence on an aggregate is extreme. A client is named in its
    first round with a fault or an extreme reply, then in its 10th, its 100th and so on. At most 10
    lines are printed per run.

    Args:
        folder: folder of the run; `metrics.jsonl` in it lists all faults.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rounds: Counter[int] = Counter()
        self._extreme: Counter[int] = Counter()
        self._last: dict[int, str] = {}
        self._replies = self._seen = self._touched = self._skipped = self._lines = 0

    def heard(self, record: Record) -> Iterator[str]:
        """Count a round's faults and extreme replies; yield the lines to print about them."""
        self._seen += record.round > 0
        self._touched += bool(record.faults)
        self._skipped += record.skipped is not None
        self._replies += len(record.faults)
        for client, text in record.extreme.items():
            self._extreme[client] += 1
            if self._lines < _MOST and _is_power_of_ten(self._extreme[client]):
                self._lines += 1
                yield f"round {record.round}: extreme influence of client {client}: {text}"
        last = {int(fault["client"]): fault for fault in record.faults}
        for client, fault in last.items():
            self._rounds[client] += 1
            self._last[client] = why = _why(fault)
            if self._lines < _MOST and _is_power_of_ten(times := self._rounds[client]):
                self._lines += 1
                begin = f"round {record.round}: lost or rejected reply of client {client}"
                often = "" if times == 1 else f", its {times:,}th round with a fault"
                yield f"{begin}{often}: {why}" + (
                    f". Further faults are only in {self._folder / 'metrics.jsonl'}"
                    if self._lines == _MOST
                    else ""
                )

    def closing(self) -> str | None:
        """Return a summary for the end of the run.

        It is None if no reply was lost or rejected and no round was skipped.
        """
        if not (self._replies or self._skipped):
            return None
        replies = lost_or_rejected(self._replies)
        facts = [f"{replies}, in {self._touched:,} of {count(self._seen, 'round')}"]
        if self._skipped:
            facts.append(f"{count(self._skipped, 'round')} skipped")
        most = self._rounds.most_common(_NAMED)
        named = [f"client {c} in {times:,} ({self._last[c]})" for c, times in most]
        if rest := len(self._rounds) - len(most):
            named.append(count(rest, "other client"))
        text = f": {joined(named)}" if named else ""
        return f"{'; '.join(facts)}{text}. See {self._folder / 'metrics.jsonl'}."


def lost_or_rejected(n: int) -> str:
    """Return a phrase such as "3 lost or rejected replies"."""
    return count(n, "lost or rejected reply", "lost or rejected replies")


def _why(fault: dict[str, Any]) -> str:
    return f"{fault['kind']}, {shortened(fault['reason'], _REASON)}"


def _is_power_of_ten(n: int) -> bool:
    return str(n).strip("0") == "1"
