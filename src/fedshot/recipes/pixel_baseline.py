"""What no training reaches: the nearest class mean of raw pixels, on the test of a column.

It stands below every table of images, since an accuracy far from chance may be close to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedshot.evaluation.episodic_test import pixel_logits, score
from fedshot.evaluation.raw_baselines import PIXELS
from fedshot.protocol.method import predict_at_server
from fedshot.runs.prepare import PreparedRun


def pixels(setting: PreparedRun, result: Mapping[str, Any]) -> dict[str, float]:
    """Return accuracy and interval of the raw pixels on the test; `{}` for texts, which have none.

    A group's question is answered from the supports of all its clients together, a client's own
    from its training images. A run's `result` may hold it already.
    """
    if setting.dataset.is_text:
        return {}
    if known := result.get("baselines", {}).get(PIXELS):
        return {name: known[name] for name in ("accuracy", "interval")}
    found = score(predict_at_server(pixel_logits, setting.test.eval_episodes), setting.test)
    return {"accuracy": found.accuracy, "interval": found.interval}
