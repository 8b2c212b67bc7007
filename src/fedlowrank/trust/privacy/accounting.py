"""Privacy budget that a run spends, by dp-accounting: (ε, δ) of clients under central or local noise.

``noise`` is σ, the noise multiplier: the standard deviation in units of the clipping norm C; ``delta`` is δ.
The server divides the noised sum by a number that does not depend on which clients replied, such as N or qN.
Sampling amplifies privacy only as long as no observer of the models knows which clients were drawn in a round.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ...core.arguments.bounds import check_bounds
from ...core.arguments.field_checks import CheckedFields
from ...core.errors import ConfigError, did_you_mean

Accountant = Literal["pld", "rdp"]

# Above this ε the grid of the PLD accountant takes seconds to hours, and a tight value is of no use.
_LARGEST_PLD_EPSILON = 100.0


@dataclass(frozen=True)
class Sampling(CheckedFields):
    """Sampling of the clients of a round.

    Attributes:
        kind: ``poisson``: each client independently with probability q; ``fixed``: ``count`` clients without
            replacement; ``all``: all clients.
        clients: N, the number of all clients of the federation.
        count: number of clients in a round, for ``fixed``.
        rate: q, the probability of each client, for ``poisson``.
    """

    kind: Literal["poisson", "fixed", "all"]
    clients: int
    count: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        bounds = {"clients": ">= 1", "count": f">= 1 and <= {self.clients}", "rate": "> 0 and <= 1"}
        check_bounds(self, bounds, "sampling")
        for name, kind in (("count", "fixed"), ("rate", "poisson")):
            if (getattr(self, name) is not None) != (self.kind == kind):
                raise ConfigError(f"sampling: kind {kind!r} needs {name}, and no other kind takes it")

    @property
    def probability(self) -> float | None:
        """Probability with which each client is drawn independently; None for draws of a fixed size."""
        if self.kind == "poisson":
            return self.rate
        return 1.0 if self.kind == "all" or self.count == self.clients else None

    @property
    def relation(self) -> Literal["add_remove", "replace_one"]:
        """Relation by which two federations are neighbors. ε of different relations must not be compared.

        ``add_remove``: one client is absent or sends zeros, and the sum changes by at most C. This relation holds for
        Poisson sampling and if all clients take part, since the divisor is fixed. ``replace_one``: one
        client has other data, and the sum changes by at most 2C. This is the relation for draws of a fixed size.
        """
        return "replace_one" if self.probability is None else "add_remove"


def epsilon(noise: float, rounds: int, delta: float, sampling: Sampling, accountant: Accountant) -> float:
    """Compute ε of central differential privacy after some rounds, for the relation ``sampling.relation``.

    The accountant rdp gives an upper bound by Rényi divergences: Mironov et al. 2019 (arXiv:1908.10530) for
    Poisson sampling; Wang et al. 2019 (arXiv:1808.00087, Theorem 27) for draws of a fixed size, which pld does not
    support. pld gives the tight value by privacy loss distributions (Koskela et al. 2020, arXiv:1906.03049), or
    without sampling by the closed form of Balle and Wang 2018 (arXiv:1805.06530, Theorem 8). With sampling,
    pld returns the value of rdp if that is above 100.

    Raises:
        ConfigError: if numbers are invalid, pld is used with draws of a fixed size, or dp-accounting is not installed.
    """
    return composed_epsilon({(noise, sampling): rounds}, delta, accountant)


def local_epsilon(noise: float, releases: int, delta: float, accountant: Accountant) -> float:
    """Compute ε of local differential privacy of a client that sent ``releases`` noised updates.

    The neighboring relation is replace-one: the client's data may be any other. Two clipped updates differ by
    up to 2C, so the noise in units of this sensitivity is σ/2. Sampling does not help, because the server sees it.
    """
    return composed_epsilon({(noise / 2, Sampling("all", 1)): releases}, delta, accountant)


def composed_epsilon(
    round_counts: Mapping[tuple[float, Sampling], int], delta: float, accountant: Accountant
) -> float:
    """ε after different rounds, as :func:`epsilon`; ``round_counts`` has their number by noise and sampling."""
    if accountant not in ("pld", "rdp"):
        raise ConfigError(f"privacy.accountant: {accountant!r}. {did_you_mean(accountant, ['pld', 'rdp'])}")
    for (noise, _), count in round_counts.items():
        _check(noise=noise, releases=count, delta=delta)
    relations = {sampling.relation for _, sampling in round_counts}
    if len(relations) > 1:
        raise ConfigError(
            "run.sampling: ε of draws of a fixed size cannot be added to others; keep the first"
        )
    if accountant == "pld" and "replace_one" in relations:
        raise ConfigError("privacy.accountant: 'pld' has no bound for draws of a fixed size; set 'rdp'")
    return _compose(tuple((*key, count) for key, count in round_counts.items() if count), delta, accountant)


def total_epsilon(
    round_counts: Mapping[tuple[float, Sampling], int], delta: float, accountant: Accountant
) -> float:
    """ε after the rounds of several runs, as :func:`composed_epsilon`, also if runs differ in their relation.

    The accountant composes the rounds of one relation. If there are two relations, each part is evaluated
    at δ/2, and ε and δ of both parts are summed (basic composition). A sum of both relations holds for
    ``replace_one``, in which one client is removed and another one added. A guarantee (ε, δ') for
    ``add_remove`` is (2ε, (1 + exp ε) δ') for two such steps (Dwork & Roth 2014, group privacy).
    """
    counts_by_relation: dict[str, dict[tuple[float, Sampling], int]] = {}
    for key, count in round_counts.items():
        if count:
            counts_by_relation.setdefault(key[1].relation, {})[key] = count
    if len(counts_by_relation) < 2:
        # earlier runs may have used another accountant
        return composed_epsilon(
            round_counts, delta, "rdp" if "replace_one" in counts_by_relation else accountant
        )
    replaced_epsilon = composed_epsilon(counts_by_relation["replace_one"], delta / 2, "rdp")
    return replaced_epsilon + _for_two_steps(
        lambda small: composed_epsilon(counts_by_relation["add_remove"], small, accountant), delta / 2
    )


def _for_two_steps(epsilon_at: Callable[[float], float], delta: float) -> float:
    """2ε at a δ' with (1 + exp ε(δ')) δ' ≤ δ, found by decreasing δ'; infinite if there is none above 1e-300."""
    step_delta = delta / 2
    while step_delta > 1e-300:
        step_epsilon = epsilon_at(step_delta)
        if step_epsilon > 600:
            break
        if (1 + math.exp(step_epsilon)) * step_delta <= delta:
            return 2 * step_epsilon
        # ε grows as δ' falls, so no larger δ' satisfies the bound
        step_delta = min(step_delta / 2, delta / (1 + math.exp(step_epsilon)))
    return math.inf


def noise_for(epsilon: float, delta: float, rounds: int, sampling: Sampling, accountant: Accountant) -> float:
    """Find the smallest noise with which all rounds stay within the budget ``epsilon``; an error if there is none.

    Returns:
        σ, at most 0.001 (for σ < 1, at most 0.001 σ) larger than the smallest one, and never smaller.
    """
    _check(epsilon=epsilon, rounds=rounds)
    return _smallest_noise(lambda s: composed_epsilon({(s, sampling): rounds}, delta, accountant), epsilon)


def local_noise_for(epsilon: float, delta: float, releases: int, accountant: Accountant) -> float:
    """Find the smallest noise with which a client stays within its budget ``epsilon``, as :func:`noise_for`."""
    _check(epsilon=epsilon, rounds=releases)
    return _smallest_noise(lambda noise: local_epsilon(noise, releases, delta, accountant), epsilon)


def rounds_within(
    epsilon: float,
    noise: float,
    delta: float,
    sampling: Sampling,
    accountant: Accountant,
    max_rounds: int,
    past_rounds: Mapping[tuple[float, Sampling], int] | None = None,
) -> int:
    """Count the rounds, up to ``max_rounds``, that stay within the budget ``epsilon``; 0 if the first does not.

    The rounds in ``past_rounds``, in the form of :func:`total_epsilon`, precede them and are not counted.
    """
    _check(epsilon=epsilon, most=max_rounds)

    def keeps(rounds: int) -> bool:
        round_counts = Counter(past_rounds or {})
        round_counts[noise, sampling] += rounds
        return total_epsilon(round_counts, delta, accountant) <= epsilon

    low, high, middle = 0, max_rounds + 1, 1
    while high - low > 1:
        low, high = (middle, high) if keeps(middle) else (low, middle)
        middle = min(2 * low, max_rounds) if high > max_rounds else (low + high) // 2
    return low


def default_count_noise(client_count: float) -> float:
    """σ_b = m/20 of Andrew et al. 2021, for m expected clients a round: noise of 0.05 in the share."""
    return client_count / 20


def split_noise(noise: float, count_noise: float) -> float:
    """Compute the noise of updates if a part of the budget goes to adaptive clipping.

    Both releases together cost as much as one with ``noise`` (Andrew et al. 2021, arXiv:1905.03871, Theorem 1).
    The count must be Σ (b_i - 1/2), b_i = 1 for an update within the bound, else 0: its sensitivity is 1/2.
    The share is then b̃ = 1/2 + (Σ (b_i - 1/2) + N(0, σ_b²)) / m with the fixed divisor m.

    Returns:
        σ_Δ = (σ⁻² - (2σ_b)⁻²)^(-1/2) with σ_b = ``count_noise``, the standard deviation of the count.

    Raises:
        ConfigError: if σ_b is at most σ/2, because the count alone then spends the whole budget.
    """
    _check(noise=noise, count_noise=count_noise)
    if count_noise <= noise / 2:
        raise ConfigError(
            f"clipping.quantile: the noise of the count, {count_noise:g}, must be above σ/2 = {noise / 2:g}; "
            "draw more clients a round, lower privacy.noise or leave clipping.quantile out"
        )
    return float((noise**-2 - (2 * count_noise) ** -2) ** -0.5)


def next_clip(clip: float, share: float, quantile: float, rate: float) -> float:
    """C exp(-η_C (b̃ - γ)), b̃ the noised share of updates within C (Andrew et al. 2021, Algorithm 1)."""
    return clip * math.exp(-rate * (share - quantile))


def _check(**values: float) -> None:
    bounds = {"epsilon": "> 0", "noise": ">= 1e-6", "count_noise": "> 0", "delta": "> 0 and < 1"}
    bounds |= {"rounds": ">= 1", "most": ">= 0", "releases": ">= 0"}
    check_bounds(SimpleNamespace(**values), {name: bounds[name] for name in values}, "privacy")


def _library() -> Any:
    try:
        import dp_accounting
    except ImportError as error:
        raise ConfigError('privacy needs dp-accounting: pip install "fedlowrank[privacy]"') from error
    return dp_accounting


@lru_cache(maxsize=4096)
def _compose(rounds: tuple[tuple[float, Sampling, int], ...], delta: float, accountant: Accountant) -> float:
    library = _library()
    if not rounds:
        return 0.0
    if accountant == "pld" and {sampling.probability for _, sampling, _ in rounds} == {1.0}:
        precision = sum(count * noise**-2 for noise, _, count in rounds)
        return float(library.get_epsilon_gaussian(precision**-0.5, delta))
    curve = sum(count * _rdp_of_a_round(noise, sampling) for noise, sampling, count in rounds)
    bound = float(library.rdp.compute_epsilon(library.rdp.RdpAccountant().orders, curve, delta)[0])
    if accountant == "rdp" or bound > _LARGEST_PLD_EPSILON:
        return bound
    losses = (_pld_of_a_round(n, s.probability).self_compose(count) for n, s, count in rounds)
    # both are upper bounds; the distribution's tails, which are cut at 1e-15, count as an infinite loss below that δ
    return min(bound, float(reduce(lambda a, b: a.compose(b), losses).get_epsilon_for_delta(delta)))


@lru_cache(maxsize=1024)
def _rdp_of_a_round(noise: float, sampling: Sampling) -> npt.NDArray[np.float64]:
    """Rényi divergence of a round, by order. Rounds add up, so a further one costs almost no computation."""
    library = _library()

    def curve(event: Any, relation: str) -> npt.NDArray[np.float64]:
        accountant = library.rdp.RdpAccountant(neighboring_relation=library.NeighboringRelation[relation])
        return np.asarray(accountant.compose(event).rdp, dtype=np.float64)

    # absl warns about each order whose series does not converge; omitting such an order is safe
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)
    try:
        if sampling.probability is not None:
            release = library.GaussianDpEvent(noise)
            return curve(library.PoissonSampledDpEvent(sampling.probability, release), "ADD_OR_REMOVE_ONE")
        release = library.GaussianDpEvent(noise / 2)
        event = library.SampledWithoutReplacementDpEvent(sampling.clients, sampling.count, release)
        # for large draws the theorem gives more than the bound without sampling, which also holds
        return np.minimum(curve(event, "REPLACE_ONE"), curve(release, "REPLACE_ONE"))
    finally:
        absl.setLevel(level)


@lru_cache(maxsize=4)
def _pld_of_a_round(noise: float, rate: float) -> Any:
    distributions = _library().pld.privacy_loss_distribution
    return distributions.from_gaussian_mechanism(noise, sampling_prob=rate)


def _smallest_noise(epsilon_at: Callable[[float], float], budget: float) -> float:
    high = 1.0
    while epsilon_at(high) > budget:
        high *= 2
        if high > 1e6:
            raise ConfigError(
                f"privacy.epsilon: no noise keeps to {budget:g}; raise it or set accountant = 'pld'"
            )
    low = high / 2
    while epsilon_at(low) <= budget:
        high, low = low, low / 2
    while high - low > 1e-3 * min(1.0, high):
        middle = (low + high) / 2
        low, high = (low, middle) if epsilon_at(middle) <= budget else (middle, high)
    return high
