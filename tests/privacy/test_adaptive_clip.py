"""A clip that follows a quantile: its rule by brute force, its noise, and where it ends."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from fedshot.core.seeds import Key
from fedshot.privacy.accounting import Accountant
from fedshot.privacy.adaptive_clip import AdaptiveClip, split
from fedshot.privacy.differential import Mechanism
from fedshot.protocol.reducers import Mean, Sum
from privacy.test_private_clients import IDS, KEY, ZEROS, exchanged, vector

PARTS = {client: {"a": vector(client, 0), "b": vector(0, 2)} for client in range(6)}  # of 8 clients
REDUCE = {"a": Sum(ZEROS), "b": Mean(ZEROS)}


@pytest.mark.parametrize(("noise", "clients"), [(0.5, 1000), (2.0, 100), (3.0, 8)])
def test_the_sums_and_the_count_together_cost_what_one_release_costs(
    noise: float, clients: int
) -> None:
    of_sums, of_count = split(noise, clients)
    assert of_sums**-2 + of_count**-2 == pytest.approx(noise**-2)
    assert noise < of_sums <= noise * math.sqrt(4 / 3) + 1e-12
    clip = AdaptiveClip(Mechanism(noise, 1.0, quantile=0.5), clients, {})
    if clients > 20 * noise:
        assert clip.deviation(1) == pytest.approx(clients / 20)  # as in the paper
    fixed = AdaptiveClip(Mechanism(noise, 1.0, quantile=0.5, fixed=True), clients, {})
    assert fixed.deviation(1) == 2 * clip.deviation(1)
    assert clip.mechanism("train").deviation("a", 2) == of_sums


@pytest.mark.slow
def test_the_cost_is_that_of_the_two_releases_by_dp_accounting() -> None:
    dp = pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    of_sums, of_count = split(2.0, 50)
    both = dp.ComposedDpEvent([dp.GaussianDpEvent(of_sums), dp.GaussianDpEvent(of_count)])
    expected = dp.pld.PLDAccountant().compose(both, 10).get_epsilon(1e-5)
    assert Accountant(2.0, 1e-5).epsilon(10) == pytest.approx(expected, rel=1e-3)


def test_the_clip_moves_by_the_share_of_clients_below_it() -> None:
    """Norms are sqrt(c^2 + 4). Two of eight clients are lost, and count as a half each."""
    clips: dict[str, float] = {}
    mechanism, expected = Mechanism(0.0, 3.0, quantile=0.7), 3.0
    norms = [math.hypot(client, 2) for client in PARTS]
    for step in range(3):
        got = exchanged(mechanism, PARTS, REDUCE, KEY.at(step), quorum=0.0, clips=clips)
        total = sum(2 * min(1, expected / norm) for norm in norms)
        torch.testing.assert_close(got["b"], vector(0, total) / len(IDS))
        share = (sum(norm <= expected for norm in norms) + 1) / len(IDS)
        expected *= math.exp(-0.2 * (share - 0.7))
        assert clips == {"train": pytest.approx(expected)}
        assert [*got.parts] == ["a", "b"]


def test_each_part_can_have_a_clip_that_moves() -> None:
    clips: dict[str, float] = {}
    mechanism = Mechanism(0.0, {"a": 1.0, "b": 1.0}, quantile=0.5)
    exchanged(mechanism, PARTS, REDUCE, quorum=0.0, clips=clips)
    expected = {"a": math.exp(-0.2 * ((2 + 1) / 8 - 0.5)), "b": math.exp(-0.2 * (1 / 8 - 0.5))}
    assert clips == pytest.approx(expected)


def test_the_noise_is_that_of_the_split() -> None:
    mechanism, (of_sums, of_count) = Mechanism(1.0, 3.0, quantile=0.5), split(1.0, len(IDS))
    zeros, moved = torch.zeros(2000, dtype=torch.float64), []
    for step in range(200):
        clips: dict[str, float] = {}
        parts, key = {0: {"a": zeros[:1]}}, KEY.at(step)
        exchanged(mechanism, parts, {"a": Sum(zeros[:1])}, key, clips=clips, quorum=0.0)
        count = len(IDS) * math.log(clips["train"] / 3) / -0.2
        moved.append(count - 0.5)  # one client is below the clip, the others are lost
    assert kstest(np.array(moved) / of_count * 2, "norm").pvalue > 1e-6
    got = exchanged(mechanism, {0: {"a": zeros}}, {"a": Sum(zeros)}, quorum=0.0)
    assert kstest(got["a"].numpy() / (3 * of_sums), "norm").pvalue > 1e-6


def test_the_clip_comes_to_the_quantile_of_the_norms() -> None:
    """Norms with logarithms that are normal, at quantile 0.8, from a clip 1,000 times too small."""
    clip = AdaptiveClip(Mechanism(1.0, 0.005, quantile=0.8), 200, {})
    draw = Key(5).numpy()
    found = []
    for _ in range(200):
        norms = draw.lognormal(1.0, 0.5, 200)
        below = float((norms <= clip.mechanism("train").clip).sum()) - 100  # type: ignore[operator]
        noisy = torch.tensor(below + clip.deviation(1) * draw.standard_normal())
        clip.update("train", {"train": noisy})
        found.append(math.log(clip.clips["train"]))
    assert np.mean(found[100:]) == pytest.approx(1.0 + 0.5 * 0.8416, abs=0.05)


def test_the_clip_of_clients_that_send_zeros_stays_above_0() -> None:
    clip = AdaptiveClip(Mechanism(1.0, 1.0, quantile=0.5), 1, {"train": 2.0**-40})
    clip.update("train", {"train": torch.tensor(0.5)})
    assert clip.clips == {"train": 2.0**-40}
