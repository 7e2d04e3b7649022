"""Points that Optuna's tree-structured Parzen estimator proposes for a sweep.

Optuna's study is stored in `optuna.log` in the sweep's folder, so that a stopped search can
continue. A proposal depends only on the results before it. Without `--jobs`, one point is proposed
at a time. With more `--jobs` than seeds, several points are proposed before their results are
known, so the proposals depend on the number of `--jobs`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedshot.core.extras import require
from fedshot.recipes.jobs import Event
from fedshot.recipes.trials import Space, rounded

if TYPE_CHECKING:
    from fedshot.recipes.sweep_runner import Sweep

_FILE = "optuna.log"


def require_optuna() -> Any:
    """Return the package optuna. Raises ConfigError if it is not installed."""
    require("optuna", "a sweep with Optuna")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def search(sweep: Sweep) -> Iterator[Event]:
    """Propose and train points until the requested number has finished; yield the events.

    A failed training run ends the search; if repeated, the command tries the same point again.
    """
    optuna = require_optuna()
    backend = optuna.storages.journal.JournalFileBackend(str(sweep.folder / _FILE))
    text = json.dumps(sweep.spaces, sort_keys=True)
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(backend),
        study_name=f"sweep-{hashlib.sha256(text.encode()).hexdigest()[:8]}",
        direction="maximize",
        load_if_exists=True,
    )
    distributions = {path: _distribution(optuna, space) for path, space in sweep.spaces.items()}
    at_once = -(-(sweep.jobs or 1) // sweep.seeds)
    while (left := sweep.optuna - sum(one.state.is_finished() for one in study.trials)) > 0:
        proposed = [one for one in study.trials if not one.state.is_finished()]
        while len(proposed) < min(at_once, left):
            study.sampler = optuna.samplers.TPESampler(seed=len(study.trials), constant_liar=True)
            study.ask(distributions)
            proposed.append(study.trials[-1])
        points = sweep.add(_options(one.params, sweep.spaces) for one in proposed)
        yield from sweep.train(points)
        if any(point.failed for point in points):
            return
        for one, point in zip(proposed, points, strict=True):
            if point.diverged:
                study.tell(one.number, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(one.number, fmean(point.accuracies))


def _distribution(optuna: Any, space: Space) -> Any:
    kind, values = next(iter(space.items()))
    if kind == "choice":  # Optuna takes texts and numbers, but no lists
        return optuna.distributions.CategoricalDistribution([json.dumps(one) for one in values])
    if kind == "int":
        return optuna.distributions.IntDistribution(*values)
    return optuna.distributions.FloatDistribution(*values, log=kind == "log")


def _options(params: Mapping[str, Any], spaces: Mapping[str, Space]) -> dict[str, Any]:
    """Return a point's options from the values that Optuna proposes."""
    return {
        path: json.loads(params[path]) if "choice" in space
        else params[path] if "int" in space else rounded(params[path])
        for path, space in spaces.items()
    }  # fmt: skip
