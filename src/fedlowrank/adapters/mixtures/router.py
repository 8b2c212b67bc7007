"""The router of a client, which mixes clusters by the route π = softmax(θ)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor

from ...core.arguments.field_checks import CheckedFields
from ...core.arguments.switch import Switch, check_switch
from ...core.contract import Pass
from ...core.errors import ConfigError
from ...core.key import Key

Route = int | Sequence[float] | Tensor
"""The index of a single cluster, or the shares of all C clusters."""


@dataclass(frozen=True)
class Router(CheckedFields):
    """How a client learns its mixture π = softmax(θ / temperature).

    Attributes:
        routing: source of the mixture: learned; or optimal, the one-hot of the client's known cluster.
        lr: learning rate of θ, which has no weight decay; η of the MFL update.
        update: update of θ: gradient, together with the model (Algorithm 1); or mfl, π_c ∝ exp(-η f_k(w_c)) of the
            models that the server has averaged (eq. 4 and 5): computed when they arrive, fixed while the client
            trains, even shares in the first round.
        temperature: temperature of the softmax, above 0; a higher one makes the shares more even.
        noise: standard deviation of uniform noise on θ at every training step.
        top: number of clusters that are mixed, those with the largest θ (the first ones win ties); None mixes all.
            A gradient needs at least two.
        keep: whether a client keeps θ from round to round; otherwise it learns θ anew from 0. The MFL update does
            not need a kept θ.
        unseen_steps: number of steps in which a client without θ learns it before inference, with all else frozen; 0 mixes
            evenly. The MFL update takes no steps; a client computes its π before inference as it does before
            training.
    """

    routing: Literal["learned", "optimal"] = "learned"
    lr: float = 0.1
    update: Literal["gradient", "mfl"] = "gradient"
    temperature: float = 1.0
    noise: float = 0.0
    top: int | None = None
    keep: bool = True
    unseen_steps: int = 10

    # keep = False holds for every router that keeps no θ
    switch: ClassVar[Switch] = Switch(
        "routing",
        dict.fromkeys(("lr", "update", "temperature", "noise", "top", "unseen_steps"), ("learned",)),
    )

    def __post_init__(self) -> None:
        check_switch(self, self.switch, "router")
        # in the MFL update the temperature cancels out
        reads = dict.fromkeys(("temperature", "noise", "unseen_steps"), ("gradient",))
        check_switch(self, Switch("update", reads), "router")
        if not (0 <= self.lr < math.inf and 0 < self.temperature < math.inf and 0 <= self.noise < math.inf):
            raise ConfigError(
                f"router: lr and noise must be >= 0 and temperature > 0; they are {self.lr}, {self.noise}, "
                f"{self.temperature}"
            )
        if self.unseen_steps < 0 or (self.top is not None and self.top < 1):
            raise ConfigError(
                f"router: unseen_steps must be >= 0 and top >= 1; they are {self.unseen_steps} and {self.top}"
            )
        if self.top == 1 and self.trains_theta:
            raise ConfigError(
                "router: top = 1 mixes one cluster with the share 1 whatever θ is, so θ has no gradient and "
                "is never learned; use top >= 2, or update = 'mfl'"
            )

    @property
    def trains_theta(self) -> bool:
        """Whether θ is trained together with the model."""
        return self.routing == "learned" and self.update == "gradient"

    @property
    def uses_mfl(self) -> bool:
        """Whether θ is computed from the loss of each cluster."""
        return self.routing == "learned" and self.update == "mfl"

    def passes(self, local_pass: Pass) -> dict[str, Pass]:
        """Local training, and the steps in which a new client learns its router."""
        steps = max(1, self.unseen_steps)
        return {"local": local_pass, "router": Pass(steps, local_pass.batch_size, steps)}

    def shares(self, theta: Tensor) -> Tensor:
        """Compute the shares π ``[C]`` from θ ``[C]``."""
        z = theta / self.temperature
        if self.top is not None and self.top < len(theta):
            # a stable sort, so that ties have the same order on every engine
            excluded_clusters = z.detach().sort(descending=True, stable=True).indices[self.top :]
            z = z.scatter(0, excluded_clusters, -math.inf)
        return z.softmax(0)

    def noises(self, key: Key, steps: int, theta: Tensor) -> Tensor:
        """Draw the noise on θ for each step ``[steps, C]``; one row of zeros without noise."""
        if self.noise == 0:
            return theta.new_zeros(1, len(theta))
        # a uniform variable on ±b has the standard deviation b / √3
        count, dtype = len(theta), theta.dtype
        uniform = key.draw(lambda g, n: torch.rand(n, count, generator=g, dtype=dtype), steps)
        return ((2 * uniform - 1) * (self.noise * math.sqrt(3))).to(theta.device)


def parse_route(route: Route, cluster_count: int) -> list[float]:
    """Convert a route to the shares of all C clusters, which sum to 1; the index of a cluster gives its one-hot.

    An index is an int, an integer of NumPy or a tensor without dimensions.

    Raises:
        ConfigError: if there is no such cluster, or the shares are not C numbers >= 0 that sum to 1.
    """
    if isinstance(route, np.integer) or (
        isinstance(route, np.ndarray | Tensor) and not route.ndim and "int" in str(route.dtype)
    ):
        route = int(route)
    if isinstance(route, int):
        if isinstance(route, bool) or not 0 <= route < cluster_count:
            raise ConfigError(
                f"there is no cluster {route!r}; num_clusters is {cluster_count}, counted from 0"
            )
        return [float(c == route) for c in range(cluster_count)]
    try:
        shares = torch.as_tensor(route, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"a route must be the index of a cluster or {cluster_count} shares; it is {route!r}"
        ) from error
    # a softmax in half precision sums to 1 up to a thousandth
    if (
        shares.shape != (cluster_count,)
        or not bool((shares >= 0).all())
        or abs(float(shares.sum()) - 1) > 1e-3
    ):
        raise ConfigError(f"a mixture must be {cluster_count} numbers >= 0 that add up to 1; it is {route}")
    return cast(list[float], (shares / shares.sum()).tolist())
