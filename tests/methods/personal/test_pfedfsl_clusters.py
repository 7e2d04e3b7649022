"""Planted clusters: clients whose classes differ in the same pixels find each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from fedshot.reports.affinity_plots import affinity_picture
from methods.personal.planted_clusters import (
    CLIENTS,
    GROUPS,
    OTHER,
    SAME,
    TRUTH,
    Play,
    affinity_groups,
    chosen,
)


@pytest.mark.slow
def test_a_model_of_the_same_cluster_has_the_lower_loss(tmp_path: Path) -> None:
    """The premise: without it affinities would have nothing to find."""
    losses = Play(tmp_path, m=0).play(10).losses()
    for i in range(CLIENTS):
        assert losses[i][SAME[i]].max() < losses[i][OTHER[i]].min()


@pytest.mark.slow
def test_the_affinities_recover_the_clusters_and_are_drawn(tmp_path: Path) -> None:
    """Eq. (8) under an even choice, so that every pair has been tried about as often."""
    q = Play(tmp_path, choose="random").play(20).server.q.numpy()
    assert adjusted_rand_score(TRUTH, affinity_groups(q, GROUPS)) >= 0.9
    shuffled = np.array([0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11])
    again = affinity_groups(q[np.ix_(shuffled, shuffled)], GROUPS)
    assert adjusted_rand_score([TRUTH[i] for i in shuffled], again) >= 0.9
    assert "client that receives it" in affinity_picture(q, again)


@pytest.mark.slow
def test_choice_by_affinity_sends_clients_their_own_clusters_models(tmp_path: Path) -> None:
    """Who is sent whom recovers the clusters; the entries of Q themselves level out.

    One's own model, trained on the same samples, nearly always weighs most, so eq. (8) takes away
    from all that are sent, least from the best. The highest is sent next and lowered in its turn:
    what differs in the end is how often each was sent, not where its entry stands.
    """
    play = Play(tmp_path)
    play.play(12)
    counts = chosen(play, 12)
    assert counts[SAME].sum() / counts.sum() > 2 * 3 / 11  # twice what chance would send
    assert adjusted_rand_score(TRUTH, affinity_groups(counts, GROUPS)) >= 0.9
    q, losses = play.server.q.numpy(), play.losses()
    assert q[SAME].max() < 0
    assert losses[SAME].mean() < 0.5 * losses[OTHER].mean()  # mixtures have become the clusters'


@pytest.mark.slow
def test_where_gains_alone_are_noted_hardly_any_is(tmp_path: Path) -> None:
    """One's own model nearly always weighs most, so the choice stays one of chance."""
    play = Play(tmp_path, affinity="positive").play(20)
    q = play.server.q.numpy()
    assert (q[~np.eye(CLIENTS, dtype=bool)] > 0).sum() <= 2
    counts = chosen(play, 10)
    assert counts[SAME].sum() / counts.sum() < 0.35  # 3 / 11 by chance


def test_affinities_are_drawn_with_groups_side_by_side() -> None:
    q = np.where(np.equal.outer(TRUTH, TRUTH), 0.1, -0.2)
    np.fill_diagonal(q, -np.inf)
    shuffled = np.array([0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11])
    mixed = q[np.ix_(shuffled, shuffled)]
    groups = affinity_groups(mixed, GROUPS)
    assert adjusted_rand_score([TRUTH[i] for i in shuffled], groups) == 1
    assert groups[0] == 0
    found = affinity_picture(mixed, groups)
    assert "client that receives it" in found
    assert "Affinities of 12 clients" in found
    nothing = np.zeros((3, 3))
    np.fill_diagonal(nothing, -np.inf)
    assert "<svg" in affinity_picture(nothing)
