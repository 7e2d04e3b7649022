"""Epsilon against closed forms, integrals, and dp-accounting called directly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import log_ndtr
from scipy.stats import norm

from fedshot.privacy.accounting import Accountant

pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
pytestmark = pytest.mark.slow  # importing dp-accounting takes seconds


def gaussian_delta(noise: float, epsilon: float) -> float:
    """Balle and Wang 2018, theorem 8: delta of one Gaussian release."""
    a, b = 1 / (2 * noise), epsilon * noise
    return math.exp(log_ndtr(a - b)) - math.exp(epsilon + log_ndtr(-a - b))


def sampled_delta(noise: float, probability: float, epsilon: float) -> float:
    """The larger hockey-stick divergence of a sampled Gaussian and its neighbour, integrated."""
    x = np.linspace(-40 * noise, 40 * noise + 1, 2_000_001)
    without = norm.pdf(x, 0, noise)
    having = (1 - probability) * without + probability * norm.pdf(x, 1, noise)
    step = x[1] - x[0]
    return max(
        float(np.clip(p - math.exp(epsilon) * q, 0, None).sum() * step)
        for p, q in ((having, without), (without, having))
    )


@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0])
def test_one_release_about_all_clients_has_the_closed_form(noise: float) -> None:
    epsilon = Accountant(noise, 1e-5).epsilon(1)
    assert gaussian_delta(noise, epsilon) == pytest.approx(1e-5, rel=1e-3)
    assert epsilon <= 1 / (2 * noise**2) + math.sqrt(2 * math.log(1e5)) / noise  # by zero-CDP


def test_releases_about_all_clients_are_one_release_with_less_noise() -> None:
    """The squares of the sensitivities add up, over exchanges and over rounds."""
    found = Accountant(6.0, 1e-5, releases=4).epsilon(9)
    assert found == pytest.approx(Accountant(1.0, 1e-5).epsilon(1), rel=1e-6)


@pytest.mark.parametrize(("noise", "probability"), [(0.8, 0.1), (1.0, 0.5), (3.0, 0.02)])
def test_one_round_of_a_sampled_cohort_is_the_integral(noise: float, probability: float) -> None:
    epsilon = Accountant(noise, 1e-4, probability=probability).epsilon(1)
    assert sampled_delta(noise, probability, epsilon) == pytest.approx(1e-4, rel=0.02)


def test_rounds_are_those_of_dp_accounting() -> None:
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant

    event = dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1.0))
    expected = PLDAccountant().compose(event, 50).get_epsilon(1e-5)
    found = Accountant(1.0, 1e-5, probability=0.1).epsilon(50)
    assert expected <= found < 1.001 * expected
    renyi = dp.rdp.RdpAccountant().compose(event, 50).get_epsilon(1e-5)
    assert found < renyi


def test_exchanges_of_one_cohort_cost_more_than_those_of_cohorts_of_their_own() -> None:
    of_one = Accountant(2.0, 1e-5, releases=4, probability=0.1).epsilon(10)
    assert of_one > 1.1 * Accountant(2.0, 1e-5, probability=0.1).epsilon(40)


@pytest.mark.parametrize("probability", [1.0, 0.2])
def test_the_calibrated_noise_is_the_least(probability: float) -> None:
    start = Accountant(1.0, 1e-5, 3, probability)
    made = start.calibrated(3.0, 20)
    assert made.epsilon(20) <= 3.0
    assert Accountant(made.noise * 0.997, 1e-5, 3, probability).epsilon(20) > 3.0
    assert made.epsilon(0) == 0.0
    assert made.rounds_within(3.0, 20) == 20
    assert made.rounds_within(2.0, 20) == max(r for r in range(20) if made.epsilon(r) <= 2.0)


def test_a_cohort_of_a_fixed_size_costs_what_dp_accounting_says_and_no_more_than_all() -> None:
    """With cohorts of nearly all clients, the bound for samples is above that without sampling."""
    import dp_accounting as dp

    event = dp.SampledWithoutReplacementDpEvent(500, 50, dp.GaussianDpEvent(2.0 / math.sqrt(2)))
    one_replaced = dp.NeighboringRelation.REPLACE_ONE
    accountant = dp.rdp.RdpAccountant(neighboring_relation=one_replaced)
    expected = accountant.compose(event, 20).get_epsilon(1e-5)
    found = Accountant(2.0, 1e-5, releases=2, probability=0.1, fixed_of=500).epsilon(20)
    assert found == pytest.approx(expected)
    of_all = Accountant(2.0, 1e-5).epsilon(20)
    assert found < 0.5 * of_all
    assert Accountant(2.0, 1e-5, probability=0.98, fixed_of=500).epsilon(20) == of_all
    assert Accountant(2.0, 1e-5, fixed_of=500).epsilon(20) == of_all
