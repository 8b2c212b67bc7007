"""Central privacy on a secure sum: each client adds a part of the noise, so that nobody sees the sum without it.

Kairouz, Liu and Steinke, *The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation*,
ICML 2021 (arXiv:2102.06387). Let n be the number of clients, of which at least t = ⌊2n/3⌋ + 1 are in a total, C the clipping
norm and σ the noise multiplier, on the secure sum's grid of step γ:

    x_i = round(v_i/γ) + N_Z(0, σ²C²/(tγ²)),   v_i the client's change, ‖v_i‖ ≤ C - γ√d/2,

N_Z is the discrete Gaussian and d the size of a change. Rounding moves a change by at most γ√d/2, so its norm is at most
C. The noise of a total has at least the variance σ²C², and n/t times as much if all reply. A sum of k discrete Gaussians
is nearly one (Theorem 1 there): if the part of a client is at least :data:`MIN_STD_STEPS` steps wide, the difference τ is
below 10 k exp(-π² 16²), 10^-1096 k, and is ignored. Its Rényi divergences are at most a Gaussian's (Canonne, Kamath and
Steinke 2020, arXiv:2004.00010), so the accountant rdp holds.

If c sites tell the server what noise they added, they remove it, and σ becomes σ √((t-c)/t). The secure sum stays closed
with up to 2t - n - 1 such sites.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from ...core import tree
from ...core.errors import ConfigError
from ...core.io.text import format_count
from ...core.tree import Params
from ...trust.privacy.accounting import epsilon
from ...trust.privacy.budget import Budget
from ...trust.privacy.noise import discrete_gaussian
from ...trust.secure_sums import FixedPoint, Vector
from ...trust.trust_settings import Trust
from .member import min_participants

MIN_STD_STEPS = 16.0
"""Smallest standard deviation of a client's part of the noise, in steps of the grid."""

MAX_ROUNDING_SHARE = 0.05
"""Largest share of the clipping norm that rounding to the grid may cost."""


def check_settings(trust: Trust) -> None:
    """Check that distributed noise can provide central privacy with these settings; raises ConfigError."""
    if trust.clipping.quantile is not None:
        raise ConfigError(
            "clipping.quantile: under secure sums over a network the count of clipped updates has no noise of its own; "
            "set a fixed clipping.norm alone"
        )
    if trust.privacy.accountant != "rdp":
        raise ConfigError(
            "privacy.accountant: under secure sums over a network noise is discrete, for which the bound of 'rdp' is "
            "proven and 'pld' is not; set 'rdp'"
        )


@dataclass(frozen=True)
class DistributedNoise:
    """A client's part of the noise.

    Attributes:
        norm: C, the clipping norm.
        noise: σ of a total, the noise multiplier.
        clients: n, the number of clients.
        grid: fixed-point grid of the numbers that are summed.
    """

    norm: float
    noise: float
    clients: int
    grid: FixedPoint

    @property
    def std(self) -> float:
        """Standard deviation of a client's part of the noise, in steps of the grid."""
        return self.noise * self.norm / math.sqrt(min_participants(self.clients)) / self.grid.sum_step

    def check(self, size: int) -> None:
        """Check that the grid is fine enough for changes of ``size`` numbers; raises ConfigError."""
        rounding_error = self.grid.sum_step * math.sqrt(size) / 2
        if self.std < MIN_STD_STEPS or rounding_error > MAX_ROUNDING_SHARE * self.norm:
            raise ConfigError(
                f"run.secure: its steps of {self.grid.sum_step:.2g} are too wide for clipping.norm = {self.norm:g} and "
                f"noise σ = {self.noise:.3g}; raise secure.bits or lower secure.bound"
            )
        if self.norm > self.grid.largest_sum:
            raise ConfigError(
                f"run.secure: numbers are clipped to ±{self.grid.largest_sum:g}, and clipping.norm = {self.norm:g}; raise "
                "secure.bound"
            )

    def vector(self, change: Params) -> Vector:
        """Encode the change of a client on the grid, with its part of the noise: ``[d]`` integers modulo 2^64."""
        v = torch.cat([t.double().cpu().reshape(-1) for t in tree.tensors(change)])
        self.check(v.numel())
        change_norm, max_norm = float(v.norm()), self.norm - self.grid.sum_step * math.sqrt(v.numel()) / 2
        # the computed norm is rounded, too
        scale = min(1.0, max_norm * (1 - 1e-12) / change_norm) if change_norm else 1.0
        steps = (v * scale / self.grid.sum_step).round().to(torch.int64).numpy()
        return (steps + discrete_gaussian(v.numel(), self.std)).view(np.uint64)


def describe_collusion(budget: Budget, client_count: int) -> str:
    """Describe ε of all rounds against the server, and against the server with sites that tell it their noise."""
    min_clients, privacy = min_participants(client_count), budget.privacy
    descriptions = []
    for colluder_count in range(2 * min_clients - client_count):
        noise = budget.noise * math.sqrt((min_clients - colluder_count) / min_clients)
        value = epsilon(noise, budget.rounds, float(privacy.delta or 0), budget.sampling, privacy.accountant)
        suffix = f" with {format_count(colluder_count, 'other site')}" if colluder_count else ""
        descriptions.append(f"{value:.4g} against the server{suffix}")
    return f"privacy of {budget.rounds} rounds at δ = {privacy.delta:g}: ε = {', '.join(descriptions)}"
