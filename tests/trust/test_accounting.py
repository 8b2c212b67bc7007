"""Reference values, independent formulas and calibration of the accountant."""

from __future__ import annotations

import logging
import math
import sys
from itertools import pairwise

import numpy as np
import pytest
from scipy import integrate, optimize, special, stats

pytest.importorskip("dp_accounting")

from fedlowrank.core.errors import ConfigError
from fedlowrank.trust.privacy import accounting
from fedlowrank.trust.privacy.accounting import (
    Accountant,
    Sampling,
    composed_epsilon,
    default_count_noise,
    epsilon,
    local_epsilon,
    local_noise_for,
    next_clip,
    noise_for,
    rounds_within,
    split_noise,
)

DELTA = 1e-5
ALL = Sampling("all", 100)
FIXED = Sampling("fixed", 1000, count=10)
BOTH = pytest.mark.parametrize("accountant", ["rdp", "pld"])


def poisson(rate: float) -> Sampling:
    return Sampling("poisson", 1000, rate=rate)


@pytest.mark.parametrize("delta", [1e-13, 1e-15, 1e-17])
def test_a_distribution_with_cut_tails_is_no_worse_than_the_moments(delta: float) -> None:
    bounds = [epsilon(0.8, 20, delta, poisson(0.3), accountant) for accountant in ("rdp", "pld")]
    assert bounds[1] <= bounds[0] < 40


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("sampling", "noise", "rounds", "rdp", "pld"),
    [
        (poisson(0.01), 4.0, 10_000, 1.035, 0.947),
        (poisson(0.01), 8.0, 10_000, 0.481, 0.437),
        (poisson(0.01), 2.0, 10_000, 2.353, 2.163),
        (poisson(250 / 60_000), 1.3, 3_600, 0.942, 0.853),
        (poisson(0.01), 1.0, 100, 1.214, 0.718),
        (ALL, 4.0, 50, 9.235, 8.596),
    ],
)
def test_reference_values(sampling: Sampling, noise: float, rounds: int, rdp: float, pld: float) -> None:
    assert epsilon(noise, rounds, DELTA, sampling, "rdp") == pytest.approx(rdp, abs=1e-3)
    assert epsilon(noise, rounds, DELTA, sampling, "pld") == pytest.approx(pld, abs=1e-3)


@BOTH
def test_never_more_than_the_moments_accountant_of_abadi_2016(accountant: Accountant) -> None:
    assert epsilon(4.0, 10_000, DELTA, poisson(0.01), accountant) <= 1.26


def test_draws_of_a_fixed_size_have_twice_the_sensitivity() -> None:
    # σ = 1 in units of its own sensitivity 2C is σ = 2 in units of C
    assert epsilon(2.0, 100, DELTA, FIXED, "rdp") == pytest.approx(1.483, abs=1e-3)
    assert FIXED.relation == "replace_one"
    with pytest.raises(ConfigError, match="'pld' has no bound"):
        epsilon(2.0, 100, DELTA, FIXED, "pld")


@pytest.mark.full
def test_large_draws_of_a_fixed_size_cost_no_more_than_no_sampling() -> None:
    unsampled = local_epsilon(2.0, 100, DELTA, "rdp")
    spent = [
        epsilon(2.0, 100, DELTA, Sampling("fixed", 1000, count=count), "rdp") for count in (10, 500, 999)
    ]
    assert spent == sorted(spent)
    assert spent[-1] <= unsampled


@BOTH
def test_all_clients_need_no_sampling(accountant: Accountant) -> None:
    fixed = Sampling("fixed", 100, count=100)
    assert fixed.relation == ALL.relation == poisson(0.1).relation == "add_remove"
    expected = epsilon(3.0, 20, DELTA, ALL, accountant)
    assert epsilon(3.0, 20, DELTA, fixed, accountant) == expected
    assert epsilon(3.0, 20, DELTA, poisson(1.0), accountant) == pytest.approx(expected, rel=1e-12)


@pytest.mark.full
@pytest.mark.parametrize(
    ("sampling", "accountant"),
    [(poisson(0.05), "rdp"), (poisson(0.05), "pld"), (FIXED, "rdp"), (ALL, "rdp"), (ALL, "pld")],
)
def test_more_noise_spends_less_and_more_rounds_spend_more(
    accountant: Accountant, sampling: Sampling
) -> None:
    by_noise = [epsilon(noise, 20, DELTA, sampling, accountant) for noise in (1.5, 3.0, 20.0)]
    assert all(a > b > 0 for a, b in pairwise(by_noise))
    by_rounds = [epsilon(2.0, rounds, DELTA, sampling, accountant) for rounds in (0, 1, 20)]
    assert by_rounds[0] == 0
    assert all(a < b for a, b in pairwise(by_rounds))
    assert epsilon(2.0, 20, 1e-7, sampling, accountant) > epsilon(2.0, 20, 1e-4, sampling, accountant)


@pytest.mark.full
@BOTH
def test_a_higher_rate_spends_more(accountant: Accountant) -> None:
    spent = [epsilon(2.0, 20, DELTA, poisson(rate), accountant) for rate in (0.01, 0.1, 0.5, 1.0)]
    assert all(a < b for a, b in pairwise(spent))


@pytest.mark.full
@pytest.mark.parametrize(("noise", "rounds"), [(4.0, 50), (10.0, 5), (1.0, 1)])
def test_rdp_without_sampling_is_the_closed_formula(noise: float, rounds: int) -> None:
    """Divergence α T / (2σ²) of order α, converted by Proposition 12 of Canonne et al. 2020 (v4)."""

    def bound(order: float) -> float:
        divergence = rounds * order / (2 * noise**2)
        return divergence + math.log1p(-1 / order) - math.log(DELTA * order) / (order - 1)

    best = min(bound(order) for order in np.geomspace(1.02, 500, 100_000))
    assert best - 1e-9 <= epsilon(noise, rounds, DELTA, ALL, "rdp") <= best + 5e-3


@pytest.mark.full
def test_rdp_of_poisson_sampling_is_the_binomial_formula() -> None:
    """Mironov et al. 2019 (arXiv:1908.10530, section 3.3), for integer orders."""
    rate, noise, rounds = 0.02, 1.1, 200

    def bound(order: int) -> float:
        k = np.arange(order + 1)
        terms = np.log(special.comb(order, k)) + (order - k) * np.log1p(-rate) + k * np.log(rate)
        divergence = rounds * special.logsumexp(terms + (k * k - k) / (2 * noise**2)) / (order - 1)
        return float(divergence + math.log1p(-1 / order) - math.log(DELTA * order) / (order - 1))

    best = min(map(bound, range(2, 64)))
    assert best - 0.03 <= epsilon(noise, rounds, DELTA, poisson(rate), "rdp") <= best + 1e-9


def exact_gaussian(noise: float) -> float:
    """Balle and Wang 2018 (arXiv:1805.06530, Theorem 8)."""

    def gap(value: float) -> float:
        left = stats.norm.cdf(0.5 / noise - value * noise)
        return float(left - np.exp(value + stats.norm.logcdf(-0.5 / noise - value * noise)) - DELTA)

    return float(optimize.brentq(gap, 0, 200, xtol=1e-10))


@pytest.mark.full
@pytest.mark.parametrize(("noise", "rounds"), [(4.0, 50), (8.0, 3), (2.0, 1)])
def test_pld_is_the_exact_gaussian_mechanism(noise: float, rounds: int) -> None:
    exact = exact_gaussian(noise / math.sqrt(rounds))
    assert epsilon(noise, rounds, DELTA, ALL, "pld") == pytest.approx(exact, abs=1e-6)
    # the grid that serves sampled rounds
    almost_all = epsilon(noise, rounds, DELTA, poisson(1 - 1e-9), "pld")
    assert exact - 1e-6 <= almost_all <= exact + 1e-3


def test_pld_of_one_sampled_round_is_the_integral() -> None:
    """δ(ε) = ∫ max(0, p - e^ε p') of both directions, p of the mixture (1 - q) N(0, σ²) + q N(1, σ²)."""
    rate, noise = 0.1, 1.2

    def delta_of(value: float) -> float:
        x = np.linspace(-12, 14, 40_001)
        p = (1 - rate) * stats.norm.pdf(x, 0, noise) + rate * stats.norm.pdf(x, 1, noise)
        p0 = stats.norm.pdf(x, 0, noise)
        removed = integrate.trapezoid(np.maximum(0, p - math.exp(value) * p0), x)
        added = integrate.trapezoid(np.maximum(0, p0 - math.exp(value) * p), x)
        return float(max(removed, added))

    exact = optimize.brentq(lambda value: delta_of(value) - DELTA, 0, 10, xtol=1e-8)
    assert epsilon(noise, 1, DELTA, poisson(rate), "pld") == pytest.approx(exact, abs=1e-3)


@pytest.mark.full
def test_pld_is_tighter_than_rdp_and_gives_way_above_100() -> None:
    assert epsilon(0.7, 20, DELTA, poisson(0.1), "pld") < epsilon(0.7, 20, DELTA, poisson(0.1), "rdp")
    large = epsilon(0.05, 20, DELTA, poisson(0.5), "rdp")
    assert large > 100
    assert epsilon(0.05, 20, DELTA, poisson(0.5), "pld") == large


@BOTH
def test_local_noise_is_half_in_units_of_its_sensitivity(accountant: Accountant) -> None:
    one = epsilon(3.0, 1, DELTA, ALL, accountant)
    assert local_epsilon(6.0, 1, DELTA, accountant) == pytest.approx(one, rel=1e-12)
    assert local_epsilon(12.0, 4, DELTA, accountant) == pytest.approx(one, rel=1e-9)
    assert local_epsilon(12.0, 0, DELTA, accountant) == 0


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("sampling", "accountant", "budget", "rounds"),
    [
        (poisson(0.01), "rdp", 1.0, 100),
        (poisson(0.01), "pld", 0.1, 50),
        (ALL, "rdp", 8.0, 100),
        (ALL, "pld", 8.0, 100),
        (ALL, "pld", 100.0, 1),
        pytest.param(FIXED, "rdp", 3.0, 30, marks=pytest.mark.full),
    ],
)
def test_calibrated_noise_is_the_smallest_within_budget(
    sampling: Sampling, accountant: Accountant, budget: float, rounds: int
) -> None:
    noise = noise_for(budget, DELTA, rounds, sampling, accountant)
    assert epsilon(noise, rounds, DELTA, sampling, accountant) <= budget
    assert epsilon(noise - 1.01e-3 * min(1, noise), rounds, DELTA, sampling, accountant) > budget


@BOTH
def test_calibrated_local_noise_is_the_smallest_within_budget(accountant: Accountant) -> None:
    noise = local_noise_for(6.0, DELTA, 40, accountant)
    assert (
        local_epsilon(noise, 40, DELTA, accountant)
        <= 6.0
        < local_epsilon(noise - 1.01e-3, 40, DELTA, accountant)
    )


def test_a_budget_out_of_reach_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no noise keeps to 0\.001"):
        noise_for(1e-3, 1e-12, 10, ALL, "rdp")
    assert noise_for(1e-3, 1e-12, 10, ALL, "pld") > 1


@pytest.mark.few(2)
@BOTH
@pytest.mark.parametrize("sampling", [poisson(0.05), ALL])
def test_rounds_within_a_budget(accountant: Accountant, sampling: Sampling) -> None:
    spent = [epsilon(2.0, rounds, DELTA, sampling, accountant) for rounds in range(14)]
    for rounds in (1, 2, 7, 12):
        assert rounds_within(spent[rounds], 2.0, DELTA, sampling, accountant, 1000) == rounds
        assert rounds_within(spent[rounds + 1] - 1e-9, 2.0, DELTA, sampling, accountant, 1000) == rounds
    assert rounds_within(spent[12], 2.0, DELTA, sampling, accountant, 5) == 5
    assert rounds_within(spent[1] / 2, 2.0, DELTA, sampling, accountant, 1000) == 0
    assert rounds_within(spent[12], 2.0, DELTA, sampling, accountant, 0) == 0


@pytest.mark.few(1)
@BOTH
def test_rounds_of_different_noise_add_up(accountant: Accountant) -> None:
    q = poisson(0.05)
    mixed = composed_epsilon({(1.5, q): 5, (2.5, q): 5}, DELTA, accountant)
    assert epsilon(2.5, 10, DELTA, q, accountant) < mixed < epsilon(1.5, 10, DELTA, q, accountant)
    assert composed_epsilon({(1.5, q): 5, (2.5, q): 0}, DELTA, accountant) == epsilon(
        1.5, 5, DELTA, q, accountant
    )
    with pytest.raises(ConfigError, match="cannot be added"):
        composed_epsilon({(1.5, q): 5, (1.5, FIXED): 5}, DELTA, accountant)


@BOTH
def test_update_and_count_together_cost_one_release(accountant: Accountant) -> None:
    noise, count_noise = 1.1, default_count_noise(20)
    assert count_noise == 1.0
    update = split_noise(noise, count_noise)
    assert update > noise
    # the sensitivity of the count is 1/2, so its noise multiplier is 2 σ_b
    both = composed_epsilon({(update, ALL): 1, (2 * count_noise, ALL): 1}, DELTA, accountant)
    assert both == pytest.approx(epsilon(noise, 1, DELTA, ALL, accountant), rel=1e-9)
    for small in (noise / 2, 0.1):
        with pytest.raises(ConfigError, match="σ/2"):
            split_noise(noise, small)


@pytest.mark.parametrize(("quantile", "start"), [(0.5, 0.1), (0.8, 50.0), (0.2, 1.0)])
def test_the_clip_converges_to_the_quantile_of_norms(quantile: float, start: float) -> None:
    draws = np.random.default_rng(7)
    clip, clips = start, []
    for _ in range(400):
        norms = draws.lognormal(mean=1.0, sigma=0.5, size=50)
        share = 0.5 + (np.sum((norms <= clip) - 0.5) + draws.normal(0, default_count_noise(50))) / 50
        clip = next_clip(clip, share, quantile, 0.2)
        clips.append(clip)
    exact = stats.lognorm.ppf(quantile, 0.5, scale=math.e)
    assert np.mean(clips[200:]) == pytest.approx(exact, rel=0.03)


def test_a_further_round_costs_no_further_divergence() -> None:
    before = accounting._rdp_of_a_round.cache_info().misses
    for rounds in range(1, 101):
        epsilon(1.2345, rounds, DELTA, poisson(0.03), "rdp")
    assert accounting._rdp_of_a_round.cache_info().misses == before + 1


@pytest.mark.full
def test_orders_that_do_not_converge_are_left_out_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("absl").setLevel(logging.WARNING)
    assert epsilon(0.50001, 1, DELTA, poisson(0.1), "rdp") > 0
    assert not caplog.records
    assert logging.getLogger("absl").level == logging.WARNING


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r'pip install "fedlowrank\[privacy\]"'):
        epsilon(1.987654, 1, DELTA, ALL, "rdp")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1, DELTA, ALL, "rdp"), "noise"),
        ((math.nan, 1, DELTA, ALL, "rdp"), "noise"),
        ((1.0, -1, DELTA, ALL, "rdp"), "releases"),
        ((1.0, 1, 0.0, ALL, "rdp"), "delta"),
        ((1.0, 1, 1.0, ALL, "rdp"), "delta"),
        ((1.0, 1, DELTA, ALL, "rpd"), "Did you mean 'rdp'"),
    ],
)
def test_wrong_numbers(arguments: tuple[float, int, float, Sampling, Accountant], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        epsilon(*arguments)


def test_wrong_budgets() -> None:
    with pytest.raises(ConfigError, match="epsilon"):
        noise_for(0.0, DELTA, 10, ALL, "rdp")
    with pytest.raises(ConfigError, match="rounds"):
        noise_for(1.0, DELTA, 0, ALL, "rdp")
    with pytest.raises(ConfigError, match="rounds"):
        local_noise_for(1.0, DELTA, 0, "rdp")
    with pytest.raises(ConfigError, match="most"):
        rounds_within(1.0, 1.0, DELTA, ALL, "rdp", -1)


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "uniform", "clients": 10},
        {"kind": "all", "clients": 0},
        {"kind": "all", "clients": 10, "rate": 0.1},
        {"kind": "all", "clients": 10, "count": 3},
        {"kind": "poisson", "clients": 10},
        {"kind": "poisson", "clients": 10, "rate": 0.0},
        {"kind": "poisson", "clients": 10, "rate": 1.1},
        {"kind": "poisson", "clients": 10, "rate": 0.1, "count": 1},
        {"kind": "fixed", "clients": 10},
        {"kind": "fixed", "clients": 10, "count": 11},
        {"kind": "fixed", "clients": 10, "count": 0},
    ],
)
def test_wrong_sampling(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Sampling(**settings)  # type: ignore[arg-type]
