"""What no training reaches: the nearest class mean of raw pixels, on the test of a column.

It stands below every table of images, since an accuracy far from chance may be close to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedshot.evaluation import pixel_logits, score
from fedshot.protocol import answer_at_server
from fedshot.recipes.bench import State
from fedshot.reports.words import percent, printable
from fedshot.setting import Setting


def pixels(setting: Setting) -> dict[str, float]:
    """Return accuracy and interval of the raw pixels on the test; `{}` for texts, which have none.

    A group's question is answered from the supports of all its clients together, a client's own
    from its training images.
    """
    if setting.dataset.is_text:
        return {}
    found = score(answer_at_server(pixel_logits, setting.test.questions), setting.test)
    return {"accuracy": found.accuracy, "interval": found.interval}


def floors(states: Sequence[State]) -> list[str]:
    """Return a line with the floor of each column that has one; none where no cell tells it."""
    told = [
        f"{printable(state.cell.column.label)} {percent(held['accuracy'], held['interval'])}"
        for state in states
        if state.result
        for one in state.result.seeds.values()
        if (held := one.get("pixels"))
    ]
    told = list(dict.fromkeys(told))  # all seeds and rows of a column have one test
    return [f"Raw pixels, nearest class mean, on the same test: {'; '.join(told)}."] if told else []
