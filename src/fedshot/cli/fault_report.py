"""What the terminal says of replies that did not count: who, why, and how often, in few lines.

A run may lose a client every round for weeks and still make its quorum, so the rounds alone would
not tell that a host is broken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshot.core.text import count, joined, shortened

if TYPE_CHECKING:
    from fedshot.runs.recorder import Record

_MOST = 10  # lines, in the whole run; where all clients fail by chance, more would say nothing
_NAMED = 3  # clients in the last sentence
_REASON = 300  # characters


class FaultReport:
    """Listens to the rounds of a run and says what its owner should know.

    A client is named when its reply does not count for the first time, and again when it has not
    counted in 10, 100, 1,000 rounds.

    Args:
        folder: of the run, where all of it stands.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rounds: Counter[int] = Counter()
        self._last: dict[int, str] = {}
        self._replies = self._seen = self._touched = self._skipped = self._lines = 0

    def heard(self, record: Record) -> Iterator[str]:
        """Take in a round; yield what is to be said of it now."""
        self._seen += record.round > 0
        self._touched += bool(record.faults)
        self._skipped += record.skipped is not None
        self._replies += len(record.faults)
        last = {int(fault["client"]): fault for fault in record.faults}
        for client, fault in last.items():
            self._rounds[client] += 1
            self._last[client] = why = _why(fault)
            if self._lines < _MOST and _is_power_of_ten(times := self._rounds[client]):
                self._lines += 1
                begin = f"round {record.round}: client {client} did not count"
                often = "" if times == 1 else f", for the {times:,}th round"
                yield f"{begin}{often}: {why}" + (
                    f". No more of this here; all of it is in {self._folder / 'metrics.jsonl'}"
                    if self._lines == _MOST
                    else ""
                )

    def closing(self) -> str | None:
        """Return what the run should not end without, None where every reply counted."""
        if not (self._replies or self._skipped):
            return None
        replies = count(self._replies, "reply", "replies")
        facts = [f"{replies} did not count, in {self._touched:,} of {count(self._seen, 'round')}"]
        if self._skipped:
            facts.append(f"{count(self._skipped, 'round')} skipped")
        most = self._rounds.most_common(_NAMED)
        named = [f"client {c} in {times:,} ({self._last[c]})" for c, times in most]
        if rest := len(self._rounds) - len(most):
            named.append(count(rest, "other client"))
        told = f": {joined(named)}" if named else ""
        return f"{'; '.join(facts)}{told}. See {self._folder / 'metrics.jsonl'}."


def _why(fault: dict[str, Any]) -> str:
    return f"{fault['kind']}, {shortened(fault['reason'], _REASON)}"


def _is_power_of_ten(n: int) -> bool:
    return str(n).strip("0") == "1"
