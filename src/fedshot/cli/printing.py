"""Prints the result of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedshot.core.console import say

if TYPE_CHECKING:
    import argparse

    from fedshot.evaluation.episodic_test import Score
    from fedshot.runs.experiment import Experiment


def say_score(
    score: Score,
    options: argparse.Namespace,
    experiment: Experiment,
    baselines: Mapping[str, Score],
) -> None:
    """Print a test score and those of the baselines, one line each, or together as JSON."""
    from fedshot.config.schema import not_honest
    from fedshot.config.settings import at
    from fedshot.evaluation.episodic_test import far_below
    from fedshot.reports.significance import ComparisonRow, compare

    dishonest = not_honest(experiment.config.settings)
    if options.json:
        found = {
            "result": score.to_json(),
            "round": experiment.best_round,
            "baselines": {name: raw.to_json() for name, raw in baselines.items()},
        }
        say(json.dumps(found | ({"not_honest": dishonest} if dishonest else {})))
        return
    marks = "".join(f" ({text})" for text in dishonest)
    marks += " (transductive)" if score.transductive else ""
    own = experiment.prepared.own_tests
    users = at(experiment.config.settings, "split.users") is not None
    novel = "on users who took no part in training" if users else "on novel classes"
    where = "on the clients' own classes" if own else novel
    facts = [f"{experiment.method.name}: {score}{marks} {where}"]
    facts.append(f"{score.episodes} {'clients' if own else 'episodes'}")
    if score.unanswered:
        facts.append(f"{score.unanswered} unanswered")
    if score.diverged:
        facts.append(f"{score.diverged} diverged (counted as wrong)")
    if spent := experiment.spent:
        facts.append(
            f"epsilon {spent['epsilon']:.3g} at delta {spent['delta']:g} ({spent['level']})"
        )
    if score.worst_tenth is not None:
        facts.append(f"worst tenth {100 * score.worst_tenth:.2f} %")
    if far := far_below(score.clients):
        shown = [f"client {c} {100 * a:.1f} %" for c, a in list(far.items())[:3]]
        more = f" and {len(far) - 3} more" if len(far) > 3 else ""
        facts.append(f"far below the others: {'; '.join(shown)}{more}")
    say(f"{', '.join(facts)}, round {experiment.best_round}, tasks {score.tasks[:12]}")
    for name, raw in baselines.items():
        against = compare(ComparisonRow(experiment.method.name, score), ComparisonRow(name, raw))
        said = f"{experiment.method.name} is {against.outcome} it"
        said = "no difference shown" if against.outcome == "unclear" else said
        say(f"{name}: {raw}; {said} ({against})")
