"""Federated averaging that also measures how far the clients' predictions differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.learners.prediction_drift import common_form, divergence
from fedshot.nn.models.model import Model
from fedshot.protocol.averaging import average
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Outcome, Reply
from fedshot.protocol.reducers import Gather


def average_with_drift(
    clients: Clients,
    work: Callable[..., Reply],
    parts: Mapping[str, Tree],
    key: Key,
    *,
    model: Model,
    n: int,
    max_weight: int | None,
    down: Mapping[str, Tree] = {},
) -> tuple[dict[str, Tree], Outcome]:
    """Call `averaging.average`, and add "divergence" to the metrics of the outcome.

    It says how far the clients' predictions on `n` synthetic episodes differ (see `divergence`).
    The client function `work` must upload these predictions (`answer_common`), unless `n` is 0.
    """
    common = {name: Gather(form) for name, form in common_form(model, n).items()}
    new, got = average(clients, work, parts, key, max_weight=max_weight, down=down, reduce=common)
    return new, replace(got, metrics={**got.metrics, **divergence(got)})
